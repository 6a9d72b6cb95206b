"""GPT-2 124M of the bundled recipe on a card, each technique switched on and off in mid-run by its command.

Where a technique must not change the numbers, losses and weights equal an untoggled run's to the bit; where it does,
they are compared with a plain loop that makes the same changes at the same windows. Run with `-s` to see the figures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from tests.conftest import Ran, Train
from tests.reference import plain_loop
from tui3090.commands import Change
from tui3090.recipe import Recipe
from tui3090.recipes import gpt
from tui3090.records import Changed, Event, StepRecord
from tui3090.settings import Settings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.timeout(300),
]

ON, OFF, WINDOWS = 5, 14, 20
BATCH, CONTEXT, LR = 4, 256, 6e-4


def recipe(dropout: float = 0.1) -> Recipe:
    """GPT-2 124M, unshuffled so that a plain loop needs no knowledge of our order."""
    torch.manual_seed(0)
    made = gpt.recipe(size="gpt2", batch_size=BATCH, context=CONTEXT, dropout=dropout)
    return replace(made, shuffle=False, eval_data=None, metrics=None, scheduler="constant")


def ran_with(
    train: Train, script: dict[int, list[Change]], settings: Settings | None = None, windows: int = WINDOWS
) -> Ran:
    """A run of our loop."""
    ran = train(recipe(), script, settings, device="cuda:0", steps=windows)
    assert ran.status == 0, ran.records[-1]
    return ran


def plain(changes: dict[int, dict[str, Any]], windows: int = WINDOWS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The plain loop's losses and weights."""
    made = recipe()
    model = made.model.to("cuda:0")
    assert made.optimizer is not None
    lr = torch.tensor(LR, device="cuda:0")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=True
    )
    needed = sum(_accumulation(changes, window) for window in range(windows))
    rows = made.train_data
    batches = [default_collate([rows[i] for i in range(b * BATCH, (b + 1) * BATCH)]) for b in range(needed)]
    losses = plain_loop(
        model,
        batches,
        optimizer,
        total_steps=windows,
        changes=changes,
        device="cuda",
        loss_of=gpt.loss,
        base_lr=LR,
        factor=lambda step, total: 1.0,
    )
    return losses, model.state_dict()


def _accumulation(changes: dict[int, dict[str, Any]], window: int) -> int:
    known = [change["accumulate"] for at, change in sorted(changes.items()) if at <= window and "accumulate" in change]
    return known[-1] if known else 1


def furthest(ran: Ran, losses: list[float], weights: dict[str, torch.Tensor]) -> tuple[float, float]:
    """The largest differences of losses and of weights."""
    assert len(ran.losses) == len(losses)
    of_losses = max(abs(a - b) for a, b in zip(ran.losses, losses))
    of_weights = max(float((ran.weights[name] - value).abs().max()) for name, value in weights.items())
    return of_losses, of_weights


@pytest.mark.parametrize(
    ("technique", "on", "off"),
    [("checkpointing", 1, 0), ("checkpointing", 2, 0), ("graph", True, False), ("workers", 2, 0), ("prefetch", 2, 0)],
)
@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_what_must_not_change_the_numbers_does_not(train: Train, technique: str, on: Any, off: Any, amp: str) -> None:
    base = ran_with(train, {}, Settings(amp=amp))
    ran = ran_with(train, {ON: [Change(technique, on)], OFF: [Change(technique, off)]}, Settings(amp=amp))
    assert len(ran.of(Changed)) == 2
    if technique == "graph":
        assert [r.replayed for r in ran.of(StepRecord)][ON + 1 : OFF] == [True] * (OFF - ON - 1), ran.of(Event)
    losses, weights = furthest(ran, base.losses, base.weights)
    print(f"\n{technique} {on} under amp {amp}: furthest loss {losses:.3g}, weight {weights:.3g}")
    assert losses == 0
    assert weights == 0


@pytest.mark.parametrize(
    ("technique", "on", "off", "tolerance"),
    [
        ("amp", "bf16", "off", 1e-6),
        ("amp", "fp16", "off", 1e-6),
        ("accumulate", 4, 1, 1e-6),
        ("tf32", True, False, 1e-6),
        ("lr", 0.5, 1.0, 1e-6),
    ],
)
def test_what_changes_the_numbers_is_what_a_plain_loop_does(
    train: Train, technique: str, on: Any, off: Any, tolerance: float
) -> None:
    ran = ran_with(train, {ON: [Change(technique, on)], OFF: [Change(technique, off)]})
    losses, weights = furthest(ran, *plain({ON: {technique: on}, OFF: {technique: off}}))
    print(f"\n{technique} {on}: furthest loss {losses:.3g}, weight {weights:.3g} from the plain loop")
    assert losses <= tolerance
    assert weights <= tolerance


def test_all_of_them_together_under_replay(train: Train) -> None:
    keys = {
        2: [Change("amp", "bf16")],
        5: [Change("accumulate", 2)],
        8: [Change("checkpointing", 1)],
        11: [Change("lr", 0.5), Change("amp", "fp16")],
        14: [Change("accumulate", 1), Change("tf32", True)],
        17: [Change("amp", "off"), Change("checkpointing", 0)],
    }
    replayed = ran_with(train, {**keys, 1: [Change("graph", True), Change("prefetch", 2), Change("workers", 1)]})
    losses, weights = plain({window: {c.technique: c.value for c in changes} for window, changes in keys.items()})
    of_losses, of_weights = furthest(replayed, losses, weights)
    print(f"\nall under replay: furthest loss {of_losses:.3g}, weight {of_weights:.3g} from the plain loop")
    assert sum(r.replayed for r in replayed.of(StepRecord)) >= 10
    assert of_losses <= 1e-6
    assert of_weights <= 1e-6
