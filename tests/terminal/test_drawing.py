"""Frames, which go straight to the terminal, leave on it what Textual paints when it paints everything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.terminal.pty_shell import Shell

ROOT = Path(__file__).parents[2]
FRAMES = '''
import time
from pathlib import Path

from tests.bench import frame
from tui3090.dashboard import app
from tui3090.dashboard.driver import run_on
from tui3090.dashboard.terminal import Terminal
from tui3090.dashboard.view import View


class Frames(frame.Frames):
    """Until there is a file `still`; then no record comes, and the clock stands."""

    stands = 0

    def drain(self):
        self.stands += Path("still").exists()
        if not self.stands:
            return super().drain()
        if self.stands == 3:
            Path("stands").write_text(f"{view.step.step:,}".replace(",", " "))
        return []


app.LOOK_S = 0.03
source, view = Frames(4000), View(name="gpt")
source.app = app.Dashboard(source, view, lambda: source.now)
source.app._governor = frame.AlwaysDue(time.monotonic())
run_on(Terminal(), source.app)
'''


def cells(shell: Shell) -> list[list[Any]]:
    """What stands on the screen, with its colours."""
    screen = shell._screen
    return [[screen.buffer[y][x] for x in range(screen.columns)] for y in range(screen.lines)]


def frames(shell: Shell) -> None:
    """Let some come."""
    seen = len(shell.bytes)
    shell.wait(lambda: len(shell.bytes) > seen + 2000)


def press(shell: Shell, key: str, shown: Callable[[], bool]) -> None:
    """Press a key, wait for what it does, and let some frames come."""
    shell.type(key)
    shell.wait(shown)
    frames(shell)


def resize(shell: Shell, rows: int, columns: int) -> None:
    """Change the terminal's size, wait for the last row to be painted there, and let some frames come."""
    seen = len(shell.bytes)
    shell._screen.resize(rows, columns)
    shell.bash.setwinsize(rows, columns)
    shell.wait(lambda: b"\x1b[%d;" % rows in shell.bytes[seen:])
    frames(shell)


def test_frames_leave_what_textual_paints(screen: Shell) -> None:
    shell, folder = screen, screen.folder
    (folder / "frames.py").write_text(FRAMES)
    shell.command(f"PYTHONPATH={ROOT} {sys.executable} frames.py")
    shell.wait(lambda: "TRAINING" in shell.screen and "Techniques" in shell.screen)
    press(shell, "?", lambda: "closes" in shell.screen)
    press(shell, "?", lambda: "closes" not in shell.screen)
    press(shell, "2", lambda: "Techniques" not in shell.screen)
    press(shell, "2", lambda: "Techniques" in shell.screen)
    rows, columns = shell._screen.lines, shell._screen.columns
    resize(shell, rows + 5, columns + 20)
    resize(shell, rows, columns)
    (folder / "still").touch()
    shell.wait(lambda: (folder / "stands").exists() and (folder / "stands").read_text())
    last = (folder / "stands").read_text()
    shell.wait(lambda: last in shell.screen and not shell.unread())
    drawn = cells(shell)
    shell._screen.erase_in_display(2)
    shell.type("\x0c")
    shell.wait(lambda: cells(shell) == drawn)
    shell.type("\x11d")
    assert shell.status() == 0
