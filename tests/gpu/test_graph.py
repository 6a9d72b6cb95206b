"""Graph replay on a card: what it must notice, what it must survive, what it must give back."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.conftest import ScriptedCommands, Train
from tests.reference import Blocks, loss_of, samples
from tui3090.commands import Change, Command, Evaluate, Pause
from tui3090.meters.allocator import Allocator
from tui3090.recipe import Recipe
from tui3090.records import Event, Refused, State, StepRecord
from tui3090.settings import Settings
from tui3090.techniques.graph import Replay

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"), pytest.mark.timeout(300)]

REPLAY = Settings(graph=True)


def recipe(count: int = 80, batch_size: int = 4, **fields: Any) -> Recipe:
    """The reference's small model."""
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Blocks(width=64, batch_norm=fields.pop("batch_norm", False), dropout=fields.pop("dropout", 0.1)),
        "train_data": samples(count, width=64),
        "loss": loss_of,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "batch_size": batch_size,
    }
    return Recipe(**{**options, **fields})


def replayed(ran: Any) -> list[bool]:
    return [record.replayed for record in ran.of(StepRecord)]


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    "settings", [REPLAY, Settings(graph=True, accumulate=3), Settings(graph=True, amp="fp16", checkpointing=1)]
)
def test_equals_eager_with_short_last_batches(
    train: Train, deterministic: None, batch_norm: bool, settings: Settings
) -> None:
    eager = train(
        recipe(86, batch_norm=batch_norm, epochs=3), settings=settings.having("graph", False), device="cuda:0"
    )
    ran = train(recipe(86, batch_norm=batch_norm, epochs=3), settings=settings, device="cuda:0")
    assert ran.status == 0
    assert any(replayed(ran)), ran.of(Event)
    assert ran.losses == eager.losses
    for name, value in ran.weights.items():
        assert torch.equal(value, eager.weights[name]), name


def test_a_shape_that_comes_once_runs_eagerly_and_never_on_stale_rows(train: Train) -> None:
    ran = train(recipe(42, epochs=1), settings=REPLAY, device="cuda:0")
    assert replayed(ran) == [False] + [True] * 9 + [False]  # 42 = 10 x 4 + 2
    assert [r.samples for r in ran.of(StepRecord)][-1] == 2


def test_python_randomness_in_the_model_is_noticed(train: Train) -> None:
    def jittered(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model, batch) * (1 + random.random())

    ran = train(recipe(loss=jittered), settings=REPLAY, device="cuda:0")
    assert ran.status == 0
    assert not any(replayed(ran))
    assert any("changes from call to call" in e.text for e in ran.of(Event))


def test_a_host_read_in_the_loss_falls_back_and_says_why(train: Train) -> None:
    def reading(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        return loss * (1.0 if loss.item() < 1e9 else 0.0)

    plain = train(recipe(loss=reading, dropout=0.0), device="cuda:0")
    ran = train(
        recipe(loss=reading, dropout=0.0),
        {8: [Change("graph", False)], 9: [Change("graph", True)]},
        REPLAY,
        device="cuda:0",
    )
    assert ran.status == 0
    assert not any(replayed(ran))
    assert ran.losses == pytest.approx(plain.losses, rel=1e-4)
    assert [e.text for e in ran.of(Event) if e.source == "graph"], "the reason is told"


def test_learning_rate_accumulation_and_pausing_need_no_new_capture(train: Train) -> None:
    captured: list[int] = []
    script: dict[int, list[Command]] = {
        4: [Change("lr", 0.5)],
        6: [Change("accumulate", 2)],
        8: [Pause(True)],
        9: [Pause(False), Change("accumulate", 4)],  # the pause is asked for news once
        11: [Change("lr", 2.0)],
    }
    commands = ScriptedCommands(script)
    commands.arrived.set()
    ran = train(recipe(200), commands=commands, settings=REPLAY, device="cuda:0")
    assert [state.state for state in ran.of(State)][1:3] == ["paused", "training"]
    replay = ran.trainer.replay
    captured.append(len(replay._captures))
    assert captured == [1]
    assert replayed(ran)[1:-1].count(False) == 0


def test_memory_does_not_grow_with_toggles(train: Train) -> None:
    allocator = Allocator(0)
    reserved: list[int] = []

    def measured(model: nn.Module, batch: Any) -> torch.Tensor:
        reserved.append(allocator.read()["reserved"])
        return loss_of(model, batch)

    script = {4 * i: [Change("graph", i % 2 == 1)] for i in range(1, 41)}
    ran = train(recipe(4 * 200, loss=measured), script, device="cuda:0")
    assert ran.status == 0
    assert sum(replayed(ran)) > 30
    gc.collect()
    early = max(reserved[: len(reserved) // 10])
    assert max(reserved) <= early * 1.05


def test_captures_beside_a_pinning_loader_and_a_busy_poller(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, stop, captures = Allocator(0), threading.Event(), 0
    record = Replay._record

    def counted(self: Replay, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        nonlocal captures
        captures += 1
        return record(self, run)

    monkeypatch.setattr(Replay, "_record", counted)

    def look() -> None:
        while not stop.wait(0.005):
            allocator.read()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        script = {3 * i: [Change("graph", i % 2 == 1)] for i in range(1, 140)}
        ran = train(recipe(4 * 420), script, Settings(workers=1, prefetch=2), device="cuda:0")
    finally:
        stop.set()
        thread.join()
    assert ran.status == 0
    assert not [e for e in ran.of(Event) if e.source == "graph"]
    assert not ran.of(Refused)
    assert sum(replayed(ran)) > 100
    assert captures >= 200


def test_whoever_frees_cublas_workspaces_frees_none_of_a_graph_s(train: Train, deterministic: None) -> None:
    """As Lightning does when it starts, and torch.compile's own graphs."""

    def run(settings: Settings) -> Any:
        torch.manual_seed(3)
        wide = {"model": Blocks(width=1024, dropout=0.0), "train_data": samples(400, width=1024), "batch_size": 16}

        def freed(model: nn.Module, batches: Any) -> dict[str, float]:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch.full((256 << 20,), float("nan"), device="cuda:0")  # where they were
            return {"freed": 1.0}

        made = recipe(**{**wide, "eval_data": samples(16, width=1024), "metrics": freed, "epochs": 1})
        return train(made, {number: [Evaluate()] for number in (8, 12, 16)}, settings, device="cuda:0")

    eager, ran = run(Settings()), run(REPLAY)
    assert ran.status == 0, ran.records[-1]
    assert sum(replayed(ran)) >= 20
    assert ran.losses == eager.losses


class Sizes:
    """A batch sampler whose batches change their size: one graph each."""

    def __init__(self, *sizes: int, times: int = 4) -> None:
        self._sizes = sizes * times

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(size)) for size in self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_the_first_shape_s_backward_makes_the_gradients_that_all_add_to(
    train: Train, deterministic: None, amp: str
) -> None:
    """In the graphs' memory: zeroing them first would cost reading and writing all of them once more."""

    def run(settings: Settings) -> Any:
        data = DataLoader(samples(40, width=64), batch_sampler=Sizes(4, 4, 4, 8, 4, 8, 8, 4))
        return train(recipe(train_data=data, epochs=2), settings=settings, device="cuda:0")

    settings = Settings(graph=True, amp=amp, accumulate=2)
    eager, ran = run(settings.having("graph", False)), run(settings)
    assert ran.losses == eager.losses
    assert sum(replayed(ran)) > len(ran.losses) // 2
    replay = ran.trainer.replay
    pool = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(replay._pool)]
    gradients = replay.step.gradients()
    assert gradients
    for gradient in gradients:
        assert any(0 <= gradient.data_ptr() - s["address"] < s["total_size"] for s in pool)


def test_graphs_released_within_a_window_take_no_gradient_with_them(
    train: Train, deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui3090.techniques.graph.room", lambda device: 0.0)

    def run(settings: Settings) -> Any:
        data = DataLoader(samples(40, width=64), batch_sampler=Sizes(4, 4, 4, 4, 4, 4, 4, 4, 2, 4, 4, 4))
        return train(recipe(train_data=data, epochs=2), settings=settings, device="cuda:0")

    settings = Settings(graph=True, accumulate=3)
    eager, ran = run(settings.having("graph", False)), run(settings)
    assert sum(replayed(ran)) > 5
    assert sum("graphs released to make room" in event.text for event in ran.of(Event)) > 2
    assert ran.losses == eager.losses
    for name, value in ran.weights.items():
        assert torch.equal(value, eager.weights[name]), name


def test_failed_captures_give_their_memory_back_and_are_not_tried_for_ever(train: Train) -> None:
    calls: list[bool] = []

    def reading(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        calls.append(torch.cuda.is_current_stream_capturing())
        return loss * (1.0 if loss.item() < 1e9 else 0.0)

    def run(settings: Settings) -> tuple[Any, int]:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.manual_seed(3)
        wide = {"model": Blocks(width=1024, dropout=0.0), "optimizer": None}
        data = DataLoader(samples(400, width=1024), batch_sampler=Sizes(300, 200, 100, 50, 30, times=6))
        ran = train(recipe(loss=reading, epochs=1, **{**wide, "train_data": data}), settings=settings, device="cuda:0")
        gc.collect()
        torch.cuda.empty_cache()
        return ran, torch.cuda.memory_reserved(0)

    plain, reserved_plainly = run(Settings())
    del plain.trainer
    ran, reserved = run(REPLAY)
    assert ran.status == 0
    assert ran.losses == pytest.approx(plain.losses, rel=1e-4)
    assert 1 <= sum(calls) <= 3, "tried, and given up for this model"
    assert reserved <= reserved_plainly * 1.05
    told = [e.text for e in ran.of(Event) if e.source == "graph"]
    assert any("test_graph.py" in text and "captur" in text for text in told), told


def test_nothing_waits_for_the_window_in_flight(train: Train) -> None:
    calls: list[int] = []

    def strict(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 6:
            torch.cuda.set_sync_debug_mode("error")
        return loss_of(model, batch)

    for settings in (
        Settings(),
        Settings(amp="fp16"),
        Settings(checkpointing=1),
        Settings(accumulate=2),
        Settings(prefetch=2),
        Settings(workers=1),
    ):
        calls.clear()
        try:
            ran = train(recipe(4 * 50, loss=strict), settings=settings, device="cuda:0")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert ran.status == 0, (settings, ran.records[-1])


def test_other_optimizers_run_outside_the_graph_with_the_same_result(train: Train, deterministic: None) -> None:
    makers: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
        lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
        lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3),
    ]
    for maker in makers:
        eager = train(recipe(optimizer=maker), device="cuda:0")
        ran = train(recipe(optimizer=maker), settings=REPLAY, device="cuda:0")
        assert any(replayed(ran))
        assert ran.losses == eager.losses


def test_a_model_that_trains_other_parameters_for_another_shape_gives_replay_up(
    train: Train, deterministic: None
) -> None:
    """A captured shape zeroes the gradients that it knows, and no others."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.few, self.many, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head((self.many if len(x) > 4 else self.few)(x))

    def run(settings: Settings) -> Any:
        torch.manual_seed(3)
        data = DataLoader(samples(40, width=64), batch_sampler=Sizes(4, 4, 4, 8, 4, 4, times=1))
        return train(recipe(model=Uneven(), train_data=data, epochs=2), settings=settings, device="cuda:0")

    eager, ran = run(Settings()), run(REPLAY)
    assert replayed(ran)[1], "it began to replay"
    assert any("other parameters" in event.text for event in ran.of(Event))
    assert ran.losses == eager.losses
    for name, value in ran.weights.items():
        assert torch.equal(value, eager.weights[name]), name
