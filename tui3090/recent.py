"""The newest windows of a run, and figures over them that cost the same however many they are."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from operator import attrgetter

from tui3090.records import Phases, Profiled, StepRecord


class Recent(deque[StepRecord]):
    """A deque of a bounded length that keeps its figures while windows come and go at its ends.

    A frame is painted twice a second, long after the last one: what is no longer in the processor's caches costs
    several times as much to look through.
    """

    def __init__(self, most: int) -> None:
        super().__init__(maxlen=most)
        self._most = most
        self._names = ["steps", "seconds"]
        """Figures that are summed: these, for attrgetter gives a tuple from two names on, and what was asked for."""
        self._figures = attrgetter(*self._names)
        self._sums: list[float] = [0, 0]
        """Of each of them, over the windows."""
        self._parts: deque[list[float]] = deque(maxlen=most)
        """Each window's, in the order of the names."""
        self._appended = 0
        self._lengths: list[float] | None = None
        """Seconds of each window, sorted; what is not finite is left out. None: nobody has asked yet."""
        self._stalls: deque[tuple[int, float]] | None = None
        """Number of the window and share of stall, falling: of those that may yet be the greatest. None: as above."""

    def append(self, record: StepRecord) -> None:
        """The newest window; the oldest goes where there are too many."""
        gone = self[0] if len(self) == self._most else None
        super().append(record)
        self._appended += 1
        parts = self._parts_of(record)
        if gone is None:
            self._sums = [before + part for before, part in zip(self._sums, parts)]
        else:
            self._sums = [before + part - old for before, part, old in zip(self._sums, parts, self._parts[0])]
        self._parts.append(parts)
        if self._appended % self._most == 0:  # or roundings would add up over a run
            self._sums = [sum(parts) for parts in zip(*self._parts)]
        if (lengths := self._lengths) is not None:
            if gone is not None and math.isfinite(gone.seconds):
                del lengths[bisect_left(lengths, gone.seconds)]
            if math.isfinite(record.seconds):
                insort(lengths, record.seconds)
        if self._stalls is not None:
            self._stalled(self._appended, record)

    def clear(self) -> None:
        """No window."""
        super().clear()
        self._parts.clear()
        self._sums = [0] * len(self._names)
        self._lengths = self._stalls = None

    @property
    def median_s(self) -> float | None:
        """Of the windows' seconds; None: there is no window, or none that is finite."""
        if self._lengths is None:
            self._lengths = sorted(window.seconds for window in self if math.isfinite(window.seconds))
        known, middle = self._lengths, len(self._lengths) // 2
        if not known:
            return None
        return known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2

    @property
    def worst_stall(self) -> float:
        """The greatest share of a window's time in which the device waited for data, as it was measured.

        Windows in which loader workers had to start are left out; 0: there is no other.
        """
        if self._stalls is None:
            self._stalls = deque()
            for number, window in enumerate(self, self._appended - len(self) + 1):
                self._stalled(number, window)
        return self._stalls[0][1] if self._stalls else 0.0

    def _stalled(self, number: int, window: StepRecord) -> None:
        stalls = self._stalls
        assert stalls is not None
        if not window.loader_start and window.seconds > 0 and math.isfinite(share := window.stall_s / window.seconds):
            while stalls and stalls[-1][1] <= share:
                stalls.pop()
            stalls.append((number, share))
        while stalls and stalls[0][0] <= self._appended - len(self):
            stalls.popleft()

    def total(self, name: str) -> float:
        """The sum of a figure of the windows, `seconds`, `tokens`, `replayed`, each times its steps; `steps`: of them.

        A window that lacks it counts as 0.
        """
        if name not in self._names:
            self._names.append(name)
            self._figures = attrgetter(*self._names)
            self._parts = deque(map(self._parts_of, self), self._most)
            self._sums.append(sum([parts[-1] for parts in self._parts]))
        place = self._names.index(name)
        if not math.isfinite(self._sums[place]):  # what is not finite would stay in a sum that is carried on
            self._sums[place] = sum([parts[place] for parts in self._parts])
        return self._sums[place]

    def _parts_of(self, record: StepRecord) -> list[float]:
        steps, *values = self._figures(record)
        return [steps, *[(value or 0) * steps for value in values]]


class Sampled(deque[Phases]):
    """The newest steps whose time was told by phase; their means are worked out once, however often they are asked."""

    def __init__(self, most: int) -> None:
        super().__init__(maxlen=most)
        self._means: dict[tuple[str, ...], list[float]] = {}

    def append(self, record: Phases) -> None:
        """The newest; the oldest goes where there are too many."""
        super().append(record)
        self._means.clear()

    def clear(self) -> None:
        """No sample."""
        super().clear()
        self._means.clear()

    def means(self, names: tuple[str, ...]) -> list[float]:
        """Of these times of the samples that took any, in seconds and in this order; empty: there is no such sample."""
        if names not in self._means:
            told = [sample for sample in self if 0 < sample.seconds < math.inf]
            self._means[names] = [sum(getattr(s, name) for s in told) / len(told) for name in names if told]
        return self._means[names]


def busy_share(look: Profiled, windows: Recent) -> float | None:
    """The share of a window's time, waiting for data left out, in which a kernel runs; None: no kernel was seen.

    What the kernels of the profiled window took over what `windows` take, or the share in the profiled window itself
    where that is more: the profiler makes launches dearer, and so the gaps between kernels longer.
    """
    if look.busy_share is None:
        return None
    busy_s = (windows.total("seconds") - windows.total("stall_s")) / max(1.0, windows.total("steps"))
    return max(look.busy_share, min(1.0, look.kernel_s / busy_s) if busy_s > 0 else 0.0)
