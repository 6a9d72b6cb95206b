"""Out of memory is survived: the same samples in smaller micro-batches, then checkpointing, then a sentence."""

from __future__ import annotations

import gc
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.conftest import Ran, Train
from tests.reference import Blocks, loss_of, samples
from tui3090.commands import Change, MakeSave, Stop
from tui3090.recipe import Recipe
from tui3090.records import Changed, Event, Saved, Started, StepRecord
from tui3090.rewind import Rewind
from tui3090.settings import Settings


class Card:
    """A card with memory for so many samples a micro-batch, half as many without checkpointing if `needs_it`."""

    def __init__(self, room: int, fails_from: int = 0, needs_it: bool = False) -> None:
        self.room = room
        self.fails_from = fails_from
        self.needs_it = needs_it
        self.calls = 0
        self.held: list[weakref.ref[torch.Tensor]] = []
        self.sizes: list[int] = []

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Cross entropy, where it fits."""
        self.calls += 1
        size = len(batch["labels"])
        activations = model(batch["x"])
        checkpointed = "forward" in vars(model.blocks[0])
        if self.calls > self.fails_from and (size > self.room or (self.needs_it and not checkpointed)):
            activations.mul(1.0)
            self.held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        assert all(reference() is None for reference in self.held), "what the failed window held is still there"
        self.sizes.append(size)
        return nn.functional.cross_entropy(activations.float(), batch["labels"])


def recipe(card: Card | None = None, dropout: float = 0.0, batch_size: int = 8, **fields: Any) -> Recipe:
    torch.manual_seed(3)
    return Recipe(
        model=Blocks(dropout=dropout, **fields),
        train_data=samples(60),
        loss=card.loss if card else loss_of,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        batch_size=batch_size,
    )


def same(ran: Ran, plain: Ran, tolerance: float) -> None:
    assert ran.status == 0, ran.records[-1]
    assert ran.losses == pytest.approx(plain.losses, abs=tolerance, nan_ok=True)
    for name, value in plain.weights.items():
        torch.testing.assert_close(ran.weights[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("room", "fails_from"), [(4, 0), (2, 3), (1, 5), (3, 2)])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_same_samples_in_smaller_micro_batches_give_the_same_steps(
    train: Train, room: int, fails_from: int, workers: int
) -> None:
    card = Card(room, fails_from)
    ran = train(recipe(card), settings=Settings(workers=workers))
    same(ran, train(recipe()), 1e-6)
    assert max(card.sizes[fails_from:]) <= room
    changes = ran.of(Changed)
    assert {change.technique for change in changes} == {"accumulate"}
    assert all(change.origin == "out of memory" for change in changes)
    assert ran.of(Started)[-1].batch_size == max(card.sizes[fails_from:])
    assert [r.samples for r in ran.of(StepRecord)] == [8] * 7 + [4]
    assert len(ran.of(StepRecord)) == ran.of(StepRecord)[-1].planned_steps == 8


def test_an_odd_batch_keeps_its_samples_together(train: Train) -> None:
    card = Card(room=1)
    same(train(recipe(card, batch_size=5)), train(recipe(batch_size=5)), 1e-6)


def test_epochs_after_it_go_on_in_smaller_micro_batches(train: Train) -> None:
    card = Card(room=4, fails_from=3)
    ran = train(Recipe(**{**vars(recipe(card)), "epochs": 3}))
    same(ran, train(Recipe(**{**vars(recipe()), "epochs": 3})), 1e-6)


def test_batches_that_halves_do_not_divide_stay_together(train: Train) -> None:
    """Of 9, by way of 5 (4 and 5) to 3: three of 3, as many as accumulation counts on."""
    card = Card(room=3, fails_from=3)
    ran = train(Recipe(**{**vars(recipe(card, batch_size=9)), "epochs": 2}), settings=Settings(accumulate=2))
    same(ran, train(Recipe(**{**vars(recipe(batch_size=9)), "epochs": 2}), settings=Settings(accumulate=2)), 1e-6)
    assert {r.samples for r in ran.of(StepRecord)} == {18, 6}


def test_a_resume_goes_on_in_the_smaller_ones(train: Train, tmp_path: Path) -> None:
    plain = train(recipe())
    first = train(recipe(Card(room=2, fails_from=2)), {5: [Stop()]}, folder=tmp_path)
    card = Card(room=2)
    now = first.trainer.job.settings
    ran = train(recipe(card), settings=now, folder=tmp_path, resume=True)
    assert ran.status == 0, ran.records[-1]
    assert not card.held
    assert first.losses + ran.losses == pytest.approx(plain.losses, abs=1e-6)
    assert [r.lr for r in ran.of(StepRecord)] == pytest.approx([r.lr for r in plain.of(StepRecord)[5:]])


def test_a_model_that_draws_on_the_host_draws_the_same_again(train: Train) -> None:
    def made(card: Card) -> Recipe:
        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            factor = 1 + random.random() + float(numpy.random.rand())
            return card.loss(model, batch) * factor

        random.seed(1)
        numpy.random.seed(1)
        return Recipe(**{**vars(recipe(batch_size=1)), "loss": loss})

    ran = train(made(Card(room=8, fails_from=3, needs_it=True)))
    same(ran, train(made(Card(room=8))), 0)


def test_random_state_and_running_statistics_are_as_if_the_window_had_not_begun(train: Train) -> None:
    card = Card(room=8, fails_from=3, needs_it=True)  # only checkpointing helps: the draws are the same then
    ran = train(recipe(card, dropout=0.3, batch_size=1))
    plain = train(recipe(dropout=0.3, batch_size=1))
    same(ran, plain, 0)
    assert [(c.technique, c.new) for c in ran.of(Changed)] == [("checkpointing", 1)]


def test_what_a_forward_leaves_in_a_model_is_undone() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Dropout(0.5))
    rewind = Rewind(model, torch.device("cpu"))
    model(torch.randn(5, 8))
    rewind.mark()
    marked = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = torch.ones(5, 8)
    first = model(x)
    assert not any(torch.equal(buffer, marked[name]) for name, buffer in model.named_buffers())
    rewind.back()
    assert all(torch.equal(buffer, marked[name]) for name, buffer in model.named_buffers())
    assert torch.equal(model(x), first)


def test_batch_norm_sees_a_failed_window_once(train: Train) -> None:
    card = Card(room=4, fails_from=3)
    ran = train(recipe(card, batch_norm=True), settings=Settings(accumulate=2))
    assert ran.status == 0
    assert len(card.held) == 1
    counted = int(ran.weights["blocks.0.1.num_batches_tracked"])
    assert counted == sum(r.micro_batches for r in ran.of(StepRecord))


def test_keys_go_on_after_it(train: Train) -> None:
    card = Card(room=4, fails_from=2)
    ran = train(recipe(card), {4: [Change("accumulate", 4)], 6: [Change("checkpointing", 1)]})
    assert ran.status == 0
    assert [(c.technique, c.old, c.new) for c in ran.of(Changed)] == [
        ("accumulate", 1, 2),
        ("accumulate", 2, 4),
        ("checkpointing", 0, 1),
    ]
    assert sum(r.samples for r in ran.of(StepRecord)) == 60


def test_when_nothing_helps_there_is_one_sentence(train: Train, failure: Any) -> None:
    card = Card(room=0)
    ran = train(recipe(card))
    assert ran.status == 2
    assert "too small for this model even with micro-batches of 1" in failure(ran)
    assert [(c.technique, c.new) for c in ran.of(Changed)] == [
        ("accumulate", 2),
        ("accumulate", 4),
        ("accumulate", 8),
        ("checkpointing", 1),
    ]


def test_in_the_optimizers_step_it_is_not_run_again(train: Train, failure: Any, tmp_path: Path) -> None:
    class Full(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            Full.calls += 1
            if Full.calls == 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            super().step()

    made = recipe()
    given = Recipe(**{**vars(made), "optimizer": lambda model: Full(model.parameters(), lr=0.1)})
    ran = train(given, {1: [MakeSave()]}, folder=tmp_path)
    assert ran.status == 1
    assert Full.calls == 3
    assert "in the optimizer's step 3" in failure(ran)
    assert "The last good save is of step 1: --resume goes on from it." in failure(ran)
    assert [r.step for r in ran.of(Saved)] == [1], "weights that may be half changed are not saved"


def test_outside_of_a_step_no_step_is_blamed(train: Train, failure: Any) -> None:
    def no_room(model: nn.Module) -> torch.optim.Optimizer:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    ran = train(Recipe(**{**vars(recipe()), "optimizer": no_room}))
    assert ran.status == 2
    assert "full outside of a step" in failure(ran)


@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError])
def test_a_failure_that_is_told_keeps_nothing_of_what_failed(train: Train, failure: Any, kind: type[Exception]) -> None:
    """The sentence stays on the screen; the traceback, which holds the frames and their tensors, does not stay."""
    kept: list[weakref.ref[torch.Tensor]] = []

    def failing(model: nn.Module, batch: Any) -> torch.Tensor:
        activations = model(batch["x"])
        kept.append(weakref.ref(activations))
        raise kind("there is no room")

    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(train, Recipe(**{**vars(recipe()), "loss": failing})).result(60)
    gc.collect()
    assert ran.status == 2
    assert failure(ran)
    assert kept
    assert all(reference() is None for reference in kept)


def test_in_an_evaluation_training_goes_on(train: Train) -> None:
    def metrics(model: nn.Module, batches: Any) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    made = recipe()
    ran = train(Recipe(**{**vars(made), "eval_data": samples(8), "metrics": metrics, "epochs": 2}))
    same(ran, train(Recipe(**{**vars(recipe()), "epochs": 2})), 0)
    assert [e.level for e in ran.of(Event) if e.source == "eval"] == ["error", "error"]
