"""Schedules and optimizers that a recipe brings train what a plain loop trains, whatever happens in mid-run."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import default_collate

from tests.conftest import Train
from tests.reference import Blocks, loss_of, samples
from tests.schedules import LR, OPTIMIZERS, SCHEDULES
from tui3090.commands import Change, Evaluate
from tui3090.recipe import Recipe
from tui3090.records import Event, StepRecord
from tui3090.settings import Settings

COUNT, BATCH, EPOCHS = 44, 4, 2
POISONED = 30
"""A sample of the seventh batch is infinite in both epochs."""
TWO_FROM, ONE_FROM = 2, 6
"""Windows before which accumulation becomes 2, and 1 again."""
HALF_FROM, WHOLE_FROM = 3, 5
"""Windows before which the rate of all groups is halved, and whole again."""


def rows() -> list[dict[str, torch.Tensor]]:
    """With a batch in the middle that makes loss and gradient nan."""
    made = samples(COUNT)
    made[POISONED]["x"] = torch.full((16,), math.inf)
    return made


def recipe(optimizer: str, schedule: str, **fields: Any) -> Recipe:
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Blocks(),
        "train_data": rows(),
        "loss": loss_of,
        "optimizer": OPTIMIZERS[optimizer],
        "scheduler": SCHEDULES[schedule],
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "shuffle": False,
        "eval_data": samples(12, seed=5),
    }
    return Recipe(**{**options, **fields})


def plain_loop(optimizer_name: str, schedule_name: str) -> tuple[list[float], list[list[float]], nn.Module, Any]:
    """By hand: losses, each window's rates, the model and the optimizer at the end.

    A window whose gradient is not finite changes nothing, and the schedule does not move for it. ReduceLROnPlateau is
    told the eval loss after each epoch.
    """
    model = recipe(optimizer_name, schedule_name).model
    optimizer = OPTIMIZERS[optimizer_name](model)
    planned = EPOCHS * math.ceil(COUNT / BATCH)
    schedule = SCHEDULES[schedule_name](optimizer, planned)
    data, held_out = rows(), default_collate(samples(12, seed=5))
    torch.manual_seed(0)
    losses, rates, window = [], [], 0
    for _ in range(EPOCHS):
        position = 0
        while position < COUNT:
            k = 2 if TWO_FROM <= window < ONE_FROM else 1
            group = []
            for _ in range(k):
                if position < COUNT:
                    group.append(default_collate(data[position : position + BATCH]))
                    position += BATCH
            labels = [int((batch["labels"] >= 0).sum()) for batch in group]
            optimizer.zero_grad()
            total = 0.0
            for batch, count in zip(group, labels):
                loss = loss_of(model, batch) * count / sum(labels)
                loss.backward()
                total += loss.item()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            losses.append(total)
            scheduled = [g["lr"] for g in optimizer.param_groups]
            rates.append([lr * (0.5 if HALF_FROM <= window < WHOLE_FROM else 1.0) for lr in scheduled])
            if norm.isfinite():
                for g, lr in zip(optimizer.param_groups, rates[-1]):
                    g["lr"] = lr
                optimizer.step()
                for g, lr in zip(optimizer.param_groups, scheduled):
                    g["lr"] = lr
                if not isinstance(schedule, ReduceLROnPlateau):
                    schedule.step()
            window += 1
        if isinstance(schedule, ReduceLROnPlateau):
            model.eval()
            with torch.no_grad():
                schedule.step(loss_of(model, held_out).item())
            model.train()
    return losses, rates, model, optimizer


SCRIPT = {
    TWO_FROM: [Change("accumulate", 2)],
    HALF_FROM: [Change("lr", 0.5)],
    WHOLE_FROM: [Change("lr", 1.0)],
    ONE_FROM: [Change("accumulate", 1)],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equals_a_plain_loop(train: Train, optimizer: str, schedule: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        ran = train(recipe(optimizer, schedule), SCRIPT)
    assert ran.status == 0, ran.records[-1]
    losses, rates, model, theirs = plain_loop(optimizer, schedule)
    records = ran.of(StepRecord)
    assert [r.skipped for r in records].count("not finite") == EPOCHS
    assert [r.micro_batches for r in records] == [1, 1, 2, 2, 2, 2] + [1] * 12
    assert [r.lr for r in records] == pytest.approx([of_first for of_first, _ in rates], rel=1e-12)
    assert len({of_first for of_first, _ in rates}) > 1, "the rate must have moved"
    assert ran.losses == pytest.approx(losses, rel=1e-6, abs=1e-6, nan_ok=True)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ran.weights[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for got, wanted in zip(ran.trainer.job.step.optimizer.param_groups, theirs.param_groups, strict=True):
        for key in {"lr", "betas", "momentum", "weight_decay", "initial_lr"} & wanted.keys():
            assert got[key] == pytest.approx(wanted[key], rel=1e-12), key


def test_a_schedule_that_is_over_keeps_its_last_rate(train: Train) -> None:
    """OneCycleLR refuses steps beyond those it was made for, and a key can make the run longer than that."""
    script = {2: [Change("accumulate", 1)]}
    ran = train(recipe("AdamW", "OneCycleLR"), script, Settings(accumulate=4))
    assert ran.status == 0, ran.records[-1]
    records = [r for r in ran.of(StepRecord) if not r.skipped]
    assert records[0].planned_steps == 6
    assert len(records) > 12
    assert len({r.lr for r in records[5:]}) == 1
    assert records[-1].lr == pytest.approx(records[0].lr / 1e4)  # OneCycleLR's final_div_factor
    told = [event.text for event in ran.of(Event) if "schedule" in event.text]
    assert told[0] == "the recipe's own learning-rate schedule is not planned again for the new step count"
    assert told[1].startswith("the recipe's own learning-rate schedule is over after 6 steps: the rate stays at ")
    assert len(told) == 2


def test_a_schedule_that_ends_with_the_run_is_not_spoken_of(train: Train) -> None:
    data = samples(COUNT)
    for schedule in (SCHEDULES["OneCycleLR"], warm_one_cycle):
        ran = train(recipe("AdamW", "OneCycleLR", train_data=data, scheduler=schedule))
        assert ran.status == 0
        assert len(ran.losses) == 22
        assert not [event for event in ran.of(Event) if "schedule" in event.text]


def test_a_schedule_in_a_sequence_may_be_over_too(train: Train) -> None:
    given = recipe("AdamW", "OneCycleLR", scheduler=warm_one_cycle)
    ran = train(given, {2: [Change("accumulate", 1)]}, Settings(accumulate=4))
    assert ran.status == 0, ran.records[-1]
    assert any("schedule is over after 6 steps" in event.text for event in ran.of(Event))


def warm_one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Two steps of warm-up, then one cycle."""
    warm_up = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1, 2)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps - 2)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cycle], milestones=[2])


def test_a_mistake_in_a_schedule_is_told_as_one(train: Train, failure: Any) -> None:
    def broken(step: int) -> float:
        if step == 3:
            raise ValueError("no rate for step 3")
        return 1.0

    ran = train(recipe("AdamW", "LambdaLR", scheduler=lambda o, n: torch.optim.lr_scheduler.LambdaLR(o, broken)))
    assert ran.status == 1
    assert "ValueError: no rate for step 3" in failure(ran)


def test_looking_at_the_eval_loss_by_key_does_not_move_the_plateau(train: Train) -> None:
    plain = train(recipe("SGD with momentum", "ReduceLROnPlateau"))
    ran = train(recipe("SGD with momentum", "ReduceLROnPlateau"), {2: [Evaluate()], 3: [Evaluate()], 4: [Evaluate()]})
    assert [r.lr for r in ran.of(StepRecord)] == [r.lr for r in plain.of(StepRecord)]
    assert ran.losses == pytest.approx(plain.losses, abs=0, nan_ok=True)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS evaluates the loss itself, in a closure"),
        (lambda m: NoRate(m.parameters()), "NoRate has no learning rate in its parameter groups"),
    ],
)
def test_an_optimizer_that_can_not_be_driven_is_refused_before_the_first_step(
    train: Train, failure: Any, made: Any, words: str
) -> None:
    ran = train(replace(recipe("AdamW", "LambdaLR", scheduler="constant"), optimizer=made))
    assert ran.status == 2
    assert words in failure(ran)


class NoRate(torch.optim.Optimizer):
    """Decides its rate itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


class Endless(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """A stream that does not say how long it is."""

    def __iter__(self) -> Any:
        return iter(samples(COUNT))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scheduler": lambda o, n: None}, "scheduler returned a NoneType: it must return a scheduler"),
        ({"train_data": Endless()}, "the length of train_data is not known. Give the run one: max_steps in the recipe"),
    ],
)
def test_a_scheduler_that_can_not_be_had_is_refused_before_the_first_step(
    train: Train, failure: Any, fields: dict[str, Any], words: str
) -> None:
    ran = train(recipe("AdamW", "OneCycleLR", **fields))
    assert ran.status == 2
    assert words in failure(ran)


def test_a_stream_of_unknown_length_has_the_schedule_of_the_steps_asked_for(train: Train) -> None:
    ran = train(recipe("AdamW", "OneCycleLR", train_data=Endless()), steps=7)
    assert ran.status == 0
    assert ran.of(StepRecord)[-1].lr == pytest.approx(ran.of(StepRecord)[0].lr / 1e4)
