"""Garbage that cycles keep: collected between micro-batches, never while one is launched, and in bounded memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import Train
from tests.reference import Blocks, loss_of, samples
from tui3090 import garbage
from tui3090.recipe import Recipe
from tui3090.records import Evaluated, StepRecord
from tui3090.settings import Settings

CYCLES = 3 * gc.get_threshold()[0]
"""That one call of the loss leaves behind, more than Python lets lie about."""


class Knot:
    """Refers to itself, and keeps a tensor."""

    def __init__(self, kept: Any) -> None:
        self.kept, self.itself = kept, self


class Loss:
    """The reference's loss, with knots; notes how many of earlier ones were alive when it was called."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Knot] = weakref.WeakSet()
        self.before: list[int] = []
        self.frozen: list[int] = []
        self.enabled: list[bool] = []
        self.inside = False
        self.collected = {True: 0, False: 0}
        """Inside a call or not -> automatic and other collections."""

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        self.before.append(len(self.alive))
        self.frozen.append(gc.get_freeze_count())
        self.enabled.append(gc.isenabled())
        self.inside = True
        loss = loss_of(model, batch)
        for _ in range(CYCLES):
            self.alive.add(Knot(loss))
        self.inside = False
        return loss

    def look(self, phase: str, info: dict[str, int]) -> None:
        """As a callback of gc."""
        self.collected[self.inside] += phase == "start"


@pytest.fixture
def loss() -> Iterator[Loss]:
    """It is told of every collection."""
    made = Loss()
    gc.callbacks.append(made.look)
    yield made
    gc.callbacks.remove(made.look)


def recipe(loss: Loss, **fields: Any) -> Recipe:
    """Eleven windows of an epoch at accumulation 1."""
    torch.manual_seed(3)
    return Recipe(model=Blocks(), train_data=samples(42), loss=loss, batch_size=4, **fields)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_loss_that_leaves_cycles_runs_in_bounded_memory(train: Train, loss: Loss, accumulate: int) -> None:
    ran = train(recipe(loss), settings=Settings(accumulate=accumulate))
    assert ran.status == 0
    assert len(loss.before) == 11
    assert max(loss.before) <= CYCLES, "those of one micro-batch at the most"
    assert loss.collected[True] == 0
    assert loss.collected[False] >= 10


def test_what_the_start_made_is_set_aside_after_the_first_step_and_given_back(train: Train, loss: Loss) -> None:
    ran = train(recipe(loss))
    assert loss.frozen[0] == 0
    assert all(frozen > 1000 for frozen in loss.frozen[2:])
    assert not any(loss.enabled)
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
    assert len(ran.of(StepRecord)) == 11


def test_evaluation_collects_as_ever(train: Train, loss: Loss) -> None:
    def metrics(model: Any, batches: Any) -> dict[str, float]:
        return {"enabled": float(gc.isenabled())}

    ran = train(recipe(loss, eval_data=samples(8), metrics=metrics))
    assert [evaluated.metrics for evaluated in ran.of(Evaluated)] == ["enabled 1"]
    assert loss.enabled[-2:] == [True, True]


def test_whoever_switched_collection_off_keeps_it_off(train: Train, loss: Loss) -> None:
    gc.disable()
    try:
        train(recipe(loss))
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert not any(loss.enabled)


def test_an_exception_inside_leaves_collection_on() -> None:
    with pytest.raises(ValueError, match="within"), garbage.later():
        raise ValueError("within")
    assert gc.isenabled()


def test_old_cycles_go_soon_after_freezing() -> None:
    garbage.freeze()
    try:
        knot = Knot(None)
        gc.collect(0)
        gc.collect(1)  # it is among the old ones now, which only a full collection looks at
        old = weakref.ref(knot)
        del knot
        first, second, third = gc.get_threshold()
        made = 0
        while old() is not None:
            Knot(None)
            made += 1
            assert made < 4 * first * second * third, "no full collection came"
    finally:
        garbage.restore()


def test_collecting_finds_what_was_set_aside_too() -> None:
    knot = Knot(None)
    held = weakref.ref(knot)
    garbage.freeze()
    try:
        del knot
        gc.collect()
        assert held() is not None
        garbage.collect()
        assert held() is None
        assert gc.get_freeze_count() > 0
    finally:
        garbage.restore()
