"""torch.compile by key: the same training within rounding, compiled once, with a sentence where it can't be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Train
from tests.reference import Blocks, loss_of, samples
from tui3090.recipe import Recipe
from tui3090.records import Available, Change, Changed, Event, Refused, State, StepRecord
from tui3090.settings import Settings
from tui3090.techniques import compile
from tui3090.techniques.compile import missing_compiler

TOLERANCE = 1e-5
"""Fused kernels round otherwise; relative to losses of about 1 over 11 steps at a learning rate of 1e-2."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler up to where it makes kernels: what takes long is in one test alone."""
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    monkeypatch.setattr(compile, "OPTIONS", {})


def recipe(count: int = 42, **fields: Any) -> Recipe:
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Blocks(batch_norm=fields.pop("batch_norm", False), dropout=fields.pop("dropout", 0.1)),
        "train_data": samples(count),
        "loss": loss_of,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "batch_size": 4,
        "shuffle": False,
    }
    return Recipe(**{**options, **fields})


def compilations(ran: Any) -> list[str]:
    return [event.text for event in ran.of(Event) if event.source == "compile" and event.text.startswith("compiled in")]


def test_on_off_on_off(train):
    script = {2: [Change("compile", True)], 5: [Change("compile", False)], 7: [Change("compile", True)]}
    plain, ran = train(recipe()), train(recipe(), script)
    print(ran.of(Event), ran.of(State))
    assert ran.status == 0
    print(ran.losses, plain.losses)
