"""Schedules and optimizers that a recipe brings, on a card: replay gives what the eager run gives, to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.conftest import Ran, Train
from tests.reference import Blocks, loss_of, samples
from tests.schedules import OPTIMIZERS, SCHEDULES
from tui3090.commands import Change
from tui3090.recipe import Recipe
from tui3090.records import Event, StepRecord
from tui3090.settings import Settings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.timeout(300),
]

SCRIPT = {
    5: [Change("accumulate", 2)],
    8: [Change("lr", 0.5)],
    12: [Change("lr", 1.0)],
    15: [Change("accumulate", 1)],
}


def recipe(optimizer: str, schedule: str, **fields: Any) -> Recipe:
    """Two epochs of 20 batches; a sample of the tenth is infinite."""
    torch.manual_seed(3)
    rows = samples(80, width=64)
    rows[38]["x"] = torch.full((64,), math.inf)
    options: dict[str, Any] = {
        "model": Blocks(width=64),
        "train_data": rows,
        "loss": loss_of,
        "optimizer": OPTIMIZERS[optimizer],
        "scheduler": SCHEDULES[schedule],
        "batch_size": 4,
        "epochs": 2,
        "shuffle": False,
        "eval_data": samples(12, width=64, seed=5),
    }
    return Recipe(**{**options, **fields})


def same(ran: Ran, eager: Ran) -> None:
    """Losses, rates, skipped windows, weights and the optimizer's state, to the bit."""
    assert ran.status == eager.status == 0, (ran.records[-1], eager.records[-1])
    ours, theirs = ran.of(StepRecord), eager.of(StepRecord)
    assert [(r.step, r.lr, r.skipped, r.micro_batches) for r in ours] == [
        (r.step, r.lr, r.skipped, r.micro_batches) for r in theirs
    ]
    torch.testing.assert_close(ran.losses, eager.losses, rtol=0, atol=0, equal_nan=True)
    for name, value in eager.weights.items():
        assert torch.equal(ran.weights[name], value), name
    states = [list(r.trainer.job.step.optimizer.state.values()) for r in (ran, eager)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replay_equals_eager(train: Train, optimizer: str, schedule: str) -> None:
    eager = train(recipe(optimizer, schedule), SCRIPT, device="cuda:0")
    ran = train(recipe(optimizer, schedule), SCRIPT, Settings(graph=True), device="cuda:0")
    same(ran, eager)
    records = ran.of(StepRecord)
    assert [r.skipped for r in records].count("not finite") == 2
    assert sum(r.replayed for r in records) >= len(records) - 3, ran.of(Event)
    replay = ran.trainer.replay
    assert (replay._update is not None) == (optimizer.startswith("Adam") and schedule != "OneCycleLR")
    outside = [e.text for e in ran.of(Event) if "outside the graph" in e.text]
    assert len(outside) == (replay._update is None)


def test_switching_replay_on_and_off_keeps_adams_step_and_its_flags(train: Train) -> None:
    script = {4: [Change("graph", True)], 14: [Change("graph", False)], 20: [Change("graph", True)]}
    eager = train(recipe("AdamW", "LambdaLR"), device="cuda:0")
    ran = train(recipe("AdamW", "LambdaLR"), script, device="cuda:0")
    same(ran, eager)
    assert 20 < sum(r.replayed for r in ran.of(StepRecord)) < 36
    for made in (ran, eager):
        optimizer = made.trainer.job.step.optimizer
        assert all(group["capturable"] and group["fused"] for group in optimizer.param_groups)
        counted = {(state["step"].device.type, int(state["step"])) for state in optimizer.state.values()}
        assert counted == {("cuda", made.of(StepRecord)[-1].step)}
