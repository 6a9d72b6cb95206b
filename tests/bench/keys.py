"""How long a key waits for its answer while torch loads: the installed command on a pty, `n` pressed again and again.

    python -m tests.bench.keys [--rounds N]

From the first picture until the first step: `n` is typed, and the clock stops when its answer (keys locked, unlocked)
is on the terminal. The first press, which comes before Textual is there, stands apart.
"""

from __future__ import annotations

import argparse
import os
import platform
import select
import statistics
import tempfile
import time
from pathlib import Path

from tests.bench.first_paint import HERE, end, start

ANSWERS = b"Keys locked", b"Keys unlocked"
WITHIN_S = 60.0


def waits(run: Path) -> list[float]:
    """Seconds of each press until the first step has come."""
    pid, terminal = start(HERE, run.parent)
    found: list[float] = []
    try:
        until = time.monotonic() + WITHIN_S
        _read(terminal, b"\x1b[50;", until)
        while not _stepped(run):
            began = time.monotonic()
            os.write(terminal, b"n")
            _read(terminal, ANSWERS[len(found) % 2], until)
            found.append(time.monotonic() - began)
            _rest(terminal, 0.1)
    finally:
        end(pid, terminal)
    return found


def _stepped(run: Path) -> bool:
    records = run / "records.jsonl"
    return records.exists() and b'"type":"step"' in records.read_bytes().replace(b" ", b"")


def _read(terminal: int, words: bytes, until: float) -> None:
    """Read until the words have come."""
    came = b""
    while words not in came:
        if not select.select([terminal], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError(f"{words!r} did not come: {came[-300:]!r}")
        came += os.read(terminal, 1 << 16)


def _rest(terminal: int, seconds: float) -> None:
    """Let what else is painted go by."""
    until = time.monotonic() + seconds
    while select.select([terminal], [], [], max(0.0, until - time.monotonic()))[0]:
        os.read(terminal, 1 << 16)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}", flush=True)
    print("| run | the first ms | later presses | median ms | longest ms |\n|---|---|---|---|---|")
    for number in range(asked.rounds):
        with tempfile.TemporaryDirectory() as folder:
            first, *later = (seconds * 1e3 for seconds in waits(Path(folder) / "run"))
        middle, longest = statistics.median(later), max(later)
        print(f"| {number + 1} | {first:.0f} | {len(later)} | {middle:.0f} | {longest:.0f} |", flush=True)


if __name__ == "__main__":
    main()
