"""On a card: deterministic algorithms, so that 'equal' can mean to the bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

import pytest
import torch

from tui3090.meters.nvml import close_nvml, handle_of, open_nvml


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch's deterministic algorithms for the time of a test."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def uuid() -> str:
    """The card's, as torch gives it."""
    return str(torch.cuda.get_device_properties(0).uuid)


@pytest.fixture
def handle(uuid: str) -> Iterator[Any]:
    """NVML's handle of the card."""
    open_nvml()
    yield handle_of(uuid)
    close_nvml()


@pytest.fixture(scope="session")
def cycles_per_second() -> float:
    """Of `torch.cuda._sleep`, which keeps the device busy for so many cycles of its clock."""
    cycles = 100_000_000
    torch.cuda._sleep(cycles)  # the clock comes up
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (start.elapsed_time(end) / 1000)
