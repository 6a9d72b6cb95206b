"""The terminal that the dashboard is drawn on: a /dev/tty of our own, which never holds anything up.

A terminal that takes no more (a closed lid) is waited for only by the thread that writes, which can be told to give up,
and one that is gone is told apart from one that is slow. Importing this module does not import Textual.
"""

from __future__ import annotations

import contextlib
import os
import select
import termios
from typing import Any

TO_SHELL = "\x1b[?2026l\x1b[?2048l\x1b[?2004l\x1b[?1004l\x1b[<u\x1b[?7h\x1b[?1049l\x1b[?25h"
"""Undoes what the driver switches on: modes, keyboard protocol, alternate screen, hidden cursor."""


class Terminal:
    """The controlling terminal, opened without blocking. Raises OSError where there is none."""

    def __init__(self) -> None:
        # an open file of its own: non-blocking mode belongs to it, and the shell's stays as it is
        self._fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        self._attributes: list[Any] = termios.tcgetattr(self._fd)
        self._waiting = b""
        self._ready_to_read = select.poll()
        self._ready_to_read.register(self._fd, select.POLLIN)
        self._woken, self._waking = os.pipe()
        self._ready_to_read.register(self._woken, select.POLLIN)
        self._ready_to_write = select.poll()
        self._ready_to_write.register(self._fd, select.POLLOUT)
        self.gone = False
        """Whether it was hung up: nothing can be read from it or written to it any more."""
        self.taken = False
        """Whether the alternate screen was taken by somebody who does not give it back."""
        self._given_up = False

    def fileno(self) -> int:
        """The descriptor, for termios calls."""
        return self._fd

    def size(self) -> tuple[int, int]:
        """Columns and rows; 80 x 24 where the terminal does not tell."""
        try:
            columns, rows = os.get_terminal_size(self._fd)
        except OSError:
            return 80, 24
        return columns or 80, rows or 24

    def write(self, text: str) -> None:
        """Take text for the next `flush`."""
        self._waiting += text.encode("utf-8", "replace")

    def title(self, words: str) -> None:
        """Set the window's title, for the next `flush`; `title_back` gives back the one before."""
        self.write(f"\x1b[22;2t\x1b]2;{words}\x07")

    def title_back(self) -> None:
        """Give back the title that was there before `title`."""
        self.write("\x1b[23;2t")
        self.flush()

    def flush(self) -> None:
        """Write what waits, for as long as the terminal takes; given up or gone, it is dropped."""
        while self._waiting and not (self.gone or self._given_up):
            try:
                self._waiting = self._waiting[os.write(self._fd, self._waiting) :]
            except BlockingIOError:
                self._ready_to_write.poll(200)
            except OSError:
                self.gone = True
        self._waiting = b""

    def read(self, seconds: float | None) -> bytes:
        """What was typed, waiting `seconds` at the most for it, None: until something is; nothing also after `wake` and
        when the terminal is gone."""
        if self.gone or not (ready := self._ready_to_read.poll(None if seconds is None else seconds * 1000)):
            return b""
        if any(descriptor == self._woken for descriptor, _ in ready):
            os.read(self._woken, 1)
            return b""
        try:
            data = os.read(self._fd, 4096)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self.gone = self.gone or not data
        return data

    def wake(self) -> None:
        """Have the `read` that waits in another thread, or the next one, return at once."""
        os.write(self._waking, b"!")

    def give_up(self) -> None:
        """Stop waiting for a terminal that takes nothing: what waits for it is dropped."""
        self._given_up = True

    def restore(self) -> None:
        """Give the shell's screen, modes and line discipline back, also where the driver could not."""
        with contextlib.suppress(OSError, termios.error):
            if os.tcgetpgrp(self._fd) != os.getpgrp():
                return
            if self._given_up:
                termios.tcflush(self._fd, termios.TCOFLUSH)  # makes room where nobody reads
            if self._given_up or self.taken:
                os.write(self._fd, TO_SHELL.encode())
            termios.tcsetattr(self._fd, termios.TCSANOW, self._attributes)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self._fd, self._woken, self._waking):
            os.close(descriptor)


def open_terminal() -> Terminal | None:
    """The terminal, where a dashboard can be drawn: stdout is it, it is not dumb, and we are in the foreground."""
    if os.environ.get("TERM", "dumb") == "dumb" or not os.isatty(1):
        return None
    try:
        terminal = Terminal()
    except (OSError, termios.error):
        return None
    if os.tcgetpgrp(terminal.fileno()) == os.getpgrp():
        return terminal
    terminal.close()
    return None
