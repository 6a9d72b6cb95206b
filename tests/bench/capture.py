"""A whole step in one CUDA graph, as one writes it by hand: what our replay is compared with.

Forward, backward, unscaling, clipping, optimizer and loss scaler are captured together; a batch is copied into the
memory that the graph reads. All batches have one shape, there is no accumulation, and nothing is checked: what our
replay also does (several shapes and settings, a check against eager, a step that can be eager again) is not in here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.bench.loops import OPTIMIZER, PlainLoop
from tui3090.recipe import Recipe
from tui3090.settings import Settings

WARM = 3
"""Steps before the capture: the optimizer's and the scaler's state is made in them."""


class CapturedLoop(PlainLoop):
    """The plain loop's steps, from the fourth on by replay of one graph. All of it is on one side stream."""

    def __init__(self, recipe: Recipe, device: torch.device, settings: Settings) -> None:
        super().__init__(recipe, device, settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, capturable=True, **OPTIMIZER)
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: dict[str, Any] = {}
        self._loss: Tensor | None = None
        self._taken = 0
        self._hosts = [torch.empty((), pin_memory=True) for _ in range(2)]
        self._arrived = [torch.cuda.Event() for _ in range(2)]

    def step(self) -> float | None:
        """One optimizer step; the loss of the one before it, so that the device never waits. None: it is the first."""
        with torch.cuda.stream(self._stream):
            self._fill(next(self.batches))
            if self._taken < WARM:
                self.optimizer.zero_grad(set_to_none=True)
                loss = self.trained([self._static])
            else:
                loss = self._replayed()
            now, before = self._taken % 2, (self._taken + 1) % 2
            self._hosts[now].copy_(loss, non_blocking=True)
            self._arrived[now].record(self._stream)
        self._taken += 1
        if self._taken == 1:
            return None
        self._arrived[before].synchronize()
        return self._hosts[before].item()

    def _fill(self, batch: Any) -> None:
        if not self._static:
            self._static = self._placed(batch)
            return
        for name, value in batch.items():
            self._static[name].copy_(value, non_blocking=True)

    def _replayed(self) -> Tensor:
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            self.optimizer.zero_grad(set_to_none=True)  # backward makes the gradients, in the graph's own memory
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                self._loss = self.trained([self._static])
        self._graph.replay()
        assert self._loss is not None
        return self._loss
