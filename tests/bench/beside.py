"""How much a training thread is held up by the dashboard beside it, without a card.

    python -m tests.bench.beside [--seconds N] [--rounds N]

In place of the trainer a thread does what replay's does at 230 steps a second: some Python between calls that let go of
the interpreter's lock, a step's record, and once a step a wait for a card that is a clock: 3.3 ms forward and backward,
1 ms update. The run's log and the poller stand beside it as in life; runs with the real app on a terminal and headless
take turns. Stated: a step of the host's clock, which is the one on the screen, and one of the card's, longer only where
the card had to wait for the host; the 99th percentile and the 99.9th, the median of the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import platform
import statistics
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.bench.frame import REAL, on_terminal
from tui3090.dashboard.app import Dashboard
from tui3090.dashboard.driver import run_on
from tui3090.dashboard.source import LiveSource
from tui3090.dashboard.terminal import Terminal
from tui3090.dashboard.view import View
from tui3090.link import Commands, Outlet
from tui3090.meters.poller import Poller
from tui3090.records import State, StepRecord
from tui3090.runlog import RecordReader, RunFolder, RunLog

FORWARD_BACKWARD_S, UPDATE_S = 0.0033, 0.0010
SETTLED_S = 5.0
"""Until steps count."""
CALLS = 4, 2, 3, 2
"""Calls of torch's before the forward, before the wait, before the update and after it."""
CALL = 1600
"""Turns of a loop of Python's for each of them, some 50 microseconds."""


class StandIn(threading.Thread):
    """Trains nothing, as busily as the trainer under replay."""

    def __init__(self, outlet: Outlet) -> None:
        super().__init__(daemon=True)
        self._outlet = outlet
        self._records = [r for r in RecordReader(REAL).read(1 << 30) if isinstance(r, StepRecord) and not r.skipped]
        self.host: list[float] = []
        """Seconds from the beginning of a step to that of the next."""
        self.card: list[float] = []
        """Seconds from the end of an update to that of the next."""

    def run(self) -> None:
        """Until the process ends."""
        let_go = ctypes.CDLL(None).sched_yield  # called by ctypes, which lets go of the interpreter's lock

        def calls(count: int) -> None:
            for _ in range(count):
                for _ in range(CALL):
                    pass
                let_go()

        self._outlet.emit(State(time=time.time(), state="training"))
        began = free = updated = time.perf_counter()
        for number, record in enumerate(itertools.cycle(self._records), 1):
            calls(CALLS[0])
            free = max(time.perf_counter(), free) + FORWARD_BACKWARD_S
            calls(CALLS[1])
            time.sleep(max(0.0, updated - time.perf_counter()))
            self._outlet.emit(replace(record, time=time.time(), step=number, planned_steps=1_000_000))
            calls(CALLS[2])
            free = max(time.perf_counter(), free) + UPDATE_S
            self.card.append(free - updated)
            updated = free
            calls(CALLS[3])
            now = time.perf_counter()
            self.host.append(now - began)
            began = now


def beside(screen: bool, seconds: float, answer: Path) -> None:
    """In the child: write the steps' seconds to `answer`."""
    log = RunLog(RunFolder(answer.parent))
    outlet = Outlet(log)
    stand_in, poller = StandIn(outlet), Poller(outlet.emit, device="cpu")

    def start() -> None:
        poller.start()
        stand_in.start()

    if screen:
        app = Dashboard(LiveSource(outlet, Commands(), start), View(name="gpt", folder=str(answer.parent)))
        threading.Timer(SETTLED_S + seconds, app.exit).start()
        run_on(Terminal(), app)
    else:
        start()
        time.sleep(SETTLED_S + seconds)
    settled = round(SETTLED_S / (FORWARD_BACKWARD_S + UPDATE_S))
    answer.write_text(json.dumps([stand_in.host[settled:], stand_in.card[settled:]]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}", flush=True)
    told: dict[str, list[list[float]]] = {}
    for _ in range(asked.rounds):
        for name, screen in (("headless", False), ("under the dashboard", True)):
            (host, card), _size = on_terminal(160, 50, partial(beside, screen, asked.seconds))
            figures = [1e3 * statistics.quantiles(steps, n=1000)[at] for steps in (host, card) for at in (989, 998)]
            told.setdefault(name, []).append(figures)
    print("| | host, 99 % ms | 99.9 % | card, 99 % | 99.9 % |\n|---|---|---|---|---|")
    for name, rounds in told.items():
        print(f"| {name} | {' | '.join(f'{statistics.median(each):.2f}' for each in zip(*rounds))} |")


if __name__ == "__main__":
    main()
