"""The table on a card: what is predicted before a cell runs is what it takes, and a cap is found as a card's end is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"), pytest.mark.timeout(600)]

GIB = 6.0


def test_the_table_of_gpt2_on_a_small_card() -> None:
    options = ["--vram", f"{GIB:g}", "--json", "--", "--size", "gpt2", "--context", "512", "--batch-size", "4"]
    command = [sys.executable, "-m", "tui3090", "fit", "gpt", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["room"] == GIB * 2**30
    measured = [cell for cell in told["cells"] if cell["status"] == "ok"]
    assert {cell["column"] for cell in measured} >= {"fp32", "fp32+checkpointing", "fp32+graph", "bf16", "bf16+graph"}
    for cell in measured:
        assert cell["peak_allocated"] <= cell["peak_reserved"] <= GIB * 2**30
        assert cell["predicted"] == pytest.approx(cell["peak_allocated"], rel=0.1), cell
    last = max(cell["batch"] for cell in told["cells"])
    assert all(cell["status"] == "oom" for cell in told["cells"] if cell["batch"] == last)
    assert not any(cell["status"] in ("failed", "died") for cell in told["cells"]), told
    assert told["best"] is not None
