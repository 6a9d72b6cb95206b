"""Thinning: what a long run's log holds, how big it is, and that nothing of a run is misplaced by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from tests.test_records import _step as step
from tui3090.lines import to_line
from tui3090.records import Changed, Event, Phases, Reading, Record, State, StepRecord
from tui3090.thinning import EVERY_PHASES, EVERY_READING, EVERY_STEP, PARTS, READING_S, THINNED_S, Thinner


def thinned(records: Iterable[Record]) -> list[Record]:
    thinner = Thinner()
    return [*(due for record in records for due in thinner.add(record)), *thinner.rest()]


def steps(count: int, seconds: float, first: int = 1) -> Iterator[StepRecord]:
    like = step()
    for number in range(first, first + count):
        yield replace(like, step=number, time=number * seconds, seconds=seconds, loss=float(number % 2))


def of_steps(records: Iterable[Record]) -> list[StepRecord]:
    return [record for record in records if isinstance(record, StepRecord)]


def test_early_steps_have_a_line_each_and_later_ones_share() -> None:
    extra = 1000
    last = replace(step(), step=EVERY_STEP + extra, time=200.0, loss=math.nan, skipped="not finite")
    lines = of_steps(thinned([*steps(EVERY_STEP + extra, 0.01), last]))
    early, late = lines[:EVERY_STEP], lines[EVERY_STEP:]
    assert [line.step for line in early] == list(range(1, EVERY_STEP + 1))
    assert [line.steps for line in late] == [round(THINNED_S / 0.01)] * (extra // 25) + [1]
    assert late[0].loss == pytest.approx(0.5, abs=0.03)
    assert late[-1] == last


def test_late_lines_stand_for_a_part_of_the_run_so_far() -> None:
    """At one step a second, where the shortest time plays no part."""
    lines = of_steps(thinned(steps(100_000, 1.0)))[EVERY_STEP:]
    assert sum(line.steps for line in lines) == 90_000
    assert len(lines) <= PARTS * math.log(100_000 / EVERY_STEP) + 1
    assert all(line.steps <= line.step / PARTS + 1 for line in lines)


def test_a_clock_that_is_set_back_holds_nothing_back() -> None:
    back = [replace(record, time=record.time - 1e6) for record in steps(100, 0.05, first=EVERY_STEP + 1)]
    lines = of_steps(thinned([*steps(EVERY_STEP, 0.05), *back]))[EVERY_STEP:]
    assert len(lines) == 20
    readings = [Reading(time=1e9 + n / 2) for n in range(EVERY_READING)] + [Reading(time=n / 2) for n in range(40)]
    assert len(thinned(readings)) == EVERY_READING + 10 + 1  # and the newest, which was held back


def test_early_readings_have_a_line_each_and_later_one_every_two_seconds() -> None:
    readings = [Reading(time=n / 2, rss=n) for n in range(EVERY_READING + 402)]
    lines = thinned(readings)
    assert lines[:EVERY_READING] == readings[:EVERY_READING]
    assert lines[EVERY_READING:-1] == readings[EVERY_READING + 3 :: round(2 * READING_S)]
    assert lines[-1] == readings[-1]


def test_early_phases_have_a_line_each_and_later_one_every_ten_seconds() -> None:
    phases = [Phases(time=float(n), step=n, seconds=0.5) for n in range(EVERY_PHASES + 100)]
    lines = thinned(phases)
    assert lines[:EVERY_PHASES] == phases[:EVERY_PHASES]
    assert lines[EVERY_PHASES:] == phases[EVERY_PHASES + 9 :: 10]
    back = Phases(time=-1e6, step=999, seconds=0.5)
    assert thinned([*phases, back])[-1] == back  # a clock that is set back


def test_what_came_before_a_change_or_the_end_is_written_before_it() -> None:
    thinner = Thinner()
    for record in [*steps(EVERY_STEP, 0.01), *(Reading(time=n / 10) for n in range(EVERY_READING))]:
        thinner.add(record)
    held = [*steps(3, 0.01, first=EVERY_STEP + 1)]
    for record in [*held, Reading(time=EVERY_READING / 10)]:
        assert not thinner.add(record)
    assert len(thinner.add(Event(time=1.0, level="info", source="run", text="x"))) == 1
    changed = Changed(time=1.0, step=9, technique="amp", old="off", new="bf16")
    reading, group, last = thinner.add(changed)
    assert reading == Reading(time=EVERY_READING / 10)
    assert isinstance(group, StepRecord)
    assert (group.step, group.steps) == (held[-1].step, 3)
    assert last is changed
    assert thinner.add(State(time=1.0, state="paused")) == [State(time=1.0, state="paused")]


def test_ten_hours_at_thirty_steps_a_second_are_less_than_50_mb() -> None:
    """A million windows and 72 000 readings; to be quick, late windows come several at a time."""
    thinner, counts, total = Thinner(), {"step": 0, "reading": 0}, 0.0
    like = replace(
        step(), planned_steps=1_080_000, epoch=12.492027334851937, loss=1.6024965047836304, lr=0.0005413043478260869,
        grad_norm=1.2119767665863037, tokens=8192, seconds=1 / 30, wait_s=0.0010382720000023937,
        stall_s=9.216000325977802e-06, flops=7.001333563392e12, hardware_flops=7.155952386048e12,
        peak_flops_s=9.89e14, precision="bf16", replayed=True, settings="amp=bf16 graph=on tf32=on",
    )  # fmt: skip
    reading = Reading(
        time=1796106994.3972504, card_total=25757220864, card_used=25757220864, own=2 << 33, others=1 << 30, util=0.98,
        power_w=348.619, power_limit_w=350.0, temperature_c=79.0, fan=0.82, clock_mhz=1695, clock_max_mhz=1965,
        tensor_core_source="n/a: this card has no GPM counters; a GeForce needs a profiler", cpu=1.0300336794194199,
        rss=2766438400, host_total=135128870912, host_available=134435979264, ui_share=0.007595224485087519,
        allocated=9876543210, reserved=12876543210, peak_allocated=11876543210, peak_reserved=12876543210,
        weights=498_000_000, gradients=498_000_000, optimizer_state=996_000_000, held_back="power, heat",
        pcie_in_s=4.1e8, pcie_out_s=1.2e8, holders="someone 1.1 GiB", worker_count=4, worker_cpu=0.37123123,
    )  # fmt: skip
    number, many = 0, 1
    while number < 10 * 3600 * 30:
        number += many
        now = 1.8e9 + number / 30
        due = [*thinner.add(replace(like, time=now, step=number, steps=many))]
        many = 1 if number < EVERY_STEP else 5 if number < 3600 * 30 else 15
        if number % 15 == 0:
            due += thinner.add(replace(reading, time=now))
        for record in due:
            counts[record.type] += 1
            if counts[record.type] % 100 == 0:
                total += 100 * len(to_line(record))
    assert 19_000 < counts["step"] < 28_000
    assert 8_000 < counts["reading"] < 9_000
    assert total < 25e6
