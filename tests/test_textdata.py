"""Sequences of different lengths: nothing is lost, little is padded, few shapes come."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tui3090.feed import Feed
from tui3090.recipe import IGNORED, Recipe, RecipeError, padding_in, tokens_in
from tui3090.techniques.graph import SHAPES
from tui3090.textdata import BUCKETS, LengthGrouped, Packed, Pad, Tokens, cut, cut_short, loaders, padded_lengths

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=60)


def sequences(lengths: list[int]) -> list[list[int]]:
    """Of these lengths, no token twice."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [list(range(end - length + 1, end + 1)) for end, length in zip(ends, lengths)]


def tokens(lengths: list[int]) -> Tokens:
    ids = sequences(lengths)
    return Tokens(ids, ids)


def test_tokens_give_back_what_they_were_made_of() -> None:
    ids = [[5, 6, 7], [8], [9, 10]]
    made = Tokens(ids, [[IGNORED, 6, 7], [8], [9, 10]])
    assert [made[i]["input_ids"].tolist() for i in range(3)] == ids
    assert made[0]["labels"].tolist() == [IGNORED, 6, 7]
    assert made[0]["input_ids"].dtype == made[0]["labels"].dtype == torch.int64
    assert [Tokens(ids, [2, 0, 1])[i]["labels"] for i in range(3)] == [2, 0, 1]
    with pytest.raises(IndexError):
        made[3]


def test_a_cut_stream_keeps_every_token_and_ends_each_text() -> None:
    made = cut([[1, 2, 3], [4, 5]], 4, end=0)
    assert [made[i]["input_ids"].tolist() for i in range(len(made))] == [[1, 2, 3, 0], [4, 5, 0]]
    assert made[1]["labels"].tolist() == [4, 5, 0]
    assert len(cut([[1, 2, 3, 4]], 4, end=0)) == 1  # a lone token has no label after the shift


@given(LENGTHS)
def test_packing_keeps_every_token_once_and_no_row_is_too_long(lengths: list[int]) -> None:
    packed = Packed(tokens(lengths), 200)
    rows = [packed[i] for i in range(len(packed))]
    assert packed.lengths.tolist() == [len(row["input_ids"]) for row in rows]
    assert max(packed.lengths) <= 200
    assert sorted(torch.cat([row["input_ids"] for row in rows]).tolist()) == list(range(1, sum(lengths) + 1))
    for row in rows:
        begins = row["position_ids"] == 0
        assert torch.equal(row["labels"] == IGNORED, begins)
        assert torch.equal(row["labels"][~begins], row["input_ids"][~begins])
    assert sum(int((row["position_ids"] == 0).sum()) for row in rows) == len(lengths)


def total(lengths: list[int], sizes: tuple[int, ...]) -> int:
    """Tokens with padding when each sequence is padded to the next size."""
    return sum(min(size for size in sizes if size >= length) for length in lengths)


@given(st.lists(st.integers(1, 80), min_size=1, max_size=12), st.integers(1, 4))
def test_padded_lengths_leave_the_least_padding(lengths: list[int], buckets: int) -> None:
    chosen = padded_lengths(torch.tensor(lengths), buckets)
    assert len(chosen) <= buckets
    assert list(chosen) == sorted(set(chosen))
    assert all(length % 8 == 0 for length in chosen)
    longest = -(-max(lengths) // 8) * 8
    choices = [c for n in range(buckets) for c in combinations(range(8, longest, 8), n)]
    assert total(lengths, chosen) == min(total(lengths, (*choice, longest)) for choice in choices)


def test_a_batch_is_padded_to_one_of_the_lengths_and_masked() -> None:
    pad = Pad((8, 24), pad_id=9)
    made = tokens([3, 8])
    batch = pad([made[0], made[1]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9, 9, 9], list(range(4, 12))]
    assert batch["labels"].tolist() == [[1, 2, 3, *[IGNORED] * 5], list(range(4, 12))]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8]
    assert (tokens_in(batch), padding_in(batch)) == (11, 5)
    full = pad([made[1]])
    assert full["attention_mask"].tolist() == [[1] * 8]
    assert (tokens_in(full), padding_in(full)) == (8, 0)
    assert pad([tokens([9])[0]])["input_ids"].shape == (1, 24)
    assert pad([tokens([25])[0]])["input_ids"].shape == (1, 32)  # longer than any that was known
    assert pad([Tokens([[1], [2]], [7, 8])[i] for i in (0, 1)])["labels"].tolist() == [7, 8]
    packed = pad([Packed(tokens([3, 2]), 8)[0]])
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]  # each token of padding is a text of its own


@given(LENGTHS, st.integers(1, 7), st.integers(0, 5))
def test_groups_hold_each_sequence_once_and_begin_with_the_longest(lengths: list[int], size: int, seed: int) -> None:
    torch.manual_seed(seed)
    sampler = LengthGrouped(torch.tensor(lengths), size)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert sorted({len(batch) for batch in batches[:]}, reverse=True)[0] <= size
    assert sum(len(batch) < size for batch in batches) <= 1
    assert max(lengths) in [lengths[i] for i in batches[0]]


def recipe(lengths: list[int], batch_size: int = 4) -> Recipe:
    train, evaluation = loaders(tokens(lengths), tokens(lengths[:8]), batch_size, pad_id=0)
    return Recipe(model=torch.nn.Linear(1, 1), train_data=train, eval_data=evaluation)


def shapes_of(feed: Feed, epochs: int) -> tuple[set[Any], int, int]:
    """Shapes, tokens and padding of some epochs."""
    shapes, real, padding = set(), 0, 0
    for epoch in range(epochs):
        feed.start_epoch(epoch)
        while (window := feed.next_window(1)) is not None:
            (micro,) = window.micro_batches
            shapes.add((tuple(micro.batch["input_ids"].shape), "attention_mask" in micro.batch))
            real, padding = real + micro.tokens, padding + micro.padding
    return shapes, real, padding


def test_grouping_by_length_leaves_few_shapes_and_little_padding() -> None:
    torch.manual_seed(0)
    lengths = (torch.randn(1001).mul(0.7).exp() * 40).long().clamp(2, 512).tolist()
    feed = Feed(recipe(lengths, 16), torch.device("cpu"), seed=0)
    shapes, real, padding = shapes_of(feed, 3)
    assert real == 3 * sum(lengths)
    assert len({shape for (_, shape), _ in shapes}) <= BUCKETS
    assert len(shapes) <= SHAPES
    ungrouped = DataLoader(tokens(lengths), batch_size=16, shuffle=True, collate_fn=Pad((), 0))
    ran = sum(batch["input_ids"].numel() for batch in ungrouped)
    assert padding / (real + padding) < 0.35
    assert 1 - sum(lengths) / ran > 0.55


def test_an_epoch_draws_its_groups_from_the_runs_seed() -> None:
    lengths = list(range(2, 102))

    def order(seed: int, epoch: int) -> list[int]:
        feed = Feed(recipe(lengths), torch.device("cpu"), seed=seed)
        feed.start_epoch(epoch)
        windows = iter(lambda: feed.next_window(1), None)
        return [i for w in windows for m in w.micro_batches if m.indices is not None for i in m.indices.tolist()]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed, epoch in [(0, 0), (0, 1), (1, 0)]}) == 3


def test_memory_that_is_short_halves_grouped_batches_too() -> None:
    feed = Feed(recipe([5] * 8), torch.device("cpu"), seed=0)
    assert feed.batch_size == 4
    feed.start_epoch(0)
    window = feed.next_window(1)
    assert window is not None
    halves = feed.halve(window)
    assert halves is not None
    assert [micro.samples for micro in halves.micro_batches] == [2, 2]


@settings(max_examples=10)
@given(LENGTHS)
def test_eval_batches_hold_each_sequence_once(lengths: list[int]) -> None:
    _, evaluation = loaders(tokens([9]), tokens(lengths), 4, pad_id=0)
    assert sum(tokens_in(batch) for batch in evaluation) == sum(lengths)


def test_nothing_to_go_through_is_a_sentence() -> None:
    for train, evaluation, size, sentence in [
        ([], [3], 4, "There is too little text to train on"),
        ([3], [], 4, "There is too little text to evaluate on"),
        ([3], [3], 0, "--batch-size is 0: give 1 or more."),
    ]:
        with pytest.raises(RecipeError, match=sentence):
            loaders(tokens(train), tokens(evaluation), size, pad_id=0)


def test_what_is_cut_short_is_counted() -> None:
    assert cut_short([7, 8, 3, 8], 8) == ["2 of 4 rows fill --max-length 8: what they have beyond is cut off"]
    assert cut_short([7, 3], 8) == []


def test_one_length_gives_one_shape() -> None:
    train, evaluation = loaders(tokens([5, 30, 17]), tokens([4]), 3, pad_id=0, length=64)
    assert {batch["input_ids"].shape[1] for loader in (train, evaluation) for batch in loader} == {64}
