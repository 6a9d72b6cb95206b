"""Which step records, readings and phases have a line in records.jsonl, so that the log of a long run stays small.

- Each of the first `EVERY_STEP` steps has its line. Later a line stands for the steps of at least `THINNED_S` seconds
  of training and of at least a `PARTS`-th of the training so far, with their means: finer than any picture of the run.
- Each of the first `EVERY_READING` readings has its line. Later there is one every `READING_S` seconds, and in a long
  run one every `PARTS`-th of the training so far, as it was read.
- Each of the first `EVERY_PHASES` samples of a step's phases has its line, later one every `PHASES_S` seconds.
- Every other record has its line, and no step or reading of before a change is written after it.

At 30 steps a second ten hours make 28 000 lines of steps, 8600 of readings and 4000 of phases.
This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tui3090.records import Changed, Phases, Reading, Record, Resumed, State, StepRecord

EVERY_STEP = 10_000
"""Steps that have a line each; later lines stand for several."""
THINNED_S = 0.25
"""Later a line at most this often, by the time that the steps took: the clock on the wall may be set back."""
PARTS = 2_500
"""And at most so many lines for training that is as long again as that before."""
EVERY_READING = 2000
"""Readings that have a line each: a quarter of an hour."""
READING_S = 2.0
"""Later one at most this often."""
EVERY_PHASES = 600
"""Sampled steps that have a line each: ten minutes."""
PHASES_S = 10.0
"""Later one at most this often."""


class Thinner:
    """Takes all records of a run in their order and gives those that have a line."""

    def __init__(self) -> None:
        self._steps = 0
        self._trained_s = 0.0
        self._group: list[StepRecord] = []
        self._group_s = 0.0
        self._readings = 0
        self._written_at = 0.0
        self._held: Reading | None = None
        self._phases = 0
        self._phases_at = 0.0

    def add(self, record: Record) -> Sequence[Record]:
        """The records that are due for the file now."""
        match record:
            case StepRecord():
                return self._step(record)
            case Reading():
                return self._reading(record)
            case Phases():
                return self._sampled(record)
            case Changed() | State() | Resumed():
                return [*self.rest(), record]
        return (record,)

    def rest(self) -> list[Record]:
        """What is held back: the newest reading, and the steps being gathered as one record."""
        held, self._held = self._held, None
        return [*([held] if held else []), *self._gathered()]

    def _step(self, record: StepRecord) -> list[StepRecord]:
        seconds = record.seconds * record.steps
        self._steps += record.steps
        self._trained_s += seconds
        if self._steps <= EVERY_STEP:
            return [record]
        due: list[StepRecord] = []
        if self._group and _alike(record) != _alike(self._group[0]):
            due = self._gathered()
        self._group.append(record)
        self._group_s += seconds
        if self._group_s >= max(THINNED_S, self._trained_s / PARTS):
            due += self._gathered()
        return due

    def _gathered(self) -> list[StepRecord]:
        group, self._group, self._group_s = self._group, [], 0.0
        return [_mean(group)] if group else []

    def _reading(self, record: Reading) -> Sequence[Reading]:
        self._readings += 1
        apart_s = max(READING_S, self._trained_s / PARTS)
        if self._readings > EVERY_READING and abs(record.time - self._written_at) < apart_s:
            self._held = record
            return ()
        self._written_at, self._held = record.time, None
        return (record,)

    def _sampled(self, record: Phases) -> Sequence[Phases]:
        self._phases += 1
        if self._phases > EVERY_PHASES and abs(record.time - self._phases_at) < PHASES_S:
            return ()
        self._phases_at = record.time
        return (record,)


def _alike(record: StepRecord) -> tuple[str, str, bool, bool]:
    """What windows that one line stands for have in common."""
    return record.skipped, record.settings, record.loader_start, record.compiled


def _mean(group: Sequence[StepRecord]) -> StepRecord:
    """One record for several windows of the same settings: the last one's counters, the means of what was measured."""
    last, n = group[-1], len(group)
    if n == 1:
        return last
    norms = [r.grad_norm for r in group if r.grad_norm is not None]
    flops = [r.flops for r in group if r.flops is not None]
    hardware = [r.hardware_flops for r in group if r.hardware_flops is not None]
    return replace(
        last,
        steps=sum(r.steps for r in group),
        loss=_digits(sum(r.loss for r in group) / n),
        lr=_digits(sum(r.lr for r in group) / n),
        grad_norm=_digits(sum(norms) / len(norms)) if norms else None,
        samples=round(sum(r.samples for r in group) / n),
        tokens=round(sum(r.tokens for r in group) / n),
        padding=round(sum(r.padding for r in group) / n),
        seconds=_digits(sum(r.seconds for r in group) / n),
        wait_s=_digits(sum(r.wait_s for r in group) / n),
        stall_s=_digits(sum(r.stall_s for r in group) / n),
        flops=_digits(sum(flops) / len(flops)) if flops else None,
        hardware_flops=_digits(sum(hardware) / len(hardware)) if hardware else None,
        replayed=all(r.replayed for r in group),
    )


def _digits(mean: float) -> float:
    """A mean to the seven digits that a float32 has: the others would only be bytes."""
    return float(f"{mean:.7g}")
