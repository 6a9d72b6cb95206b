"""A run on a card that is over, left on the screen till morning."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("pexpect")
pytest.importorskip("pyte")

from tests.terminal.conftest import opened
from tests.terminal.pty_shell import COMMAND

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"), pytest.mark.timeout(300)]


def held(pid: int) -> list[str]:
    """What a process holds of NVIDIA's driver."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(descriptor))
        except OSError:
            continue  # closed meanwhile
    return [path for path in found if path.startswith("/dev/nvidia")]


def test_a_run_that_is_over_holds_nothing_of_the_card(tmp_path: Path) -> None:
    with opened(tmp_path, 80, 24) as shell:
        shell.command(f"{COMMAND} run train.py --device cuda --run-dir run --steps 3000")
        shell.wait(lambda: shell.steps() >= 1, 120)
        process = shell.process()
        assert held(process.pid)
        shell.wait(lambda: b"\x1b]2;tui3090: train finished\x07" in shell.bytes, 120)
        shell.wait(lambda: "show" in process.cmdline())
        assert held(process.pid) == []
        assert shell.leave() == 0
        assert shell.restored
