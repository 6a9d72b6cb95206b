"""The loop and its keys: what is trained must be what a plain loop trains."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import default_collate

from tests.conftest import Train
from tests.reference import Blocks, loss_of, plain_loop, samples
from tui3090.commands import Change, Evaluate, Stop
from tui3090.recipe import Recipe
from tui3090.records import Changed, Evaluated, Event, Refused, Stage, Started, State, StepRecord
from tui3090.settings import Settings

LR = 1e-2


def recipe(count: int = 42, batch_size: int = 4, **fields: Any) -> Recipe:
    """The reference's model and data as a recipe."""
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Blocks(batch_norm=fields.pop("batch_norm", False)),
        "train_data": samples(count),
        "loss": loss_of,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=LR),
        "batch_size": batch_size,
        "shuffle": False,
    }
    return Recipe(**{**options, **fields})


def batches(count: int = 42, batch_size: int = 4) -> list[dict[str, torch.Tensor]]:
    """The same data in the same batches."""
    rows = samples(count)
    return [default_collate(rows[i : i + batch_size]) for i in range(0, count, batch_size)]


def reference(
    changes: dict[int, dict[str, Any]], total: int, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The plain loop's losses and weights."""
    model = recipe(batch_norm=options.pop("batch_norm", False)).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    losses = plain_loop(model, batches(), optimizer, total_steps=total, changes=changes, **options)
    return losses, model.state_dict()


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    """Every weight within a tolerance, relative to 1."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_equals_the_plain_loop(train: Train) -> None:
    ran = train(recipe())
    losses, weights = reference({}, total=11)
    assert ran.status == 0
    assert ran.losses == pytest.approx(losses, abs=1e-6)
    same(ran.weights, weights, 1e-6)


@pytest.mark.parametrize(
    ("technique", "values", "tolerance"),
    [
        ("checkpointing", (1, 0), 1e-6),
        ("checkpointing", (2, 0), 1e-6),
        ("amp", ("bf16", "off"), 2e-3),
        ("amp", ("fp16", "off"), 2e-3),
        ("lr", (0.5, 1.0), 1e-6),
        ("workers", (1, 0), 1e-6),
    ],
)
def test_a_key_in_mid_run_is_what_a_plain_loop_would_do(
    train: Train, technique: str, values: tuple[Any, Any], tolerance: float
) -> None:
    on, off = values
    ran = train(recipe(), {3: [Change(technique, on)], 7: [Change(technique, off)]})
    losses, weights = reference({3: {technique: on}, 7: {technique: off}}, total=11)
    skipped = sum(bool(record.skipped) for record in ran.of(StepRecord))  # fp16's first scale overflows
    assert [(c.step, c.technique, c.new) for c in ran.of(Changed)] == [
        (4, technique, on),
        (8 - skipped, technique, off),
    ]
    assert ran.losses == pytest.approx(losses, abs=tolerance)
    same(ran.weights, weights, tolerance)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("checkpoint", [0, 1])
def test_batch_norm_and_dropout_are_not_disturbed_by_checkpointing_or_workers(
    train: Train, checkpoint: int, workers: int
) -> None:
    ran = train(recipe(batch_norm=True), settings=Settings(checkpointing=checkpoint, workers=workers))
    plain = train(recipe(batch_norm=True))
    assert ran.losses == plain.losses
    same(ran.weights, plain.weights, 0)
    assert int(ran.weights["blocks.0.1.num_batches_tracked"]) == 11


def test_accumulation_weighs_by_labels_and_the_short_last_window_counts_in_full(train: Train) -> None:
    # a plan of its own: constant rate, since accumulation plans the default schedule again
    ran = train(recipe(scheduler="constant"), {2: [Change("accumulate", 4)]})
    losses, weights = reference({2: {"accumulate": 4}}, total=5, factor=lambda step, total: 1.0)
    assert [record.micro_batches for record in ran.of(StepRecord)] == [1, 1, 4, 4, 1]
    assert ran.losses == pytest.approx(losses, abs=1e-6)
    same(ran.weights, weights, 1e-6)


class Weight(nn.Module):
    """One weight; the loss is the weight itself, its gradient 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))


def test_the_last_window_of_an_epoch_is_not_scaled_down(train: Train) -> None:
    ran = train(
        Recipe(
            model=Weight(),
            train_data=[torch.ones(1)] * 10,
            loss=lambda model, batch: (model.w * batch.mean()).sum(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
            batch_size=1,
            scheduler="constant",
            clip_norm=None,
        ),
        settings=Settings(accumulate=4),
    )
    records = ran.of(StepRecord)
    assert [record.grad_norm for record in records] == [1.0, 1.0, 1.0]
    assert [record.loss for record in records] == [0.0, -1.0, -2.0]  # the mean over what the window holds
    assert [record.planned_steps for record in records] == [3, 3, 3]
    assert ran.weights["w"].item() == -3.0


def test_the_schedule_counts_optimizer_steps(train: Train) -> None:
    def schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
        assert steps == 25
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)

    ran = train(
        Recipe(
            model=Weight(),
            train_data=[torch.ones(1)] * 100,
            loss=lambda model, batch: (model.w * batch.mean()).sum(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
            batch_size=1,
            scheduler=schedule,
        ),
        settings=Settings(accumulate=4),
    )
    assert ran.of(StepRecord)[12].lr == pytest.approx(
        0.52
    )  # after 12 updates, in the middle of micro-batch 50's window


def test_accumulation_in_mid_run_plans_again_and_the_rate_does_not_jump(train: Train) -> None:
    ran = train(recipe(count=400), {50: [Change("accumulate", 2)]})
    records = ran.of(StepRecord)
    assert records[49].planned_steps == 100
    assert records[50].planned_steps == 75 == len(records)
    steps = [b.lr - a.lr for a, b in pairwise(records[10:])]
    assert max(abs(step) for step in steps) <= LR * 0.04 + 1e-9
    assert records[-1].lr == pytest.approx(LR * 0.02, rel=0.1)


class Nan(nn.Module):
    """A linear model whose output is nan on one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 2] -> [batch, 1]."""
        return self.linear(x)


def nan_recipe(poison: float, **fields: Any) -> Recipe:
    """Eight steps, of which the fifth is poisoned."""
    torch.manual_seed(0)
    data = [torch.full((2,), 0.1 * (i + 1)) for i in range(8)]
    data[4] = torch.tensor([poison, 1.0])
    return Recipe(
        model=Nan(),
        train_data=data,
        loss=lambda model, batch: model(batch).float().pow(2).mean() / 100,
        batch_size=1,
        shuffle=False,
        **fields,
    )


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("other", [False, True], ids=["AdamW", "SGD with momentum"])
def test_a_step_that_is_not_finite_changes_nothing(train: Train, amp: str, poison: float, other: bool) -> None:
    given = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)} if other else {}
    ran = train(
        nan_recipe(poison, scheduler=lambda o, n: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (s + 1)), **given),
        settings=Settings(amp=amp),
    )
    records = ran.of(StepRecord)
    assert [bool(r.skipped) for r in records] == [False] * 4 + [True] + [False] * 3
    assert not math.isfinite(records[4].loss)
    assert records[4].skipped == ("overflow" if amp == "fp16" else "not finite")
    assert [r.step for r in records] == [1, 2, 3, 4, 4, 5, 6, 7]
    assert records[5].lr == records[4].lr  # the schedule did not move
    assert all(value.isfinite().all() for value in ran.weights.values())
    without = nan_recipe(poison, **given)
    without.train_data.pop(4)  # type: ignore[union-attr]
    if amp != "fp16":
        clean = train(
            Recipe(
                model=without.model,
                train_data=without.train_data,
                loss=without.loss,
                batch_size=1,
                shuffle=False,
                optimizer=without.optimizer,
                scheduler=lambda o, n: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (s + 1)),
            ),
            settings=Settings(amp=amp),
        )
        same(ran.weights, clean.weights, 0)
    else:
        assert [r.loss_scale for r in records[3:6]] == [65536.0, 32768.0, 32768.0]


def test_clipping_sees_unscaled_gradients(train: Train) -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1, bias=False)
            nn.init.zeros_(self.linear.weight)

    ran = train(
        Recipe(
            model=Three(),
            train_data=[torch.full((4,), 0.75)] * 2,  # small enough that fp16 holds 65536 times it
            loss=lambda model, batch: model.linear(batch).float().mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
            batch_size=1,
            scheduler="constant",
        ),
        settings=Settings(amp="fp16", accumulate=2),
    )
    (record,) = ran.of(StepRecord)
    assert record.grad_norm == pytest.approx(1.5)
    assert ran.weights["linear.weight"].norm().item() == pytest.approx(1.0, rel=1e-5)  # lr 1 x norm 1


def test_micro_batches_and_windows_without_labels(train: Train) -> None:
    rows = samples(32)
    for row in rows[4:8] + rows[16:32]:
        row["labels"] = torch.tensor(-100)
    ran = train(recipe(train_data=rows, scheduler="constant"), settings=Settings(accumulate=4))
    first, second = ran.of(StepRecord)
    assert (first.micro_batches, first.skipped) == (3, "")
    assert (second.micro_batches, second.skipped, second.step) == (0, "no labels", 1)
    kept = rows[:4] + rows[8:16]
    three = train(recipe(train_data=kept, scheduler="constant"), settings=Settings(accumulate=4))
    assert first.loss == pytest.approx(three.losses[0], abs=1e-6)
    same(ran.weights, three.weights, 1e-6)


def test_evaluation_leaves_training_as_it_was(train: Train) -> None:
    def metrics(model: nn.Module, given: Any) -> dict[str, float | str]:
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(99)  # draws of an evaluation are not training's
        return {
            "accuracy": sum(float((model(b["x"]).argmax(-1) == b["labels"]).float().mean()) for b in given),
            "sample": "x[/b]",
        }

    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model, batch) * (1 + random.random() + float(numpy.random.rand()))

    numpy.random.seed(1)
    random.seed(1)
    plain = train(recipe(loss=noisy))
    numpy.random.seed(1)
    random.seed(1)
    ran = train(recipe(loss=noisy, eval_data=samples(10, seed=5), metrics=metrics), {4: [Evaluate()]})
    assert ran.losses == plain.losses
    asked, last = ran.of(Evaluated)
    assert (asked.step, last.step) == (4, 11)
    assert asked.loss is not None
    assert asked.metrics.startswith("accuracy ")
    assert asked.text == "x[/b]"


def test_a_mistake_in_the_metrics_does_not_end_training(train: Train) -> None:
    def metrics(model: nn.Module, given: Any) -> dict[str, float | str]:
        raise KeyError("accuracy")

    ran = train(recipe(eval_data=samples(10), metrics=metrics), {4: [Evaluate()]})
    assert ran.status == 0
    assert len(ran.losses) == 11
    assert ran.losses == train(recipe()).losses
    errors = [event.text for event in ran.of(Event) if event.level == "error"]
    assert len(errors) == 2
    assert "KeyError: 'accuracy'" in errors[0]


def test_a_stream_that_can_be_gone_through_once_is_refused_at_its_second_epoch(train: Train, failure: Any) -> None:
    class Once(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
        rows = iter(samples(12))

        def __iter__(self) -> Any:
            return self.rows

    ran = train(recipe(train_data=Once(), epochs=2))
    assert len(ran.losses) == 3
    assert "gave nothing in epoch 2" in failure(ran)


def test_evaluation_is_the_mean_over_labels_and_none_without_any(train: Train) -> None:
    unlabelled = [{"x": row["x"], "labels": torch.tensor(-100)} for row in samples(8)]
    assert train(recipe(eval_data=unlabelled)).of(Evaluated)[-1].loss is None
    ran = train(recipe(eval_data=samples(13) + unlabelled))
    model = recipe().model
    model.load_state_dict(ran.weights)
    whole = loss_of(model.eval(), default_collate(samples(13) + unlabelled))
    assert ran.of(Evaluated)[-1].loss == pytest.approx(whole.item(), abs=1e-6)


def test_what_is_told_in_order(train: Train) -> None:
    ran = train(recipe())
    assert [s.name for s in ran.of(Stage) if s.seconds is not None] == [
        "train.py",
        "model",
        "data",
        "device",
        "first step",
    ]
    assert [s.state for s in ran.of(State)] == ["training", "finished"]
    (started,) = ran.of(Started)
    assert (started.rows, started.batch_size, started.unit, started.device) == (42, 4, "samples", "cpu")
    assert [r.samples for r in ran.of(StepRecord)] == [4] * 10 + [2]
    assert ran.of(StepRecord)[-1].epoch == 1.0


def test_stop_ends_at_the_windows_end(train: Train) -> None:
    ran = train(recipe(), {5: [Stop()]})
    assert len(ran.losses) == 5
    assert [s.state for s in ran.of(State)] == ["training", "stopping", "stopped"]
    assert ran.status == 0


def test_steps_asked_for_are_taken_over_as_many_epochs_as_it_needs(train: Train) -> None:
    ran = train(recipe(), steps=25)
    assert len(ran.losses) == 25
    assert ran.of(StepRecord)[-1].planned_steps == 25
    assert train(recipe(), steps=3).of(StepRecord)[-1].step == 3


def test_what_can_not_be_had_is_refused_and_training_goes_on(train: Train) -> None:
    ran = train(recipe(), {1: [Change("graph", True), Change("offload", True), Change("amp", "int4"), Change("no", 1)]})
    assert [(r.technique, r.reason) for r in ran.of(Refused)] == [
        ("graph", "CUDA graph replay needs an NVIDIA card, and training runs on the CPU."),
        ("offload", "Offload needs an NVIDIA card to move activations off, and training runs on the CPU."),
        ("amp", "amp is off, bf16 or fp16, not 'int4'"),
        ("no", ran.of(Refused)[3].reason),
    ]
    assert ran.losses == train(recipe()).losses
    assert not ran.of(Changed)


def test_asked_for_at_the_start_and_not_to_be_had_ends_before_the_first_step(train: Train, failure: Any) -> None:
    ran = train(recipe(), settings=Settings(graph=True))
    assert ran.status == 2
    assert "needs an NVIDIA card" in failure(ran)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"loss": lambda model, batch: model(batch["x"])}, "The loss returned a tensor of shape (4, 4)"),
        ({"loss": lambda model, batch: torch.zeros(())}, "depends on no trainable parameter"),
        ({"loss": lambda model, batch: model(batch["y"])}, "test_trainer.py"),
        ({"optimizer": lambda model: 3}, "optimizer returned a int"),
    ],
)
def test_what_the_loss_or_optimizer_can_not_do_is_one_sentence(
    train: Train, failure: Any, broken: dict[str, Any], words: str
) -> None:
    ran = train(recipe(**broken))
    assert ran.status == 2
    assert words in failure(ran)
    assert "\n" not in failure(ran)


def test_sys_exit_in_a_recipe_is_its_status(train: Train, failure: Any) -> None:
    def leave(model: nn.Module, batch: Any) -> torch.Tensor:
        raise SystemExit(3)

    ran = train(recipe(loss=leave))
    assert ran.status == 3
    assert "sys.exit(3)" in failure(ran)


@pytest.mark.parametrize("error", [ValueError("boom [/b]"), KeyboardInterrupt("boom [/b]")], ids=["error", "interrupt"])
def test_a_failure_after_the_first_step_has_status_1(train: Train, failure: Any, error: BaseException) -> None:
    calls = []

    def sometimes(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise error
        return loss_of(model, batch)

    ran = train(recipe(loss=sometimes))
    assert ran.status == 1
    assert f"{type(error).__name__}: boom [/b]" in failure(ran)
    assert len(ran.losses) == 3


def test_autocast_is_in_force_in_the_training_thread_only_from_the_next_window_on(train: Train) -> None:
    seen: list[tuple[bool, torch.dtype]] = []

    def probing(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), model.head(batch["x"]).dtype))
        return loss_of(model, batch)

    with torch.autocast("cpu", dtype=torch.float16, enabled=False):
        train(recipe(loss=probing), {2: [Change("amp", "bf16")], 4: [Change("amp", "off")]})
    on, off = (True, torch.bfloat16), (False, torch.float32)
    assert seen[:6] == [off, off, on, on, off, off]


def test_the_users_adam_is_rebuilt_fused_and_it_is_said(train: Train) -> None:
    ran = train(recipe())
    assert ran.trainer.job.step.waits_for_nothing
    assert any("rebuilt with fused=True" in e.text for e in ran.of(Event))
    kept = train(recipe(optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=LR, foreach=True)))
    assert not kept.trainer.job.step.waits_for_nothing
    assert kept.losses == pytest.approx(ran.losses, abs=1e-6)


changes = st.one_of(
    st.tuples(st.just("amp"), st.sampled_from(["off", "bf16", "fp16"])),
    st.tuples(st.just("checkpointing"), st.sampled_from([0, 1, 2, 3])),
    st.tuples(st.just("accumulate"), st.sampled_from([1, 2, 3, 4])),
    st.tuples(st.just("lr"), st.sampled_from([0.5, 1.0, 2.0])),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.integers(0, 9), st.lists(changes.filter(lambda c: c[0] != "amp"), max_size=3), max_size=5))
def test_random_keys_at_random_windows_equal_a_plain_loop(
    train: Train, pressed: dict[int, list[tuple[str, Any]]]
) -> None:
    script = {window: [Change(name, value) for name, value in keys] for window, keys in pressed.items()}
    ran = train(recipe(scheduler="constant"), script)
    losses, weights = reference(
        {window: dict(keys) for window, keys in pressed.items()}, total=11, factor=lambda step, total: 1.0
    )
    assert ran.losses == pytest.approx(losses, abs=1e-6)
    same(ran.weights, weights, 1e-6)
