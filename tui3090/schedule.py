"""The learning-rate schedule: linear warm-up and decay unless the recipe brings its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from tui3090.recipe import RecipeError

WARM_UP = 0.03
"""Share of the planned steps."""


class LinearPlan:
    """The factor on the base rate: up to 1 over the first 3 % of the planned optimizer steps, then down to 0.

    Planning again in mid-run leaves the rate in force where it is: what is left of the warm-up and of the decay is
    spread over the steps that are left.
    """

    def __init__(self, steps: int) -> None:
        warm_up = max(1, round(steps * WARM_UP))
        # the first step is not wasted on a rate of 0, nor the last
        self.knots = [(-1, 0.0), (warm_up - 1, 1.0), (max(steps, warm_up), 0.0)]

    def __call__(self, step: int) -> float:
        """The factor after `step` optimizer steps, for the next one."""
        for (start, low), (end, high) in zip(self.knots, self.knots[1:]):
            if step < end:
                return low + (high - low) * (step - start) / (end - start)
        return self.knots[-1][1]

    def replan(self, step: int, steps_left: int) -> None:
        """After `step` optimizer steps there are now `steps_left` more: go from the rate in force to 0 over them."""
        (peak, _), (end, _) = self.knots[-2:]
        now, steps_left = (step, self(step)), max(1, steps_left)
        rest = [(step + steps_left, 0.0)]
        if step < peak:
            rest.insert(0, (step + max(1, round(steps_left * (peak - step) / (end - step))), 1.0))
            rest[-1] = (max(rest[-1][0], rest[0][0] + 1), 0.0)
        self.knots = [now, *rest]


class Schedule:
    """Moves `param_groups["lr"]`, once for every optimizer step that was taken."""

    def __init__(
        self,
        optimizer: Optimizer,
        wanted: Callable[[Optimizer, int], Any] | str | None,
        planned_steps: int | None,
    ) -> None:
        self.beyond = 0
        """Optimizer steps that were taken when the schedule was over: the rate stays where it was."""
        self._optimizer = optimizer
        self.base = [float(group["lr"]) for group in optimizer.param_groups]
        """The groups' rates as the recipe gave them."""
        self.plan: LinearPlan | None = None
        self.scheduler: LRScheduler | ReduceLROnPlateau | None = None
        if callable(wanted):
            self.scheduler = _made(wanted, optimizer, planned_steps)
        elif wanted is None and planned_steps:
            self.plan = LinearPlan(planned_steps)
            self.scheduler = LambdaLR(optimizer, self.plan)
        self._first = [group["lr"] for group in optimizer.param_groups]
        """The groups' rates of the first step."""

    @property
    def kind(self) -> str:
        """What it is, for people: a scheduler's class, or ours."""
        if self.scheduler is None:
            return "constant"
        return type(self.scheduler).__name__ if self.plan is None else "the default"

    @property
    def fixed(self) -> bool:
        """Whether the recipe brought it: then it is not planned again when the number of steps changes."""
        return self.scheduler is not None and self.plan is None

    def step(self) -> None:
        """An optimizer step was taken."""
        if self.scheduler is None or isinstance(self.scheduler, ReduceLROnPlateau):
            return
        if _at_its_last(self.scheduler):
            self.beyond += 1
        else:
            self.scheduler.step()

    def evaluated(self, loss: float) -> None:
        """An evaluation gave this loss: the one thing that ReduceLROnPlateau goes by."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)

    def state_dict(self) -> dict[str, Any] | None:
        """Where it stands; None: there is no schedule, or it does not say."""
        tell = getattr(self.scheduler, "state_dict", None)
        return tell() if tell is not None else None

    def load_state_dict(self, state: dict[str, Any] | None, steps: int) -> None:
        """Stand where `state` was taken; without one, where `steps` optimizer steps lead. Sets the learning rates."""
        groups = self._optimizer.param_groups
        if state is None:
            for group, lr in zip(groups, self._first):
                group["lr"] = lr
            with warnings.catch_warnings(action="ignore"):  # torch misses the optimizer's steps, which were taken
                for _ in range(steps):
                    self.step()
        elif self.scheduler is not None:
            rates = [group["lr"] for group in groups]
            self.scheduler.load_state_dict(state)
            for group, lr in zip(groups, state.get("_last_lr", rates)):
                group["lr"] = lr

    def replan(self, step: int, steps_left: int | None) -> None:
        """The number of steps that are left has changed."""
        if self.plan is not None and steps_left is not None:
            self.plan.replan(step, steps_left)


def _made(
    wanted: Callable[[Optimizer, int], Any], optimizer: Optimizer, planned_steps: int | None
) -> LRScheduler | ReduceLROnPlateau:
    """The recipe's scheduler; raises RecipeError for what is none, and where it wants a length that nobody knows."""
    try:
        made = wanted(optimizer, planned_steps or 0)
    except Exception as error:
        if planned_steps is not None:
            raise
        raise RecipeError(
            f"scheduler failed ({type(error).__name__}: {error}): it is given 0 steps, for the length of train_data is "
            "not known. Give the run one: max_steps in the recipe, or --steps."
        ) from error
    if not callable(getattr(made, "step", None)):
        raise RecipeError(
            f"scheduler returned a {type(made).__name__}: it must return a scheduler of torch.optim.lr_scheduler."
        )
    return made  # type: ignore[no-any-return]


def _at_its_last(scheduler: LRScheduler) -> bool:
    """Whether it has given the last rate that it knows.

    OneCycleLR, alone or as the last of a SequentialLR, raises when asked for more, and keys can make a run longer.
    """
    last = getattr(scheduler, "_schedulers", [scheduler])[-1]
    return isinstance(last, OneCycleLR) and last.last_epoch + 1 >= last.total_steps
