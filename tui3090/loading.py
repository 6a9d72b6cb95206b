"""The DataLoader behind the feed: its workers start once and serve epoch after epoch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from tui3090 import shm
from tui3090.handover import Handover
from tui3090.sampling import OwnStream, SeededCollate, SeededDataset
from tui3090.workers import WorkerDied, is_workers_death, ready

FEW = 100
"""Items up to which a list is looked through for datasets."""

Batches = Iterator[tuple[int, list[int]]]
"""Of each batch the epoch's seed, and the indices of its samples."""


class Loader:
    """Fetches batches of a dataset, in this process or by workers; what the user should know goes into `notes`.

    Workers have the dataset as it was when they started. They are kept for as long as it looks the same here. How they
    start is as the loader that was `given`, the user's, asks for.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Any,
        indexed: bool,
        pin_memory: bool,
        notes: list[str],
        given: DataLoader[Any] | None = None,
    ) -> None:
        self._dataset, self._collate, self._indexed, self._given = dataset, collate, indexed, given
        self._pin_memory = pin_memory
        self._notes = notes
        self.workers = 0
        """Processes that fetch; 0: this one does."""
        self.own_stream: OwnStream | None = None
        """What an iterable dataset in this process draws from."""
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._batches = _Batches()
        self._handed: list[Any] = []
        """The outline of what the workers were given."""
        self._handover: Handover | None = None
        self._largest = 0
        """Bytes of the largest batch so far."""
        self._shm_free: int | None = None
        """Of shared memory, before the workers came."""
        self._shm_told = 0
        """The number of workers for which there was too little of it."""

    def goes_on(self, workers: int) -> bool:
        """Whether so many workers are there, and have the dataset as it is."""
        return self._loader is not None and self.workers == workers > 0 and _same(self._handed, self._outline())

    def load(self, batches: Batches, workers: int, seed: int) -> bool:
        """Fetch these from here on; what was prepared of others is dropped. Whether a new loader was needed."""
        if self._indexed and self.goes_on(workers):
            self._batches.coming, self._iterator = batches, None
            return False
        self.close()
        dataset = SeededDataset(self._dataset)
        options = self._options(workers, seed)
        if workers and self._handover is not None:
            dataset.dataset = self._handover.wrapped(self._dataset)
            self._handed = self._outline()
        self._batches.coming = batches
        self._loader = DataLoader(
            dataset,
            batch_sampler=self._batches,  # type: ignore[arg-type]  # a batch is what SeededDataset takes
            collate_fn=SeededCollate(self._collate),
            persistent_workers=workers > 0,
            **options,
        )
        return True

    def stream(self, batch_size: int | None, drop_last: bool, workers: int, seed: int) -> None:
        """Fetch all of an iterable dataset. Its workers start anew, so that each epoch begins with it as it is here."""
        self.close()
        options = self._options(workers, seed)
        self._loader = DataLoader(
            self._dataset, batch_size=batch_size, drop_last=drop_last, collate_fn=self._collate, **options
        )
        if not workers:
            self.own_stream = OwnStream(seed)
            with self.own_stream.drawn():
                self._iterator = iter(self._loader)

    def next(self, awaited: list[int]) -> Any | None:
        """The next batch; None: there is none. Raises WorkerDied, which names the samples that were `awaited`."""
        if self._loader is None:
            return None
        try:
            with self.own_stream.drawn() if self.own_stream is not None else nullcontext():
                if self._iterator is None:  # here, so that the caller's clock has the start of workers too
                    self._iterator = iter(self._loader)
                batch = next(self._iterator, None)
        except (RuntimeError, OSError, EOFError) as error:
            if not self.workers or not is_workers_death(error):
                raise
            raise WorkerDied(shm.worker_died(error, awaited)) from error
        return batch

    def gave(self, size: int) -> None:
        """A batch of so many bytes came."""
        if size > self._largest:
            self._largest = size
            self._look_at_shm()

    def close(self) -> None:
        """End the workers."""
        self._iterator = self._loader = self.own_stream = None
        self._batches.coming, self._handed, self.workers = iter(()), [], 0

    def _options(self, workers: int, seed: int) -> dict[str, Any]:
        options: dict[str, Any] = {
            "num_workers": workers,
            "pin_memory": self._pin_memory,
            "generator": torch.Generator().manual_seed(seed),  # else every new loader draws from dropout's
        }
        self.workers = workers
        if workers:
            self._shm_free = shm.free()
            self._look_at_shm()
            self._handover = self._handover or Handover(
                self._dataset, self._collate, self._indexed, self._notes, self._given
            )
            options["multiprocessing_context"] = self._handover.context
            options["worker_init_fn"] = partial(ready, os.getpid(), self._handover.init)
            options["prefetch_factor"] = shm.BATCHES_A_WORKER
        return options

    def _look_at_shm(self) -> None:
        """Warn, once for a number of workers, if what they prepare has no room in shared memory."""
        if self.workers in (0, self._shm_told):
            return
        if sentence := shm.too_small(self.workers, self._largest, self._shm_free):
            self._notes.append(sentence)
            self._shm_told = self.workers

    def _outline(self) -> list[Any]:
        return outline(self._dataset, self._collate)


class _Batches:
    """A batch sampler that gives what is coming."""

    coming: Batches = iter(())

    def __iter__(self) -> Batches:
        return self.coming


def outline(*things: Any) -> list[Any]:
    """What can be seen of datasets at no cost: the objects that their attributes are, lengths, versions of tensors.

    A dataset inside another is gone into; items of a long list, an array or other objects are not.
    """
    seen: list[Any] = []
    gone_into: set[int] = set()
    waiting: deque[Any] = deque(things)
    while waiting:
        thing = waiting.popleft()
        if id(thing) in gone_into:
            continue
        gone_into.add(id(thing))
        values = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
        for value in (thing, *values):
            seen += [value, _mark(value)]
            inner = value if isinstance(value, (list, tuple)) and len(value) <= FEW else [value]
            waiting.extend(one for one in inner if _is_like_a_dataset(one))
    return seen


def _mark(value: Any) -> Any:
    """What tells that an object has changed though it is the same one."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    try:
        return len(value)
    except Exception:  # it has none, or a user's own __len__ fails
        return None


def _is_like_a_dataset(value: Any) -> bool:
    return hasattr(value, "__dict__") and hasattr(value, "__getitem__") and not isinstance(value, (torch.Tensor, type))


def _same(before: list[Any], now: list[Any]) -> bool:
    """Whether two outlines are of the same state: the same objects, or equal numbers and texts."""
    return len(before) == len(now) and all(
        a is b or (type(a) is type(b) and isinstance(a, (int, float, str, bytes)) and a == b)
        for a, b in zip(before, now)
    )


def batch_size_of(loader: DataLoader[Any]) -> int:
    """A loader's own, or what its batch sampler says of itself; 1: it says nothing."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 1)
    return size if isinstance(size, int) and size > 0 else 1


def own_sampler_of(loader: DataLoader[Any] | None) -> Any:
    """A loader's batch sampler whose order only it knows; None: batches of one size, in order or shuffled."""
    batches: Any = loader.batch_sampler if loader is not None else None
    if loader is None or type(batches) is not BatchSampler:
        return batches
    samples: Any = batches.sampler
    drawn = type(samples) is RandomSampler and (samples.replacement or len(samples) != len(samples.data_source))
    return batches if drawn or type(samples) not in (RandomSampler, SequentialSampler) else None
