"""What watching costs: the CPU time of the dashboard's, the poller's and the run log's threads.

Every thread of ours that runs Python holds the interpreter's lock while it does, and training waits for it: up to five
milliseconds, Python's switch interval, unless it is given way to.
This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import threading
import time

OURS = (
    "MainThread",
    "poller",
    "runlog",
    "watch",
    "listener",
    "notify",
    "past",
    "textual-input",
    "textual-output",
    "asyncio_",
)
"""Beginnings of the names of our threads. The trainer's and torch's do training's work and are not counted."""
HELD_S = 0.0005
"""How long work that gives way holds the interpreter's lock. Giving way takes some 50 microseconds itself."""
_gave_way = 0.0


def give_way() -> None:
    """Let training have the interpreter's lock, if it waits for it and none of our threads has given way lately.

    For between two pieces of work that take some tens of microseconds each and milliseconds together.
    """
    global _gave_way
    if time.perf_counter() - _gave_way < HELD_S:
        return
    time.sleep(0)
    _gave_way = time.perf_counter()


def cpu_times() -> dict[int, float]:
    """CPU seconds so far of each of our threads, by native id; empty where the system has no clock for a thread."""
    times: dict[int, float] = {}
    for thread in threading.enumerate():
        if thread.native_id is None or not thread.name.startswith(OURS):
            continue
        try:
            times[thread.native_id] = time.clock_gettime(_cpu_clock(thread.native_id))
        except (OSError, AttributeError):
            continue  # it ended meanwhile, or this is not Linux
    return times


def cpu_seconds() -> float:
    """The sum over our threads. One that ends takes its time with it: the sum may fall."""
    return sum(cpu_times().values())


def _cpu_clock(native_id: int) -> int:
    """Linux's CPU clock of a thread.

    The same number as `time.pthread_getcpuclockid` computes, which, however, reads the memory of the thread it is asked
    about and crashes the process when that thread has just ended; the kernel answers that with an error.
    """
    return (~native_id << 3) | 6
