"""What graph replay decides without a card: whether a window would capture."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tui3090.feed import MicroBatch
from tui3090.settings import Settings
from tui3090.techniques.graph import SHAPES, Replay


def micro(rows: int) -> MicroBatch:
    return MicroBatch(batch={"x": torch.zeros(rows, 2)}, weight=1.0, samples=rows, tokens=0)


def replay() -> Replay:
    model = nn.Linear(2, 1)
    step: Any = SimpleNamespace(
        settings=Settings(graph=True),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        waits_for_nothing=True,
        keep_gradients=False,
        scales=False,
        gradients=lambda: [],
    )
    return Replay(step, contextlib.nullcontext, lambda text: None)


def test_a_shape_is_captured_when_it_comes_for_the_second_time() -> None:
    made = replay()
    assert not made.captures([micro(4)])
    made.prepare([micro(4)])  # the first time it is only noted
    assert made.captures([micro(4)])
    assert made.captures([micro(3), micro(4)])
    assert not made.captures([micro(3)])


def test_not_when_it_was_refused_or_there_are_enough() -> None:
    made = replay()
    made.prepare([micro(4)])
    made._captures = {(rows,): object() for rows in range(SHAPES)}  # type: ignore[misc]
    assert not made.captures([micro(4)])
    made._captures.clear()
    made.given_up = "It is given up."
    assert not made.captures([micro(4)])


def test_the_update_is_captured_in_the_step_after_its_first_with_graphs() -> None:
    made = replay()
    made.step.keep_gradients = True
    assert not made.captures([micro(4)])
    made._update_key = made._key_of_update()
    assert made.captures([micro(4)])
    made._update = object()  # type: ignore[assignment]
    assert not made.captures([micro(4)])
