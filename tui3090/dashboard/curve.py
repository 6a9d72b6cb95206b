"""A value over the steps of a run in bounded memory, and those of other runs to compare it with."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from operator import attrgetter

SMOOTHING = 0.02
"""Weight of a new loss in the smoothed one."""
POINTS = 4096
"""A curve's points at the most: when they are full, neighbours are merged two by two."""


@dataclass(slots=True)
class Point:
    """One or several neighbouring steps of a curve."""

    step: int
    """The last of them."""
    low: float
    high: float
    smooth: float
    """The smoothed value at the last of them."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chart's picture of a curve."""

    asked: object
    """Size and marks."""
    added: int
    """How many values the curve had."""
    time: float
    rows: list[list[tuple[str, str]]]


@dataclass(slots=True)
class Curve:
    """A value over the steps of the run, decimated: every step early, then runs of 2, 4, 8 … steps a point."""

    points: list[Point] = field(default_factory=list)
    smooth: float = math.nan
    best: float = math.inf
    best_step: int = 0
    not_finite: int = 0
    """Values that were nan or infinite; they are in no point."""
    added: int = 0
    """Finite values so far; a line of several steps counts once."""
    drawn: Drawn | None = field(default=None, repr=False, compare=False)
    """The chart's last picture of it."""
    _weight: float = 0.0
    _per_point: int = 1
    _in_last: int = 0

    def add(self, step: int, value: float, steps: int = 1) -> None:
        """Take the value of `step`, the mean over `steps` of them."""
        if not math.isfinite(value):
            self.not_finite += steps
            return
        self.added += 1
        if value < self.best:
            self.best, self.best_step = value, step
        # an exponential mean, corrected for its start: the first value counts in full
        share = 1 - (1 - SMOOTHING) ** steps
        self._weight += share * (1 - self._weight)
        self.smooth = value if math.isnan(self.smooth) else self.smooth + (value - self.smooth) * share / self._weight
        if self.points and self._in_last < self._per_point:
            last = self.points[-1]
            last.step, last.low, last.high = step, min(last.low, value), max(last.high, value)
            last.smooth = self.smooth
            self._in_last += 1
            return
        self.points.append(Point(step, value, value, self.smooth))
        self._in_last = 1
        if len(self.points) >= POINTS:
            self._merge()

    def back_to(self, step: int) -> None:
        """Forget what came after `step`: training goes on from there."""
        while self.points and self.points[-1].step > step:
            self.points.pop()
        # the point that is being filled may have been one of them: what comes begins a new one
        self._in_last = self._per_point
        self.smooth = self.points[-1].smooth if self.points else math.nan
        if self.best_step > step:
            best = min(self.points, key=lambda point: point.low, default=Point(0, math.inf, math.inf, math.nan))
            self.best, self.best_step = best.low, best.step
        self.added += 1  # the picture is another

    def _merge(self) -> None:
        pairs = zip(self.points[::2], self.points[1::2], strict=True)
        self.points = [Point(b.step, min(a.low, b.low), max(a.high, b.high), b.smooth) for a, b in pairs]
        self._in_last += self._per_point
        self._per_point *= 2


@dataclass(slots=True)
class Other:
    """Another run whose loss is drawn behind this one's. A thread fills the curve."""

    letter: str
    """By which the chart and the legend name it; empty: it is the last run of the same recipe."""
    name: str
    curve: Curve = field(default_factory=Curve)

    def at(self, step: int) -> float | None:
        """Its smoothed loss at `step`; None: it had none yet, or had ended before."""
        points = self.curve.points
        found = bisect_right(points, step, key=attrgetter("step"))
        if found == len(points):
            return points[-1].smooth if points and points[-1].step == step else None
        # a point of several steps stands for its last
        return points[found - 1].smooth if found else None
