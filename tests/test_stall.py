"""The data stall on a CPU, where it is the loader's wait: the shares that sleeping loaders and steps must give."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.conftest import Ran, Train
from tui3090.feed import Window
from tui3090.ledger import Running
from tui3090.recipe import Recipe
from tui3090.records import StepRecord
from tui3090.settings import Settings


class Sleepy(Dataset[dict[str, Any]]):
    """Takes `sleep_s` a sample, `slow_s` more for every eighth."""

    def __init__(self, count: int, sleep_s: float, slow_s: float = 0.0) -> None:
        self.count, self.sleep_s, self.slow_s = count, sleep_s, slow_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.sleep_s + (self.slow_s if index % 8 == 7 else 0.0))
        return {"x": torch.ones(2)}


def recipe(data: Sleepy, step_s: float, epochs: int = 1) -> Recipe:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(step_s)
        return model(batch["x"]).sum()

    return Recipe(model=nn.Linear(2, 1), train_data=data, loss=loss, batch_size=1, epochs=epochs, shuffle=False)


def shares(ran: Ran) -> list[float]:
    """The stall's share of each window but those for which workers had to start."""
    assert ran.status == 0
    return [record.stall_s / record.seconds for record in ran.of(StepRecord) if not record.loader_start]


# The middle window decides: on a machine with much else to do single ones may be anything.


def test_a_loader_in_the_training_thread(train: Train) -> None:
    assert median(shares(train(recipe(Sleepy(8, 0.05), 0.2)))) == pytest.approx(0.20, abs=0.05)


def test_workers_that_keep_up(train: Train) -> None:
    ran = train(recipe(Sleepy(10, 0.05), 0.2), settings=Settings(workers=2))
    assert median(shares(ran)) < 0.05


def test_a_worker_that_does_not_keep_up(train: Train) -> None:
    ran = train(recipe(Sleepy(10, 0.3), 0.1), settings=Settings(workers=1))
    # the worker prepared two batches while the first was waited for
    assert median(shares(ran)[3:]) == pytest.approx(0.67, abs=0.05)


def test_every_eighth_batch_slow_shows_in_the_worst(train: Train) -> None:
    found = shares(train(recipe(Sleepy(16, 0.0, slow_s=0.3), 0.1)))
    assert median(found) < 0.2 < 0.6 < max(found)


def test_workers_that_start_are_told_apart(train: Train) -> None:
    ran = train(recipe(Sleepy(4, 0.0), 0.0, epochs=3), settings=Settings(workers=1))
    assert [record.loader_start for record in ran.of(StepRecord)] == [True, False, False, False] * 3
    plain = train(recipe(Sleepy(4, 0.0), 0.0, epochs=3))
    assert [record.loader_start for record in plain.of(StepRecord)] == [True] + [False] * 11


class At:
    """A CUDA event that came at a known time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def elapsed_time(self, other: At) -> float:
        return (other.seconds - self.seconds) * 1000


@pytest.mark.parametrize(
    ("wait_s", "idle_s", "loader_start", "stall_s"),
    [
        (0.3, 0.2, False, 0.2),  # hidden in part: the device had work for the first 0.1 s of the wait
        (0.3, 0.0, False, 0.0),  # all of it hidden
        (0.001, 0.2, False, 0.001),  # idle, but not for want of data
        (0.3, -1e-6, False, 0.0),
        (0.3, None, False, 0.0),  # something else came between: nobody knows
        (0.3, None, True, 0.3),  # nothing was in flight while workers started
    ],
)
def test_on_a_card_it_is_the_wait_or_the_idle_time_whichever_is_less(
    wait_s: float, idle_s: float | None, loader_start: bool, stall_s: float
) -> None:
    running: Any = Running(
        window=Window([], wait_s, loader_start),
        in_flight=None,
        settings=Settings(),
        lr=0.0,
        epoch=0.0,
        began=0.0,
        begin=At(1.0 + (idle_s or 0.0)),  # type: ignore[arg-type]
        before=None if idle_s is None else At(1.0),  # type: ignore[arg-type]
        flops=None,
        replayed=False,
        sample=None,
    )
    assert running.stall_s == pytest.approx(stall_s)
