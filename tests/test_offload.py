"""Offload's policy, on the CPU, where its copies are copies like any other: what travels, when, and equal losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Train
from tests.reference import Blocks, loss_of, samples
from tui3090.recipe import Recipe
from tui3090.records import Change, Event, Refused
from tui3090.settings import Settings
from tui3090.techniques import compile, offload
from tui3090.techniques.offload import Offload

ON, OFF = Settings(offload=True), Settings()
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small storages travel too."""
    monkeypatch.setattr(offload, "LEAST", 64)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be had without a card."""
    monkeypatch.setattr(offload, "unavailable", lambda machine, settings: None)


def recipe(**fields: Any) -> Recipe:
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Blocks(depth=6, batch_norm=fields.pop("batch_norm", False)),
        "train_data": samples(42),
        "loss": loss_of,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "batch_size": 4,
        "shuffle": False,
    }
    return Recipe(**{**options, **fields})


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    "settings", [Settings(), Settings(checkpointing=1), Settings(checkpointing=2, accumulate=2), Settings(amp="bf16")]
)
def test_losses_and_weights_are_equal_to_the_bit(
    train: Train, anywhere: None, settings: Settings, batch_norm: bool
) -> None:
    plain = train(recipe(batch_norm=batch_norm), settings=settings)
    script = {2: [Change("offload", True)], 4: [Change("offload", False)], 5: [Change("offload", True)]}
    ran = train(recipe(batch_norm=batch_norm), script, settings)
    assert ran.status == 0
    assert ran.losses == plain.losses
    for name, value in ran.weights.items():
        assert torch.equal(value, plain.weights[name]), name
    (told, *again) = [event.text for event in ran.of(Event) if event.text.startswith("offload: ")]
    assert "go to pinned host memory and back with each micro-batch" in told
    assert again == [told]
