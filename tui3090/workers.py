"""Loader workers: how their processes begin, what they are sent, and how they end."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import select
import signal
import threading
from multiprocessing.context import BaseContext
from typing import Any

import torch

from tui3090.recipe import RecipeError

SHARED_TENSORS = 64
"""Tensors of a dataset that loader workers are given as shared memory; a process can be sent 256 descriptors."""


class WorkerDied(RecipeError):
    """A loader worker is gone; its text says what may have killed it."""


class _CountingPickler(pickle.Pickler):
    """Finds out whether something can be pickled, and how many tensors are in it."""

    tensors = 0

    def reducer_override(self, value: Any) -> Any:
        self.tensors += isinstance(value, torch.Tensor)
        return NotImplemented


def choose_context(dataset: Any, collate: Any, indexed: bool) -> tuple[BaseContext, bool, str]:
    """How workers start, whether the dataset's tensors are sent by value, and what the user should know, if anything.

    forkserver: a fork of this process would inherit its threads' locks. fork where the data can't be pickled.
    """
    forked = "Loader workers are forked, which can hang a process with threads: the dataset"
    pickler = _CountingPickler(io.BytesIO())
    try:
        pickler.dump((dataset, collate))
    except Exception as error:
        note = (
            f"{forked} or collate_fn can't be pickled ({type(error).__name__}: {error}). Define its classes and "
            "functions at a module's top level."
        )
        return multiprocessing.get_context("fork"), False, note
    many = pickler.tensors > SHARED_TENSORS
    if many and not indexed:
        note = f"{forked} holds {pickler.tensors} tensors. Stack them into a few."
        return multiprocessing.get_context("fork"), False, note
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data"])  # else every worker imports torch again
    return context, many, ""


def ready(run: int, worker: int) -> None:
    """In a worker: a closed terminal or ctrl+c is the main process's matter; with its end (pid `run`) all is over.

    torch's workers look whether their parent lives: under forkserver that is the server, which lives as long as they.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(run,), name="end with the run", daemon=True).start()


def _end_with(run: int) -> None:
    try:
        ended = os.pidfd_open(run)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a kernel before 5.3
        return
    select.select([ended], [], [])
    os._exit(1)


def is_workers_death(error: Exception) -> bool:
    """Whether a worker is gone, rather than that it passed on an error of the dataset's.

    Off the main thread torch notices by asking now and then; meanwhile a batch may break off on its way.
    """
    if str(error).startswith("Caught "):
        return False
    return isinstance(error, (OSError, EOFError)) or any(
        w in str(error) for w in ("DataLoader worker", "shared memory")
    )
