"""Which batches and updates run by replay, and which eagerly, without a card: a stand-in takes the graphs' place.

As a graph does, the stand-in reads the batch that it was captured with, wherever that lies, whatever was meant.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from tests.reference import loss_of, samples
from tests.schedules import OPTIMIZERS, SCHEDULES
from tests.test_user_schedules import BATCH, recipe
from tui3090.feed import MicroBatch
from tui3090.optimizers import make_optimizer
from tui3090.recipe import Recipe
from tui3090.schedule import Schedule
from tui3090.step import Step
from tui3090.techniques.capture import copied, trained_in
from tui3090.techniques.graph import SHAPES, Replay, _Capture

CPU = torch.device("cpu")


class Graph:
    """Stands in for a captured graph: replaying it runs the same work."""

    def __init__(self, run: Any) -> None:
        self.replay = run


class FakeReplay(Replay):
    """Captures by the stand-in; counts what ran by replay, and what eagerly in spite of it."""

    def __init__(self, step: Step) -> None:
        super().__init__(step, lambda: None, self._told)  # type: ignore[arg-type, return-value]
        self.said: list[str] = []
        self.hits = self.misses = 0

    def _told(self, text: str) -> None:
        self.said.append(text)

    def make_room(self, within_window: bool = False) -> None:
        """There is room. What the graphs read is no batch any more."""
        self.misses += 1
        for capture in self._captures.values():
            for leaf in capture.static.values():
                leaf.fill_(math.nan if leaf.is_floating_point() else 0)

    def _capture(self, micro: MicroBatch, earlier: MicroBatch) -> _Capture:
        static = copied(micro.batch)
        with torch.random.fork_rng(), trained_in(self.step.parameters) as self._trained:
            self.step.forward_backward(static, first=True)
        self.step.keep_gradients = True

        def run(first: bool) -> None:
            self.hits += 1
            self.step.forward_backward(static, first)

        return _Capture(static, Graph(lambda: run(True)), Graph(lambda: run(False)))  # type: ignore[arg-type]

    def _capture_update(self) -> Any:
        return Graph(self.step.apply)


def stepped(made: Recipe, windows: list[list[dict[str, torch.Tensor]]], replayed: bool) -> tuple[Any, list[float]]:
    """The runner after these windows of batches, and their losses."""
    torch.manual_seed(0)
    optimizer, _ = make_optimizer(made, made.model, CPU)
    step = Step(made, made.model, optimizer, [], CPU, lambda micro: micro.batch)
    runner: Any = FakeReplay(step) if replayed else step
    losses = []
    for window in windows:
        micro_batches = [MicroBatch(batch, float(len(batch["labels"])), len(batch["labels"]), 0) for batch in window]
        runner.prepare(micro_batches)
        weight = sum(micro.weight for micro in micro_batches)
        for number, micro in enumerate(micro_batches):
            runner.accumulate(micro, micro.weight / weight, number == 0)
        runner.update()
        losses.append(runner.report().wait().loss)
    return runner, losses


def batches(sizes: list[int]) -> list[dict[str, torch.Tensor]]:
    rows = [row for row in samples(2 * sum(sizes)) if row["labels"] >= 0]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [default_collate(rows[start : start + size]) for start, size in zip(starts, sizes)]


@pytest.mark.parametrize(("accumulate", "eager"), [(1, 2), (3, 3)])
def test_a_short_batch_sees_no_stale_row(accumulate: int, eager: int) -> None:
    """Ten samples in batches of 4, 4 and 2, four times over: the first window of a shape runs eagerly."""
    given = batches([4, 4, 2] * 4)
    windows = [given[i : i + accumulate] for i in range(0, 12, accumulate)]
    made = [recipe("AdamW", "LambdaLR") for _ in range(2)]
    ran, losses = stepped(made[0], windows, replayed=True)
    _, expected = stepped(made[1], windows, replayed=False)
    assert losses == expected
    for ours, theirs in zip(made[0].model.parameters(), made[1].model.parameters()):
        assert torch.equal(ours, theirs)
    assert (ran.misses, ran.hits, len(ran._captures)) == (eager, 12 - eager, 2)
    assert ran.said == []


class WithMoreForLong(nn.Module):
    """Trains one layer more where the sequence is long, and another where it is short."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 4)
        self.long, self.short = nn.Linear(16, 16), nn.Linear(16, 16)
        self.embedding.requires_grad_(False)  # the optimizer is given it all the same

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, words] -> [batch, 4]."""
        return self.head((self.long if x.shape[1] > 8 else self.short)(self.embedding(x).mean(1)))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("lengths", [[6, 6, 6, 12, 6, 6], [12, 12, 12, 6, 12, 12, 6, 6]])
def test_no_gradient_is_left_to_a_shape_that_does_not_make_it(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], accumulate: int
) -> None:
    """A captured shape zeroes only what it knows: the layer that another one trains must not be stepped again."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    generator = torch.Generator().manual_seed(2)
    given = [
        {"x": torch.randint(50, (4, n), generator=generator), "labels": torch.randint(4, (4,), generator=generator)}
        for n in lengths
        for _ in range(accumulate)
    ]
    windows = [given[i : i + accumulate] for i in range(accumulate - 1, len(given) - accumulate + 1, accumulate)]

    def made() -> Recipe:
        torch.manual_seed(3)
        return Recipe(
            model=WithMoreForLong(),
            train_data=[0],
            loss=loss_of,
            batch_size=4,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        )

    recipes = made(), made()
    ran, losses = stepped(recipes[0], windows, replayed=True)
    _, expected = stepped(recipes[1], windows, replayed=False)
    assert ran.hits, "it began to replay"
    assert ran.said == [ran.given_up]
    assert "other parameters" in ran.given_up
    assert losses == expected
    for ours, theirs in zip(recipes[0].model.parameters(), recipes[1].model.parameters()):
        assert torch.equal(ours, theirs)


class OverWords(nn.Module):
    """A mean over a sequence of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, words] -> [batch, 4]."""
        return self.head(self.embedding(x).mean(1))


def test_sequences_of_many_lengths_take_a_bounded_number_of_graphs() -> None:
    """Lengths of 17 to 64, each three times."""
    generator = torch.Generator().manual_seed(2)
    lengths = [length for _ in range(3) for length in range(17, 65)]
    windows = [
        [{"x": torch.randint(50, (4, n), generator=generator), "labels": torch.randint(4, (4,), generator=generator)}]
        for n in lengths
    ]

    def made() -> Recipe:
        torch.manual_seed(3)
        return Recipe(model=OverWords(), train_data=[0], loss=loss_of, batch_size=4)

    ran, losses = stepped(made(), windows, replayed=True)
    _, expected = stepped(made(), windows, replayed=False)
    assert losses == expected
    assert len(ran._captures) == SHAPES
    assert ran.hits == SHAPES * 2, "captured the second time, replayed then and the third time"
    assert ran.hits + ran.misses == len(windows)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "captures", "replays", "told"),
    [
        ("AdamW", "LambdaLR", 1, 9, ""),
        ("AdamW", "CosineAnnealingLR", 1, 9, ""),
        ("AdamW", "OneCycleLR", 0, 0, "more than its rate changes from step to step, as betas do under OneCycleLR"),
        ("AdamW", "betas now and then", 3, 6, ""),
        ("SGD with momentum", "LambdaLR", 0, 0, "SGD waits on the host to learn whether the gradient is finite"),
        ("third party", "LambdaLR", 0, 0, "SignDescent waits on the host to learn whether the gradient is finite"),
        ("hooked", "LambdaLR", 0, 0, "the recipe hooked functions of its own to it"),
    ],
)
def test_what_the_update_is_captured_with_stays_as_it_is(
    optimizer: str, schedule: str, captures: int, replays: int, told: str
) -> None:
    """A graph has the betas baked in, and the learning rate not: a schedule that moves betas runs outside of it."""
    made = recipe(optimizer if optimizer in OPTIMIZERS else "AdamW", "LambdaLR")
    driven, _ = make_optimizer(made, made.model, CPU)
    if optimizer == "hooked":
        driven.register_step_post_hook(lambda *given: None)
    step = Step(made, made.model, driven, [], CPU, lambda micro: micro.batch)
    plan = Schedule(driven, SCHEDULES.get(schedule, "constant"), 10)
    said: list[str] = []
    replay = Replay(step, lambda: None, said.append)  # type: ignore[arg-type, return-value]
    replay._captures[("of another shape",)] = None  # type: ignore[assignment]
    count = {"captured": 0, "replayed": 0}

    def capture() -> Any:
        def run() -> None:
            count["replayed"] += 1
            assert [group["betas"] for group in driven.param_groups] == baked, "stale betas"
            step.apply()

        count["captured"] += 1
        baked = [group["betas"] for group in driven.param_groups]
        return Graph(run)

    replay._capture_update = capture  # type: ignore[method-assign]
    step.keep_gradients = True
    batch = default_collate(samples(BATCH))
    for number in range(10):
        step.accumulate(MicroBatch(batch, 1.0, BATCH, 0), 1.0, first=True)
        replay.update()
        plan.step()
        if schedule == "betas now and then" and number in (2, 5, 8):
            for group in driven.param_groups:
                group["betas"] = (0.9 - number / 100, 0.999)
    assert (count["captured"], count["replayed"]) == (captures, replays)
    assert said == ([f"the optimizer's step runs outside the graph: {told}"] if told else [])
