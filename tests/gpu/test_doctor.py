"""The doctor on a real card."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")


def test_it_names_the_card_and_starts_no_cuda() -> None:
    script = "from tui3090.doctor import doctor; doctor(); import torch; print(torch.cuda.is_initialized())"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    *report, initialized = run.stdout.splitlines()
    assert initialized == "False"
    major, minor = torch.cuda.get_device_capability(0)
    assert any(torch.cuda.get_device_name(0) in line for line in report), run.stdout
    assert any(f"compute capability {major}.{minor}" in line for line in report), run.stdout
    assert any(f"built for CUDA {torch.version.cuda}" in line for line in report), run.stdout
    assert not any("no kernels" in line or "sees no card" in line for line in report), run.stdout
