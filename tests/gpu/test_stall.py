"""The data stall and the phases on a card, where launching is asynchronous: work of known length."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Ran, Train
from tests.test_stall import Slow
from tui3090.commands import Evaluate
from tui3090.feed import Feed
from tui3090.meters.phases import Sampler
from tui3090.recipe import Recipe
from tui3090.records import Phases, StepRecord
from tui3090.settings import Settings

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"), pytest.mark.timeout(300)]

Busy = Callable[[float], None]


@pytest.fixture
def busy(cycles_per_second: float) -> Busy:
    """Queues so many seconds of work; the host does not wait."""
    return lambda seconds: torch.cuda._sleep(int(seconds * cycles_per_second))


def recipe(data: Any, busy: Busy, step_s: float, **fields: Any) -> Recipe:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        for _ in range(10):
            busy(step_s / 10)
        return model(batch).sum()

    options: dict[str, Any] = {"batch_size": 1, "epochs": 1, "shuffle": False}
    return Recipe(model=nn.Linear(2, 1), train_data=data, loss=loss, **{**options, **fields})


def shares(ran: Ran, of: str = "stall_s") -> list[float]:
    """Of the windows once things run: the first ones warm up, the last is drained."""
    assert ran.status == 0
    return [getattr(record, of) / record.seconds for record in ran.of(StepRecord)[3:-1]]


def test_queued_kernels_are_no_stall(train: Train, busy: Busy) -> None:
    ran = train(recipe(Slow(12, 0.001), busy, 0.2), device="cuda:0")
    assert max(shares(ran)) < 0.05
    assert median(record.seconds for record in ran.of(StepRecord)[3:-1]) == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_slower_than_the_step(train: Train, busy: Busy, workers: int) -> None:
    ran = train(recipe(Slow(12, 0.3), busy, 0.1), settings=Settings(workers=workers), device="cuda:0")
    assert median(shares(ran)) == pytest.approx(0.67, abs=0.05)


def test_a_slow_loader_behind_prefetch(train: Train, busy: Busy) -> None:
    ran = train(recipe(Slow(14, 0.1), busy, 0.2), settings=Settings(prefetch=2), device="cuda:0")
    assert median(shares(ran)) < 0.02
    assert median(shares(ran, "wait_s")) == pytest.approx(0.5, abs=0.1)


def test_every_eighth_batch_slow_shows_in_the_worst(train: Train, busy: Busy) -> None:
    ran = train(recipe(Slow(26, 0.4, every=8), busy, 0.1), device="cuda:0")
    found = shares(ran)
    assert median(found) < 0.05
    assert max(found) == pytest.approx(0.75, abs=0.08)  # 0.3 of 0.4 s


def test_the_start_of_workers_is_apart_and_happens_once(train: Train, busy: Busy) -> None:
    ran = train(recipe(Slow(8, 0.001), busy, 0.02, epochs=3), settings=Settings(workers=1), device="cuda:0")
    first, *rest = ran.of(StepRecord)
    assert first.loader_start
    assert first.stall_s == first.wait_s > 0
    assert not any(record.loader_start for record in rest)
    turns = [record for number, record in enumerate(ran.of(StepRecord)) if number in (8, 16)]
    assert all(record.stall_s == record.wait_s for record in turns)  # nothing is in flight
    assert sum(record.wait_s for record in turns) < first.wait_s / 4


def test_batches_come_in_pinned_memory_that_is_used_again(busy: Busy) -> None:
    """Over epochs, with the copies on a side stream: of 256 batches only those on their way take memory."""
    made = torch.utils.data.TensorDataset(torch.arange(64.0).repeat(1 << 16, 1).T.contiguous())
    source = Feed(recipe(made, busy, 0.0, collate_fn=first_of), torch.device("cuda:0"), seed=0, workers=1, prefetch=2)
    seen, before = [], torch.cuda.host_memory_stats()["num_host_alloc"]
    for epoch in range(4):
        source.start_epoch(epoch)
        while (window := source.next_window(1)) is not None:
            (micro,) = window.micro_batches
            assert micro.ready is not None or micro.batch.is_pinned()
            seen.append(source.to_device(micro)[0, 0])
            source.look_ahead()
    source.close()
    assert torch.stack(seen).tolist() == [float(i) for i in range(64)] * 4
    assert torch.cuda.host_memory_stats()["num_host_alloc"] - before < 20


def first_of(samples: list[Any]) -> torch.Tensor:
    return torch.stack([sample[0] for sample in samples])


def test_the_seconds_of_all_steps_are_the_time_that_passed(train: Train, busy: Busy) -> None:
    script = {number: [Evaluate()] for number in range(5, 30, 5)}  # without eval_data: the window in flight ends
    ran = train(recipe(Slow(30, 0.0), busy, 0.05), script, device="cuda:0")
    records = ran.of(StepRecord)[2:]  # after the second, garbage is looked for once, which is no step's time
    passed = records[-1].time - records[0].time
    assert sum(record.seconds for record in records[1:]) == pytest.approx(passed, abs=0.12)


class Both(torch.autograd.Function):
    """Keeps the device busy forward, and twice as long backward."""

    busy: Busy

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Both.busy(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Both.busy(0.04)
        return gradients[0]


@pytest.mark.parametrize("graph", [False, True])
def test_the_phases_are_the_device_s(train: Train, busy: Busy, monkeypatch: pytest.MonkeyPatch, graph: bool) -> None:
    monkeypatch.setattr("tui3090.meters.phases.EVERY_S", 0.0)
    monkeypatch.setattr("tui3090.meters.phases.SHARE", 1.0)
    monkeypatch.setattr(Both, "busy", staticmethod(busy), raising=False)
    given = Recipe(
        model=nn.Linear(2, 1),
        train_data=Slow(16, 0.0),
        loss=lambda model, batch: Both.apply(model(batch)).sum(),
        batch_size=1,
        epochs=1,
    )
    ran = train(given, settings=Settings(graph=graph), device="cuda:0")
    assert ran.status == 0
    replayed = {record.step: record.replayed for record in ran.of(StepRecord)}
    found = [phases for phases in ran.of(Phases) if replayed[phases.step] is graph][2:]
    assert len(found) >= 5
    for phases in found:
        assert phases.seconds == pytest.approx(0.06, abs=0.006)
        if graph:
            assert phases.graph_s == pytest.approx(0.06, abs=0.003)
            assert phases.forward_s == phases.backward_s == 0.0
        else:
            assert phases.forward_s == pytest.approx(0.02, abs=0.003)
            assert phases.backward_s == pytest.approx(0.04, abs=0.003)
            assert phases.graph_s == 0.0
        assert phases.optimizer_s < 0.005


def test_marks_cost_less_than_half_a_percent(train: Train, busy: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their time on the host, in a window that has them, is bounded; the sampler spreads it to less than its share."""
    costs: list[float] = []
    took = Sampler.took

    def noted(sampler: Any, sample: Any) -> None:
        costs.append(sample.cost_s)
        took(sampler, sample)

    monkeypatch.setattr("tui3090.meters.phases.EVERY_S", 0.05)
    monkeypatch.setattr("tui3090.meters.phases.Sampler.took", noted)
    began = time.perf_counter()
    ran = train(recipe(Slow(400, 0.0), busy, 0.005), device="cuda:0")
    passed = time.perf_counter() - began
    assert ran.status == 0
    assert len(costs) >= 5
    assert sum(costs) < 0.005 * passed
