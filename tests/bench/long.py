"""What a long run costs: the size of its log, the time until `tui3090 show` has read it, memory and frames.

    python -m tests.bench.long [--hours H] [--rate STEPS_PER_SECOND]

The run is made up, with a clock of its own: steps and readings like those of a real run on a card, put through the
thinning and the lines of the product. Nothing is trained and no card is needed.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.terminal.pty_shell import Shell
from tui3090.dashboard.frame import CONTENTS, digit, paint
from tui3090.dashboard.layout import places
from tui3090.dashboard.view import View
from tui3090.lines import to_line
from tui3090.records import Changed, Reading, Record, State, StepRecord
from tui3090.runlog import RecordReader, RunFolder
from tui3090.thinning import Thinner

REAL = Path(__file__).parents[1] / "data" / "h200.jsonl"
BEGAN = 1.8e9


def long_run(hours: float, rate: float) -> Iterator[Record]:
    """The records of a run, as trainer and poller emit them."""
    real = RecordReader(REAL).read(1 << 30)
    steps = [r for r in real if isinstance(r, StepRecord) and not r.skipped]
    readings = [r for r in real if isinstance(r, Reading) and r.allocated is not None]
    yield from (r for r in real[:100] if not isinstance(r, (StepRecord, Reading, Changed)))
    planned = round(hours * 3600 * rate)
    read, now = 0, BEGAN
    for number in range(1, planned + 1):
        now = BEGAN + number / rate
        if now - BEGAN >= read * 0.5125:
            yield replace(readings[read % len(readings)], time=now)
            read += 1
        like = steps[number % len(steps)]
        yield replace(
            like,
            time=now,
            step=number,
            planned_steps=planned,
            epoch=number / 50_000,
            loss=like.loss + 3 * math.exp(-number / 2e5),
            seconds=1 / rate + like.wait_s * 1e-3,
        )
    yield State(time=now, state="finished", detail=f"{planned} steps")


def frame_ms(view: View) -> float:
    """The least time of twenty that all panels of a screen of 160 x 50 take, the chart drawn anew."""
    took = []
    for _ in range(20):
        view.loss.drawn = None
        began = time.perf_counter()
        for name, place in places(160, 50, "").items():
            paint(CONTENTS[name], digit(name), place, view, BEGAN)
        took.append(time.perf_counter() - began)
    return min(took) * 1000


def resident_mb() -> float:
    """Memory of this process at its greatest so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hours", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=30.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        _write(folder, asked.hours, asked.rate)
        _show(folder, Path(name))


def _write(folder: RunFolder, hours: float, rate: float) -> None:
    """Take the run into a view and a log, and say what became of both."""
    view, thinner, windows = View(), Thinner(), 0
    lines = {"step": 0, "reading": 0}
    with folder.records.open("w", encoding="utf-8") as file:
        for record in long_run(hours, rate):
            view.absorb((record,))
            for due in thinner.add(record):
                file.write(to_line(due))
                lines[due.type] = lines.get(due.type, 0) + 1
            if isinstance(record, StepRecord):
                windows += 1
                if windows in (10_000, 100_000) or windows == round(hours * 3600 * rate):
                    print(
                        f"after {windows:>9,} windows: memory {resident_mb():.1f} MB at the most, "
                        f"frame {frame_ms(view):.2f} ms, {len(view.loss.points)} points",
                        flush=True,
                    )
    print(
        f"records.jsonl of {hours:g} h at {rate:g} steps/s: {folder.records.stat().st_size / 1e6:.1f} MB, "
        f"{lines['step']:,} lines of steps and {lines['reading']:,} of readings",
        flush=True,
    )


def _show(folder: RunFolder, where: Path) -> None:
    """Open it with the installed command, without a terminal and in one."""
    command = [sys.executable, "-m", "tui3090", "show", str(folder.path)]
    print("five times each, seconds: " + _five("show | cat", lambda: _piped(command)), flush=True)
    print(_five("show in a terminal, until its end is on the screen", lambda: _on_screen(where, " ".join(command))))


def _five(what: str, once: Callable[[], float]) -> str:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = [once() for _ in range(5)]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 5
    return f"{what}: {min(took):.2f} to {max(took):.2f}, of CPU time {cpu:.2f}"


def _piped(command: list[str]) -> float:
    """Seconds that the command takes where there is no terminal."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    return time.perf_counter() - began


def _on_screen(where: Path, command: str) -> float:
    """Seconds from the command until the screen says how the run ended."""
    shell = Shell(where, columns=160, rows=50)
    began = time.perf_counter()
    shell.command(command)
    shell.wait(lambda: "FINISHED" in shell.screen)
    took = time.perf_counter() - began
    shell.type("q")
    assert shell.status(30) == 0
    shell.close()
    return took


if __name__ == "__main__":
    main()
