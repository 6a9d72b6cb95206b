"""Loader workers: how their processes begin, and how they end."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable

from tui3090.recipe import RecipeError


class WorkerDied(RecipeError):
    """A loader worker is gone; its text says what may have killed it."""


def ready(run: int, then: Callable[[int], None] | None, worker: int) -> None:
    """In a worker, before `then`, the user's own beginning of one.

    A closed terminal or ctrl+c is the main process's matter; with its end (pid `run`) all is over: torch's workers look
    whether their parent lives, and under forkserver that is the server, which lives as long as they.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(run,), name="end with the run", daemon=True).start()
    if then is not None:
        then(worker)


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
