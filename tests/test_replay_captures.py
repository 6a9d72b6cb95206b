"""What graph replay decides without a card: whether a window would capture."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
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
        parameters=list(model.parameters()),
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


@pytest.mark.parametrize(
    ("free", "cap", "reserved", "released"),
    [(12, 1.0, 5, False), (8, 1.0, 5, True), (100, 0.2, 5, False), (100, 0.1, 5, True)],
)
def test_graphs_are_released_before_an_eager_pass_that_would_not_fit_beside_them(
    monkeypatch: pytest.MonkeyPatch, free: int, cap: float, reserved: int, released: bool
) -> None:
    """`free`, `reserved` and what the graphs keep (10) in GiB of a card of 100; `cap`: the allocator's share of it."""
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * gib, 100 * gib))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: cap)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved * gib)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    told: list[str] = []
    made = replay()
    made._say, made.step.device = told.append, torch.device("cpu")
    made.make_room()
    assert not told, "nothing to release"
    key = made._key(micro(4))
    made._captures[key] = object()  # type: ignore[assignment]
    made.pool_bytes = 10 * gib
    made.make_room()
    assert made.live != released
    assert [text.startswith("graphs released to make room") for text in told] == [True] * released
    if released:  # and captured again when the shape comes for the second time
        made.prepare([micro(4)])
        assert made.captures([micro(4)])


def test_gradients_outlive_graphs_that_are_released_within_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in the graphs' memory, which would be kept for them."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made = replay()
    made.step.device = torch.device("cpu")
    weight, bias = made.step.parameters
    for within_window in (True, False):
        made._captures[made._key(micro(4))] = object()  # type: ignore[assignment]
        weight.grad = held = torch.full_like(weight, 2.0)
        made.release(within_window)
        assert not made.live
        assert bias.grad is None
        if within_window:
            assert weight.grad is not None
            assert torch.equal(weight.grad, held)
            assert weight.grad.data_ptr() != held.data_ptr()
        else:
            assert weight.grad is None
