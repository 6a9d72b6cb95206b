"""How much of a step is waiting for data: the loader's sleep against the step's, in the records and on the panel."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.conftest import Train
from tests.dashboard.views import NOW, started, texts, view
from tui3090.advice import advise
from tui3090.dashboard.panels import step as panel
from tui3090.facts import Facts
from tui3090.feed import Window
from tui3090.ledger import Running
from tui3090.recipe import Recipe
from tui3090.records import Available, StepRecord
from tui3090.settings import CORES, Settings


class Slow(Dataset[torch.Tensor]):
    """Each `every`-th sample takes its time."""

    def __init__(self, count: int, sleep_s: float, every: int = 1) -> None:
        self.count, self.sleep_s, self.every = count, sleep_s, every

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % self.every == 0:
            time.sleep(self.sleep_s)
        return torch.ones(2)


def steps(train: Train, data: Slow, step_s: float, workers: int, epochs: int = 1) -> list[StepRecord]:
    """A run of one sample a step, each of which takes `step_s`."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(step_s)
        return model(batch).pow(2).mean()

    recipe = Recipe(model=nn.Linear(2, 1), train_data=data, loss=loss, batch_size=1, shuffle=False, epochs=epochs)
    ran = train(recipe, settings=Settings(workers=workers))
    assert ran.status == 0
    return ran.of(StepRecord)


@pytest.mark.parametrize(
    ("load_s", "step_s", "workers", "share"),
    [(0.025, 0.1, 0, 0.20), (0.025, 0.1, 2, 0.0), (0.15, 0.05, 1, 0.67)],
)
def test_the_stall_is_what_the_loader_keeps_the_step_waiting(
    train: Train, monkeypatch: pytest.MonkeyPatch, load_s: float, step_s: float, workers: int, share: float
) -> None:
    records = steps(train, Slow(9, load_s), step_s, workers)[3:]  # the first find what was prepared during the start
    assert median(r.stall_s / r.seconds for r in records) == pytest.approx(share, abs=0.05)
    assert all(r.stall_s == r.wait_s for r in records)  # on the CPU
    # what Try next makes of these very records
    for name, value in (("LEAST_WINDOWS", 3), ("LEAST_S", 0.1)):
        monkeypatch.setattr(f"tui3090.facts.{name}", value)
    for name in ("SETTLING_WINDOWS", "SETTLING_S"):
        monkeypatch.setattr(f"tui3090.gains.{name}", 0)
    facts = Facts()
    begun = started(device="cpu", unit="samples", settings=Settings(workers=workers).short())
    for record in [begun, Available(time=NOW, technique="workers"), *records]:
        facts.absorb(record)
    pieces = [advice for advice in advise(facts) if "starves" in advice.reason]
    assert [piece.key for piece in pieces] == ([] if share == 0 else ["w"] if workers < CORES else [""])


def test_a_burst_shows_as_the_worst_beside_the_mean(train: Train) -> None:
    records = steps(train, Slow(10, 0.08, every=5), step_s=0.02, workers=0)[4:]
    shares = [r.stall_s / r.seconds for r in records]
    assert shares[1] == max(shares) == pytest.approx(0.8, abs=0.15)
    seen = view(started(device="cpu", unit="samples"), *records)
    mean = 100 * sum(r.stall_s for r in records) / sum(r.seconds for r in records)
    assert mean < 50
    legend = texts(panel.rows(seen, 96, 4, NOW))[2]
    assert legend.startswith(f"data stall {mean:.0f} %, worst {100 * max(shares):.0f} %")


def test_workers_that_start_are_told_apart(train: Train) -> None:
    records = steps(train, Slow(4, 0.0), 0.0, workers=1, epochs=3)
    assert [record.loader_start for record in records] == [True, False, False, False] * 3
    # without workers only the run's first batch is, which was fetched before the run's first window
    records = steps(train, Slow(4, 0.0), 0.0, workers=0, epochs=3)
    assert [record.loader_start for record in records] == [True] + [False] * 11


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
        compiled=False,
        sample=None,
    )
    assert running.stall_s == pytest.approx(stall_s)
