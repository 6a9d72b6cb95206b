"""How soon the screen is there: from exec to the first picture, of one or several checkouts in turns.

    python -m tests.bench.first_paint [--rounds N] [CHECKOUT ...]

The command runs on a pty of 160x50; the clock stops when the last row of the picture has come. A checkout is a folder
that holds `tui3090/`; without any, this one is measured.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import signal
import statistics
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path

HERE = Path(__file__).parents[2]
WITHIN_S = 30.0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("checkouts", type=Path, nargs="*", default=[HERE])
    arguments = parser.parse_args()
    taken: dict[Path, list[float]] = {checkout.resolve(): [] for checkout in arguments.checkouts}
    for checkout in taken:
        first_paint(checkout)  # writes the bytecode
    for _ in range(arguments.rounds):
        for checkout, seconds in taken.items():
            seconds.append(first_paint(checkout))
    print("| checkout | median s | least | most |\n|---|---|---|---|")
    for checkout, seconds in taken.items():
        print(f"| {checkout} | {statistics.median(seconds):.3f} | {min(seconds):.3f} | {max(seconds):.3f} |")


def start(checkout: Path, folder: Path) -> tuple[int, int]:
    """The command in a folder, on a pty of 160 x 50: its process and the terminal's descriptor."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "TERM": "xterm-256color"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program has its bytecode
        os.execve(sys.executable, [sys.executable, "-m", "tui3090", "run", "--run-dir", "run"], environment)
    return pid, terminal


def first_paint(checkout: Path) -> float:
    """Seconds from exec until the footer of the first picture is on the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        pid, terminal = start(checkout, Path(folder))
        try:
            came = b""
            while b"\x1b[?1049h" not in came or b"\x1b[50;" not in came:
                if time.perf_counter() - began > WITHIN_S:
                    raise TimeoutError(f"no picture within {WITHIN_S:.0f} s: {came[-300:]!r}")
                came += os.read(terminal, 1 << 16)
            return time.perf_counter() - began
        finally:
            end(pid, terminal)


def end(pid: int, terminal: int) -> None:
    """Close the terminal and end the command and what it started, which are one session."""
    os.killpg(pid, signal.SIGKILL)
    os.close(terminal)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
