"""The share of the time that watching takes from training."""

from __future__ import annotations

import time

from tui3090.own import cpu_times


class OwnShare:
    """The share of the wall clock in which our threads computed, between one reading and the next."""

    def __init__(self) -> None:
        self._wall = time.monotonic()
        self._cpu = cpu_times()

    def read(self) -> dict[str, float | None]:
        """`ui_share` of a `Reading`; None where the system has no clock for a thread."""
        wall, cpu = time.monotonic(), cpu_times()
        used = sum(seconds - self._cpu.get(thread, 0.0) for thread, seconds in cpu.items())
        elapsed = wall - self._wall
        self._wall, self._cpu = wall, cpu
        return {"ui_share": max(used, 0.0) / elapsed if cpu and elapsed > 0 else None}
