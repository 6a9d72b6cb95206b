"""Token sequences of different lengths -> batches: padded with length grouping, packed, or cut from one long text.

Padding costs time, and every new shape costs a graph capture: so lengths are multiples of 8, batches hold sequences of
like length, and there are at most `BUCKETS` lengths.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tui3090.recipe import IGNORED, RecipeError

MULTIPLE = 8
"""Lengths are multiples of it: what Tensor Cores take in 16 bits."""
BUCKETS = 6
"""Lengths that batches are padded to at the most: fewer than graph replay captures (graph.SHAPES), for an epoch's last
batch is smaller, and one without padding has no mask."""
SORTED = 50
"""Batches whose sequences are sorted by length together; more leave less padding and less chance."""


class Tokens(Dataset[dict[str, Any]]):
    """Token sequences with their labels, one for each token or one for each sequence, in flat memory."""

    def __init__(self, sequences: Sequence[Sequence[int]], labels: Sequence[Sequence[int]] | Sequence[int]) -> None:
        self.lengths = torch.tensor([len(sequence) for sequence in sequences])
        """[sequences], int64."""
        self._ends = self.lengths.cumsum(0)
        self._ids = _flat(sequences)
        self._of_each = [label for label in labels if isinstance(label, int)]
        self._of_tokens = _flat(label for label in labels if not isinstance(label, int))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        end = int(self._ends[index])
        piece = slice(end - int(self.lengths[index]), end)
        labels = self._of_each[index] if self._of_each else self._of_tokens[piece].long()
        return {"input_ids": self._ids[piece].long(), "labels": labels}  # [length] each, or one label


def _flat(sequences: Iterable[Sequence[int]]) -> Tensor:
    """All of them one after the other: [tokens], int32, without a Python object for each on the way."""
    numbers = array("i", chain.from_iterable(sequences))
    return torch.frombuffer(numbers, dtype=torch.int32) if numbers else torch.zeros(0, dtype=torch.int32)


def cut(texts: Sequence[Sequence[int]], length: int, end: int) -> Tokens:
    """Texts one after the other, each followed by the token `end`, cut into sequences of `length`; the last is shorter.

    The labels are the tokens themselves: a causal model shifts them.
    """
    stream = [token for sequence in texts for token in (*sequence, end)]
    pieces = [stream[start : start + length] for start in range(0, len(stream), length)]
    pieces = [piece for piece in pieces if len(piece) > 1]  # a lone token has nothing to tell after the shift
    return Tokens(pieces, pieces)


def cut_short(lengths: Sequence[int], max_length: int) -> list[str]:
    """A sentence on the sequences that fill `max_length`, behind which whatever came is lost, if any do."""
    full = sum(length >= max_length for length in lengths)
    return (
        [f"{full} of {len(lengths)} rows fill --max-length {max_length}: what they have beyond is cut off"]
        if full
        else []
    )


class Packed(Dataset[dict[str, Any]]):
    """Whole sequences of `tokens` packed into rows of at most `length`.

    `position_ids` begin anew with each: transformers' models then let none see another. The first label of each is left
    out, for it would be told by the last token of the one before.
    """

    def __init__(self, tokens: Tokens, length: int) -> None:
        self._tokens = tokens
        self._rows: list[list[int]] = []
        room: list[int] = []
        for index in tokens.lengths.argsort(descending=True, stable=True).tolist():  # the longest first: they fit worst
            needs = int(tokens.lengths[index])
            row = next((r for r in range(max(0, len(room) - SORTED), len(room)) if room[r] >= needs), None)
            if row is None:
                self._rows.append([])
                room.append(length)
                row = len(room) - 1
            self._rows[row].append(index)
            room[row] -= needs
        self.lengths = torch.tensor([length - left for left in room])
        """[rows], int64."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        samples = [self._tokens[i] for i in self._rows[index]]
        for sample in samples:
            sample["labels"][0] = IGNORED
            sample["position_ids"] = torch.arange(len(sample["input_ids"]))
        return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}


def padded_lengths(lengths: Tensor, buckets: int = BUCKETS) -> tuple[int, ...]:
    """At most `buckets` multiples of 8 to pad to, chosen so that these lengths get the least padding in all."""
    rounded = -(-lengths // MULTIPLE) * MULTIPLE
    sizes, counts = rounded.unique(return_counts=True)  # ascending
    before = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    best = torch.cat([torch.zeros(1), torch.full((len(sizes),), float("inf"))])  # of the first n sizes, no bucket yet
    choices: list[list[int]] = []
    for _ in range(min(buckets, len(sizes))):
        costs, choice = [0.0], [0]
        for last in range(1, len(sizes) + 1):  # the bucket for sizes[first:last] is as long as its longest
            cost = best[:last] + sizes[last - 1] * (before[last] - before[:last])
            costs.append(float(cost.min()))
            choice.append(int(cost.argmin()))
        best = torch.tensor(costs)
        choices.append(choice)
    chosen, last = [], len(sizes)
    for choice in reversed(choices):
        if last:
            chosen.append(int(sizes[last - 1]))
            last = choice[last]
    return tuple(reversed(chosen))


@dataclass(frozen=True)
class Pad:
    """Makes a batch of sequences: [batch, length], length one of `lengths`, with a mask of what is no padding."""

    lengths: tuple[int, ...]
    pad_id: int

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        own = torch.tensor([len(sample["input_ids"]) for sample in samples])
        longest = int(own.max())
        to = next((length for length in self.lengths if length >= longest), -(-longest // MULTIPLE) * MULTIPLE)
        filling = {"input_ids": self.pad_id, "labels": IGNORED, "position_ids": 0}
        batch = {}
        for name in samples[0]:
            values = [sample[name] for sample in samples]
            if isinstance(values[0], Tensor):
                batch[name] = torch.full((len(values), to), filling[name])
                for row, value in zip(batch[name], values):
                    row[: len(value)] = value
            else:
                batch[name] = torch.tensor(values)
        batch["attention_mask"] = (torch.arange(to) < own[:, None]).long()
        return batch


class LengthGrouped(Sampler[list[int]]):
    """Batches of sequences of like length, in a new order each epoch; the longest first, to see if memory is short."""

    def __init__(self, lengths: Tensor, batch_size: int) -> None:
        self.lengths = lengths
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Draws from torch's generator, which the run seeds for each epoch."""
        by_length = self.lengths.argsort(stable=True)
        left_over = len(by_length) % self.batch_size  # the shortest of all, that the short batch has one shape
        rest = by_length[left_over:]
        together = rest[torch.randperm(len(rest))].split(self.batch_size * SORTED)
        parts = [part[self.lengths[part].argsort(descending=True, stable=True)] for part in together]
        batches = torch.cat([*parts, by_length[:left_over]]).split(self.batch_size)
        longest = max(range(len(batches)), key=lambda number: int(self.lengths[batches[number]].max()))
        for number in [longest, *(n for n in torch.randperm(len(batches)).tolist() if n != longest)]:
            yield batches[number].tolist()


def loaders(
    train: Tokens | Packed, evaluation: Tokens | Packed, batch_size: int, pad_id: int, length: int | None = None
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders for a Recipe's train_data and eval_data; `length`: pad every batch to it, so that there is one shape.

    Raises RecipeError where there is nothing to go through.
    """
    if batch_size < 1:
        raise RecipeError(f"--batch-size is {batch_size}: give 1 or more.")
    for data, use in ((train, "train"), (evaluation, "evaluate")):
        if not len(data):
            raise RecipeError(f"There is too little text to {use} on: give more, or another --held-out.")
    pad = Pad(
        (length,) if length is not None else padded_lengths(torch.cat([train.lengths, evaluation.lengths])), pad_id
    )
    in_order = [batch.tolist() for batch in evaluation.lengths.argsort(stable=True).split(batch_size)]
    return (
        DataLoader(train, batch_sampler=LengthGrouped(train.lengths, batch_size), collate_fn=pad),
        DataLoader(evaluation, batch_sampler=in_order, collate_fn=pad),
    )
