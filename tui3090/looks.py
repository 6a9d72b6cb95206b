"""Closer looks at single windows: their phases, which kernels run, and what each layer keeps for backward.

Phases are marked while training goes on. For the others a window has the device to itself: what was in flight ends
before it, and it ends before the look is read. So these are rare: by themselves at most one a minute, and never more
than 2 % of the time.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tui3090.assemble import Job
from tui3090.feed import Window
from tui3090.meters.activations import ActivationMeter
from tui3090.meters.kernels import Kernel, Profiler, off_by_8_text, read
from tui3090.meters.phases import Sample, Sampler, no_mark
from tui3090.records import Activations, Event, Profiled, Record, StepRecord
from tui3090.techniques.graph import Replay

EVERY_S = 60.0
"""Between two profiled windows that nobody asked for."""
SETTLED_S = 15.0
"""From the start, or a change, to the first of them: captures and warming up are over."""
WARM = 2
"""Windows after the start, or a change, whose phases are not marked: compiling and counting FLOPs come in them."""
SPREAD = 50
"""The next one comes after so many times what the last one cost."""


class Looks:
    """Decides which windows are looked at, and looks."""

    def __init__(
        self,
        job: Job,
        replay: Replay,
        emit: Callable[[Record], None],
        interrupt: Callable[[], int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`interrupt` lets the window in flight end, and gives the optimizer steps taken then."""
        self._job = job
        self._replay = replay
        self._emit = emit
        self._interrupt = interrupt
        self._clock = clock
        self._off_by_8 = off_by_8_text(job.step.model)
        self._asked_kernels = self._asked_activations = False
        self._broken = not job.machine.cuda
        """Whether the profiler is not tried without being asked."""
        self._seen = False
        """Whether it ever saw a kernel."""
        self._sampler = Sampler(job.machine.device)
        self._windows = 0
        """Since the start, or the last change."""
        self._due = clock() + SETTLED_S
        self._not_before = 0.0

    def ask_kernels(self) -> None:
        """Profile the next window that can be."""
        if self._job.machine.cuda:
            self._asked_kernels = True
        else:
            self._say("Reading Tensor Cores needs an NVIDIA card, and training runs on the CPU.")

    def ask_activations(self) -> None:
        """Measure the activations of the next window."""
        self._asked_activations = True

    def changed(self) -> None:
        """A technique was switched: the last profile is no longer true, the next comes when things have settled."""
        self._due = max(self._not_before, min(self._due, self._clock() + SETTLED_S))
        self._windows = 0

    def sample(self, window: Window, before: torch.cuda.Event | None) -> Sample | None:
        """Marks for the phases of a window that begins, if it is its turn; `before` is the end of the one before it."""
        step = self._job.step
        self._windows += 1
        if self._windows <= WARM or step.mark is not no_mark or window.loader_start or not window.weighed:
            return None
        sample = self._sampler.begin(before)
        if sample is None or self._replay.captures(window.weighed):
            return None

        def mark(phase: str) -> None:
            sample.mark(phase)
            if phase == "end":
                step.mark = no_mark

        step.mark = mark
        return sample

    def sampled(self, sample: Sample, record: StepRecord) -> None:
        """Read the marks of a window that is over."""
        if (phases := sample.phases(record)) is not None:
            self._emit(phases)
        self._sampler.took(sample)

    @contextmanager
    def at(self, window: Window) -> Iterator[bool]:
        """Around a window: looks at it if it is its turn, and says whether it does."""
        if self._asked_activations and (on := self._not_eager()):
            self._asked_activations = False
            self._say(f"Activations are measured layer by layer in an eager step: switch {on} off first.")
        due = self._asked_kernels or self._asked_activations or (not self._broken and self._clock() >= self._due)
        if not due or not window.weighed:
            yield False
        elif self._asked_activations:
            with self._activations():
                yield True
        elif self._replay.captures(window.weighed):
            yield False  # a capture must not be profiled: the next window is
        else:
            with self._profiled():
                yield True

    def _not_eager(self) -> str:
        """The techniques in force under which a forward does not go layer by layer, or keeps nothing on the card."""
        settings = self._job.settings
        return " and ".join(name for name in ("graph", "compile", "offload") if getattr(settings, name))

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        self._interrupt()
        began = self._clock()
        profiler = self._start()
        entered = self._clock()
        kernels: list[Kernel] | None = None
        try:
            yield
            step = self._interrupt()
        finally:
            ended = self._clock()
            if profiler is not None:
                kernels = self._stop(profiler)
        cost = (entered - began) + (self._clock() - ended)
        self._not_before = self._clock() + SPREAD * cost
        self._due = max(self._not_before, self._clock() + EVERY_S)
        self._asked_kernels = False
        if kernels is not None:
            self._seen = self._seen or bool(kernels)
            self._broken = not self._seen
            missing = "" if kernels else "the profiler saw no kernel"
            if self._broken:
                missing += ": the driver does not let it here"
            self._emit(
                Profiled(
                    time=time.time(),
                    step=step,
                    off_by_8=self._off_by_8,
                    replayed=self._replay.live,
                    seconds=cost,
                    missing=missing,
                    **read(kernels),
                )
            )

    def _start(self) -> Profiler | None:
        try:
            profiler = Profiler()
            profiler.__enter__()
            return profiler
        except Exception as error:  # the recipe may use a profiler of its own
            self._fail(error)
            return None

    def _stop(self, profiler: Profiler) -> list[Kernel] | None:
        try:
            profiler.__exit__(None, None, None)
            return profiler.kernels()
        except Exception as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        """Go on without: a look must not end the training beside it."""
        traceback.print_exc()
        self._broken = True
        self._say(f"Torch's profiler does not work here ({type(error).__name__}: {error}).", "warning")

    @contextmanager
    def _activations(self) -> Iterator[None]:
        self._asked_activations = False
        self._interrupt()
        step = self._job.step
        meter = ActivationMeter(step.model, step.blocks)

        def mark(phase: str) -> None:
            """The forward of the first micro-batch is what counts."""
            if phase == "forward":
                meter.enter()
            elif phase == "backward":
                meter.exit()
                step.mark = no_mark

        step.mark = mark
        try:
            yield
            number = self._interrupt()
        finally:
            meter.exit()
            step.mark = no_mark
        self._emit(Activations(time=time.time(), step=number, total=meter.total, layers=meter.layers()))

    def _say(self, text: str, level: str = "info") -> None:
        self._emit(Event(time=time.time(), level=level, source="meters", text=text))
