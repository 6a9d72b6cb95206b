"""Measures a step stretch by stretch, on a card: what the prediction is made from."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tui3090.assemble import Job
from tui3090.feed import Feed, MicroBatch, leaves
from tui3090.fit.cells import Column
from tui3090.fit.prediction import Point
from tui3090.step import Step


def elements_in(batch: object) -> int:
    """Numbers in a batch's tensors: padding counts."""
    return sum(leaf.numel() for _, leaf in leaves(batch) if isinstance(leaf, Tensor))


def small_batches(feed: Feed) -> list[MicroBatch]:
    """The data's first batch, half of it, and so on to one sample; the smallest first. The feed is of no use after it.

    It is cut by the samples' indices: batches of an iterable dataset can't be.
    """
    window = feed.next_window(1)
    batches = []
    while window is not None:
        batches.append(window.micro_batches[0])
        window = feed.halve(window)
    feed.close()
    return batches[::-1]


def card_peak(device: torch.device) -> Callable[[], int]:
    """A function that gives the most that was requested of the allocator at once since it was called before.

    What it gives for a request may be up to 1 MiB bigger, whatever piece is at hand. That is little for a big batch's
    tensors, but it would spoil the straight line through two small ones.
    """

    def peak() -> int:
        # memory_stats() would spell out some 200 counters each time
        most: int = torch.cuda.memory_stats_as_nested_dict(device)["requested_bytes"]["all"]["peak"]
        torch.cuda.reset_peak_memory_stats(device)
        return most

    return peak


class _Stretches(TorchDispatchMode):
    """Takes the peak after every operator, and notes the gradients that had arrived."""

    def __init__(self, peak: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._peak = peak
        self._gradients = 0
        self.peaks: list[int] = []
        self.gradients: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ends()
        return result

    def ends(self) -> None:
        """A stretch is over."""
        self.peaks.append(self._peak())
        self.gradients.append(self._gradients)

    def arrived(self, parameter: Tensor) -> None:
        """Backward is done with a weight."""
        self._gradients += parameter.grad.nbytes if parameter.grad is not None else 0


def measure_stretches(step: Step, micro: MicroBatch, peak: Callable[[], int]) -> Point:
    """Run an optimizer step whose state exists already, and take the peak of each operator in it."""
    step.drop_gradients()
    peak()
    stretches = _Stretches(peak)
    trained = [p for p in step.model.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(stretches.arrived) for p in trained]
    try:
        with stretches:
            step.accumulate(micro, 1.0, first=True)
            step.update()
    finally:
        for hook in hooks:
            hook.remove()
    stretches.ends()
    return Point(elements_in(micro.batch), tuple(stretches.peaks), tuple(stretches.gradients))


def probe(
    job: Job, columns: Sequence[Column], batches: Sequence[MicroBatch], peak: Callable[[], int]
) -> dict[str, list[Point]]:
    """The points of each eager column, by its name. Where memory is full, bigger batches are left out."""
    points: dict[str, list[Point]] = {}
    for column in columns:
        job.step.settings = replace(job.settings, amp=column.amp, checkpointing=column.settings.checkpointing)
        points[column.name] = []
        for micro in batches:
            try:
                job.step.accumulate(micro, 1.0, first=True)  # the optimizer's state, what libraries keep for themselves
                job.step.update()
                points[column.name].append(measure_stretches(job.step, micro, peak))
                continue
            except torch.OutOfMemoryError:
                enough = True
            except Exception:  # a batch of one has no variance for BatchNorm, say: the cell will tell
                traceback.print_exc()
                enough = False
            # out of the except block: its traceback held the failed step's tensors
            job.step.drop_gradients()
            gc.collect()
            if job.machine.cuda:
                torch.cuda.empty_cache()
            if enough:
                break
    return points
