"""What watching costs: the CPU time of the dashboard's, the poller's and the run log's threads."""

from __future__ import annotations

import threading
import time

OURS = ("MainThread", "poller", "runlog", "watch", "textual-input", "textual-output", "asyncio_")
"""Beginnings of the names of our threads. The trainer's and torch's do training's work and are not counted."""


class OwnShare:
    """The share of the wall clock in which our threads computed, between one reading and the next."""

    def __init__(self) -> None:
        self._wall = time.monotonic()
        self._cpu = _cpu_times()

    def read(self) -> dict[str, float | None]:
        """`ui_share` of a `Reading`; None where the system has no clock for a thread."""
        wall, cpu = time.monotonic(), _cpu_times()
        used = sum(seconds - self._cpu.get(thread, 0.0) for thread, seconds in cpu.items())
        elapsed = wall - self._wall
        self._wall, self._cpu = wall, cpu
        return {"ui_share": max(used, 0.0) / elapsed if cpu and elapsed > 0 else None}


def _cpu_times() -> dict[int, float]:
    """CPU seconds so far of each of our threads, by native id."""
    times: dict[int, float] = {}
    for thread in threading.enumerate():
        if thread.native_id is None or not thread.name.startswith(OURS):
            continue
        try:
            times[thread.native_id] = time.clock_gettime(_cpu_clock(thread.native_id))
        except (OSError, AttributeError):
            continue  # it ended meanwhile, or this is not Linux
    return times


def _cpu_clock(native_id: int) -> int:
    """Linux's CPU clock of a thread.

    The same number as `time.pthread_getcpuclockid` computes, which, however, reads the memory of the thread it is asked
    about and crashes the process when that thread has just ended; the kernel answers that with an error.
    """
    return (~native_id << 3) | 6
