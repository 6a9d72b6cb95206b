"""Keys pressed at any moment, from another thread, in the middle of a forward or a backward."""

from __future__ import annotations

import random
import threading
from collections import defaultdict

import torch

from tests.conftest import Train
from tests.test_trainer import recipe, same
from tui3090.commands import Change
from tui3090.link import Commands
from tui3090.records import Changed, StepRecord

PRESSES = 200
KEYS = {"checkpointing": (0, 1, 2), "accumulate": (1, 2, 4), "lr": (0.5, 1.0, 2.0)}


def test_a_press_in_the_middle_of_a_step_waits_for_its_end(train: Train) -> None:
    commands, draw = Commands(), random.Random(7)
    trains, over = threading.Event(), threading.Event()
    sent: list[int] = []

    def press() -> None:
        trains.wait(60)
        while not over.wait(0.01) and len(sent) < PRESSES:
            technique = draw.choice(list(KEYS))
            commands.send(Change(technique, draw.choice(KEYS[technique])))
            sent.append(1)

    class Slow(torch.autograd.Function):
        """Gives the other thread time between forward and backward."""

        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            trains.set()
            over.wait(0.01)
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            over.wait(0.01)
            return gradient

    def made() -> object:
        plain = recipe(count=3000, scheduler="constant")
        loss_of = plain.loss
        object.__setattr__(plain, "loss", lambda model, batch: Slow.apply(loss_of(model, batch)))
        return plain

    thread = threading.Thread(target=press)
    thread.start()
    try:
        ran = train(made(), commands=commands, steps=50)
    finally:
        over.set()
        thread.join()
    assert ran.status == 0, ran.records[-1]
    assert len(sent) >= 100
    assert len(ran.of(Changed)) >= 20

    script: dict[int, list[Change]] = defaultdict(list)
    for change in ran.of(Changed):
        script[change.step - 1].append(Change(change.technique, change.new))
    again = train(recipe(count=3000, scheduler="constant"), script, steps=50)
    assert [r.settings for r in again.of(StepRecord)] == [r.settings for r in ran.of(StepRecord)]
    assert again.losses == ran.losses
    same(again.weights, ran.weights, 0)
