"""Accidents of data loading: workers that die, streams that every worker copies, draws that must not meet."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tests.conftest import Train
from tests.reference import Blocks, loss_of, samples
from tests.test_feed import feed
from tui3090.recipe import Recipe
from tui3090.records import Event, StepRecord
from tui3090.settings import Settings


class Deadly(Dataset[dict[str, torch.Tensor]]):
    """A worker that is asked for the last sample but two dies by a signal."""

    def __init__(self, number: int) -> None:
        self.rows, self.number = samples(32), number

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 29 and get_worker_info() is not None:
            os.kill(os.getpid(), self.number)
        return self.rows[index]


def recipe(data: Any, **fields: Any) -> Recipe:
    torch.manual_seed(3)
    return Recipe(model=Blocks(), train_data=data, loss=loss_of, batch_size=4, shuffle=False, **fields)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_worker_that_dies_is_a_sentence_with_the_remedies(train: Train, failure: Any, number: signal.Signals) -> None:
    # in a thread, as training is: torch's handler, which would raise wherever the main thread stands, is not there
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with ThreadPoolExecutor(1) as pool:
            ran = pool.submit(train, recipe(Deadly(number)), settings=Settings(workers=1)).result(60)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert ran.status == 1
    assert len(ran.of(StepRecord)) <= 7
    for words in ("A loader worker died", "/dev/shm has", "GiB free", "fewer --workers", "--shm-size"):
        assert words in failure(ran)
    assert not [p for p in psutil.Process().children() if "pt_data" in p.name()]


class Copied(IterableDataset[dict[str, torch.Tensor]]):
    """Does not share its samples out among workers; says how many there are, or does not."""

    def __init__(self, count: int) -> None:
        self.rows = samples(count)

    def __iter__(self) -> Any:
        return iter(self.rows)


class Sized(Copied):
    """With a length."""

    def __len__(self) -> int:
        return len(self.rows)


def test_a_stream_that_each_worker_copies_is_told_once_and_progress_stays_below_the_end(train: Train) -> None:
    ran = train(recipe(Sized(16)), settings=Settings(workers=2))
    records = ran.of(StepRecord)
    assert sum(record.samples for record in records) == 32
    assert [record.planned_steps for record in records] == [4] * 4 + [None] * 4
    assert all(record.epoch <= 1 for record in records)
    (told,) = [event for event in ran.of(Event) if event.source == "data"]
    assert "more samples than the 16 of its length: each of 2 workers goes through all of it" in told.text
    assert told.level == "warning"


def test_a_stream_that_keeps_its_length_is_planned(train: Train) -> None:
    ran = train(recipe(Sized(16), epochs=2))
    assert [record.planned_steps for record in ran.of(StepRecord)] == [8] * 8
    assert not [event for event in ran.of(Event) if event.source == "data"]


def test_a_stream_without_a_length_runs_with_an_unknown_total_or_by_steps(train: Train) -> None:
    assert [record.planned_steps for record in train(recipe(Copied(16))).of(StepRecord)] == [None] * 4
    assert [record.planned_steps for record in train(recipe(Copied(16)), steps=6).of(StepRecord)] == [6] * 6


class Drawing(IterableDataset[float]):
    """Twelve random numbers, of torch and of Python in turn."""

    def __iter__(self) -> Any:
        for _ in range(6):
            yield float(torch.rand(()))
            yield random.random()


def draws(seed: int, epoch: int, workers: int) -> list[float]:
    source = feed(Drawing(), workers=workers, seed=seed, batch_size=1)
    source.start_epoch(epoch)
    numbers: list[float] = []
    while (window := source.next_window(1)) is not None:
        numbers += window.micro_batches[0].batch.tolist()
    source.close()
    return numbers


@pytest.mark.parametrize("workers", [0, 2])
def test_a_streams_draws_are_the_seeds_and_no_two_workers_meet(workers: int) -> None:
    once = draws(seed=1, epoch=0, workers=workers)
    assert len(set(once)) == 12 * max(1, workers)
    assert draws(seed=1, epoch=0, workers=workers) == once
    assert not set(draws(seed=1, epoch=1, workers=workers)) & set(once)
    assert not set(draws(seed=2, epoch=0, workers=workers)) & set(once)


def test_a_streams_draws_leave_dropout_alone() -> None:
    source = feed(Drawing(), batch_size=2)
    torch.manual_seed(5)
    random.seed(5)
    expected = nn.functional.dropout(torch.ones(20)), random.random()
    torch.manual_seed(5)
    random.seed(5)
    source.next_window(3)
    assert torch.equal(nn.functional.dropout(torch.ones(20)), expected[0])
    assert random.random() == expected[1]
