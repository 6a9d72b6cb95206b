"""What the screen knows of a run: records absorbed into bounded history.

The same view is fed by a live run and by a run folder; its size does not grow with the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tui3090.records import (
    OVER,
    Available,
    Changed,
    Evaluated,
    Event,
    Reading,
    Record,
    Stage,
    Started,
    State,
    StepRecord,
)

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


@dataclass(slots=True)
class Curve:
    """A value over the steps of the run, decimated: every step early, then runs of 2, 4, 8 … steps a point."""

    points: list[Point] = field(default_factory=list)
    smooth: float = math.nan
    best: float = math.inf
    best_step: int = 0
    not_finite: int = 0
    """Values that were nan or infinite; they are in no point."""
    _weight: float = 0.0
    _per_point: int = 1
    _in_last: int = 0

    def add(self, step: int, value: float, steps: int = 1) -> None:
        """Take the value of `step`, the mean over `steps` of them."""
        if not math.isfinite(value):
            self.not_finite += steps
            return
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

    def _merge(self) -> None:
        pairs = zip(self.points[::2], self.points[1::2], strict=True)
        self.points = [Point(b.step, min(a.low, b.low), max(a.high, b.high), b.smooth) for a, b in pairs]
        self._in_last += self._per_point
        self._per_point *= 2


@dataclass(slots=True)
class View:
    """The run as far as its records tell."""

    name: str = ""
    folder: str = ""
    live: bool = True
    """Whether a run stands behind it that may still write."""
    stages: dict[str, Stage] = field(default_factory=dict)
    started: Started | None = None
    state: State = field(default_factory=lambda: State(time=0.0, state="loading"))
    first_step_time: float | None = None
    step: StepRecord | None = None
    """The newest."""
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=600))
    """The steps since the last change, at most these."""
    loss: Curve = field(default_factory=Curve)
    skipped: int = 0
    """Windows without an update."""
    reading: Reading | None = None
    readings: deque[Reading] = field(default_factory=lambda: deque(maxlen=240))
    available: dict[str, str] = field(default_factory=dict)
    """Technique -> why it can't be used; empty: it can."""
    in_force: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Technique -> value, where it was changed in the run."""
    changes: deque[Changed] = field(default_factory=lambda: deque(maxlen=200))
    evaluated: deque[Evaluated] = field(default_factory=lambda: deque(maxlen=200))
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=1000))
    warnings: int = 0

    @property
    def over(self) -> bool:
        """Whether the run has come to its end."""
        return self.state.state in OVER

    def absorb(self, records: Iterable[Record]) -> bool:
        """Take new records, oldest first. Returns whether there were any."""
        any_ = False
        for record in records:
            any_ = True
            match record:
                case StepRecord():
                    self._step(record)
                case Reading():
                    self.reading = record
                    self.readings.append(record)
                case Changed():
                    self.changes.append(record)
                    self.in_force[record.technique] = record.new
                    self.recent.clear()
                case State():
                    self.state = record
                case Stage():
                    self.stages[record.name] = record
                case Available():
                    self.available[record.technique] = record.reason
                case Evaluated():
                    self.evaluated.append(record)
                case Event():
                    self.events.append(record)
                    self.warnings += record.level != "info"
                case Started():
                    self.started = record
        return any_

    def _step(self, record: StepRecord) -> None:
        if self.first_step_time is None:
            self.first_step_time = record.time
        self.step = record
        self.recent.append(record)
        if record.skipped:
            self.skipped += record.steps
        if record.skipped != "no labels":
            self.loss.add(record.step, record.loss, record.steps)
