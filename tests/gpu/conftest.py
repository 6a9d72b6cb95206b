"""On a card: deterministic algorithms, so that 'equal' can mean to the bit."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

import pytest
import torch


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch's deterministic algorithms for the time of a test."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
