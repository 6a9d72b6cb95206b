"""How many bf16 weights the optimizer's updates leave as they are, because they round away."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

EVERY = 50
"""Optimizer steps between two looks."""
SAMPLED = 65_536
"""Weights that are looked at, spread over the model; a few more where it has many small parameters."""


class Unmoved:
    """Compares a sample of the bf16 weights with what it was `EVERY` steps before.

    A look enqueues a few small kernels and a copy to pinned memory. The host reads the count one step later: by then
    it has waited for that step's outcome, which came after the count on the same stream.
    """

    def __init__(self, trained: Iterable[Tensor]) -> None:
        # flatten() of a contiguous tensor is a view, which follows the weights; of another one it would be a copy
        bf16 = [p.detach() for p in trained if p.dtype == torch.bfloat16 and p.is_contiguous()]
        stride = -(-sum(p.numel() for p in bf16) // SAMPLED)
        self._sample = [p.flatten()[::stride] for p in bf16]
        self._steps = 0
        if bf16:
            self._before = torch.cat(self._sample)
            self._count = torch.zeros((), dtype=torch.int64, pin_memory=self._before.is_cuda)

    def stepped(self) -> float | None:
        """An optimizer step's outcome was waited for; the share of weights that did not move, when there is news."""
        if not self._sample:
            return None
        self._steps += 1
        if self._steps % EVERY == 0:
            now = torch.cat(self._sample)
            self._count.copy_((now == self._before).sum(), non_blocking=True)
            self._before = now
        if self._steps > EVERY and self._steps % EVERY == 1:
            return int(self._count) / self._before.numel()
        return None
