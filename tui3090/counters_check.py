"""`tui3090 doctor --counters`: CUPTI's counters against matmuls whose use of the Tensor Cores is known."""

from __future__ import annotations

import time
from typing import Protocol

from tui3090.meters.counters import Counters, CountersMissing, load_library

SECONDS = 2.0
"""Of each matmul."""
SIZE = 4096
"""Rows and columns of its matrices."""
BUSY, IDLE = 0.5, 0.02
"""What the counters must show at the least in fp16, and at the most in fp32 without TF32."""


class Reads(Protocol):
    """What the check needs of `Counters`."""

    def read(self) -> float | None:
        """The mean since the last call."""


def check_counters() -> tuple[str, bool]:
    """A sentence, and whether the counters can be trusted here. Uses the first card that CUDA sees."""
    import torch

    if not torch.cuda.is_available():
        return "not checked: torch sees no card", False
    torch.ones(1, device="cuda:0")  # the context must be there
    try:
        counters = Counters(load_library(), 0)
        try:
            half = busy_in(counters, "float16")
            single = busy_in(counters, "float32")
        finally:
            counters.close()
    except CountersMissing as missing:
        return f"refused: {missing}", False
    return judged(half, single)


def busy_in(counters: Reads, dtype: str) -> float | None:
    """The counters' reading while the card does nothing but matmuls of a dtype."""
    import torch

    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        left = torch.randn(SIZE, SIZE, device="cuda:0", dtype=getattr(torch, dtype))
        torch.mm(left, left)  # loads the kernel
        torch.cuda.synchronize()
        counters.read()  # what was before does not count
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for _ in range(10):
                torch.mm(left, left)
            torch.cuda.synchronize()
        return counters.read()
    finally:
        matmul.allow_tf32 = before


def judged(half: float | None, single: float | None) -> tuple[str, bool]:
    """What the readings of a fp16 and a fp32 matmul say of the counters."""
    if half is None or single is None:
        return "they gave no sample: please report it, with the card and the driver", False
    figures = f"fp16 matmul {half * 100:.0f} %, fp32 matmul {single * 100:.1f} %"
    if half >= BUSY and single <= IDLE:
        return f"right: {figures}. They are not yet verified on hardware: please report that it works", True
    return f"implausible: {figures}, where above 50 and about 0 belong: don't use --counters here", False
