"""How much a training thread is held up by the dashboard beside it, without a card.

    python -m tests.bench.beside [--frames N] [--rounds N]

In place of the trainer a thread does what replay's does at 230 steps a second: some Python between calls that let go of
the interpreter's lock, and once a step a wait for a card that is a clock: 3.3 ms forward and backward, 1 ms update. The
real app is on a terminal, gets the records of so many steps, and paints twice a second. Runs with and without it take
turns. Stated: a step of the host's clock, which is the one on the screen, and one of the card's, longer only where the
card had to wait for the host; the 99th percentile and the 99.9th, the median of the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import threading
import time
from functools import partial
from pathlib import Path

from tests.bench.frame import WARM_UP, AlwaysDue, Frames, on_terminal
from tui3090.dashboard.app import LOOK_S, Dashboard
from tui3090.dashboard.driver import run_on
from tui3090.dashboard.terminal import Terminal
from tui3090.dashboard.view import View

FORWARD_BACKWARD_S, UPDATE_S = 0.0033, 0.0010
STEPS = 114
"""That come with a frame."""
CALLS = 4, 2, 3, 2
"""Calls of torch's before the forward, before the wait, before the update and after it."""
CALL = 1600
"""Turns of a loop of Python's for each of them, some 50 microseconds."""


class StandIn(threading.Thread):
    """Trains nothing, as busily as the trainer under replay."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
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

        began = free = updated = time.perf_counter()
        while True:
            calls(CALLS[0])
            free = max(time.perf_counter(), free) + FORWARD_BACKWARD_S
            calls(CALLS[1])
            time.sleep(max(0.0, updated - time.perf_counter()))
            calls(CALLS[2])
            free = max(time.perf_counter(), free) + UPDATE_S
            self.card.append(free - updated)
            updated = free
            calls(CALLS[3])
            now = time.perf_counter()
            self.host.append(now - began)
            began = now


def beside(screen: bool, frames: int, answer: Path) -> None:
    """In the child: write the steps' seconds to `answer`."""
    stand_in = StandIn()
    if screen:
        source = Frames(frames, STEPS)
        source.app = Dashboard(source, View(name="gpt"), lambda: source.now)
        source.app._governor = AlwaysDue(time.monotonic())
        threading.Timer(WARM_UP * LOOK_S, stand_in.start).start()
        run_on(Terminal(), source.app)
    else:
        stand_in.start()
        time.sleep(frames * LOOK_S)
    answer.write_text(json.dumps([stand_in.host[20:], stand_in.card[20:]]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}", flush=True)
    told: dict[str, list[list[float]]] = {}
    for _ in range(asked.rounds):
        for name, screen in (("without", False), ("beside the dashboard", True)):
            (host, card), _size = on_terminal(160, 50, partial(beside, screen, asked.frames))
            figures = [1e3 * statistics.quantiles(steps, n=1000)[at] for steps in (host, card) for at in (989, 998)]
            told.setdefault(name, []).append(figures)
    print("| | host, 99 % ms | 99.9 % | card, 99 % | 99.9 % |\n|---|---|---|---|---|")
    for name, rounds in told.items():
        print(f"| {name} | {' | '.join(f'{statistics.median(each):.2f}' for each in zip(*rounds))} |")


if __name__ == "__main__":
    main()
