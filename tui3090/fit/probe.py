"""Measures a step stretch by stretch, on a card: what the prediction is made from."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tui3090.assemble import Job
from tui3090.feed import Feed, MicroBatch, leaves
from tui3090.fit.cells import Column
from tui3090.fit.prediction import Point
from tui3090.recipe import Recipe
from tui3090.step import Step

SIZES = (1, 2, 4)
"""Samples in the batches that are measured; the two biggest that fit count."""


def elements_in(batch: object) -> int:
    """Numbers in a batch's tensors: padding counts."""
    return sum(leaf.numel() for _, leaf in leaves(batch) if isinstance(leaf, Tensor))


def small_batches(recipe: Recipe, device: torch.device, seed: int) -> list[MicroBatch]:
    """The first batch of the data at each of `SIZES` that the data has samples for."""
    batches = []
    for size in SIZES:
        feed = Feed(replace(recipe, batch_size=size), device, seed)
        feed.start_epoch(0)
        window = feed.next_window(1)
        feed.close()
        if window is not None and window.micro_batches[0].samples == size:
            batches.append(window.micro_batches[0])
    return batches


def card_peak(device: torch.device) -> Callable[[], int]:
    """A function that gives the most that was allocated since it was called before."""

    def peak() -> int:
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most

    return peak


def measure_stretches(step: Step, micro: MicroBatch, peak: Callable[[], int]) -> Point:
    """Run an optimizer step whose state exists already. A stretch ends where a gradient arrives, and at the end."""
    peaks: list[int] = []
    there: list[int] = []
    gradients = 0

    def arrived(parameter: Tensor) -> None:
        nonlocal gradients
        peaks.append(peak())
        there.append(gradients)
        gradients += parameter.grad.nbytes if parameter.grad is not None else 0

    step.drop_gradients()
    peak()
    trained = [p for p in step.model.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in trained]
    try:
        step.accumulate(micro, 1.0, first=True)
        step.update()
    finally:
        for hook in hooks:
            hook.remove()
    peaks.append(peak())
    there.append(gradients)
    return Point(elements_in(micro.batch), tuple(peaks), tuple(there))


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
