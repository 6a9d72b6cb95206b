"""CPU and memory of this process, its loader workers and the machine."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import psutil

SLOW_S = 2.0
"""Seconds between looks at the workers and the machine's memory."""


class Host:
    """Reads the process that it is made in."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._wall, self._cpu = time.monotonic(), time.process_time()
        self._slow: dict[str, Any] = {}
        self._slow_at = -SLOW_S
        self._workers: dict[int, tuple[psutil.Process, float]] = {}
        """Process and CPU seconds at the last look, by pid."""

    def read(self) -> dict[str, Any]:
        """The host's fields of a `Reading`."""
        wall, cpu = time.monotonic(), time.process_time()
        share = (cpu - self._cpu) / (wall - self._wall) if wall > self._wall else None
        self._wall, self._cpu = wall, cpu
        if wall - self._slow_at >= SLOW_S:
            memory = psutil.virtual_memory()
            self._slow = {
                "host_total": memory.total,
                "host_available": memory.available,
                **self._read_workers(wall - self._slow_at),
            }
            self._slow_at = wall
        return {"cpu": share, "rss": self._process.memory_info().rss, **self._slow}

    def _read_workers(self, elapsed: float) -> dict[str, Any]:
        """Loader workers are this process's multiprocessing children.

        Asking multiprocessing is far cheaper than looking for children among all processes of the machine, and finds
        those of a forkserver too, which are not our children to the system.
        """
        seen: dict[int, tuple[psutil.Process, float]] = {}
        shares: list[float] = []
        rss = 0
        for child in multiprocessing.active_children():
            if child.pid is None:
                continue
            known = self._workers.get(child.pid)
            try:
                process = known[0] if known else psutil.Process(child.pid)
                times = process.cpu_times()
                rss += process.memory_info().rss
            except psutil.Error:
                continue  # it ended meanwhile
            cpu = times.user + times.system
            seen[child.pid] = (process, cpu)
            if known:
                shares.append((cpu - known[1]) / elapsed)
        self._workers = seen
        return {
            "worker_count": len(seen),
            "worker_cpu": sum(shares) / len(shares) if shares else None,
            "worker_rss": rss if seen else None,
        }
