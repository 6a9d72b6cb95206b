"""What a change of a technique brought: figures from equal work before and after it, in steady state.

What is compared are samples: runs of windows that hold the same amount of work before and after, each at least
`SAMPLE_S` long. After a change windows settle before they count: warm-up, capture, compilation and workers that start
are left out, and so is the first window of an epoch.

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tui3090.records import OVER, Changed, Gain, Reading, Record, Resumed, Started, State, StepRecord

SETTLING_WINDOWS, SETTLING_S = 3, 1.0
"""After a change windows count from when both are over."""
UNREPLAYED = 20
"""Under graph replay windows settle until the first that was replayed, but no longer than this."""
SAMPLES, LEAST_SAMPLES = 20, 6
"""On each side, and how few will do where a step takes long or there were few before."""
SAMPLE_S, ALL_S = 0.25, 60.0
"""The least length of a sample, and the time from which on fewer are taken."""
HISTORY = 4096
"""Windows that are kept from before a change."""
SMALLEST = 0.01
"""A change of throughput below this share is none."""
STILL_SAME = 0.02
"""Noise up to which no change is called the same; above it is too noisy to tell."""
OFF_COURSE = 4.0
"""Standard errors by which the loss has to be above its course."""
COUNTERS_S = 2.0
"""A reading of the Tensor Cores' counters is the mean over the time before it."""


class Gains:
    """Watches the records of a run, one StepRecord a window, and gives a Gain once its figures are known."""

    def __init__(self) -> None:
        self._unit = ""
        self._settling = Settling()
        self._side = _Side()
        """Since the last change."""
        self._measuring: _Measurement | None = None
        self._epoch = 0
        self._training = Training()

    @property
    def progress(self) -> tuple[int, int] | None:
        """Samples that the newest change has, and how many it needs; None: nothing is being measured."""
        measuring = self._measuring
        return (measuring.done(self._side.count), measuring.samples) if measuring is not None else None

    def absorb(self, record: Record) -> Gain | None:
        """Take the next record; the gain that it completes."""
        self._training.absorb(record)
        match record:
            case StepRecord():
                return self._step(record)
            case Reading():
                self._side.read(record, self._training.since)
            case Changed():
                return self._changed(record)
            case Started(unit=unit):
                self._unit = unit
            case State(state=state) if state in OVER:
                return self._finish(record.time)
            case Resumed():
                self._measuring, self._epoch = None, 0
                self._side, self._settling = _Side(), Settling()
        return None

    def _step(self, record: StepRecord) -> Gain | None:
        self._side.seen = True
        self._side.diverged = self._side.diverged or record.skipped == "not finite"
        starts_epoch = math.isfinite(record.epoch) and math.ceil(record.epoch) > self._epoch
        if starts_epoch:
            self._epoch = math.ceil(record.epoch)
        if not measured(record) or not self._settling.over(record) or starts_epoch or record.loader_start:
            return None
        self._side.add(record)
        measuring = self._measuring
        if measuring is not None and measuring.done(self._side.count) >= measuring.samples:
            return self._finish(record.time)
        return None

    def _changed(self, record: Changed) -> Gain | None:
        measuring, side = self._measuring, self._side
        if measuring is not None and not side.seen:  # came with the change before: both are measured as one
            before, gain = measuring.before, None
        else:
            before, gain = side, self._finish(record.time)
        self._measuring = _Measurement.of(record, before)
        self._side, self._settling = _Side(), Settling()
        return gain

    def _finish(self, time: float) -> Gain | None:
        """End the measurement with what it has; None: that is too little."""
        measuring, self._measuring = self._measuring, None
        if measuring is None or measuring.done(self._side.count) < LEAST_SAMPLES:
            return None
        return measuring.gain(self._side, time, self._unit)


def measured(record: StepRecord) -> bool:
    """Whether a window ran, and its times are times of a step: a log may hold anything."""
    times = record.seconds, record.wait_s, record.stall_s
    return record.skipped != "no labels" and not record.compiled and all(0 <= time < math.inf for time in times)


class Training:
    """Since when training has gone on: readings tell nothing of it while it is paused or evaluates."""

    def __init__(self) -> None:
        self.since = -math.inf
        """infinite while it does not go on."""

    def absorb(self, record: Record) -> None:
        """Take the next record."""
        if isinstance(record, State):
            self.since = record.time if record.state == "training" else math.inf


class Settling:
    """Lets the windows after a change, or after the start, pass until they are steady."""

    def __init__(self) -> None:
        self._windows = self._unreplayed = 0
        self._seconds = 0.0

    def over(self, record: StepRecord) -> bool:
        """Whether this window counts."""
        if self._windows >= SETTLING_WINDOWS and self._seconds >= SETTLING_S:
            return True
        if "graph=on" in record.settings and not record.replayed and self._unreplayed < UNREPLAYED:
            self._unreplayed += record.steps
        else:
            self._windows += record.steps
            self._seconds += record.seconds * record.steps
        return False


@dataclass(slots=True)
class _Side:
    """What was seen between two changes, settled."""

    windows: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=HISTORY))
    count: int = 0
    seen: bool = False
    """Whether there was any window, settled or not."""
    diverged: bool = False
    """Whether a window's loss or gradient was not finite."""
    peak: int | None = None
    """Bytes allocated at the most, whatever it was for."""
    peak_steady: int | None = None
    """In steady windows; None: no reading told it."""
    counters: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=60))
    """Time and value of the Tensor Cores' counters."""

    def add(self, record: StepRecord) -> None:
        self.windows.append(record)
        self.count += record.steps

    def read(self, reading: Reading, training_since: float) -> None:
        self.peak = reading.peak_allocated if reading.peak_allocated is not None else self.peak
        if self.windows and reading.peak_steady is not None:  # before there is one, the reading may be an older one
            self.peak_steady = max(reading.peak_steady, self.peak_steady or 0)
        at, busy = reading.tensor_core_time, reading.tensor_core
        if at is None or busy is None or not self.windows or (self.counters and self.counters[-1][0] == at):
            return
        if at - COUNTERS_S >= max(training_since, self.windows[0].time - self.windows[0].seconds):
            self.counters.append((at, busy))

    def tensor_core(self) -> float | None:
        return statistics.fmean(busy for _, busy in self.counters) if self.counters else None


@dataclass(frozen=True, slots=True)
class _Measurement:
    """A change with what was before it."""

    change: Changed
    before: _Side
    samples: int
    """Wanted on each side; fewer than `LEAST_SAMPLES` are never wanted."""
    size_before: int
    """Windows in a sample."""
    size_after: int

    @classmethod
    def of(cls, change: Changed, before: _Side) -> _Measurement | None:
        """None where there are too few windows before it."""
        if not before.windows:
            return None
        pace = statistics.median(record.seconds for record in before.windows)
        sizes = [(1, 1)]
        if change.technique == "accumulate" and change.origin == "key":  # else steps hold the same samples as before
            old, new = int(change.old), int(change.new)
            whole = math.lcm(old, new)
            sizes.insert(0, (whole // old, whole // new))
        for size_before, size_after in sizes:  # the same micro-batches; where they are too few, the same windows
            times = max(1, math.ceil(SAMPLE_S / max(pace * size_before, 1e-6)))
            times = min(times, max(1, len(before.windows) // (LEAST_SAMPLES * size_before)))
            length = max(pace * size_before * times, 1e-6)
            wanted = max(LEAST_SAMPLES, min(SAMPLES, int(ALL_S / length)))
            samples = min(wanted, len(before.windows) // (size_before * times))
            if samples >= LEAST_SAMPLES:
                return cls(change, before, samples, size_before * times, size_after * times)
        return None

    def done(self, windows: int) -> int:
        """The samples that so many windows after the change make."""
        return min(self.samples, windows // self.size_after)

    def gain(self, after: _Side, time: float, unit: str) -> Gain | None:
        """The figures; None where the windows have none, like those without any token or sample."""
        count = self.done(len(after.windows))
        if count < LEAST_SAMPLES:
            return None
        old = _samples(list(self.before.windows)[-count * self.size_before :], self.size_before)
        new = _samples(list(after.windows)[: count * self.size_after], self.size_after)
        in_tokens = unit == "tokens"
        rates = [[_rate(sample, in_tokens) for sample in samples] for samples in (old, new)]
        if min(map(min, rates)) <= 0:
            return None
        change, noise = compare(*rates)
        losses = [[_loss(sample) for sample in samples] for samples in (old, new)]
        peaks = self.before.peak_steady, after.peak_steady
        if None in peaks:  # of the same kind on both sides
            peaks = self.before.peak, after.peak
        flops_before, mfu_before = _flops(old)
        flops_after, mfu_after = _flops(new)
        return Gain(
            time=time,
            step=self.change.step,
            technique=self.change.technique,
            old=self.change.old,
            new=self.change.new,
            verdict=verdict(change, noise),
            noise=noise,
            windows_before=count * self.size_before,
            windows_after=count * self.size_after,
            unit=unit or "samples",
            rate_before=statistics.median(rates[0]),
            rate_after=statistics.median(rates[1]),
            step_s_before=_step_s(old),
            step_s_after=_step_s(new),
            peak_before=peaks[0],
            peak_after=peaks[1],
            stall_before=_stall(old),
            stall_after=_stall(new),
            flops_s_before=flops_before,
            flops_s_after=flops_after,
            mfu_before=mfu_before,
            mfu_after=mfu_after,
            tensor_core_before=self.before.tensor_core(),
            tensor_core_after=after.tensor_core(),
            loss="not finite" if after.diverged else course(*losses),
        )


_Sample = Sequence[StepRecord]


def _samples(windows: Sequence[StepRecord], size: int) -> list[_Sample]:
    return [windows[start : start + size] for start in range(0, len(windows), size)]


def _seconds(sample: _Sample) -> float:
    return sum(record.seconds for record in sample)


def _rate(sample: _Sample, in_tokens: bool) -> float:
    done = sum(record.tokens if in_tokens else record.samples for record in sample)
    seconds = _seconds(sample)
    return done / seconds if seconds > 0 else 0.0


def _loss(sample: _Sample) -> float:
    losses = [record.loss for record in sample if math.isfinite(record.loss)]
    return statistics.fmean(losses) if losses else math.nan


def _step_s(samples: Sequence[_Sample]) -> float:
    return statistics.median(_seconds(sample) / len(sample) for sample in samples)


def _stall(samples: Sequence[_Sample]) -> float:
    """The share of all the time: a median would hide that every 8th batch is slow."""
    return sum(record.stall_s for s in samples for record in s) / max(sum(_seconds(s) for s in samples), 1e-9)


def _flops(samples: Sequence[_Sample]) -> tuple[float | None, float | None]:
    """Model FLOPs per second, and their share of the card's peak."""
    records = [record for sample in samples for record in sample]
    counted = [record.flops for record in records if record.flops is not None]
    seconds = sum(record.seconds for record in records)
    if len(counted) < len(records) or seconds <= 0:
        return None, None
    rate, peak = sum(counted) / seconds, records[-1].peak_flops_s
    return rate, rate / peak if peak else None


def compare(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """By which share the level of `after` is above that of `before`, and how far that may be off by noise.

    The change is the median of the ratios of all pairs (Hodges and Lehmann's estimate, on logarithms). Its noise is
    half of the 95 % interval that the ranks of these ratios give (Wilcoxon's), widened for neighbours that are alike,
    and no less than what drift explains: what the halves of either side differ by, and, where both sides drift the way
    of the change, one and a half times the sum, as a drift that went on would bring the sum. Values are above 0.
    """
    old, new = [math.log(value) for value in before], [math.log(value) for value in after]
    differences = sorted(b - a for a in old for b in new)
    pairs = len(differences)
    rank = math.floor(pairs / 2 - 1.96 * math.sqrt(pairs * (len(old) + len(new) + 1) / 12))
    low, high = differences[max(0, rank)], differences[min(pairs - 1, pairs - 1 - rank)]
    shift = statistics.median(differences)
    drifts = _drift(old), _drift(new)
    noise = max(high - shift, shift - low) * _alike(old, new)
    noise = max(noise, *map(abs, drifts))
    if all(drift * shift > 0 for drift in drifts):
        noise = max(noise, 1.5 * sum(map(abs, drifts)))
    return math.expm1(shift), math.expm1(min(noise, 50.0))


def _drift(values: Sequence[float]) -> float:
    """By how much the second half is above the first."""
    half = len(values) // 2
    return statistics.median(b - a for a in values[:half] for b in values[-half:]) if half else 0.0


def _alike(*sides: Sequence[float]) -> float:
    """The factor by which errors grow when neighbours are alike: sqrt((1 + r) / (1 - r)), r their correlation."""
    products = squares = 0.0
    for values in sides:
        middle = statistics.fmean(values)
        apart = [value - middle for value in values]
        products += sum(a * b for a, b in pairwise(apart))
        squares += sum(a * a for a in apart)
    correlation = min(0.8, max(0.0, products / squares)) if squares else 0.0
    return math.sqrt((1 + correlation) / (1 - correlation))


def verdict(change: float, noise: float) -> str:
    """`faster` or `slower` where the change is beyond its noise and at least 1 %, `same` where both are small."""
    if abs(change) < SMALLEST and noise <= STILL_SAME:
        return "same"
    if abs(change) < SMALLEST or abs(change) <= noise:
        return "noisy"
    return "faster" if change > 0 else "slower"


def course(before: Sequence[float], after: Sequence[float]) -> str:
    """Whether the loss stayed on its course: `same`, or `higher`; empty where it can't be told.

    Its course is the median of the last half of `before`; a loss that was rising may go on to rise at that slope (Theil
    and Sen's), one that was falling may stop. `higher` means that the median of `after` is above it by more than
    `OFF_COURSE` standard errors (a fifth more for 20 samples, two thirds for 6) and by more than 1 %. The spread is the
    greater of both sides' about their lines, by the median absolute deviation, so that single spikes don't count; it
    is widened for neighbours that are alike. A lower loss is no alarm.
    """
    old = [value for value in before if math.isfinite(value)]
    new = [value for value in after if math.isfinite(value)]
    if min(len(old), len(new)) < LEAST_SAMPLES:
        return ""
    late, slope = old[len(old) // 2 :], _slope(old)
    ahead = (len(late) + len(new)) / 2 if slope > 0 else 0.0
    expected = statistics.median(late) + slope * ahead
    spread = max(_spread(old), _spread(new)) * _alike(old, new)
    # of medians: sqrt(pi / 2) times the mean's; of a slope: sqrt(12 / n^3)
    error = spread * math.hypot(1.2533 * math.sqrt(1 / len(late) + 1 / len(new)), ahead * math.sqrt(12 / len(old) ** 3))
    limit = OFF_COURSE * (1 + 4 / min(len(old), len(new))) * error
    return "higher" if statistics.median(new) - expected > max(limit, SMALLEST * abs(expected)) else "same"


def _slope(values: Sequence[float]) -> float:
    """The median of the slopes between all pairs, a step."""
    count = len(values)
    return statistics.median((values[j] - values[i]) / (j - i) for i in range(count) for j in range(i + 1, count))


def _spread(values: Sequence[float]) -> float:
    """The standard deviation about their line, by the median absolute deviation."""
    slope = _slope(values)
    level = [value - slope * place for place, value in enumerate(values)]
    middle = statistics.median(level)
    return 1.4826 * statistics.median(abs(value - middle) for value in level)
