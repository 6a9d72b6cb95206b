"""Closer looks: when they come, that they change nothing, and that training goes on whatever happens to them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Train
from tests.reference import Blocks, loss_of, samples
from tui3090 import looks
from tui3090.commands import Change, MeasureActivations, Profile
from tui3090.feed import MicroBatch, Window
from tui3090.looks import EVERY_S, SETTLED_S, SPREAD, Looks
from tui3090.meters.kernels import Kernel
from tui3090.meters.phases import no_mark
from tui3090.recipe import Recipe
from tui3090.records import Activations, Event, Phases, Profiled, StepRecord
from tui3090.settings import Settings

WINDOW = Window([MicroBatch(batch={}, weight=1.0, samples=1, tokens=0)], 0.0)
KERNELS = [Kernel("nvjet_tst_64x64", 0, 90), Kernel("vectorized_elementwise_kernel", 90, 100)]


class FakeProfiler:
    """Takes time to stop, and gives what the card ran."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def __enter__(self) -> FakeProfiler:
        if self._card.broken:
            raise RuntimeError("a profiler is running already")
        return self

    def __exit__(self, *exception: Any) -> None:
        self._card.now += self._card.cost_s

    def kernels(self) -> list[Kernel]:
        return self._card.ran


class Card:
    """Looks on a card that is not there, with a clock that only moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.cost_s = 0.1
        self.ran = KERNELS
        self.broken = self.captures = False
        self.records: list[Any] = []
        self.drained = 0
        machine = SimpleNamespace(cuda=True, device=torch.device("cpu"))
        step = SimpleNamespace(model=nn.Linear(2, 8), mark=no_mark, blocks=[])
        job: Any = SimpleNamespace(machine=machine, step=step, settings=Settings())
        replay: Any = SimpleNamespace(live=True, captures=lambda micro_batches: self.captures)
        monkeypatch.setattr(looks, "Profiler", lambda: FakeProfiler(self))
        self.job = job
        self.looks = Looks(job, replay, self.records.append, self.drain, lambda: self.now)

    def drain(self) -> int:
        self.drained += 1
        return self.drained

    def window(self, after: float = 0.0, window: Window = WINDOW) -> bool:
        """Whether the window that begins so many seconds later has the device to itself."""
        self.now += after
        with self.looks.at(window) as alone:
            self.now += 1.0
        return alone


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


class TestWhenAStepIsProfiled:
    def test_by_itself_once_things_have_settled_and_then_every_minute(self, card: Card) -> None:
        assert not card.window(SETTLED_S - 1.1)
        assert card.window(0.2)
        (record,) = card.records
        assert (record.tensor_core_share, record.kernels, record.missing) == (pytest.approx(0.9), 2, "")
        assert record.step == 2  # what was known after the device was drained for the second time
        assert record.off_by_8 == "Linear [8 × 2]"
        assert record.seconds == pytest.approx(0.1)
        assert not card.window(EVERY_S - 0.1)
        assert card.window(0.1)
        assert card.drained == 4

    def test_never_for_more_than_two_percent_of_the_time(self, card: Card) -> None:
        card.cost_s = 3.0
        assert card.window(SETTLED_S)
        assert not card.window(SPREAD * 3.0 - 1.0)
        assert card.window(1.0)
        card.looks.ask_kernels()
        assert card.window()  # on request at once

    def test_soon_after_a_change_within_the_same_bound(self, card: Card) -> None:
        assert card.window(SETTLED_S)
        card.looks.changed()
        assert not card.window(SETTLED_S - 1.1)
        assert card.window(1.0)
        card.cost_s = 3.0
        card.looks.ask_kernels()
        assert card.window()
        card.looks.changed()
        assert not card.window(SPREAD * 3.0 - 1.0)

    def test_never_with_a_capture(self, card: Card) -> None:
        card.captures = True
        card.looks.ask_kernels()
        assert not card.window()
        card.captures = False
        assert card.window()

    def test_not_a_window_in_which_nothing_runs(self, card: Card) -> None:
        card.looks.ask_kernels()
        assert not card.window(window=Window([MicroBatch(batch={}, weight=0.0, samples=1, tokens=0)], 0.0))
        assert card.window()

    def test_a_profiler_that_can_t_be_had_ends_no_training(self, card: Card) -> None:
        card.broken = True
        assert card.window(SETTLED_S)
        (event,) = card.records
        assert (event.level, event.source) == ("warning", "meters")
        assert "a profiler is running already" in event.text
        assert not card.window(10 * EVERY_S)  # not tried again unless asked
        card.looks.ask_kernels()
        assert card.window()

    def test_one_that_sees_nothing_says_so(self, card: Card) -> None:
        card.ran = []
        assert card.window(SETTLED_S)
        (record,) = card.records
        assert record.tensor_core_share is None
        assert record.missing == "the profiler saw no kernel: the driver does not let it here"
        assert not card.window(10 * EVERY_S)

    def test_one_that_sees_nothing_after_others_that_did_is_not_the_last(self, card: Card) -> None:
        assert card.window(SETTLED_S)
        card.ran = []
        assert card.window(EVERY_S)
        assert card.records[1].missing == "the profiler saw no kernel"
        card.ran = KERNELS
        assert card.window(EVERY_S)
        assert card.records[2].kernels == 2

    def test_an_error_in_the_window_goes_through(self, card: Card) -> None:
        card.looks.ask_kernels()
        with pytest.raises(ZeroDivisionError), card.looks.at(WINDOW):
            raise ZeroDivisionError
        assert card.records == []


@pytest.mark.parametrize("technique", ["graph", "compile", "offload"])
def test_activations_are_measured_in_eager_steps(card: Card, technique: str) -> None:
    card.job.settings = Settings().having(technique, True)
    card.looks.ask_activations()
    assert not card.window()
    (event,) = card.records
    assert event.text == f"Activations are measured layer by layer in an eager step: switch {technique} off first."
    assert not card.window()
    assert len(card.records) == 1


def recipe(**fields: Any) -> Recipe:
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Blocks(),
        "train_data": samples(40),
        "loss": loss_of,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "batch_size": 4,
        "epochs": 1,
    }
    return Recipe(**{**options, **fields})


def test_looking_changes_nothing(train: Train) -> None:
    plain = train(recipe())
    script = {3: [MeasureActivations(), Profile()], 6: [MeasureActivations()]}
    ran = train(recipe(), script, Settings(accumulate=2))
    looked = train(recipe(), script)
    assert ran.status == looked.status == 0
    assert looked.losses == plain.losses
    for name, value in looked.weights.items():
        assert torch.equal(value, plain.weights[name]), name
    first, second = looked.of(Activations)
    assert first.layers == second.layers
    assert (first.step, second.step) == (4, 7)
    assert first.total == ran.of(Activations)[0].total  # of one micro-batch, whatever the window holds


def test_on_the_cpu_r_says_that_it_needs_a_card(train: Train) -> None:
    ran = train(recipe(), {3: [Profile()]})
    assert [e.text for e in ran.of(Event) if e.source == "meters"] == [
        "Reading Tensor Cores needs an NVIDIA card, and training runs on the CPU."
    ]
    assert ran.of(Profiled) == []


class Slow(torch.autograd.Function):
    """Takes time to go forward and back; sleeping longer than asked only makes the bounds truer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(0.06)
        return gradients[0]


def test_the_phases_of_a_run_are_those_of_its_steps(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui3090.meters.phases.EVERY_S", 0.0)
    monkeypatch.setattr("tui3090.meters.phases.SHARE", 1.0)
    monkeypatch.setattr(looks, "WARM", 1)
    ran = train(recipe(loss=lambda model, batch: Slow.apply(loss_of(model, batch))), {2: [Change("accumulate", 2)]})
    records = {record.step: record for record in ran.of(StepRecord)}
    found = ran.of(Phases)
    assert {phases.step for phases in found} == set(records) - {1, 3}  # the first after the start and the change
    for phases in found:
        micro_batches = records[phases.step].micro_batches
        assert micro_batches == (1 if phases.step <= 2 else 2)
        assert phases.forward_s >= 0.03 * micro_batches
        assert phases.backward_s >= 0.06 * micro_batches
        assert phases.optimizer_s > 0
        assert phases.seconds == pytest.approx(records[phases.step].seconds, abs=1e-6)
        named = phases.data_s + phases.copy_s + phases.forward_s + phases.backward_s + phases.optimizer_s
        assert named + phases.other_s == pytest.approx(phases.seconds)
        assert named <= phases.seconds + 1e-5


def test_most_windows_have_no_marks(train: Train) -> None:
    ran = train(recipe(epochs=4))
    assert len(ran.of(Phases)) < len(ran.of(StepRecord)) / 4
