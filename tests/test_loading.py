"""Workers that serve epoch after epoch: the same samples in the same order, and never those of a dataset that was."""

from __future__ import annotations

import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, SequentialSampler, Subset

from tests.test_feed import CPU, Numbers, Stream, feed, taken
from tui3090 import loading
from tui3090.feed import Feed, Window
from tui3090.loading import outline
from tui3090.recipe import Recipe
from tui3090.workers import WorkerDied


class Drawn(Numbers):
    """Beside the numbers the process that fetched them, and a scale of the dataset's."""

    scale = 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "process": os.getpid(), "scaled": self.scale * index}


class Ordered:
    """A batch sampler with an order for each epoch, which sets the dataset's scale where it is given one."""

    def __init__(self, count: int, scaled: Drawn | None = None) -> None:
        self.count, self.scaled, self.asked = count, scaled, [-1]

    def set_epoch(self, epoch: int) -> None:
        self.asked.append(epoch)
        if self.scaled is not None:
            self.scaled.scale = 10**epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = [(index * 5 + self.asked[-1]) % self.count for index in range(self.count)]
        return iter([order[:3], order[3:4], order[4:]])


class Ahead:
    """A DataLoader that is five batches ahead, as with workers."""

    fetched = 0

    def __init__(self, dataset: Any, batch_sampler: Any, collate_fn: Any, **_: Any) -> None:
        self._dataset, self._batches, self._collate = dataset, batch_sampler, collate_fn

    def __iter__(self) -> Iterator[Any]:
        waiting: deque[Any] = deque()
        batches = iter(self._batches)
        while True:
            while len(waiting) < 5 and (batch := next(batches, None)) is not None:
                waiting.append(self._collate(self._dataset.__getitems__(batch)))
                Ahead.fetched += 1
            if not waiting:
                return
            yield waiting.popleft()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "DataLoader", Ahead)
    monkeypatch.setattr(Ahead, "fetched", 0)


def batches(source: Feed) -> Iterator[tuple[Window, Any]]:
    """The rest of an epoch in windows of one micro-batch."""
    while (window := source.next_window(1)) is not None:
        yield window, window.micro_batches[0].batch


@pytest.mark.parametrize("sampler", [False, True])
def test_the_samples_of_three_epochs_are_the_same_to_the_byte_and_workers_start_once(sampler: bool) -> None:
    def run(script: dict[int, int]) -> tuple[list[bytes], list[int], list[int]]:
        """Batches as bytes; the windows for which workers started; how many processes there were."""
        data: Any = DataLoader(Drawn(13), batch_sampler=Ordered(13)) if sampler else Drawn(13)
        source, made, processes, starts = feed(data, workers=script.pop(-1)), [], [], []
        for epoch in range(3):
            if epoch:
                source.start_epoch(epoch)
            for window, batch in batches(source):
                processes.append(batch.pop("process"))
                starts += [len(made)] * window.loader_start
                made.append(pickle.dumps({name: tensor.numpy() for name, tensor in batch.items()}))
                if len(made) in script:
                    source.set_workers(script[len(made)])
        source.close()
        return made, starts, torch.cat(processes).unique().tolist()

    plain, starts, processes = run({-1: 0})
    assert (len(set(plain)), starts, processes) == (len(plain), [0], [os.getpid()])
    for workers in (1, 2):
        made, starts, processes = run({-1: workers})
        assert (made, starts, len(processes)) == (plain, [0], workers)
        assert os.getpid() not in processes
    made, starts, processes = run({-1: 1, 5: 2})  # in the second epoch
    assert (made, starts, len(processes)) == (plain, [0, 5], 3)


def test_a_batch_sampler_of_the_recipes_own_is_asked_when_its_epoch_begins(ahead: None) -> None:
    sampler = Ordered(13)
    source = feed(DataLoader(Numbers(13), batch_sampler=sampler), workers=1)
    for epoch in range(3):
        if epoch:
            source.start_epoch(epoch)
        assert sorted(taken(source)) == list(range(13))
        assert sampler.asked == list(range(-1, epoch + 1))


class Turned(Ordered):
    """A sampler whose order is the epoch's."""

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]
        return iter([(index + self.asked[-1]) % self.count for index in range(self.count)])

    def __len__(self) -> int:
        return self.count


def test_a_sampler_inside_a_batch_sampler_is_told_of_the_epoch() -> None:
    source = feed(DataLoader(Numbers(5), batch_size=2, sampler=Turned(5)))
    assert taken(source) == [0, 1, 2, 3, 4]
    source.start_epoch(2)
    assert taken(source) == [2, 3, 4, 0, 1]


@pytest.mark.parametrize("sampler", [False, True])
def test_workers_start_anew_where_the_dataset_has_changed(sampler: bool) -> None:
    data = Drawn(6)
    given: Any = DataLoader(data, batch_sampler=Ordered(6, scaled=data)) if sampler else data
    source, seen, starts = feed(given, workers=1), [], []
    for epoch in range(3):
        if epoch and not sampler:
            data.scale = 10 ** min(epoch, 1)  # in the third epoch it is as it was
        if epoch:
            source.start_epoch(epoch)
        for window, batch in batches(source):
            seen += [sum(batch["scaled"].tolist()) // sum(batch["i"].tolist())] if batch["i"].any() else []
            starts.append(window.loader_start)
    source.close()
    per_epoch = 3 if sampler else 2
    assert seen[::per_epoch] == ([1, 10, 100] if sampler else [1, 10, 10])
    assert starts[::per_epoch] == [True, True, sampler]
    assert sum(starts) == 2 + sampler


def test_what_was_fetched_ahead_of_an_epoch_is_dropped_where_the_dataset_has_changed(ahead: None) -> None:
    data = Drawn(12)
    source = feed(data, workers=1)
    assert len(taken(source)) == 12
    assert Ahead.fetched == 7  # of the 3 batches of an epoch
    data.count, data.scale = 14, 10
    source.start_epoch(1)
    scaled = [number for _, batch in batches(source) for number in batch["scaled"].tolist()]
    assert sorted(scaled) == [10 * index for index in range(14)]


def changed(data: Any, how: Callable[[Any], Any]) -> bool:
    """Whether it is seen."""
    before = outline(data, None)
    assert loading._same(before, outline(data, None)), "nothing was done yet"
    how(data)
    return not loading._same(before, outline(data, None))


def test_what_is_seen_of_a_change() -> None:
    def made() -> Any:
        inner = Drawn(4)
        inner.rows, inner.tensor, inner.options = [1, 2], torch.zeros(3), SimpleNamespace(rate=1)  # type: ignore[attr-defined]
        return ConcatDataset([Subset(inner, [0, 1]), inner])

    def inner(data: Any) -> Any:
        return data.datasets[1]

    assert changed(made(), lambda data: setattr(inner(data), "scale", 2))
    assert changed(made(), lambda data: setattr(data.datasets[0], "indices", [0, 1]))
    assert changed(made(), lambda data: inner(data).rows.append(3))
    assert changed(made(), lambda data: inner(data).tensor.add_(1))
    assert changed(made(), lambda data: setattr(inner(data), "tensor", torch.zeros(3)))
    assert changed(made(), lambda data: setattr(inner(data), "options", SimpleNamespace(rate=1)))
    assert changed([1, 2], lambda data: data.append(3))
    # what is not, and the documentation says so
    assert not changed(made(), lambda data: inner(data).rows.reverse())
    assert not changed(made(), lambda data: setattr(inner(data).options, "rate", 2))
    assert not changed(made(), lambda data: setattr(inner(data), "count", 2 * 2)), "an equal number"


def test_workers_of_a_stream_start_anew_each_epoch() -> None:
    source, starts = feed(Stream(), workers=1, batch_size=5), []
    for epoch in range(2):
        if epoch:
            source.start_epoch(epoch)
        for window, batch in batches(source):
            starts.append((window.loader_start, batch.tolist()[0]))
    source.close()
    assert starts == [(True, 0), (False, 5)] * 2


class Shuffled(Stream):
    """Draws its order when it is gone through."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(10).tolist())


def test_a_streams_order_leaves_dropout_alone() -> None:
    source = feed(Shuffled())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    source.start_epoch(1)
    order = taken(source)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(6)
    source.start_epoch(1)
    assert taken(source) == order, "it is the run's and the epoch's"


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.sampled_from([None, 4]), st.data())
def test_whatever_happens_with_a_loader_that_is_ahead_each_epoch_has_its_samples(
    count: int, batch_size: int, size: int, epochs: int | None, data: st.DataObject
) -> None:
    def made(workers: int) -> Feed:
        recipe = Recipe(model=nn.Linear(1, 1), train_data=Drawn(count), batch_size=batch_size)
        return Feed(recipe, CPU, 0, workers, epochs=epochs)

    source, plain = made(1), made(0)
    given: dict[int, list[int]] = {}
    draws: dict[tuple[int, int], list[float]] = {}
    places = [(0, 0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "DataLoader", Ahead)
        source.start_epoch(0)
        while source.epoch < 4:
            doing = data.draw(st.sampled_from(["go on"] * 8 + ["workers", "halve", "back", "peek", "change"]))
            if doing == "workers":
                source.set_workers(data.draw(st.integers(0, 2)))
            elif doing == "peek":
                source.peek()
            elif doing == "change":
                source.dataset.scale += 1
            elif doing == "back":
                places = places[: data.draw(st.integers(1, len(places)))]
                epoch, done = places[-1]
                source.resume(epoch, done, source.batch_size, source.whole_batch, None)
                given = {number: samples for number, samples in given.items() if number <= epoch}
                given[epoch] = given.get(epoch, [])[:done]
            window = source.next_window(size)
            if window is None:
                source.start_epoch(source.epoch + 1)
                places.append((source.epoch, 0))
                continue
            assert window.epoch_start == (source.taken == sum(micro.samples for micro in window.micro_batches))
            if doing == "halve":
                window = source.halve(window) or window
            for micro in window.micro_batches:
                given.setdefault(source.epoch, []).extend(micro.batch["i"].tolist())
                draws |= {
                    (source.epoch, i): drawn
                    for i, drawn in zip(micro.batch["i"].tolist(), micro.batch["draws"].tolist())
                }
            places.append((source.epoch, source.taken))
    for epoch in range(4):
        plain.start_epoch(epoch)
        expected = {}
        order = []
        for _, batch in batches(plain):
            order += batch["i"].tolist()
            expected |= {(epoch, i): drawn for i, drawn in zip(batch["i"].tolist(), batch["draws"].tolist())}
        assert given[epoch] == order, epoch
        assert {key: draws[key] for key in expected} == expected


@pytest.mark.parametrize(("epochs", "fetched"), [(1, 3), (2, 6), (None, 7)])
def test_nothing_is_fetched_beyond_the_last_epoch(ahead: None, epochs: int | None, fetched: int) -> None:
    source = Feed(Recipe(model=nn.Linear(1, 1), train_data=Numbers(12), batch_size=4), CPU, 0, 1, epochs=epochs)
    source.start_epoch(0)
    assert len(taken(source)) == 12
    assert Ahead.fetched == fetched  # three were given, the rest is ahead


def test_a_worker_that_dies_at_an_epochs_turn_is_told_with_the_samples_that_were_awaited() -> None:
    def run() -> None:
        sampler = BatchSampler(SequentialSampler(range(8)), 4, False)
        source = feed(DataLoader(Drawn(8), batch_sampler=Renewed(sampler)), workers=1)
        *_, (_, batch) = batches(source)
        os.kill(int(batch["process"][0]), signal.SIGKILL)
        source.start_epoch(1)
        try:
            source.next_window(1)
        finally:
            source.close()

    # in a thread, as training is: torch's handler would raise wherever the main thread stands
    with ThreadPoolExecutor(1) as pool, pytest.raises(WorkerDied, match="while samples 0, 1, 2 … were awaited"):
        pool.submit(run).result(60)


class Renewed:
    """A batch sampler of the recipe's own."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._sampler)
