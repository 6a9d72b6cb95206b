"""Where the time of a window goes, by marks on the device's time line that are read when the window is long over.

A mark is a CUDA event, on the CPU a look at the clock. Marks are set in one window a second at the most, so that a run
of short steps pays nothing for them; nothing waits for them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import torch

from tui3090.records import Phases, StepRecord

EVERY_S = 1.0
"""Between two samples at the least."""
SHARE = 0.004
"""Of the time that setting and reading marks may take: below 0.5 %."""


def no_mark(phase: str) -> None:
    """What `Step.mark` is in all other windows."""


class Sample:
    """The marks of one window."""

    def __init__(
        self, device: torch.device, before: torch.cuda.Event | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`before`: the end of the last work of the window before it; None on the CPU."""
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._before = before
        self._clock = clock
        self._marks: list[tuple[str, torch.cuda.Event | float]] = []
        self.cost_s = 0.0
        """The host's time for it, so far."""

    def mark(self, phase: str) -> None:
        """From here on the window is in `phase`: copy, forward, backward, graph, optimizer, other; 'end': in none."""
        began = self._clock()
        if self._stream is None:
            self._marks.append((phase, began))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._marks.append((phase, event))
        self.cost_s += self._clock() - began

    def phases(self, record: StepRecord) -> Phases | None:
        """Where the time went, once the window that `record` is of is over; None: it had no end."""
        began = self._clock()
        if not self._marks or self._marks[-1][0] != "end":
            return None
        spent: defaultdict[str, float] = defaultdict(float)
        for (phase, start), (_, end) in zip(self._marks, self._marks[1:]):
            spent[phase] += _between(start, end)
        # to the microsecond: the log keeps one a second
        spent = defaultdict(float, {phase: round(seconds, 6) for phase, seconds in spent.items()})
        whole = record.seconds if self._before is None else _between(self._before, self._marks[-1][1])
        phases = Phases(
            time=time.time(),
            step=record.step,
            seconds=round(whole, 6),
            data_s=round(record.stall_s, 6),
            copy_s=spent["copy"],
            forward_s=spent["forward"],
            backward_s=spent["backward"],
            graph_s=spent["graph"],
            optimizer_s=spent["optimizer"],
        )
        self.cost_s += self._clock() - began
        return phases


def _between(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Seconds."""
    if isinstance(start, float) or isinstance(end, float):
        return end - start  # type: ignore[operator]
    elapsed: float = start.elapsed_time(end)
    return elapsed / 1000


class Sampler:
    """Decides which windows are sampled."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._due = 0.0

    def begin(self, before: torch.cuda.Event | None) -> Sample | None:
        """A sample for the window that begins now; None: it is not its turn, or its time can't be told."""
        if self._clock() < self._due or (self._device.type == "cuda" and before is None):
            return None
        self._due = self._clock() + EVERY_S  # what this one costs is known a window later
        return Sample(self._device, before, self._clock)

    def took(self, sample: Sample) -> None:
        """The next one comes so much later that the cost stays within its share."""
        self._due = self._clock() + max(EVERY_S, sample.cost_s / SHARE)
