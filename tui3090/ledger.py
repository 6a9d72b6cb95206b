"""What became of each window: from its launch to its StepRecord."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tui3090.feed import MicroBatch, Window, leaves
from tui3090.meters.flops import FlopCount, FlopCounter
from tui3090.meters.peaks import peak
from tui3090.meters.phases import Sample
from tui3090.records import StepRecord
from tui3090.settings import Settings
from tui3090.step import InFlight, Outcome

COUNTED_SHAPES = 32
"""Batch shapes whose FLOPs are counted at the most; a window with another one has no figure."""


@dataclass(slots=True)
class Running:
    """A window that was launched and whose outcome is not known yet."""

    window: Window
    in_flight: InFlight | None
    """None: no micro-batch had a label, and nothing was run."""
    settings: Settings
    lr: float
    """Of the first parameter group, scaled, as the update uses it."""
    epoch: float
    began: float
    """When its fetch began, by `time.perf_counter`."""
    begin: torch.cuda.Event | None
    """Its first work on the device; None on the CPU."""
    before: torch.cuda.Event | None
    """The last work of the window before it; None: something else came between."""
    flops: FlopCount | None
    replayed: bool
    compiled: bool
    """Whether something was compiled in it."""
    sample: Sample | None
    """Marks of its phases, in a window now and then."""
    ended: float | None = None
    """When the next window's fetch began; None: none did."""

    @property
    def stall_s(self) -> float:
        """Time in which the device had nothing to do because the batch was not there: the host's wait at the most, and
        on a card the gap between the last work of the window before and the first of this one at the most."""
        if self.begin is None:
            return self.window.wait_s
        if self.before is None:  # at an epoch's turn, and while workers start, the device waits as long as the host
            return self.window.wait_s if self.window.loader_start or self.window.epoch_start else 0.0
        gap: float = self.before.elapsed_time(self.begin) / 1000
        return min(self.window.wait_s, max(0.0, gap))


class FlopTally:
    """FLOPs of a forward and backward, counted once for each shape and way of checkpointing."""

    def __init__(self) -> None:
        self._counts: dict[Any, FlopCount | None] = {}
        self.ran_out = False
        """Whether memory was full while something was counted; it is not counted again."""

    @contextmanager
    def counting(self, micro: MicroBatch, settings: Settings) -> Iterator[None]:
        """Around an eager micro-batch: counts it if its shape is new."""
        key = _key(micro, settings)
        if key in self._counts or len(self._counts) >= COUNTED_SHAPES:
            yield
            return
        try:
            with FlopCounter() as counter:
                yield
        except torch.OutOfMemoryError:
            self._counts[key] = None
            self.ran_out = True
            raise
        self._counts[key] = counter.count

    def of(self, micro_batches: Sequence[MicroBatch], settings: Settings) -> FlopCount | None:
        """The sum over a window; None where a shape of it was never counted."""
        counts = [self._counts.get(_key(micro, settings)) for micro in micro_batches]
        known = [count for count in counts if count is not None]
        if not known or len(known) < len(counts):
            return None
        return FlopCount(sum(count.model for count in known), sum(count.hardware for count in known))


def _key(micro: MicroBatch, settings: Settings) -> Any:
    shapes = tuple(tuple(leaf.shape) for _, leaf in leaves(micro.batch) if isinstance(leaf, Tensor))
    return settings.checkpointing, shapes


class Ledger:
    """Makes the records of windows, in their order."""

    def __init__(self, device_name: str, weights_dtype: str) -> None:
        self._device_name = device_name
        self._weights_dtype = weights_dtype

    def why_skipped(self, outcome: Outcome | None, settings: Settings) -> str:
        """Why a window was no optimizer step; empty: it was."""
        if outcome is None:
            return "no labels"
        if outcome.finite:
            return ""
        return "overflow" if settings.amp == "fp16" else "not finite"

    def record(self, running: Running, outcome: Outcome | None, step: int, planned: int | None) -> StepRecord:
        """The record of a window whose outcome is known; `step` counts the optimizer steps up to and with it."""
        window, settings = running.window, running.settings
        ended = running.ended if running.ended is not None else time.perf_counter()
        precision = self._precision(settings)
        return StepRecord(
            time=time.time(),
            step=step,
            planned_steps=planned,
            epoch=running.epoch,
            micro_batches=len(window.weighed),
            loss=outcome.loss if outcome is not None else float("nan"),
            lr=running.lr,
            grad_norm=outcome.grad_norm if outcome is not None else None,
            samples=sum(micro.samples for micro in window.micro_batches),
            tokens=sum(micro.tokens for micro in window.micro_batches),
            padding=sum(micro.padding for micro in window.micro_batches),
            seconds=ended - running.began,
            wait_s=window.wait_s,
            stall_s=running.stall_s,
            loader_start=window.loader_start,
            skipped=self.why_skipped(outcome, settings),
            loss_scale=outcome.loss_scale if outcome is not None else None,
            flops=running.flops.model if running.flops is not None else None,
            hardware_flops=running.flops.hardware if running.flops is not None else None,
            peak_flops_s=peak(self._device_name, precision),
            precision=precision,
            replayed=running.replayed,
            compiled=running.compiled,
            settings=settings.short(),
        )

    def _precision(self, settings: Settings) -> str:
        """What matmuls run in."""
        if settings.amp != "off":
            return settings.amp
        if self._weights_dtype == "bfloat16":
            return "bf16"
        return "tf32" if settings.tf32 else "fp32"
