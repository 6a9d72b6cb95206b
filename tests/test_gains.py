"""What a change brought: equal work, steady state, noise, the loss's course."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Train
from tests.dashboard.views import NOW, started, step
from tui3090.commands import Change
from tui3090.gains import Gains, compare, course, verdict
from tui3090.lines import from_object
from tui3090.link import Outlet
from tui3090.recipe import Recipe
from tui3090.records import Changed, Gain, Reading, Record, Resumed, State, StepRecord
from tui3090.runlog import RecordReader, RunFolder, RunLog

GIB = 1 << 30


def windows(seconds: Iterable[float], **changes: Any) -> list[StepRecord]:
    """One window for each time, in the middle of an epoch."""
    return [step(seconds=s, epoch=0.5, stall_s=0.0, **changes) for s in seconds]


def change(technique: str = "amp", old: Any = "off", new: Any = "bf16", **changes: Any) -> Changed:
    return Changed(**{"time": NOW, "step": 100, "technique": technique, "old": old, "new": new} | changes)


def gains_of(*groups: Record | Sequence[Record]) -> list[Gain]:
    """The gains of a run of a tokens recipe with these records."""
    gains, found = Gains(), []
    records = [started()]
    for group in groups:
        records += [group] if isinstance(group, Record) else group
    for record in records:
        gain = gains.absorb(record)
        found += [gain] if gain is not None else []
    return found


WARM_UP = windows([5.0] * 3)


class TestMeasuring:
    def test_equal_work_on_both_sides_in_steady_state(self) -> None:
        before = windows([1.0] * 30, flops=2e13, peak_flops_s=7e13)
        # the three windows after the change are compilation and warm-up
        after = windows([30.0, 9.0, 4.0] + [0.5] * 40, flops=2e13, peak_flops_s=7e13)
        (gain,) = gains_of(WARM_UP, before, change(), after)
        assert (gain.windows_before, gain.windows_after) == (20, 20)
        assert (gain.step, gain.technique, gain.old, gain.new) == (100, "amp", "off", "bf16")
        assert (gain.rate_before, gain.rate_after, gain.unit) == (16_000, 32_000, "tokens")
        assert (gain.step_s_before, gain.step_s_after) == (1.0, 0.5)
        assert (gain.flops_s_before, gain.flops_s_after) == (2e13, 4e13)
        assert gain.mfu_before == pytest.approx(2 / 7)
        assert gain.mfu_after == pytest.approx(4 / 7)
        assert (gain.verdict, gain.noise, gain.loss) == ("faster", 0.0, "same")

    def test_slower_is_slower(self) -> None:
        (gain,) = gains_of(WARM_UP, windows([1.0] * 30), change("checkpointing", 0, 1), windows([1.3] * 30))
        assert gain.verdict == "slower"
        assert gain.rate_after == pytest.approx(16_000 / 1.3)

    def test_short_windows_make_samples_of_a_quarter_second(self) -> None:
        (gain,) = gains_of(WARM_UP, windows([0.005] * 1300), change(), windows([0.004] * 2000))
        assert (gain.windows_before, gain.windows_after) == (1000, 1000)
        assert gain.rate_after == pytest.approx(16_000 / 0.004)

    def test_long_windows_make_fewer_samples(self) -> None:
        (gain,) = gains_of(WARM_UP, windows([30.0] * 12), change(), windows([20.0] * 9))
        assert gain.windows_after == 6

    def test_accumulation_is_measured_over_the_same_samples(self) -> None:
        before = windows([1.0] * 60, micro_batches=1)
        after = windows([2.0] * 60, micro_batches=2, samples=64, tokens=32_000)
        (gain,) = gains_of(WARM_UP, before, change("accumulate", 1, 2), after)
        assert (gain.windows_before, gain.windows_after) == (40, 20)
        assert (gain.rate_before, gain.rate_after, gain.verdict) == (16_000, 16_000, "same")
        assert (gain.step_s_before, gain.step_s_after) == (1.0, 2.0)

    def test_where_there_are_too_few_windows_for_the_same_samples_the_same_windows_do(self) -> None:
        after = windows([64.0] * 60, samples=64 * 32, tokens=64 * 16_000)
        (gain,) = gains_of(WARM_UP, windows([1.0] * 60), change("accumulate", 1, 64), after)
        assert (gain.windows_before, gain.windows_after, gain.verdict) == (20, 20, "same")

    def test_samples_are_counted_where_the_data_has_no_tokens(self) -> None:
        gains = Gains()
        gains.absorb(started(unit="samples"))
        records = [*WARM_UP, *windows([1.0] * 20, tokens=0), change(), *windows([0.8] * 23, tokens=0)]
        (gain,) = [gain for record in records if (gain := gains.absorb(record)) is not None]
        assert (gain.unit, gain.rate_before, gain.rate_after) == ("samples", 32, 40)

    def test_capture_is_left_out_until_windows_are_replayed(self) -> None:
        eager = windows([3.0] * 5, settings="graph=on")
        captured = windows([8.0] * 3, settings="graph=on", replayed=True)
        replayed = windows([0.5] * 20, settings="graph=on", replayed=True)
        (gain,) = gains_of(WARM_UP, windows([1.0] * 20), change("graph", False, True), eager, captured, replayed)
        assert gain.rate_after == 32_000

    def test_where_nothing_is_ever_replayed_the_eager_windows_count(self) -> None:
        eager = windows([1.0] * 50, settings="graph=on")
        (gain,) = gains_of(WARM_UP, windows([1.0] * 20), change("graph", False, True), eager)
        assert gain.verdict == "same"

    def test_the_start_of_an_epoch_is_left_out(self) -> None:
        epochs = [step(seconds=1.0 if n % 5 else 9.0, epoch=0.9 + n / 5 + 0.2, stall_s=0.0) for n in range(40)]
        (gain,) = gains_of(WARM_UP, windows([1.0] * 20), change(), epochs)
        assert gain.step_s_after == 1.0
        assert gain.noise == 0.0

    def test_stall_is_a_share_of_the_whole_time(self) -> None:
        before = [step(seconds=1.0, epoch=0.5, stall_s=0.4 if n % 8 == 0 else 0.0) for n in range(40)]
        (gain,) = gains_of(WARM_UP, before, change("workers", 0, 4), windows([1.0] * 30))
        assert gain.stall_before == pytest.approx(0.05, abs=0.011)
        assert gain.stall_after == 0

    def test_memory_is_the_peak_of_each_side(self) -> None:
        first, last = (Reading(time=NOW, peak_allocated=size * GIB) for size in (16, 17))
        after = windows([1.0] * 10), Reading(time=NOW, peak_allocated=12 * GIB), windows([1.0] * 13)
        (gain,) = gains_of(WARM_UP, first, windows([1.0] * 20), last, change(), *after)
        assert (gain.peak_before, gain.peak_after) == (17 * GIB, 12 * GIB)

    def test_memory_is_that_of_steady_windows_where_it_is_told(self) -> None:
        def peaks(steady: int | None, ever: int) -> Reading:
            return Reading(time=NOW, peak_allocated=ever * GIB, peak_steady=None if steady is None else steady * GIB)

        before = windows([1.0] * 10), peaks(16, 17), windows([1.0] * 10), peaks(15, 17)
        # an older reading that comes late, the capture's peak, and then that of replayed windows
        late, capture = peaks(16, 17), peaks(None, 20)
        after = windows([1.0] * 3), capture, windows([1.0] * 10), peaks(12, 20), windows([1.0] * 10)
        (gain,) = gains_of(WARM_UP, *before, change("graph", False, True), late, *after)
        assert (gain.peak_before, gain.peak_after) == (16 * GIB, 12 * GIB)
        # where one side has none, both are what was held at the most for whatever
        unknown = windows([1.0] * 3), capture, windows([1.0] * 20)
        (gain,) = gains_of(WARM_UP, *before, change(), *unknown)
        assert (gain.peak_before, gain.peak_after) == (17 * GIB, 20 * GIB)

    def test_the_counters_are_of_the_steady_time_and_each_reading_counts_once(self) -> None:
        def reading(at: float, busy: float) -> Reading:
            return Reading(time=NOW + at, tensor_core=busy, tensor_core_time=NOW + at)

        def timed(start: int, stop: int) -> list[StepRecord]:
            return [step(time=NOW + at, seconds=1.0, epoch=0.5) for at in range(start, stop)]

        records: list[Record] = [*timed(0, 25), reading(23.0, 0.2), reading(23.0, 0.2), reading(24.0, 0.4), change()]
        # the counters' two seconds before 28.5 still see the settling
        records += [*timed(25, 30), reading(28.5, 0.9), *timed(30, 40), reading(36.0, 0.7), *timed(40, 48)]
        (gain,) = gains_of(records)
        assert gain.tensor_core_before == pytest.approx(0.3)
        assert gain.tensor_core_after == pytest.approx(0.7)

    def test_counters_of_an_evaluation_do_not_count(self) -> None:
        records: list[Record] = [step(time=NOW + at, seconds=1.0, epoch=0.5) for at in range(10)]
        records += [
            State(time=NOW + 10, state="evaluating"),
            Reading(time=NOW, tensor_core=0.1, tensor_core_time=NOW + 13),
        ]
        records += [
            State(time=NOW + 14, state="training"),
            Reading(time=NOW, tensor_core=0.3, tensor_core_time=NOW + 15),
        ]
        records += [Reading(time=NOW, tensor_core=0.6, tensor_core_time=NOW + 17)]
        (gain,) = gains_of(records, change(), [step(time=NOW + at, seconds=1.0, epoch=0.5) for at in range(18, 40)])
        assert gain.tensor_core_before == 0.6


class TestTooLittle:
    def test_after_too_few_steps_there_is_no_gain(self) -> None:
        assert gains_of(WARM_UP, windows([1.0] * 5), change(), windows([0.5] * 40)) == []

    def test_the_next_change_ends_a_measurement(self) -> None:
        twice = change(), windows([0.5] * 12), change("tf32", False, True), windows([0.5] * 40)
        first, second = gains_of(WARM_UP, windows([1.0] * 20), *twice)
        assert (first.technique, first.windows_before, first.windows_after) == ("amp", 9, 9)
        assert (second.technique, second.windows_before, second.windows_after) == ("tf32", 9, 9)
        few = change(), windows([0.5] * 8), change("tf32", False, True), windows([0.5] * 40)
        assert gains_of(WARM_UP, windows([1.0] * 20), *few) == []

    def test_changes_at_one_step_are_measured_as_one(self) -> None:
        both = change(), change("checkpointing", 0, 1)
        (gain,) = gains_of(WARM_UP, windows([1.0] * 20), *both, windows([0.7] * 40))
        assert (gain.technique, gain.rate_before, gain.step_s_after) == ("checkpointing", 16_000, 0.7)

    def test_the_end_of_the_run_ends_a_measurement(self) -> None:
        over = State(time=NOW + 9, state="finished")
        (gain,) = gains_of(WARM_UP, windows([1.0] * 20), change(), windows([0.5] * 10), over)
        assert (gain.windows_after, gain.time) == (7, NOW + 9)

    def test_going_back_to_a_save_begins_anew(self) -> None:
        back = Resumed(time=NOW, step=50, name="step-00000050")
        assert gains_of(WARM_UP, windows([1.0] * 20), change(), windows([0.5] * 20), back, windows([0.5] * 40)) == []
        (gain,) = gains_of(back, WARM_UP, windows([1.0] * 9), change(), windows([0.5] * 40))
        assert gain.windows_before == 9

    def test_progress(self) -> None:
        gains = Gains()
        seen = []
        for record in [*WARM_UP, *windows([1.0] * 20), change(), *windows([1.0] * 23)]:
            gains.absorb(record)
            seen.append(gains.progress)
        assert seen[:23] == [None] * 23
        assert seen[23:] == [(0, 20)] * 4 + [(n, 20) for n in range(1, 20)] + [None]

    def test_windows_without_a_label_do_not_count(self) -> None:
        empty = windows([0.1] * 50, skipped="no labels")
        assert gains_of(WARM_UP, windows([1.0] * 20), change(), windows([1.0] * 3), empty) == []


class TestNoise:
    @pytest.mark.parametrize(
        ("moved", "noise", "said"),
        [
            (0.05, 0.03, "faster"),
            (-0.05, 0.03, "slower"),
            (0.03, 0.03, "noisy"),
            (0.005, 0.02, "same"),
            (0.005, 0.03, "noisy"),
            (0.015, 0.004, "faster"),
        ],
    )
    def test_the_rule(self, moved: float, noise: float, said: str) -> None:
        assert verdict(moved, noise) == said

    def test_a_change_that_is_known(self) -> None:
        moved, noise = compare([10.0] * 20, [12.0] * 20)
        assert moved == pytest.approx(0.2)
        assert noise == pytest.approx(0.0, abs=1e-12)

    def test_single_outliers_move_nothing(self) -> None:
        moved, _ = compare([10.0] * 19 + [1.0], [10.0] * 18 + [0.1, 0.2])
        assert moved == pytest.approx(0.0, abs=1e-12)

    def test_noise_alone_is_seldom_taken_for_a_change_and_a_change_is_mostly_found(self) -> None:
        draw = random.Random(3)
        wrong = found = 0
        for _ in range(200):
            before, after = ([math.exp(draw.gauss(0, 0.03)) for _ in range(20)] for _ in range(2))
            wrong += verdict(*compare(before, after)) in ("faster", "slower")
            found += verdict(*compare(before, [value * 1.08 for value in after])) == "faster"
        assert wrong <= 10
        assert found >= 190

    def test_a_drift_is_no_change(self) -> None:
        clock = [math.exp(0.002 * n) for n in range(40)]
        assert verdict(*compare(clock[:20], clock[20:])) == "noisy"

    def test_the_noise_is_told(self) -> None:
        draw = random.Random(1)
        noisy = [1.0 + draw.uniform(-0.2, 0.2) for _ in range(60)]
        (gain,) = gains_of(WARM_UP, windows(noisy[:20]), change("workers", 0, 4), windows(noisy[20:]))
        assert gain.verdict == "noisy"
        assert 0.03 < gain.noise < 0.2


class TestCourse:
    def test_a_loss_that_goes_on_is_on_course(self) -> None:
        draw = random.Random(0)
        shapes = (lambda n: 2.0, lambda n: 2 - 0.04 * n, lambda n: 0.5 + 2 * math.exp(-n / 8), lambda n: 2 + 0.02 * n)
        alarms = 0
        for shape in shapes:
            for _ in range(100):
                losses = [shape(n) + draw.gauss(0, 0.1) for n in range(40)]
                alarms += course(losses[:20], losses[20:]) != "same"
        assert alarms == 0

    def test_a_loss_that_rises_is_not(self) -> None:
        draw = random.Random(0)
        losses = [2 + draw.gauss(0, 0.05) for _ in range(40)]
        assert course(losses[:20], [value + 0.3 for value in losses[20:]]) == "higher"
        assert course(losses[:20], [value - 0.3 for value in losses[20:]]) == "same"

    def test_spikes_are_not_its_course(self) -> None:
        assert course([2.0, 2.1] * 10, [2.0, 2.1] * 8 + [50.0] * 4) == "same"

    def test_with_too_few_values_it_is_not_told(self) -> None:
        assert course([1.0] * 5, [9.0] * 20) == ""
        assert course([1.0] * 20, [math.nan] * 20) == ""

    def test_in_a_gain(self) -> None:
        draw = count()
        before = [step(seconds=1.0, epoch=0.5, loss=2 + 0.01 * (next(draw) % 3)) for _ in range(20)]
        higher = [step(seconds=1.0, epoch=0.5, loss=3 + 0.01 * (next(draw) % 3)) for _ in range(23)]
        assert [gain.loss for gain in gains_of(WARM_UP, before, change(), higher)] == ["higher"]
        higher[0] = step(seconds=1.0, epoch=0.5, loss=math.nan, skipped="not finite")
        assert [gain.loss for gain in gains_of(WARM_UP, before, change(), higher)] == ["not finite"]


def test_a_gain_lands_in_the_log_of_every_run(tmp_path: Path) -> None:
    folder = RunFolder.create("x", tmp_path / "run")
    log = RunLog(folder)
    outlet = Outlet(log)
    for record in [started(), *WARM_UP, *windows([1.0] * 20), change(), *windows([0.5] * 23)]:
        outlet.emit(record)
    log.close()
    logged = [record for record in RecordReader(folder.records).read() if isinstance(record, Gain)]
    watched = [record for record in outlet.drain() if isinstance(record, Gain)]
    assert [gain.rate_after for gain in watched] == [32_000]
    assert logged == watched


def test_a_run_that_a_key_makes_slower_says_so(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of real training, whose step takes three times as long under autocast."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        sleep(0.06 if torch.is_autocast_enabled("cpu") else 0.02)
        return model(batch).float().pow(2).mean()

    monkeypatch.setattr("tui3090.gains.SAMPLE_S", 0.01)
    monkeypatch.setattr("tui3090.gains.SETTLING_S", 0.0)
    data = [torch.ones(2) for _ in range(26)]
    recipe = Recipe(model=nn.Linear(2, 1), train_data=data, loss=loss, batch_size=1)
    ran = train(recipe, {13: [Change("amp", "bf16")]})
    gains = Gains()
    (gain,) = [found for record in ran.records if (found := gains.absorb(record)) is not None]
    assert (gain.step, gain.technique, gain.new, gain.verdict) == (14, "amp", "bf16", "slower")
    assert gain.windows_before == gain.windows_after == 10  # three settle on each side
    assert gain.step_s_before >= 0.02
    assert gain.step_s_after >= 0.06


def test_the_changes_of_a_run_on_an_h200() -> None:
    gains, found = Gains(), {}
    for record in RecordReader(Path(__file__).parent / "data" / "h200.jsonl").read():
        if gain := gains.absorb(record):
            found[gain.technique] = gain
    assert {name: gain.verdict for name, gain in found.items()} == {"tf32": "faster", "amp": "faster", "graph": "noisy"}
    assert found["tf32"].rate_after / found["tf32"].rate_before == pytest.approx(2.85, abs=0.05)
    assert found["amp"].peak_before == pytest.approx(10.6 * GIB, rel=0.01)
    assert found["amp"].peak_after == pytest.approx(8.87 * GIB, rel=0.01)
    assert {gain.loss for gain in found.values()} == {"same"}


def test_a_gain_without_figures_can_be_read_again() -> None:
    gain = from_object({"type": "gain", "time": 1.0, "step": 3, "technique": "fsdp", "old": "a", "new": "b"})
    assert gain is None  # it must have its throughput
