"""What a frame of the dashboard costs: CPU time and bytes to the terminal, of the real app on a pty.

    python -m tests.bench.frame [--frames N] [--every SECONDS] [--profile]

The records are those of a run on an H200 (tests/data), 15 steps and a reading for each frame, as half a second at 30
steps a second brings, and where a step's time goes with every other; the clock that the screen sees moves by half a
second a frame. The CPU time is that of the whole process between frames, looking for records, Textual and the
thread that writes included; it is counted in runs of ten frames. A machine that idles between two frames, as in life
(`--every 0.5`), may take several times as long for each: its caches are cold, and a virtual one was given to others.
How much of it is the machine's tells a yardstick, a loop of Python that touches little: what it takes over and over,
and what it takes with the same pause before each.
`--profile` lists what takes it.
"""

from __future__ import annotations

import argparse
import cProfile
import fcntl
import io
import itertools
import json
import os
import platform
import pstats
import pty
import statistics
import struct
import sys
import tempfile
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tui3090.commands import Command
from tui3090.dashboard import app
from tui3090.dashboard.app import Dashboard
from tui3090.dashboard.driver import run_on
from tui3090.dashboard.governor import FRAME_S, Governor
from tui3090.dashboard.terminal import Terminal
from tui3090.dashboard.view import View
from tui3090.records import Phases, Profiled, Reading, Record, State, StepRecord
from tui3090.runlog import RecordReader

REAL = Path(__file__).parents[1] / "data" / "h200.jsonl"
STEPS, RUN_OF = 15, 10
WARM_UP = 40
"""Frames that don't count."""
PROFILED = Profiled(
    time=time.time(),
    step=1,
    tensor_core_share=0.78,
    busy_share=0.93,
    without="layer_norm 9 %, gelu 6 %, AdamW 5 %",
    unknown_share=0.02,
    fp32_share=0.0,
    kernels=900,
    kernel_s=0.03,
)
PHASES = Phases(
    time=0.0, step=1, seconds=0.033, data_s=0.0004, copy_s=0.0002, forward_s=0.01, backward_s=0.018, optimizer_s=0.003
)


class Frames:
    """A source that gives each frame its records, and ends the app when there were enough frames."""

    live = True
    read_only = ""

    def __init__(self, frames: int) -> None:
        self._left = frames + WARM_UP
        # made beforehand: in a run it is the trainer that makes them
        self._records = deque(_batches(self._left + 2))
        self.cpu: list[float] = []
        """Of the process at every tenth frame's start, seconds."""
        self.app: Dashboard | None = None
        self.now = time.time()

    def start(self) -> None:
        """Nothing stands behind it."""

    def drain(self) -> list[Record]:
        """The next frame's."""
        assert self.app is not None
        if self._left % RUN_OF == 0:
            self.cpu.append(time.process_time())
        self._left -= 1
        if self._left < 0:
            self.app.exit()
        records = self._records.popleft()
        self.now = records[-1].time
        return records

    def send(self, command: Command) -> None:
        """No keys are pressed."""


class AlwaysDue(Governor):
    """Counts as the governor does, but paints at every look."""

    def due(self, now: float) -> bool:
        """Yes."""
        super().due(now)
        return True


def _batches(frames: int) -> Iterator[list[Record]]:
    real = RecordReader(REAL).read(1 << 30)
    steps = [r for r in real if isinstance(r, StepRecord) and not r.skipped]
    readings = [r for r in real if isinstance(r, Reading) and r.allocated is not None]
    others = [r for r in real if not isinstance(r, (StepRecord, Reading, State))]
    began = time.time()
    yield [*others, PROFILED, State(time=began, state="training")]
    for frame in range(frames):
        now = began + frame * FRAME_S
        numbers = range(frame * STEPS, (frame + 1) * STEPS)
        yield [
            *(replace(steps[n % len(steps)], time=now, step=n + 1, planned_steps=1_000_000) for n in numbers),
            *([replace(PHASES, time=now, optimizer_s=PHASES.optimizer_s + frame % 7 * 1e-5)] if frame % 2 else []),
            replace(readings[frame % len(readings)], time=now),
        ]


def draw(frames: int, profiled: bool, answer: Path) -> None:
    """In the child, whose terminal is the pty: write what frames cost to `answer`."""
    source = Frames(frames)
    (answer.parent / "output.log").touch()
    source.app = Dashboard(source, View(name="gpt", folder=str(answer.parent)), lambda: source.now)
    source.app._governor = AlwaysDue(time.monotonic())
    profile = cProfile.Profile()
    if profiled:
        profile.enable()
    run_on(Terminal(), source.app)
    profile.disable()
    told = io.StringIO()
    if profiled:
        pstats.Stats(profile, stream=told).sort_stats("tottime").print_stats(25)
    runs = source.cpu[WARM_UP // RUN_OF :]
    answer.write_text(json.dumps([[b - a for a, b in itertools.pairwise(runs)], told.getvalue()]))


def on_terminal(columns: int, rows: int, work: Callable[[Path], None]) -> tuple[Any, int]:
    """What `work`, in a process of its own on a terminal, wrote as JSON to the file it was given, and the bytes that
    came to the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        pid, terminal = pty.fork()
        if not pid:
            try:
                os.environ["TERM"] = "xterm-256color"
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
                work(answer)
            finally:
                os._exit(0)
        size = 0
        try:
            while came := os.read(terminal, 1 << 16):
                size += len(came)
        except OSError:  # the child has gone
            pass
        os.waitpid(pid, 0)
        os.close(terminal)
        return json.loads(answer.read_text()), size


def yardstick(pause: float, times: int) -> float:
    """The median CPU time of a fixed piece of Python, ms, each after `pause` seconds."""
    taken = []
    for _ in range(times):
        time.sleep(pause)
        began = time.thread_time()
        words = [f"{number} words" for number in range(8_000)]
        sum(len(word) for word in words)
        taken.append(time.thread_time() - began)
    return statistics.median(taken) * 1e3


def measure(columns: int, rows: int, frames: int, profiled: bool) -> tuple[list[float], int, str]:
    """CPU seconds of each run of ten frames, bytes of all frames, the profile."""
    (runs, told), size = on_terminal(columns, rows, partial(draw, frames, profiled))
    return runs, size, told


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--every", type=float, default=0.02, help="seconds from one frame to the next")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    app.LOOK_S = asked.every
    print(f"{platform.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}", flush=True)
    print("| screen | ms of CPU a frame, median | least | most | bytes a frame |\n|---|---|---|---|---|")
    for columns, rows in ((160, 50), (80, 24)):
        few = measure(columns, rows, 0, False)[1]  # the first picture, warming up, leaving
        runs, size, told = measure(columns, rows, asked.frames, asked.profile)
        each = [seconds / RUN_OF * 1e3 for seconds in runs]
        print(
            f"| {columns} x {rows} | {statistics.median(each):.2f} | {min(each):.2f} | {max(each):.2f} "
            f"| {(size - few) / asked.frames:.0f} |",
            flush=True,
        )
        if asked.profile:
            print(told)
    print(f"the yardstick: {yardstick(0, 100):.2f} ms over and over, {yardstick(asked.every, 20):.2f} with the pause")


if __name__ == "__main__":
    sys.exit(main())
