"""Where the dashboard's records come from and where its commands go: a run in this process, or a run folder."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import psutil

from tui3090.link import Commands, Outlet
from tui3090.records import OVER, Command, Record, State
from tui3090.runlog import RecordReader, RunFolder, RunFolderError

LOOK = "This is a look at a run folder: keys act in the terminal where the run is."
CHUNK = 256 << 10
"""Bytes of records.jsonl read at a time: some ten milliseconds of work."""
CHUNKS = 8
"""Read ahead of the screen at the most."""
LOOK_AGAIN_S = 0.25
"""Between two looks at a file that may grow."""
WITHOUT_A_WORD = "It ended without a word: the process is gone; output.log may say why."


class Source(Protocol):
    """What stands behind the screen."""

    live: bool
    """Whether training goes on in this process: then what the screen costs is governed."""
    read_only: str
    """Why keys don't act on training, a sentence; empty: they do."""

    def start(self) -> None:
        """Begin; called once, after the first paint."""

    def drain(self) -> list[Record]:
        """The records since the last call, oldest first; never waits."""

    def send(self, command: Command) -> None:
        """Pass a command on to the trainer."""


class LiveSource:
    """A run in this process; `start` starts its trainer thread."""

    live = True
    read_only = ""

    def __init__(self, outlet: Outlet, commands: Commands, start: Callable[[], None]) -> None:
        self._outlet = outlet
        self._commands = commands
        self._start = start

    def start(self) -> None:
        """Start the trainer."""
        self._start()

    def drain(self) -> list[Record]:
        """What the trainer and the poller emitted."""
        return self._outlet.drain()

    def send(self, command: Command) -> None:
        """Leave the command in the trainer's mailbox."""
        self._commands.send(command)


class FolderSource:
    """A run folder, read by a thread of its own from its start and on as it grows, until the run is over."""

    live = False
    read_only = LOOK

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._chunks: queue.Queue[list[Record]] = queue.Queue(CHUNKS)
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to read."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()

    def drain(self) -> list[Record]:
        """What was read since the last call."""
        records: list[Record] = []
        for _ in range(CHUNKS):
            try:
                records += self._chunks.get_nowait()
            except queue.Empty:
                break
        return records

    def send(self, command: Command) -> None:
        """Nothing: it is a look."""

    def close(self) -> None:
        """End the reading thread."""
        self._closed.set()

    def _read(self) -> None:
        reader = RecordReader(self._folder.records)
        state: State | None = None
        last_time = 0.0
        given_up = mistaken = False
        while not self._closed.is_set():
            # asked before reading: what a process wrote before it went is read before it is called gone
            lives = writer_lives(self._folder)
            records = reader.read(CHUNK)
            if records:
                last_time = records[-1].time
                state = next((r for r in reversed(records) if isinstance(r, State)), state)
                if given_up:
                    # it was not gone after all, but on another machine: from now on it is only waited for
                    records = [*([state] if state else []), *records]
                    given_up, mistaken = False, True
                self._put(records)
            elif not reader.at_end:
                continue
            elif state is not None and state.state in OVER:
                return
            elif not lives and not given_up and not mistaken:
                given_up = True
                self._put([State(time=last_time, state="failed", detail=WITHOUT_A_WORD)])
            else:
                self._closed.wait(LOOK_AGAIN_S)

    def _put(self, records: list[Record]) -> None:
        while not self._closed.is_set():
            try:
                self._chunks.put(records, timeout=LOOK_AGAIN_S)
                return
            except queue.Full:
                continue


def writer_lives(folder: RunFolder) -> bool:
    """Whether the process that run.json names still runs on this machine."""
    try:
        info: dict[str, Any] = folder.read_info()
        pid, started = info.get("pid"), info.get("pid_started")
        if not isinstance(pid, int) or not isinstance(started, (int, float)):
            return False
        # a process number is given again: the time it started tells them apart
        return bool(abs(psutil.Process(pid).create_time() - started) < 1.0)
    except (RunFolderError, psutil.Error, ValueError, OverflowError):
        return False
