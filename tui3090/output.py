"""Where what training prints goes: output.log, and from there to the log pane.

Descriptors 1 and 2 lead to the file itself, opened for append, not through a pipe: what a native library, a loader
worker or a dying process writes last is in the file, and nothing of it reaches the screen.

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import faulthandler
import io
import os
import re
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tui3090.files import open_regular

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*.?", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def plain(text: str) -> str:
    """`text` for one line of a terminal: escape codes removed, line ends and tabs as blanks, other controls as '·'."""
    return _CONTROL.sub("·", re.sub(r"[\r\n\t]+", " ", _ESCAPE.sub("", text)))


class OutputLog:
    """Sends descriptors 1 and 2, sys.stdout and sys.stderr to `path` while the context lasts, and stdin to nothing.

    Training that reads the terminal would take the dashboard's keys, so it reads an empty file instead.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: list[int] = []
        self.problem = ""
        """Why what was printed last is lost, a sentence; empty: it is written."""
        self.lost = 0
        """Bytes that Python printed and the disk did not take."""

    @property
    def stdout(self) -> int:
        """The descriptor that standard output was before."""
        return self._before[1]

    def __enter__(self) -> OutputLog:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        self._streams_before = sys.stdin, sys.stdout, sys.stderr
        log = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        self._before = [os.dup(number) for number in (0, 1, 2)]
        for number, target in enumerate((nothing, log, log)):
            os.dup2(target, number)
        os.close(log)
        os.close(nothing)
        self._streams = open(0, encoding="utf-8", closefd=False), self._line_buffered(1), self._line_buffered(2)
        self.take_streams()
        faulthandler.enable(file=2)  # an abort's or a segmentation fault's last words
        return self

    def let_go(self) -> None:
        """Put nothing in the place of what the descriptors were before: the terminal is left to others."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for before in self._before:
            os.dup2(nothing, before, inheritable=False)
        os.close(nothing)

    def take_streams(self) -> None:
        """Make sys.stdout and sys.stderr real files over the descriptors, as subprocesses and workers need them.

        Textual puts objects without a descriptor in their place when it starts: call this again after that.
        """
        sys.stdin, sys.stdout, sys.stderr = self._streams

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        faulthandler.disable()
        for stream in self._streams[1:]:
            stream.flush()
        for number, before in enumerate(self._before):
            os.dup2(before, number)
            os.close(before)
        sys.stdin, sys.stdout, sys.stderr = self._streams_before

    def _line_buffered(self, descriptor: int) -> TextIO:
        raw = io.BufferedWriter(_Lenient(descriptor, self))
        return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)


class _Lenient(io.FileIO):
    """A descriptor that a full disk does not make fail: a `print` in a dataset must not end training."""

    def __init__(self, descriptor: int, log: OutputLog) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._log = log

    def write(self, data: Any, /) -> int:
        """Write what the disk takes, and say that all of it was."""
        try:
            written = super().write(data)
        except OSError as error:
            written = memoryview(data).nbytes
            self._log.lost += written
            self._log.problem = f"output.log can't be written: {error.strerror}. What is printed is lost."
        else:
            self._log.problem = ""
        return written


class Tail:
    """Follows output.log for the log pane."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self.unfinished = ""
        """The line that is being written: of a progress bar its newest state."""

    def read(self, most: int = 65536) -> list[str]:
        """The lines that were finished since the last call, without escape codes; of a progress bar its last state.

        When more than `most` bytes came, the oldest of them are left out, and the first line says so.
        """
        try:
            if self._path.stat().st_size == self._offset:  # mostly; opening it takes ten times as long
                return []
            with open_regular(self._path) as file:
                size = file.seek(0, os.SEEK_END)
                left_out = max(0, size - self._offset - most)
                file.seek(self._offset + left_out)
                block = file.read(most)
        except OSError:
            return []
        if not block:
            return []
        self._offset += left_out + len(block)
        if left_out:
            self._rest = b""
            block = block[block.find(b"\n") + 1 :]
        *lines, self._rest = (self._rest + block).split(b"\n")
        # a progress bar may write for hours without a line end: only its newest state is kept
        self._rest = self._rest[max(0, self._rest.rstrip(b"\r").rfind(b"\r")) :][-most:]
        self.unfinished = _last_state(self._rest)
        notice = [f"… {left_out:,} bytes left out here: they are in {self._path.name}"] if left_out else []
        return notice + [_last_state(line) for line in lines]


def _last_state(line: bytes) -> str:
    """What a terminal would show of a line in which carriage returns start it again."""
    states = [state for state in line.split(b"\r") if state]
    return plain(states[-1].decode("utf-8", "replace")) if states else ""
