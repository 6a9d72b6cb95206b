"""What watching costs: the CPU time of the dashboard's, the poller's and the run log's threads.

Every thread of ours that runs Python holds the interpreter's lock while it does, and training waits for it: up to five
milliseconds, Python's switch interval. So what takes milliseconds is done in pieces.
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
HELD_S, REST_S = 0.0003, 0.005
"""How long a piece of work holds the interpreter's lock, and until the next one: a step of some milliseconds meets one
piece at the most."""
HELD_OF_STEP, HELD_MOST_S = 0.02, 0.005
"""Where that is longer, a piece may hold the lock for this share of a step, for each costs processor time of its own;
but never so long that a key would wait for it."""


class Piece:
    """A piece of work that is longer than training should wait: done for `HELD_S`, it is laid aside for `REST_S`.

    Giving the lock back for a moment is not enough: training takes and leaves it with every call of torch's, and waits
    for it again each time. `step_s` is how long a step takes, in seconds, where that is known.
    """

    def __init__(self, step_s: float | None = None) -> None:
        self._held_s = min(max(HELD_S, HELD_OF_STEP * (step_s or 0.0)), HELD_MOST_S)
        self.go_on()

    @property
    def over(self) -> bool:
        """Whether it is time to rest."""
        return time.perf_counter() >= self._until

    def go_on(self) -> None:
        """The next piece begins."""
        self._until = time.perf_counter() + self._held_s


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
