"""Shared memory, in which loader workers leave their batches for the main process: whether there is room for them.

In a container it is 64 MiB unless it was asked for more, and a worker that finds it full dies by a bus error.
"""

from __future__ import annotations

import shutil
from pathlib import Path

SHM = Path("/dev/shm")
BATCHES_A_WORKER = 2
"""That a worker prepares ahead: the `prefetch_factor` that a DataLoader has by itself."""


def free() -> int | None:
    """Bytes; None: this machine has no such place."""
    try:
        return shutil.disk_usage(SHM).free
    except OSError:
        return None


def room() -> str:
    """How much is there and free, in words."""
    try:
        usage = shutil.disk_usage(SHM)
    except OSError:
        return f"{SHM} can't be looked at"
    return f"{SHM} has {usage.free / 2**30:.2f} of {usage.total / 2**30:.2f} GiB free"


def too_small(workers: int, batch: int, free_before: int | None) -> str:
    """A sentence if what so many workers prepare is more than was free before they came, bytes; empty: it fits.

    `batch` is a batch's bytes.
    """
    needed = workers * BATCHES_A_WORKER * batch
    if free_before is None or needed <= free_before:
        return ""
    return (
        f"{workers} loader worker{'' if workers == 1 else 's'} with {BATCHES_A_WORKER} batches of "
        f"{batch / 2**20:.1f} MiB each need {needed / 2**30:.2f} GiB, and {room()}: a worker that finds it full dies. "
        "Use fewer workers (key W, --workers), or make it bigger (in a container docker run --shm-size=8g, or "
        "--ipc=host)."
    )


def worker_died(error: Exception, awaited: list[int]) -> str:
    """Why a loader worker may have died, and what to do; `awaited`: the samples that were to come next, if known."""
    first = (str(error) or type(error).__name__).splitlines()[0]
    samples = ", ".join(map(str, awaited[:3])) + (" …" if len(awaited) > 3 else "")
    meanwhile = f" while samples {samples} were awaited" if awaited else ""
    return (
        f"A loader worker died ({first[:80]}){meanwhile}: mostly memory ran out, the machine's or what batches are "
        f"handed over in ({room()}). Start with fewer --workers, or in a container with a bigger one (docker run "
        "--shm-size=8g)."
    )
