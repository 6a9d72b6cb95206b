"""Textual's driver on a terminal of our own.

Textual draws on stderr and reads stdin, and both block: a terminal that takes no more would freeze the screen's thread,
signals included. This one draws on a `Terminal`, leaves frames out while it does not keep up, and closes the app when
it is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
import threading
from codecs import getincrementaldecoder
from typing import Any, ClassVar

from textual._xterm_parser import XTermParser
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver

from tui3090.dashboard.terminal import Terminal

WAITING = 16
"""Of the 30 writes that Textual's queue takes: with more of them waiting, frames are left out."""
LEAVING_S = 1.0
"""How long a terminal that takes nothing holds up leaving."""


class Leaving(threading.Event):
    """Whether the thread that reads should end; set, it does at once."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def set(self) -> None:
        """Wake it, so that it sees it."""
        super().set()
        self._terminal.wake()


class TerminalDriver(LinuxDriver):
    """Textual's driver, drawing on and reading from a `Terminal`."""

    terminal: ClassVar[Terminal]

    def __init__(self, app: App[Any], **options: Any) -> None:
        super().__init__(app, **options)
        self._file = self.terminal  # type: ignore[assignment]
        self.exit_event = Leaving(self.terminal)
        self.fileno = self.terminal.fileno()
        self.input_tty = True
        self._size = self.terminal.size()  # else Textual guesses from descriptors that are no terminal here
        self._left_out = False
        # ctrl+z would stop training, so it is no key; a stop from outside is the kernel's business alone
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        signal.signal(signal.SIGCONT, self._continued)

    def start_application_mode(self) -> None:
        """Take the screen."""
        super().start_application_mode()  # type: ignore[no-untyped-call]
        self.terminal.taken = False  # Textual gives it back
        # moved to the background, reading gives an error (and training goes on without a screen) instead of a stop
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self._raw = termios.tcgetattr(self.fileno)

    def stop_application_mode(self) -> None:
        """Give the screen back, without waiting long for a terminal that takes nothing."""
        self._giving_up = threading.Timer(LEAVING_S, self.terminal.give_up)
        self._giving_up.daemon = True
        self._giving_up.start()
        if self.terminal.gone:
            self.attrs_before = None  # it may be another's foreground by now
        super().stop_application_mode()

    def close(self) -> None:
        """Wait until the last bytes are written, or dropped."""
        super().close()
        self._giving_up.cancel()
        for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
            signal.signal(number, signal.SIG_DFL)

    def write(self, data: str) -> None:
        """Queue output. While the terminal does not keep up it is dropped, and all is painted again afterwards."""
        assert self._writer_thread is not None
        waiting = self._writer_thread._queue.qsize()
        if waiting > WAITING:
            self._left_out = True
            return
        if self._left_out and not waiting:
            self._left_out = False
            self._app.call_later(self._app.refresh)
        super().write(data)

    def run_input_thread(self) -> None:
        """Pass on what is typed until the screen is given back or the terminal is gone, which closes the app."""
        parser = XTermParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        while not self.exit_event.is_set():
            # only a sequence that has begun may time out; at other times waking up would cost as much as a frame
            data = self.terminal.read(0.1 if parser._timeout_time is not None else None)
            if self.terminal.gone:
                self._app.exit()
                return
            for message in parser.feed(decode(data)) if data else ():
                self.process_message(message)
            for message in parser.tick():
                self.process_message(message)

    def _get_terminal_size(self) -> tuple[int, int]:
        return self.terminal.size()

    def _continued(self, *_: object) -> None:
        """After a stop from outside: the shell may have used the screen meanwhile."""
        with contextlib.suppress(OSError, termios.error):
            if os.tcgetpgrp(self.fileno) == os.getpgrp():
                termios.tcsetattr(self.fileno, termios.TCSANOW, self._raw)
        self._loop.call_soon_threadsafe(self.write, "\x1b[?1049h\x1b[?25l\x1b[2J")
        self._loop.call_soon_threadsafe(self._app.refresh)


def run_on(terminal: Terminal, app: App[Any]) -> None:
    """Run `app` on `terminal` until it exits or the terminal is gone. Sets `terminal.gone` in the latter case."""
    app.driver_class = type("Driver", (TerminalDriver,), {"terminal": terminal})
    try:
        app.run(mouse=False)
    finally:
        terminal.restore()
