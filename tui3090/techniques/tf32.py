"""TF32 in fp32 matmuls: a process-wide switch of torch, set for the time of a forward and backward.

torch has two ways to set it and refuses to read one after the other was used: what was is kept in the way it was set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from tui3090.settings import Settings

if TYPE_CHECKING:
    from tui3090.techniques import Machine


def unavailable(machine: Machine, settings: Settings) -> str | None:
    """TF32 came with Ampere."""
    if settings.tf32 and machine.capability < (8, 0):
        return "TF32 needs an NVIDIA card of the Ampere generation or newer (an RTX 30xx, say)."
    return None


def on_now() -> bool:
    """Whether fp32 matmuls may use TF32 as things stand, however it was set."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # set through fp32_precision
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@contextmanager
def matmuls(settings: Settings) -> Iterator[None]:
    """fp32 matmuls with or without TF32 as `settings` says; afterwards as they were."""
    matmul = torch.backends.cuda.matmul
    if on_now() == settings.tf32:
        yield
        return
    try:
        before: bool | str = bool(matmul.allow_tf32)
    except RuntimeError:
        before = str(matmul.fp32_precision)
    if isinstance(before, bool):
        matmul.allow_tf32 = settings.tf32
    else:
        matmul.fp32_precision = "tf32" if settings.tf32 else "ieee"
    try:
        yield
    finally:
        if isinstance(before, bool):
            matmul.allow_tf32 = before
        else:
            matmul.fp32_precision = before
