"""What the screen knows of a run: records absorbed into bounded history.

The same view is fed by a live run and by a run folder; its size does not grow with the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tui3090.dashboard import told
from tui3090.dashboard.curve import Curve, Other
from tui3090.gains import Gains
from tui3090.recent import Recent, Sampled
from tui3090.records import (
    OVER,
    Activations,
    Available,
    Changed,
    Evaluated,
    Event,
    Gain,
    Phases,
    Profiled,
    Reading,
    Record,
    Refused,
    Resumed,
    Saved,
    Stage,
    Started,
    State,
    StepRecord,
)
from tui3090.settings import BY_NAME, Settings, Value

if TYPE_CHECKING:
    from tui3090.advice import Advice
    from tui3090.facts import Facts

NAMES = 32
"""Different stages and reasons that are kept; a run of ours has a handful, a log from elsewhere may have any number."""
ADVISE_S = 2.0
"""Between two times that advice is drawn from the records."""
STREAM = (StepRecord, Reading, Phases)
"""What comes with every step or twice a second."""
PRINTED = 1000
"""Different lines of output that are kept."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A line that training printed."""

    text: str
    time: float | None
    """When it came last; None: not known."""
    times: int = 1
    """How often it came."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A technique's value that was asked for by key and is not in force yet."""

    value: Value
    pressed: float
    """When its key was last pressed."""
    sent: bool = False
    """Whether it has settled and the trainer has it; before that it may still be another value."""


@dataclass(slots=True)
class View:
    """The run as far as its records tell."""

    name: str = ""
    folder: str = ""
    again: str = ""
    """The command that goes on with it from a save."""
    live: bool = True
    """Whether a run stands behind it that may still write."""
    stages: dict[str, Stage] = field(default_factory=dict)
    started: Started | None = None
    state: State = field(default_factory=lambda: State(time=0.0, state="loading"))
    first_time: float | None = None
    """When the first record was made."""
    first_step_time: float | None = None
    step: StepRecord | None = None
    """The newest."""
    recent: Recent = field(default_factory=lambda: Recent(600))
    """The steps since the last change, at most these."""
    phases: Sampled = field(default_factory=lambda: Sampled(32))
    """Where the time of sampled steps went, since the last change; the newest of them."""
    profiled: Profiled | None = None
    """The last profiled step since the last change."""
    activations: Activations | None = None
    """What the layers keep for backward, if it was measured since the last change."""
    loss: Curve = field(default_factory=Curve)
    others: list[Other] = field(default_factory=list)
    """Runs to compare with, or the last one of the same recipe."""
    skipped: int = 0
    """Windows without an update."""
    skip_reasons: dict[str, int] = field(default_factory=dict)
    """Why -> how many of them."""
    saved: Saved | None = None
    """The newest save."""
    reading: Reading | None = None
    readings: deque[Reading] = field(default_factory=lambda: deque(maxlen=240))
    available: dict[str, str] = field(default_factory=dict)
    """Technique -> why it can't be used; empty: it can."""
    begun: Settings = field(default_factory=Settings)
    """The techniques at the start: as asked for, then as the run really began."""
    in_force: dict[str, Value] = field(default_factory=dict)
    """Technique -> value, where it was changed in the run."""
    pending: dict[str, Pending] = field(default_factory=dict)
    """Technique -> what its key asked for, until it is in force."""
    changes: deque[Changed] = field(default_factory=lambda: deque(maxlen=200))
    gains: dict[tuple[int, str, Value], Gain] = field(default_factory=dict)
    """Step, technique and new value of a change -> what it brought, once that is known."""
    measuring: Gains = field(default_factory=Gains)
    """For its progress, and for the gains of a log that holds none."""
    _facts: Facts | None = None
    """What advice is drawn from; None: no record has come."""
    _advice: list[Advice] = field(default_factory=list)
    _advised: tuple[float, int] = (-math.inf, 0)
    """Time and number of changes when it was last drawn."""
    evaluated: deque[Evaluated] = field(default_factory=lambda: deque(maxlen=200))
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=1000))
    warnings: int = 0
    output: dict[str, Printed] = field(default_factory=dict)
    """What training printed, the line that came last at the end; at most `PRINTED` different lines."""
    unfinished: str = ""
    """The line that training is printing, of a progress bar its newest state."""
    locked: bool = False
    """Whether keys are refused."""
    stop_asked: bool = False
    """Whether the user asked for the end, which comes at the end of the step."""
    left: bool = False
    """Whether the user closed the screen; a run that is not over is left running."""
    happened: int = 0
    """How many lines of output, and records but for the steady stream of steps, readings and phases: while it stands
    still, so does what follows from them alone."""
    answer: str = ""
    """What the last key press brought, a sentence."""
    answer_time: float = 0.0

    @property
    def over(self) -> bool:
        """Whether the run has come to its end."""
        return self.state.state in OVER

    @property
    def doing(self) -> str:
        """What the run is doing, one of `STATES`; stopping from the moment it was asked to."""
        return "stopping" if self.stop_asked and not self.over else self.state.state

    def value(self, technique: str) -> Value:
        """The technique's value in force."""
        begun: Value = getattr(self.begun, technique)
        return self.in_force.get(technique, begun)

    def seconds_per_step(self) -> float | None:
        """The mean over the steps since the last change; None before there is one."""
        steps = self.recent.total("steps")
        return self.recent.total("seconds") / steps if steps else None

    def throughput(self) -> tuple[float | None, str]:
        """Tokens or samples per second over the steps since the last change, and the unit: `tok/s` or `samples/s`."""
        tokens = self.started is not None and self.started.unit == "tokens"
        seconds = self.recent.total("seconds")
        done = self.recent.total("tokens" if tokens else "samples")
        return (done / seconds if seconds > 0 else None), "tok/s" if tokens else "samples/s"

    def advice(self) -> list[Advice]:
        """What to try next; drawn anew after a change and every `ADVISE_S`, by the records' time."""
        if self._facts is None:
            return []
        from tui3090.advice import advise

        last = self.reading.time if self.reading is not None else self.step.time if self.step is not None else 0.0
        changes = len(self._facts.gains) + len(self.changes)
        if not abs(last - self._advised[0]) < ADVISE_S or changes != self._advised[1]:
            self._advice, self._advised = advise(self._facts), (last, changes)
        return self._advice

    @property
    def advisable(self) -> bool:
        """Whether there are figures enough to draw advice from."""
        return self._facts is not None and self._facts.steady

    def absorb(self, records: Iterable[Record]) -> bool:
        """Take new records, oldest first. Returns whether there were any."""
        any_ = False
        for record in records:
            any_ = True
            if not isinstance(record, STREAM):
                self.happened += 1
            if self.first_time is None:
                self.first_time = record.time
            if self._facts is None:
                from tui3090.facts import Facts  # not at the top: the first paint would wait for it

                self._facts = Facts()
            self._facts.absorb(record)
            if (gain := self.measuring.absorb(record)) is not None:
                self._brought(gain)
            match record:
                case StepRecord():
                    self._step(record)
                case Reading():
                    self.reading = record
                    self.readings.append(record)
                case Phases():
                    self.phases.append(record)
                case Profiled():
                    self.profiled = record
                case Activations():
                    self.activations = record
                    if self.live:
                        self.answer, self.answer_time = "Activations measured: 3 shows the layers.", record.time
                case Changed():
                    self.changes.append(record)
                    if record.technique in BY_NAME:
                        self.in_force[record.technique] = record.new
                    self.recent.clear()
                    self.phases.clear()
                    self.profiled = self.activations = None
                    self._settled(record.technique, record.new)
                    event = told.in_force(record)
                    self.events.append(event)
                    if self.live:
                        self.answer, self.answer_time = event.text, event.time
                case Gain():
                    self._brought(record)
                case Refused():
                    self._settled(record.technique, record.value)
                    self.events.append(Event(time=record.time, level="info", source="key", text=record.reason))
                    self.answer, self.answer_time = record.reason, record.time
                case State():
                    self.state = record
                    if self.over:
                        self.pending.clear()
                case Stage():
                    if record.name in self.stages or len(self.stages) < NAMES:
                        self.stages[record.name] = record
                case Available():
                    if record.technique in BY_NAME:
                        self.available[record.technique] = record.reason
                    if record.reason:
                        self._settled(record.technique, None)
                case Saved():
                    self.saved = record
                    self.events.append(told.saved(record))
                case Resumed():
                    self._back_to(record)
                case Evaluated():
                    self.evaluated.append(record)
                    self.events.append(told.evaluated(record))
                case Event():
                    self.events.append(record)
                    self.warnings += record.level != "info"
                    if record.source == "key":
                        self.answer, self.answer_time = record.text, record.time
                case Started():
                    self.started = record
                    self.begun = Settings.from_short(record.settings)
                    self.in_force.clear()
        return any_

    def _brought(self, gain: Gain) -> None:
        self.gains[gain.step, gain.technique, gain.new] = gain
        if len(self.gains) > (self.changes.maxlen or 0):
            del self.gains[next(iter(self.gains))]

    def _back_to(self, record: Resumed) -> None:
        """Training goes on from a save: what came after it is no part of the run."""
        self.loss.back_to(record.step)
        self.recent.clear()
        for kept in (self.changes, self.evaluated):
            while kept and kept[-1].step > record.step:
                kept.pop()
        self.gains = {key: gain for key, gain in self.gains.items() if gain.step <= record.step}
        where = f"goes on from {record.name}, step {record.step}"
        self.events.append(Event(time=record.time, level="info", source="save", text=where))
        if self.live:
            self.answer, self.answer_time = f"Training {where}.", record.time

    def _settled(self, technique: str, value: Value | None) -> None:
        """Forget what was asked for, now that it is in force or (None) can't be."""
        pending = self.pending.get(technique)
        if pending and pending.sent and value in (None, pending.value):
            del self.pending[technique]

    def printed(self, lines: Iterable[str], time: float | None) -> None:
        """Take new lines of output, oldest first, that came at `time`; blank ones are left out."""
        for text in lines:
            if not text.strip():
                continue
            self.happened += 1
            before = self.output.pop(text, None)
            self.output[text] = Printed(text, time, before.times + 1 if before else 1)
            if len(self.output) > PRINTED:
                del self.output[next(iter(self.output))]

    def _step(self, record: StepRecord) -> None:
        if self.first_step_time is None:
            self.first_step_time = record.time
        self.step = record
        if not record.compiled:
            self.recent.append(record)
        if record.skipped:
            self.skipped += record.steps
            if record.skipped in self.skip_reasons or len(self.skip_reasons) < NAMES:
                self.skip_reasons[record.skipped] = self.skip_reasons.get(record.skipped, 0) + record.steps
        if record.skipped != "no labels":
            self.loss.add(record.step, record.loss, record.steps)
