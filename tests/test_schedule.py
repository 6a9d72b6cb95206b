"""The learning-rate schedule in closed form, and planned again in mid-run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import linear
from tui3090.schedule import LinearPlan, Schedule


@given(st.integers(1, 5000))
def test_warm_up_and_decay_are_those_of_the_closed_form(total: int) -> None:
    plan = LinearPlan(total)
    for step in {0, total // 100, total // 33, total // 2, total - 1}:
        assert plan(step) == pytest.approx(linear(step, total))
    assert plan(total) == 0
    assert all(0 < plan(step) <= 1 for step in range(min(total, 200)))


@given(st.integers(2, 2000), st.data())
def test_planning_again_leaves_the_rate_and_ends_at_zero(total: int, data: st.DataObject) -> None:
    plan = LinearPlan(total)
    at = 0
    for _ in range(3):
        at = data.draw(st.integers(at, at + total))
        left = data.draw(st.integers(1, 3000))
        before = plan(at)
        plan.replan(at, left)
        assert plan(at) == pytest.approx(before)
        assert plan(at + left + 1) == 0
        assert all(0 <= plan(step) <= 1 for step in range(at, at + left))


def test_a_schedule_of_the_recipes_own_is_used_as_it_is() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = Schedule(optimizer, lambda o, n: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), 10)
    assert schedule.fixed
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    schedule.replan(1, 100)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_plateau_goes_by_the_eval_loss() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = Schedule(
        optimizer, lambda o, n: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.1), 10
    )
    schedule.step()
    for loss in (1.0, 2.0):
        schedule.evaluated(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_constant_and_unknown_length_stay_at_the_base_rate() -> None:
    for wanted, steps in (("constant", 10), (None, None)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = Schedule(optimizer, wanted, steps)
        schedule.step()
        schedule.replan(1, 5)
        assert optimizer.param_groups[0]["lr"] == 1.0
