"""Accidents of data loading: workers that die, streams that every worker copies, draws that must not meet."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tests.conftest import Train
from tests.reference import Blocks, loss_of, samples
from tests.test_feed import feed
from tui3090 import shm
from tui3090.commands import Change
from tui3090.recipe import Recipe
from tui3090.records import Event, State, StepRecord
from tui3090.settings import Settings


class Deadly(Dataset[dict[str, torch.Tensor]]):
    """A worker that is asked for sample 5 dies by a signal, and leaves word of the time."""

    def __init__(self, number: int, death: Path) -> None:
        self.rows, self.number, self.death = samples(32), number, death

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 5 and get_worker_info() is not None:
            self.death.write_text(str(time.time()))
            os.kill(os.getpid(), self.number)
        return self.rows[index]


def recipe(data: Any, **fields: Any) -> Recipe:
    torch.manual_seed(3)
    return Recipe(model=Blocks(), train_data=data, loss=loss_of, batch_size=4, shuffle=False, **fields)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_worker_that_dies_is_a_sentence_with_the_remedies(
    train: Train, failure: Any, tmp_path: Path, number: signal.Signals
) -> None:
    # in a thread, as training is: torch's handler, which would raise wherever the main thread stands, is not there
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with ThreadPoolExecutor(1) as pool:
            given = recipe(Deadly(number, tmp_path / "death"))
            ran = pool.submit(train, given, settings=Settings(workers=1)).result(60)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert len(ran.of(StepRecord)) <= 1
    assert ran.status == (1 if ran.of(StepRecord) else 2)
    for words in ("A loader worker died", "/dev/shm has", "GiB free", "fewer --workers", "--shm-size"):
        assert words in failure(ran)
    # the batch before may be gone with it
    assert re.search(r"while samples (4, 5, 6|0, 1, 2) … were awaited", failure(ran))
    noticed: State = ran.of(State)[-1]
    assert noticed.time - float((tmp_path / "death").read_text()) < 10
    assert not [p for p in psutil.Process().children() if "pt_data" in p.name()]


class Unreadable(Deadly):
    """Sample 21 can't be read."""

    def __init__(self) -> None:
        self.rows = samples(32)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 21:
            raise OSError("shard 3 is cut off")
        return self.rows[index]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_can_not_be_read_ends_the_run_with_its_number(train: Train, failure: Any, workers: int) -> None:
    ran = train(recipe(Unreadable()), settings=Settings(workers=workers))
    assert ran.status == 1
    assert len(ran.losses) == 5
    assert "sample 21: OSError: shard 3 is cut off" in failure(ran)


def with_shm(monkeypatch: pytest.MonkeyPatch, free: int, total: int = 64 << 20) -> None:
    """A machine with so many bytes of shared memory."""
    monkeypatch.setattr(shm.shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=free))


def large(workers: int) -> Any:
    """A source of batches of 8 MiB: 16 MiB a worker are prepared ahead."""
    return feed([torch.zeros(1 << 20) for _ in range(8)], workers=workers, batch_size=2)


@pytest.mark.parametrize(
    ("workers", "free_mib", "warns"), [(1, 16, False), (1, 15, True), (2, 31, True), (0, 0, False)]
)
def test_too_little_shared_memory_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch, workers: int, free_mib: int, warns: bool
) -> None:
    with_shm(monkeypatch, free_mib << 20)
    source = large(workers)
    source.peek()
    source.start_epoch(1)
    source.peek()
    source.close()
    assert len(source.notes) == warns, "once, not every epoch"
    for note in source.notes:
        assert note.startswith(f"{workers} loader worker")
        assert "with 2 batches of 8.0 MiB each need 0.0" in note
        assert f"/dev/shm has 0.0{free_mib * 100 // 1024} of 0.06 GiB free" in note
        assert "fewer workers (key W, --workers)" in note
        assert "--shm-size=8g, or --ipc=host" in note


def test_what_workers_take_themselves_is_not_held_against_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with_shm(monkeypatch, 16 << 20)
    source = large(1)
    with_shm(monkeypatch, 0)
    source.peek()
    source.close()
    assert not source.notes


def test_too_little_shared_memory_is_told_when_the_workers_key_comes_into_force(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_shm(monkeypatch, 100)
    ran = train(recipe(samples(40)), {2: [Change("workers", 1)], 4: [Change("workers", 0)], 6: [Change("workers", 1)]})
    assert ran.status == 0
    events = [event for event in ran.of(Event) if event.source == "data"]
    assert [(event.level, event.text.split(" MiB")[0]) for event in events] == [
        ("warning", "1 loader worker with 2 batches of 0.0")
    ]


def test_a_machine_without_that_place_is_not_warned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shm, "SHM", tmp_path / "nowhere")
    assert shm.free() is None
    assert shm.too_small(8, 1 << 40, shm.free()) == ""
    assert "can't be looked at" in shm.worker_died(RuntimeError("gone"), [])


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
