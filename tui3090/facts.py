"""What a run's records say of it now, in bounded memory: what advice.py draws its advice from.

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from tui3090.gains import Settling, Training, measured
from tui3090.recent import Recent
from tui3090.records import Available, Changed, Event, Gain, Profiled, Reading, Record, Resumed, Started, StepRecord
from tui3090.settings import BY_NAME, Settings, Value

LEAST_WINDOWS, LEAST_S = 10, 3.0
"""Settled windows and their time from which on rates can be judged."""
PACE_S = 2.0
"""Windows of so long a time make one figure of the run's pace."""
READING_S = 1.0
"""A reading may be the mean over so long a time before it."""
UNMOVED = "bf16 weights did not change"
"""What the watchdog says of bf16 weights whose updates round away."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Some seconds of training."""

    rate: float
    """Tokens, or samples, per second."""
    stall: float
    """Data stall over the time."""


@dataclass(slots=True)
class Facts:
    """A run since its last change; what belongs to the whole run says so."""

    started: Started | None = None
    """Of the whole run."""
    settings: Settings = field(default_factory=Settings)
    """In force."""
    available: dict[str, str] = field(default_factory=dict)
    """Technique -> why it can't be used; empty: it can."""
    gains: deque[Gain] = field(default_factory=lambda: deque(maxlen=100))
    """Of the whole run."""
    unmoved: bool = False
    """Whether bf16 weights stood still in this run."""
    profiled: Profiled | None = None
    """The newest look at the kernels that saw any."""
    reading: Reading | None = None
    """The newest, settled or not."""
    windows: Recent = field(default_factory=lambda: Recent(600))
    """Settled; of those that start an epoch's or a change's loader none."""
    count: int = 0
    """Settled windows, also those that `windows` has no room for."""
    readings: deque[Reading] = field(default_factory=lambda: deque(maxlen=120))
    """Since the windows settled, of the time in which training went on."""
    paces: deque[Pace] = field(default_factory=lambda: deque(maxlen=600))
    retries: int = 0
    """Allocator retries before the change."""
    _training: Training = field(default_factory=Training)
    _settling: Settling = field(default_factory=Settling)
    _gathered: list[StepRecord] = field(default_factory=list)
    _gathered_s: float = 0.0

    def absorb(self, record: Record) -> None:
        """Take the next record."""
        self._training.absorb(record)
        match record:
            case StepRecord():
                self._step(record)
            case Reading():
                self.reading = record
                if self.windows and record.time - READING_S >= self._training.since:
                    self.readings.append(record)
            case Changed(technique=technique, new=new):
                if technique in BY_NAME:
                    self.settings = self._having(technique, new)
                self._begin_again()
            case Resumed():
                self._begin_again()
            case Gain():
                self.gains.append(record)
            case Available(technique=technique, reason=reason):
                self.available[technique] = reason
            case Started():
                self.started = record
                self.settings = Settings.from_short(record.settings)
            case Event(level="warning", text=text):
                self.unmoved = self.unmoved or UNMOVED in text
            case Profiled(missing=""):
                self.profiled = record

    def _having(self, technique: str, value: Value) -> Settings:
        try:
            return self.settings.having(technique, value)
        except ValueError:  # another version's
            return self.settings

    def _begin_again(self) -> None:
        self.windows.clear()
        self.readings.clear()
        self.paces.clear()
        self._gathered.clear()
        self._gathered_s = 0.0
        self.count = 0
        self.profiled = None
        self.retries = (self.reading.retries or 0) if self.reading else 0
        self._settling = Settling()

    def _step(self, record: StepRecord) -> None:
        if not measured(record) or not self._settling.over(record) or record.loader_start:
            return
        self.windows.append(record)
        self.count += record.steps
        self._gathered.append(record)
        self._gathered_s += record.seconds * record.steps
        if self._gathered_s >= PACE_S:
            done = sum(self._done(window) * window.steps for window in self._gathered)
            stalled = sum(window.stall_s * window.steps for window in self._gathered)
            self.paces.append(Pace(done / self._gathered_s, stalled / self._gathered_s))
            self._gathered.clear()
            self._gathered_s = 0.0

    def _done(self, window: StepRecord) -> int:
        return window.tokens if self.started is not None and self.started.unit == "tokens" else window.samples

    @property
    def cuda(self) -> bool:
        """Whether training runs on a card."""
        return self.started is not None and self.started.device != "cpu"

    @property
    def steady(self) -> bool:
        """Whether there is enough to judge rates by."""
        return self.count >= LEAST_WINDOWS and self.seconds >= LEAST_S

    @property
    def seconds(self) -> float:
        """The time of the windows, at least a second's thousandth."""
        return max(1e-3, self.windows.total("seconds"))

    def share(self, attribute: str) -> float:
        """The sum of a time of the windows, `stall_s` or `wait_s`, over all their time."""
        return self.windows.total(attribute) / self.seconds

    @property
    def step_s(self) -> float:
        """The median of the windows' times."""
        return self.windows.median_s or 0.0

    def median(self, attribute: str, least: int = 4) -> float | None:
        """The median of a figure of the readings; None where fewer than `least` have it."""
        values = [value for reading in self.readings if (value := getattr(reading, attribute)) is not None]
        return statistics.median(values) if len(values) >= least else None

    def can(self, technique: str) -> bool:
        """Whether the machine is known to offer it."""
        return self.available.get(technique) == ""

    def tried(self, technique: str, value: Value) -> bool:
        """Whether this run has measured that `value` is no gain in throughput."""
        for gain in reversed(self.gains):
            if gain.technique == technique and gain.new == value:
                return gain.verdict != "faster"
            if gain.technique == technique and gain.old == value:
                return gain.verdict == "faster"  # without it it was faster
        return False
