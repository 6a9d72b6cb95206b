"""What the benches say of their figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.bench.aims import verdict
from tests.bench.dashboard import PIECES, Runs
from tests.bench.race import ENGINE, PLAIN, Race
from tests.bench.turns import LEAST, in_turns
from tests.bench.workloads import Workload
from tui3090.records import StepRecord


def step(seconds: float, stall_s: float, flops: float | None = None) -> StepRecord:
    return StepRecord(
        time=0.0,
        step=1,
        planned_steps=None,
        epoch=0.0,
        micro_batches=1,
        loss=1.0,
        lr=1.0,
        grad_norm=1.0,
        samples=1,
        tokens=1,
        seconds=seconds,
        wait_s=stall_s,
        stall_s=stall_s,
        flops=flops,
        peak_flops_s=1000.0,
    )


def raced(records: list[Any], **seconds: list[float]) -> Race:
    workload = Workload("small", lambda batch: None, 1, steps=4)  # type: ignore[arg-type, return-value]
    return Race(workload, 1, seconds, {ENGINE: records})


@pytest.mark.parametrize(
    ("figures", "at_most", "word"),
    [
        ((1.0, 0.98, 1.1), False, "met"),
        ((1.0, 0.96, 1.1), False, "open"),
        ((0.9, 0.85, 0.96), False, "not met"),
        ((0.9, 0.85, 0.97), True, "met"),
        ((0.9, 0.85, 0.98), True, "open"),
        ((1.2, 1.0, 1.3), True, "not met"),
    ],
)
def test_an_aim_is_judged_by_the_whole_interval(figures: tuple[float, float, float], at_most: bool, word: str) -> None:
    assert verdict(figures, 0.97, "what", at_most).startswith(f"{word} ")


def test_stall_is_that_of_the_turns_second_halves_without_the_wait_for_the_next_turn() -> None:
    warming_up = [step(1.0, 1.0)] * 4
    turn = [step(1.0, 1.0), step(1.0, 1.0), step(2.0, 0.5), step(100.0, 0.0)]
    worse = [step(1.0, 0.0), step(1.0, 0.0), step(2.0, 1.5), step(100.0, 0.0)]
    assert raced([*warming_up, *turn, *worse, *turn]).stall(ENGINE) == pytest.approx((0.25, 0.25, 0.75))


def test_mfu_is_model_flops_over_what_the_peak_allows() -> None:
    run = raced([step(1.0, 0.0, flops=500.0), step(1.0, 0.0)], **{PLAIN: [1.0, 2.0, 4.0]})
    assert run.mfu(PLAIN) == pytest.approx(500.0 / (1000.0 * 2.0))
    assert raced([step(1.0, 0.0)], **{PLAIN: [1.0]}).mfu(PLAIN) is None


def test_a_rate_compares_the_same_round() -> None:
    assert raced([], ours=[1.0, 2.0, 4.0], theirs=[2.0, 4.0, 8.0]).rate("ours", "theirs") == (2.0, 2.0, 2.0)


def test_the_dashboards_rate_and_tail() -> None:
    headless = [0.01] * 100 * PIECES
    longer = [0.01] * 150 * PIECES  # its profiled window, from which on steps count, came earlier
    assert Runs([headless], [longer]).rate() == pytest.approx((1.0,) * 3)
    slow_now_and_then = [0.02 if at % 50 == 0 else 0.01 for at in range(100 * PIECES)]  # two in a hundred
    runs = Runs([headless], [slow_now_and_then])
    assert runs.rate() == pytest.approx((1 / 1.02,) * 3)
    value, low, high = runs.p99()
    assert value == high == pytest.approx(2.0)
    assert low <= value


def test_turns_after_the_deadline_are_as_few_as_count() -> None:
    def loop(boundary: Callable[[], bool]) -> None:
        while boundary():
            pass

    for deadline, rounds in ((0.0, LEAST), (math.inf, 5)):
        taken = in_turns({"a": loop, "b": loop}, steps=2, rounds=5, deadline=deadline)
        assert {name: len(seconds) for name, seconds in taken.items()} == {"a": rounds, "b": rounds}
