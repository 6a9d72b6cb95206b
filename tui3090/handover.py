"""How loader workers are started, and how the dataset reaches them."""

from __future__ import annotations

import multiprocessing
import pickle
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

MOST_SHARED = 128
"""Tensors that a dataset may hold and share with its workers. Each takes a file descriptor in every process: the
forkserver passes on no more than 250, and many systems open no more than 1024."""


class Handover:
    """The start method for workers of `dataset`, chosen once; `notes` takes a sentence where it is fork.

    `loader` is the user's, or None: the method that it asks for. Else forkserver: a fork of this process would inherit
    its threads' locks. fork where the data (or `collate`, or the loader's `worker_init_fn`) can't be pickled.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Any,
        indexed: bool,
        notes: list[str],
        loader: DataLoader[Any] | None = None,
    ) -> None:
        asked = loader.multiprocessing_context if loader is not None else None
        method = asked.get_start_method() if asked is not None else "forkserver"
        self.init = loader.worker_init_fn if loader is not None else None
        """The user's own beginning of a worker."""
        self.context: BaseContext = multiprocessing.get_context("fork")
        self._by_value = False
        forked = "Loader workers are forked, which can hang a process with threads: the"
        if method == "fork":
            notes.append(f"{forked} DataLoader asks for it.")
            return
        counter = _Counter(_Nowhere())
        try:
            counter.dump((dataset, collate, self.init))
        except Exception as error:
            notes.append(
                f"{forked} dataset, collate_fn or worker_init_fn can't be pickled ({type(error).__name__}: {error}). "
                "Define its classes and functions at a module's top level."
            )
            return
        if counter.tensors > MOST_SHARED and not indexed:  # its class tells a loader what it is: it can't be wrapped
            notes.append(f"{forked} dataset holds {counter.tensors} tensors. Stack them into a few.")
            return
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["torch.utils.data"])  # else every worker imports torch again
        self.context, self._by_value = context, counter.tensors > MOST_SHARED

    def wrapped(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """The dataset as a loader with workers is given it: of many tensors each worker gets a copy."""
        return _ByValue(dataset) if self._by_value else dataset


class _ByValue(Dataset[Any]):
    """Becomes the dataset itself in a worker, its tensors copied rather than moved to shared memory."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset
        self._pickled: bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        self._pickled = self._pickled or pickle.dumps(self._dataset)
        return pickle.loads, (self._pickled,)


class _Counter(pickle.Pickler):
    """Counts the tensors that it pickles."""

    tensors = 0

    def reducer_override(self, given: Any) -> Any:
        """Leave the pickling to the object."""
        self.tensors += isinstance(given, torch.Tensor)
        return NotImplemented


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        """Drop it."""
        return len(data)
