"""Loss scaling and autocast: skipped steps, one unscaling a step, and a state of autocast that belongs to a thread."""

from __future__ import annotations

import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.conftest import Train
from tests.reference import Blocks, loss_of, samples
from tui3090.commands import Change
from tui3090.feed import MicroBatch
from tui3090.optimizers import make_optimizer
from tui3090.recipe import Recipe
from tui3090.records import StepRecord
from tui3090.settings import Settings
from tui3090.step import Step


def linear(data: list[torch.Tensor], optimizer: Any) -> Recipe:
    torch.manual_seed(0)
    return Recipe(
        model=nn.Linear(2, 1),
        train_data=data,
        loss=lambda model, batch: model(batch).float().mean(),
        optimizer=optimizer,
        scheduler=lambda o, n: LambdaLR(o, lambda s: 1 / (s + 1)),
        batch_size=1,
        shuffle=False,
    )


OPTIMIZERS = {
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "other": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_overflow_at_the_start_moves_neither_weights_nor_schedule(train: Train, optimizer: str) -> None:
    data = [torch.tensor([math.inf, 1.0]), torch.full((2,), 0.1)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        ran = train(linear(data, OPTIMIZERS[optimizer]), settings=Settings(amp="fp16"))
        first = train(linear(data[:1], OPTIMIZERS[optimizer]), settings=Settings(amp="fp16"))
    skipped, taken = ran.of(StepRecord)
    assert (skipped.step, skipped.lr, skipped.loss_scale, skipped.skipped) == (0, 0.1, 32768.0, "overflow")
    assert (taken.step, taken.lr, taken.loss_scale, taken.skipped) == (1, 0.1, 32768.0, "")
    born = linear(data, OPTIMIZERS[optimizer]).model.state_dict()
    assert all(torch.equal(value, born[name]) for name, value in first.weights.items())
    assert not any(torch.equal(value, born[name]) for name, value in ran.weights.items())
    assert first.trainer.schedule.scheduler.last_epoch == 0
    assert ran.trainer.job.step.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_scale_that_grows_is_no_skip() -> None:
    made = linear([torch.ones(2)], OPTIMIZERS["fused"])
    optimizer, _ = make_optimizer(made, made.model, torch.device("cpu"))
    step = Step(made, made.model, optimizer, [], torch.device("cpu"), lambda micro: micro.batch)
    step.settings = Settings(amp="fp16")
    step.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    outcomes = []
    for _ in range(3):
        step.accumulate(MicroBatch(torch.full((1, 2), 0.1), 1.0, 1, 0), 1.0, first=True)
        step.update()
        outcomes.append(step.report().wait())
    assert [(outcome.finite, outcome.loss_scale) for outcome in outcomes] == [(True, 16.0), (True, 32.0), (True, 64.0)]


def test_the_scale_that_was_found_lasts_over_switching_fp16_off_and_on(train: Train) -> None:
    data = [torch.tensor([math.inf, 1.0])] + [torch.full((2,), 0.1)] * 7
    script = {3: [Change("amp", "off")], 5: [Change("amp", "fp16")]}
    ran = train(linear(data, OPTIMIZERS["fused"]), script, Settings(amp="fp16"))
    assert [r.loss_scale for r in ran.of(StepRecord)] == [32768.0] * 3 + [None] * 2 + [32768.0] * 3
    assert sum(bool(r.skipped) for r in ran.of(StepRecord)) == 1


@pytest.mark.parametrize(("amp", "unscaled"), [("off", 0), ("bf16", 0), ("fp16", 2)])
def test_gradients_are_unscaled_once_a_step_and_only_where_they_were_scaled(
    train: Train, monkeypatch: pytest.MonkeyPatch, amp: str, unscaled: int
) -> None:
    calls: list[torch.optim.Optimizer] = []
    unscale = torch.amp.GradScaler.unscale_

    def counting(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        calls.append(optimizer)
        unscale(scaler, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", counting)
    data = [torch.full((2,), 0.1) for _ in range(8)]
    ran = train(linear(data, OPTIMIZERS["fused"]), settings=Settings(amp=amp, accumulate=4))
    assert len(ran.of(StepRecord)) == 2
    assert len(calls) == unscaled


def test_a_finite_loss_with_an_infinite_gradient_changes_nothing(train: Train) -> None:
    """The square root's slope at 0 is infinite, and its value is not."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """[1, 2] -> []."""
            return (self.w * x).sqrt().sum()

    data = [torch.tensor([0.5, 1.0]), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])]
    made: dict[str, Any] = {"loss": lambda model, batch: model(batch), "batch_size": 1, "shuffle": False}
    ran = train(Recipe(model=Root(), train_data=data, scheduler="constant", **made))
    records = ran.of(StepRecord)
    assert [record.skipped for record in records] == ["", "not finite", ""]
    assert math.isfinite(records[1].loss)
    without = train(Recipe(model=Root(), train_data=[data[0], data[2]], scheduler="constant", **made))
    assert torch.equal(ran.weights["w"], without.weights["w"])


def test_what_another_thread_entered_is_not_in_force_in_training_nor_the_other_way_round(train: Train) -> None:
    seen: list[tuple[bool, torch.dtype, bool, torch.dtype]] = []

    def probing(model: nn.Module, batch: Any) -> torch.Tensor:
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        seen.append((enabled, dtype, torch.is_grad_enabled(), model.head(batch["x"]).dtype))
        return loss_of(model, batch)

    torch.manual_seed(3)
    made = Recipe(model=Blocks(), train_data=samples(24), loss=probing, batch_size=4, shuffle=False)
    script = {2: [Change("amp", "bf16")], 4: [Change("amp", "off")]}
    with torch.autocast("cpu", dtype=torch.float16), torch.no_grad(), ThreadPoolExecutor(1) as pool:
        ran = pool.submit(train, made, script).result(60)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert not torch.is_grad_enabled()
    assert ran.status == 0, ran.records[-1]
    off, on = (False, torch.bfloat16, True, torch.float32), (True, torch.bfloat16, True, torch.bfloat16)
    assert seen == [off, off, on, on, off, off]
