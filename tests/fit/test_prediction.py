"""What a batch is predicted to take, against what it takes; on the CPU by counting the bytes of live tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fit.fakes import LiveBytes
from tui3090.assemble import Job, assemble
from tui3090.feed import Feed, MicroBatch
from tui3090.fit.cells import Column
from tui3090.fit.prediction import Point, predict
from tui3090.fit.probe import elements_in, measure_stretches, probe, small_batches
from tui3090.recipe import Recipe
from tui3090.recipes import gpt
from tui3090.settings import RunPlan

CPU = torch.device("cpu")
EAGER = [Column(amp, technique) for amp in ("off", "bf16") for technique in ("", "checkpointing")]


def assembled(size: gpt.Size, loss: Any = gpt.loss) -> Job:
    def load(path: Path, options: dict[str, Any]) -> Recipe:
        text = bytes(range(256)) * (size.context // 2)
        return Recipe(model=gpt.GPT(size), train_data=gpt.Windows(text, size.context), loss=loss, batch_size=6)

    return assemble(RunPlan(Path("gpt.py"), "gpt", device="cpu"), lambda record: None, load)


WIDE = gpt.Size(layers=3, heads=2, width=128, context=16, vocabulary=256, lr=1e-3)
"""Big weights and small activations: with few samples the peak is where all gradients are."""
LONG = gpt.Size(layers=3, heads=2, width=32, context=64, vocabulary=256, lr=1e-3)
"""The reverse."""


def batch_of(job: Job, size: int) -> MicroBatch:
    feed = Feed(Recipe(**{**vars(job.recipe), "batch_size": size}), CPU, seed=0)
    feed.start_epoch(0)
    window = feed.next_window(1)
    assert window is not None
    return window.micro_batches[0]


@pytest.fixture(scope="module")
def probed() -> dict[gpt.Size, tuple[Job, dict[str, list[Point]], LiveBytes]]:
    """Of each model: what its small batches took."""
    found = {}
    for size in (WIDE, LONG):
        with LiveBytes() as counted:
            job = assembled(size)
            found[size] = job, probe(job, EAGER, small_batches(job.feed), counted.peak), counted
    return found


@pytest.mark.parametrize("column", EAGER, ids=lambda column: column.name)
@pytest.mark.parametrize("size", [WIDE, LONG], ids=["wide", "long"])
def test_predicted_from_small_batches_is_what_a_big_one_takes(
    probed: dict[gpt.Size, tuple[Job, dict[str, list[Point]], LiveBytes]], size: gpt.Size, column: Column
) -> None:
    job, points, counted = probed[size]
    job.step.settings = column.settings
    for batch in (8, 64):
        micro = batch_of(job, batch)
        with counted:
            measured = max(measure_stretches(job.step, micro, counted.peak).peaks)
        predicted = predict(points[column.name], elements_in(micro.batch))
        assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("size", [WIDE, LONG], ids=["wide", "long"])
def test_gradients_that_are_kept_for_replay_are_added(
    probed: dict[gpt.Size, tuple[Job, dict[str, list[Point]], LiveBytes]], size: gpt.Size
) -> None:
    job, points, counted = probed[size]
    job.step.settings = Column().settings
    micro = batch_of(job, 16)
    with counted:
        job.step.keep_gradients = True
        job.step.accumulate(micro, 1.0, first=True)
        counted.peak()
        job.step.accumulate(micro, 1.0, first=True)
        job.step.update()
        measured = counted.peak()
        job.step.drop_gradients()
    elements = elements_in(micro.batch)
    assert predict(points["fp32"], elements, gradients_kept=True) == pytest.approx(measured, rel=0.01)
    without = predict(points["fp32"], elements)
    assert without is not None
    assert without < measured


def test_where_the_peak_is_depends_on_the_batch() -> None:
    # forward: 100 + 10 an element; the end of backward: 140 + 1 an element
    points = [Point(n, (100 + 10 * n, 140 + n), (0, 40)) for n in (1, 2, 4)]
    assert [predict(points, n) for n in (3, 4, 5, 50)] == [143, 144, 150, 600]
    assert predict(points, 4, gradients_kept=True) == 180


def test_the_two_biggest_batches_count() -> None:
    assert predict([Point(4, (50,)), Point(1, (999,)), Point(2, (30,))], 8) == 90


def test_batches_that_took_different_ways_are_compared_by_their_peaks() -> None:
    assert predict([Point(1, (10, 30, 20)), Point(2, (40, 20))], 3) == 50


@pytest.mark.parametrize("points", [[], [Point(1, (10,))], [Point(2, (10,)), Point(2, (12,))]])
def test_one_batch_is_not_enough(points: list[Point]) -> None:
    assert predict(points, 3) is None


def test_a_batch_that_does_not_fit_and_bigger_ones_are_left_out() -> None:
    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if len(batch["labels"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gpt.loss(model, batch)

    job = assembled(LONG, loss)
    points = probe(job, EAGER[:1], small_batches(job.feed), lambda: 7)
    assert [point.elements for point in points["fp32"]] == [1 * 128, 2 * 128]
    assert job.step.gradients() == []
