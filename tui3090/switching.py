"""What changes while training goes on: a technique by key, and what lack of memory or a failing compiler enforces.

All of it happens between two windows, or before a window that failed is run again.
"""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tui3090 import garbage
from tui3090.feed import Window
from tui3090.oom import explained
from tui3090.records import Changed, Refused
from tui3090.settings import Value
from tui3090.shortage import way_out
from tui3090.techniques import refusal

if TYPE_CHECKING:
    from tui3090.trainer import Trainer

KERNELS = ("amp", "checkpointing", "tf32", "graph", "compile")
"""Techniques that change which kernels a step runs: graphs captured before are of no use afterwards."""
SAVES_MEMORY = ("amp", "checkpointing", "compile", "offload")
"""Techniques after whose change the allocator should give back what it holds for the step as it was."""


class Switches:
    """Puts changes into force for a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def change(self, name: str, value: Value, origin: str = "key") -> None:
        """Put a technique's new value in force from the next window on, or say why not."""
        job = self._trainer.job
        old = getattr(job.settings, name, None)
        try:
            settings = job.settings.having(name, value)
            reason = refusal(job.machine, settings)
        except ValueError as error:
            reason = str(error)
        if name == "graph" and value and self._trainer.replay.given_up:
            reason = self._trainer.replay.given_up
        if reason or old == value or old is None:
            if reason:
                self._trainer.tell.emit(Refused(time=time.time(), technique=name, value=value, reason=reason))
            return
        self._trainer.interrupt()
        if name == "checkpointing" and value:
            self._trainer.gradients.remember()
        job.settings = job.step.settings = settings
        if name == "amp" and value != "off" and not job.machine.cuda:
            self._trainer.tell.say(
                "train", "16-bit matmuls are emulated on most CPUs: expect them to be slower than fp32"
            )
        if name in KERNELS:
            self._trainer.replay.release()
            self._trainer.runner = self._trainer.replay if settings.graph else job.step
        elif name == "workers":
            job.feed.set_workers(settings.workers)
            self._trainer.tell_of_data()
        elif name == "prefetch":
            job.feed.prefetch = settings.prefetch
        elif name == "accumulate" and origin == "key":  # else the steps hold the same samples as before
            self.replan()
        self._trainer.tell.emit(
            Changed(time=time.time(), step=self._trainer.step + 1, technique=name, old=old, new=value, origin=origin)
        )
        self._trainer.looks.changed()
        if self._trainer.allocator is not None:
            if name in SAVES_MEMORY:
                self._empty_cache()
            self._trainer.allocator.reset_peak()
        self._trainer.tell.available(
            self._trainer.job.machine, self._trainer.job.settings, self._trainer.replay.given_up
        )

    def replan(self) -> None:
        """Accumulation decides how many optimizer steps are left."""
        left = self._trainer.job.steps_left(self._trainer.step)
        planned = self._trainer.step + left if left is not None else None
        if planned == self._trainer.planned:
            return
        self._trainer.planned = planned
        self._trainer.schedule.replan(self._trainer.step, left)
        if self._trainer.schedule.fixed:
            self._trainer.tell.say(
                "train", "the recipe's own learning-rate schedule is not planned again for the new step count"
            )

    def _empty_cache(self) -> None:
        before = torch.cuda.memory_reserved(self._trainer.job.machine.device)
        torch.cuda.empty_cache()
        freed = before - torch.cuda.memory_reserved(self._trainer.job.machine.device)
        if freed > 0:
            self._trainer.tell.say("memory", f"gave {freed / 2**30:.2f} GiB of the allocator's cache back")

    def made_smaller(self, window: Window) -> Window:
        """A window for which memory was full, as it is to be run again. Raises RecipeError when no way is left."""
        job = self._trainer.job
        self._trainer.interrupt()
        self._trainer.tell.say("memory", self._trainer.shortage, "warning")
        way = way_out(job, window, self._trainer.shortage)
        self._trainer.tell.say("memory", way.sentence, "warning")
        self.change(way.technique, way.value, origin="out of memory")
        job.started = replace(job.started, batch_size=job.feed.batch_size, settings=job.settings.short())
        self._trainer.tell.emit(job.started)
        return way.window

    def look_ahead(self) -> None:
        """Prefetch; without it where memory is too full for batches that wait."""
        try:
            return self._trainer.job.feed.look_ahead()
        except torch.OutOfMemoryError as error:
            traceback.print_exc()
            self._trainer.tell.say("memory", explained(str(error)), "warning")
        self._trainer.tell.say("memory", "out of memory while prefetching: prefetch is switched off", "warning")
        self.change("prefetch", 0, origin="out of memory")
        self._trainer.job.feed.set_workers(
            self._trainer.job.settings.workers
        )  # what was fetched for it is fetched again

    def without_compiler(self, why: str) -> None:
        """The compiler could not do it, or something went wrong while it was at work: from here on eagerly."""
        job = self._trainer.job
        if job.step.compiled.leave_loss():
            self._trainer.tell.say("compile", f"the loss is not compiled, only the model's blocks: {why}", "warning")
            return
        sentence = f"torch.compile failed in this run: {why} (output.log has the rest)."
        self._trainer.tell.say("compile", f"{sentence} Training goes on without it", "warning")
        job.machine = replace(job.machine, no_compiler=sentence)
        self.change("compile", False, origin="compile")

    def give_memory_back(self) -> None:
        """Drop what can be made again: graphs, gradients, the allocator's cache."""
        self._trainer.replay.release()
        self._trainer.job.step.drop_gradients()
        garbage.collect()
        if self._trainer.job.machine.cuda:
            _wait_for_autograd(self._trainer.job.machine.device)
            torch.cuda.empty_cache()


def _wait_for_autograd(device: torch.device) -> None:
    """Autograd's thread may still be letting go of a backward that failed; it is done with it before it does this."""
    with suppress(torch.OutOfMemoryError):
        (torch.ones((), device=device, requires_grad=True) * 1).backward()
