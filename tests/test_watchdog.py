"""What the loop notices by itself: divergence, batches without labels, a failing scale, weights that stand still."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Train
from tests.test_records import _step as step
from tests.test_trainer import recipe
from tui3090.commands import Change, GoBack, MakeSave, Pause, Stop
from tui3090.link import Commands
from tui3090.recipe import Recipe
from tui3090.records import Changed, Event, Resumed, State, StepRecord
from tui3090.watchdog import EXPLODING, NOT_FINITE, OVERFLOWS, Watchdog, explosion_limit


def looked(records: list[StepRecord], unlabelled: int = 0) -> tuple[Watchdog, list[tuple[str, str, str]]]:
    """A watchdog that has seen these windows, and what it said."""
    said: list[tuple[str, str, str]] = []
    dog = Watchdog(lambda source, text, level: said.append((source, text, level)))
    for record in records:
        dog.look(record, unlabelled)
    return dog, said


def losses(*values: float, **fields: Any) -> list[StepRecord]:
    return [replace(step(), loss=value, **fields) for value in values]


def test_a_run_of_windows_that_are_not_finite_raises_an_alarm_and_fewer_do_not() -> None:
    bad = losses(*[math.nan] * NOT_FINITE, skipped="not finite")
    assert looked(bad)[0].alarm is not None
    assert looked(bad[1:])[0].alarm is None
    assert looked(bad[1:] + losses(2.0) + bad[1:])[0].alarm is None


def test_early_overflows_are_the_scaler_at_work_and_late_ones_are_not() -> None:
    early = losses(*[math.inf] * 30, skipped="overflow", loss_scale=1024.0)
    dog, said = looked(early)
    assert dog.alarm is None
    assert len([text for _, text, level in said if level == "warning" and "overflowed" in text]) == 1
    assert not looked(early[: OVERFLOWS - 1])[1]
    late = losses(*[math.inf] * NOT_FINITE, skipped="overflow", loss_scale=0.5)
    assert looked(late)[0].alarm is not None


@pytest.mark.parametrize("level", [0.0, 0.05, 2.5, 11.0, -3.0])
def test_a_noisy_loss_is_no_explosion_and_a_lasting_rise_is(level: float) -> None:
    draw = random.Random(1)
    noisy = losses(*[level + draw.gauss(0, 0.3 * (1 + abs(level))) for _ in range(500)])
    assert looked(noisy)[0].alarm is None
    risen = explosion_limit(level) * 1.5 + 5
    assert looked(noisy + losses(*[risen] * (EXPLODING - 1)))[0].alarm is None
    dog, _ = looked(noisy + losses(*[risen] * EXPLODING))
    assert dog.alarm is not None
    dog.reset()
    assert dog.alarm is None


def test_missing_labels_are_told_at_1_10_100() -> None:
    _, said = looked(losses(*[1.0] * 100), unlabelled=1)
    assert [text.split(":")[1].split("so far")[0].strip() for _, text, _ in said] == [
        "1 batch",
        "10 batches",
        "100 batches",
    ]
    assert not looked(losses(*[1.0] * 100))[1]


class Poisoned(nn.Module):
    """A loss that turns nan from some call on, until the rate is lowered."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.start, self.calls = start, 0

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        value = (self.w * batch.mean()).sum()
        return value * math.nan if self.start <= self.calls < self.start + NOT_FINITE else value


def poisoned() -> Recipe:
    return Recipe(
        model=Poisoned(start=6),
        train_data=[torch.ones(1)] * 40,
        loss=lambda model, batch: model.loss(batch),
        batch_size=1,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        scheduler="constant",
    )


class Answering(Commands):
    """Somebody who answers a pause with keys."""

    def __init__(self, *keys: Any) -> None:
        super().__init__()
        self.keys = list(keys)
        self.states: list[State] = []

    def take(self) -> list[Any]:
        """The keys, once training is paused."""
        if self.states and self.states[-1].state == "paused":
            keys, self.keys = self.keys, []
            return keys
        return []


def watch_states(monkeypatch: pytest.MonkeyPatch, commands: Answering) -> None:
    """Let whoever answers see what the trainer is doing."""

    def told(**fields: Any) -> State:
        commands.states.append(State(**fields))
        return commands.states[-1]

    monkeypatch.setattr("tui3090.telling.State", told)


def test_training_pauses_and_goes_on_at_a_key(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Answering(Change("lr", 0.5), Pause(False))
    commands.arrived.set()
    monkeypatch.setattr(
        "tui3090.telling.State", lambda **fields: commands.states.append(State(**fields)) or State(**fields)
    )
    ran = train(poisoned(), commands=commands)
    assert ran.status == 0
    paused = [state for state in ran.of(State) if state.state == "paused"]
    assert len(paused) == 1
    assert "not finite in 10 windows in a row" in paused[0].detail
    assert "there is no good save, space goes on" in paused[0].detail
    assert [(c.technique, c.new) for c in ran.of(Changed)] == [("lr", 0.5)]
    assert len(ran.of(StepRecord)) == 40
    assert ran.of(StepRecord)[-1].step == 30


class Saving(Answering):
    """Saves before the fourth window, too."""

    def take(self) -> list[Any]:
        """A save once, and the keys when training is paused."""
        self.taken = getattr(self, "taken", -1) + 1
        return [MakeSave()] if self.taken == 3 else super().take()


def test_after_a_divergence_b_goes_back_to_the_last_good_save(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = Saving(GoBack())
    commands.arrived.set()
    watch_states(monkeypatch, commands)
    ran = train(poisoned(), commands=commands, folder=tmp_path)
    assert ran.status == 0, ran.records[-1]
    (paused,) = [state for state in ran.of(State) if state.state == "paused"]
    assert "b goes back to the last good save (step 3)" in paused.detail
    assert [record.step for record in ran.of(Resumed)] == [3]
    after = [record for record in ran.of(StepRecord) if record.time >= ran.of(Resumed)[0].time]
    assert [record.step for record in after] == list(range(4, 41))
    assert ran.weights["w"].item() == pytest.approx(1 - 40 * 0.1, abs=1e-4)


def test_where_nobody_can_press_a_key_it_ends(train: Train, failure: Any) -> None:
    commands = Commands()
    commands.leave_unattended()
    ran = train(poisoned(), commands=commands)
    assert ran.status == 1
    assert "Training diverged" in failure(ran)
    assert len(ran.of(StepRecord)) == 5 + NOT_FINITE


def test_a_paused_run_can_be_stopped(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Answering(Stop())
    commands.arrived.set()
    monkeypatch.setattr(
        "tui3090.telling.State", lambda **fields: commands.states.append(State(**fields)) or State(**fields)
    )
    ran = train(poisoned(), commands=commands)
    assert ran.of(State)[-1].state == "stopped"


class Ones(nn.Module):
    """Eight weights of one, whose gradient is one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, dtype=dtype))


def ones(dtype: torch.dtype) -> Recipe:
    return Recipe(
        model=Ones(dtype),
        train_data=[torch.ones(1)] * 101,
        loss=lambda model, batch: model.w.float().sum(),
        batch_size=1,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0),
        clip_norm=None,
        scheduler="constant",
    )


def test_bf16_weights_that_round_every_update_away_are_noticed(train: Train) -> None:
    ran = train(ones(torch.bfloat16))
    assert torch.equal(ran.weights["w"], torch.ones(8, dtype=torch.bfloat16))
    warned = [event.text for event in ran.of(Event) if event.level == "warning"]
    assert len([text for text in warned if "100 % of the bf16 weights did not change" in text]) == 1
    assert len([text for text in warned if "8 bits of mantissa" in text]) == 1


def test_fp32_weights_move_and_the_precision_key_casts_none(train: Train) -> None:
    ran = train(ones(torch.float32), {20: [Change("amp", "bf16")]}, steps=100)
    assert ran.weights["w"].dtype == torch.float32
    torch.testing.assert_close(ran.weights["w"], torch.full((8,), 0.999), rtol=0, atol=2e-6)
    assert not [event for event in ran.of(Event) if "bf16 weights" in event.text]


def test_fp16_weights_are_refused(train: Train, failure: Any) -> None:
    ran = train(ones(torch.float16))
    assert ran.status == 2
    assert "--amp fp16" in failure(ran)


def test_lost_gradients_under_checkpointing_are_told(train: Train) -> None:
    made = recipe(count=120)
    plain = made.loss

    def forgets(model: nn.Module, batch: Any) -> torch.Tensor:
        if "forward" in vars(model.blocks[0]):  # a block that checkpointing cuts off
            for parameter in model.blocks[1].parameters():
                parameter.requires_grad_(False)
        return plain(model, batch)

    object.__setattr__(made, "loss", forgets)
    ran = train(made, {5: [Change("checkpointing", 1)]})
    told = [event.text for event in ran.of(Event) if event.level == "error"]
    assert len(told) == 1
    assert "checkpointing loses gradients" in told[0]
    assert "blocks.1.0.weight" in told[0]
    assert not [e for e in train(recipe(count=120), {5: [Change("checkpointing", 1)]}).of(Event) if e.level == "error"]
