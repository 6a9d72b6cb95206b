"""Each sample exactly once, the three random streams apart, and a clock that tells the loader's wait."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from tui3090.feed import Feed
from tui3090.recipe import Recipe, RecipeError
from tui3090.sampling import IndexPlan, SampleError, mix

CPU = torch.device("cpu")


class Numbers(Dataset[dict[str, Any]]):
    """Sample i is i, beside three random numbers."""

    def __init__(self, count: int, sleep_s: float = 0.0, bad: int = -1) -> None:
        self.count, self.sleep_s, self.bad = count, sleep_s, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.bad:
            raise ValueError("unreadable")
        time.sleep(self.sleep_s)
        return {"i": index, "draws": torch.tensor([random.random(), float(torch.rand(())), random.random()])}


class Stream(IterableDataset[int]):
    """Ten numbers, with or without a length, the whole of them in every worker."""

    def __iter__(self) -> Any:
        return iter(range(10))


def feed(data: Any, workers: int = 0, batch_size: int = 4, seed: int = 0, **fields: Any) -> Feed:
    made = Feed(Recipe(model=nn.Linear(1, 1), train_data=data, batch_size=batch_size, **fields), CPU, seed, workers)
    made.start_epoch(0)
    return made


def taken(source: Feed, windows: int = 10**6, size: int = 1) -> list[int]:
    """The sample numbers of the next windows."""
    numbers: list[int] = []
    for _ in range(windows):
        window = source.next_window(size)
        if window is None:
            break
        for micro in window.micro_batches:
            batch = micro.batch["i"] if isinstance(micro.batch, dict) else micro.batch
            numbers += batch.tolist()
    return numbers


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5), st.booleans(), st.data())
def test_each_sample_once_an_epoch_wherever_it_is_resumed(
    count: int, batch_size: int, size: int, shuffle: bool, data: st.DataObject
) -> None:
    whole = taken(feed(Numbers(count), batch_size=batch_size, shuffle=shuffle), size=size)
    assert sorted(whole) == list(range(count))
    first = feed(Numbers(count), batch_size=batch_size, shuffle=shuffle)
    head = taken(first, windows=data.draw(st.integers(0, count)), size=size)
    rest = Feed(
        Recipe(model=nn.Linear(1, 1), train_data=Numbers(count), batch_size=batch_size, shuffle=shuffle), CPU, 0
    )
    rest.start_epoch(0, first.taken)
    assert head + taken(rest, size=size) == whole


def test_workers_in_mid_epoch_change_neither_order_nor_draws() -> None:
    def run(script: dict[int, int]) -> tuple[list[int], list[list[float]]]:
        source, numbers, draws = feed(Numbers(23)), [], []
        for number in range(100):
            if number in script:
                source.set_workers(script[number])
            window = source.next_window(1)
            if window is None:
                break
            numbers += window.micro_batches[0].batch["i"].tolist()
            draws += window.micro_batches[0].batch["draws"].tolist()
        return numbers, draws

    plain = run({})
    assert run({1: 2, 3: 0, 4: 1}) == plain
    assert len({tuple(draw) for draw in plain[1]}) == 23, "no two samples share their draws"


def test_fetching_does_not_touch_dropouts_stream() -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random()
    source = feed(Numbers(20))
    torch.manual_seed(5)
    random.seed(5)
    taken(source)
    source.start_epoch(1)
    source.set_workers(0)
    taken(source)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_orders_differ_by_epoch_and_seed_and_are_the_same_again() -> None:
    first, again, other = (feed(Numbers(50), seed=seed) for seed in (1, 1, 2))
    orders = [taken(first), taken(again), taken(other)]
    first.start_epoch(1)
    orders.append(taken(first))
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3


def test_a_given_loader_is_taken_over() -> None:
    data = Numbers(10)
    assert taken(feed(DataLoader(data, batch_size=3))) == list(range(10))
    assert taken(feed(DataLoader(data, batch_size=3, drop_last=True))) == list(range(9))
    shuffled = taken(feed(DataLoader(data, batch_size=3, shuffle=True)))
    assert sorted(shuffled) == list(range(10)) != shuffled
    own = DataLoader(data, batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * 9 + [0.0], 20), 4, False))
    drawn = taken(feed(own))
    assert len(drawn) == 20
    assert 9 not in drawn
    assert taken(feed(own)) == drawn, "its draws come from the run's seed"

    some = taken(feed(DataLoader(data, batch_size=3, sampler=RandomSampler(data, num_samples=7))))
    assert len(set(some)) == 7
    again = taken(feed(DataLoader(data, batch_size=3, sampler=RandomSampler(data, replacement=True, num_samples=40))))
    assert len(again) == 40

    class Pairs:
        def __iter__(self) -> Any:
            return iter([[5, 4], [3], [2, 1, 0]])

    source = feed(DataLoader(data, batch_sampler=Pairs()))
    assert source.batches_per_epoch() == 3
    assert taken(source, windows=2) == [5, 4, 3]
    source.set_workers(0)
    assert taken(source) == [2, 1, 0]


def test_no_batch_at_all_is_refused() -> None:
    with pytest.raises(RecipeError, match="gives no batch: its 3 samples make no full one, and drop_last is on"):
        feed(DataLoader(Numbers(3), batch_size=4, drop_last=True))


def test_a_stream_has_no_length_and_ends() -> None:
    source = feed(Stream(), batch_size=4)
    assert (source.rows, source.batches_per_epoch(), source.indexed) == (None, None, False)
    assert taken(source) == list(range(10))
    source.set_workers(2)
    source.start_epoch(1)
    assert Counter(taken(source)) == Counter(dict.fromkeys(range(10), 2))  # each worker has the whole


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_fails_is_named(workers: int) -> None:
    source = feed(Numbers(8, bad=6), workers=workers, shuffle=False)
    taken(source, windows=1)
    with pytest.raises(SampleError, match="sample 6: ValueError: unreadable"):
        taken(source)


@pytest.mark.parametrize("count", [64, 600])
def test_a_dataset_of_many_tensors_goes_to_workers(count: int) -> None:
    made = Recipe(model=nn.Linear(1, 1), train_data=[torch.full((1,), float(i)) for i in range(count)], shuffle=False)
    source = Feed(made, torch.device("cpu"), seed=0, workers=1)
    source.start_epoch(0)
    seen = [micro.batch for window in iter(lambda: source.next_window(4), None) for micro in window.micro_batches]
    source.close()
    assert torch.cat(seen).flatten().tolist() == list(range(count))
    assert not source.notes


class Fetched(Numbers):
    """Gives a whole batch at once, as Hugging Face's datasets do."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_of_samples_that_are_fetched_together_the_batch_is_named() -> None:
    with pytest.raises(SampleError, match="one of the samples 4, 5, 6, 7: ValueError: unreadable"):
        taken(feed(Fetched(8, bad=6), shuffle=False))


def test_the_wait_is_the_loaders() -> None:
    source = feed(Numbers(12, sleep_s=0.02), batch_size=2)
    began = time.perf_counter()
    window = source.next_window(2)
    assert window is not None
    assert 0.08 <= window.wait_s <= time.perf_counter() - began
    ahead = feed(Numbers(4), batch_size=2)
    assert ahead.peek() is ahead.peek()
    first = ahead.next_window(1)
    assert first is not None
    assert ahead.taken == 2


def test_packing_in_collate_does_not_lose_samples() -> None:
    def pack(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {"i": torch.tensor([[sample["i"] for sample in samples]])}  # one row for all

    source = feed(Numbers(20), collate_fn=pack, shuffle=False)
    taken(source, windows=2)
    assert source.taken == 8
    source.set_workers(0)
    rest = source.next_window(1)
    assert rest is not None
    assert rest.micro_batches[0].batch["i"].tolist() == [[8, 9, 10, 11]]


def test_seeds_are_spread() -> None:
    seeds = {mix(seed, stream, epoch) for seed in range(20) for stream in range(3) for epoch in range(20)}
    assert len(seeds) == 20 * 3 * 20
    assert mix(0, 1, 2) == mix(0, 1, 2) != mix(0, 2, 1)


def test_a_plan_counts_what_is_left() -> None:
    plan = IndexPlan.regular(10, 4, drop_last=False, shuffle=False, seed=0)
    assert [plan.batches_left(consumed) for consumed in (0, 3, 4, 9, 10)] == [3, 3, 2, 1, 0]
    assert [batch.tolist() for batch in plan.after(6)] == [[6, 7], [8, 9]]


def test_a_dataset_of_many_tensors_reaches_its_workers() -> None:
    """Each shared one would take a descriptor: the forkserver passes on some 250 at the most."""
    rows = [{"i": torch.tensor(n)} for n in range(600)]
    source = feed(rows, batch_size=50, shuffle=False)
    source.set_workers(1)
    assert taken(source) == list(range(600))
    assert not source.notes
    assert not any(row["i"].is_shared() for row in rows)
    source.close()


def test_a_dataset_of_few_tensors_is_shared_with_its_workers() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8))
    source = feed(data, collate_fn=_first, shuffle=False)
    source.set_workers(1)
    assert taken(source) == list(range(8))
    assert data.tensors[0].is_shared()
    source.close()


def _first(samples: list[Any]) -> torch.Tensor:
    return torch.stack([sample[0] for sample in samples])


def test_data_that_cannot_be_pickled_is_forked_with_a_warning() -> None:
    source = feed(Numbers(8), collate_fn=lambda samples: torch.tensor([s["i"] for s in samples]), shuffle=False)
    source.set_workers(1)
    assert ["can't be pickled" in note for note in source.notes] == [True]
    assert taken(source) == list(range(8))


class Started(Dataset[dict[str, Any]]):
    """Says how its worker was started and begun."""

    began: int | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"i": index, "by": [type(multiprocessing.current_process()).__name__, str(Started.began)]}


def _begin(worker: int) -> None:
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, "ours comes first"
    Started.began = worker


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("spawn", "SpawnProcess"),
        ("forkserver", "ForkServerProcess"),
        ("fork", "ForkProcess"),
        (None, "ForkServerProcess"),
    ],
)
def test_workers_are_started_and_begun_as_the_users_loader_says(asked: str | None, given: str) -> None:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": asked, "worker_init_fn": _begin}
    source = feed(DataLoader(Started(), batch_size=4, **options))
    source.set_workers(1)
    window = source.next_window(1)
    assert window is not None
    assert window.micro_batches[0].batch["by"] == [(given,) * 4, ("0",) * 4]
    assert [("DataLoader asks for it" in note) for note in source.notes] == [True] * (asked == "fork")
    source.close()
