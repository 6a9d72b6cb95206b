"""The order of an epoch and the random draws of its samples.

Three random streams are never shared: the order, drawn for each epoch; the data, seeded for each epoch and sample, so
that neither the number of workers nor a resume changes what a sample draws; and the model's dropout, which owns torch's
global generators.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from tui3090 import numpy_stream


def mix(*numbers: int) -> int:
    """A 63-bit seed from several numbers, well spread, the same on every machine."""
    state = 0
    for number in numbers:
        state = (state ^ (number & (2**64 - 1))) * 0x9E3779B97F4A7C15 & (2**64 - 1)
        state ^= state >> 29
        state = state * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        state ^= state >> 32
    return state >> 1


ORDER, DATA = 1, 2
"""Names of the random streams that are seeded from the run's seed."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, torch's and numpy's generators seeded; afterwards as they were, so that dropout's stream goes on."""
    with _apart():
        _seed(seed)
        yield


@contextmanager
def _apart() -> Iterator[None]:
    """Draws inside, which seed the generators first, leave them outside as they were."""
    python, host = random.getstate(), torch.get_rng_state()
    with numpy_stream.apart():
        try:
            yield
        finally:
            random.setstate(python)
            torch.set_rng_state(host)


class OwnStream:
    """Random generators for an iterable dataset in this process, apart from dropout's: swapped in while it is asked."""

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self._states = host_states()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and a tensor."""
        return plain(self._states)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._states = from_plain(state)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draws inside come from this stream, and go on from where they were the last time."""
        others = host_states()
        restore_host(self._states)
        try:
            yield
        finally:
            self._states = host_states()
            restore_host(others)


def plain(states: tuple[Any, Any, Any]) -> dict[str, Any]:
    """The host's generators as plain numbers and tensors, which a save may hold."""
    python, host, numpy_state = states
    version, internal, gauss = python
    state: dict[str, Any] = {"python": [version, torch.tensor(internal), gauss], "torch": host, "numpy": None}
    if numpy_state is not None:
        name, keys, *rest = numpy_state
        state["numpy"] = [name, torch.tensor(keys.tolist()), *rest]
    return state


def from_plain(state: dict[str, Any]) -> tuple[Any, Any, Any]:
    """What `plain` was given; numpy's is None where numpy is not loaded."""
    version, internal, gauss = state["python"]
    numpy = sys.modules.get("numpy")
    numpy_state = None
    if numpy and state["numpy"] is not None:
        name, keys, *rest = state["numpy"]
        if not 0 <= rest[0] <= len(keys) == numpy_stream.WORDS:  # numpy itself would read what lies beyond
            raise ValueError("numpy's random state is none")
        numpy_state = (name, numpy.array(keys.tolist(), dtype="uint32"), *rest)
    return (version, tuple(internal.tolist()), gauss), state["torch"], numpy_state


def host_states() -> tuple[Any, Any, Any]:
    """Python's, torch's and numpy's generators as they are."""
    return random.getstate(), torch.get_rng_state(), numpy_stream.state()


def restore_host(states: tuple[Any, Any, Any]) -> None:
    python, host, numpy_state = states
    random.setstate(python)
    torch.set_rng_state(host)
    if numpy_state is not None:
        numpy_stream.restore(numpy_state)


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # the CPU's alone: the card's is dropout's
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed & (2**32 - 1))


class IndexPlan:
    """The order of an epoch: sample indices, and where its batches end."""

    def __init__(self, order: torch.Tensor, ends: torch.Tensor) -> None:
        self.order = order
        """[samples], int64."""
        self.ends = ends
        """[batches], int64: samples up to and with each batch."""

    @classmethod
    def regular(cls, samples: int, batch_size: int, drop_last: bool, shuffle: bool, seed: int) -> IndexPlan:
        """Batches of one size, the last one shorter unless it is dropped."""
        order = torch.arange(samples)
        if shuffle:
            order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
        if drop_last:
            samples -= samples % batch_size
        ends = torch.arange(batch_size, samples + batch_size, batch_size).clamp(max=samples)
        return cls(order[:samples], ends if samples else ends[:0])

    @classmethod
    def sampled(cls, batch_sampler: Any, epoch: int, seed: int) -> IndexPlan:
        """What a batch sampler of the recipe's own gives for this epoch, of which it and its sampler are told."""
        samplers: list[Any] = [batch_sampler, getattr(batch_sampler, "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        with seeded(seed):
            batches = [list(batch) for batch in batch_sampler]
        order = torch.tensor([index for batch in batches for index in batch], dtype=torch.int64)
        return cls(order, torch.tensor([len(batch) for batch in batches], dtype=torch.int64).cumsum(0))

    def at_most(self, size: int) -> IndexPlan:
        """The same order in batches of at most `size`: a larger one becomes several of even size."""
        ends, start = [], 0
        for end in self.ends.tolist():
            pieces = -(-(end - start) // size)
            ends += [start + (end - start) * (piece + 1) // pieces for piece in range(pieces)]
            start = end
        return IndexPlan(self.order, torch.tensor(ends, dtype=torch.int64))

    def batches_left(self, consumed: int) -> int:
        """Batches after the first `consumed` samples, a begun one counted."""
        return len(self.ends) - int(torch.searchsorted(self.ends, consumed, right=True))

    def after(self, consumed: int) -> Iterator[torch.Tensor]:
        """The batches' indices after the first `consumed` samples, each [batch], int64."""
        start = consumed
        for end in self.ends[len(self.ends) - self.batches_left(consumed) :].tolist():
            yield self.order[start:end]
            start = end


class SampleError(Exception):
    """A dataset failed on a sample; says which."""


class _Samples(list[Any]):
    """The samples of a batch on their way to collate, with the seed for what collate draws."""

    seed = 0


class SeededDataset(Dataset[Any]):
    """The dataset with its random draws fixed by epoch and index, whoever fetches."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, batch: tuple[int, list[int]]) -> _Samples:
        """The samples of a batch, which is the epoch's seed and their indices."""
        seed, indices = batch
        samples = _Samples()
        samples.seed = mix(seed, *indices[:1])
        with _apart():
            if hasattr(self.dataset, "__getitems__"):
                _seed(samples.seed)
                try:
                    samples.extend(self.dataset.__getitems__(indices))
                except Exception as error:
                    one_of = ", ".join(map(str, indices))
                    raise SampleError(f"one of the samples {one_of}: {type(error).__name__}: {error}") from error
                return samples
            for index in indices:
                _seed(mix(seed, index))
                try:
                    samples.append(self.dataset[index])
                except Exception as error:
                    raise SampleError(f"sample {index}: {type(error).__name__}: {error}") from error
        return samples


class SeededCollate:
    """The recipe's collate with its random draws fixed likewise."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        assert isinstance(samples, _Samples)  # of SeededDataset
        if self.collate is default_collate:  # which draws nothing: the random state would be kept and put back for it
            return default_collate(list(samples))
        with seeded(mix(samples.seed, 1)):
            return self.collate(list(samples))
