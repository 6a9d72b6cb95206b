"""Where the dashboard's records come from and where its commands go: a run in this process, or a run folder."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil

from tui3090.commands import Command
from tui3090.link import Commands, Outlet
from tui3090.records import OVER, Event, Record, State
from tui3090.remote import Remote, RemoteError
from tui3090.runlog import RecordReader, RunFolder, RunFolderError

LOOK = "This is a look at a run folder: keys act in the terminal where the run is."
CHUNK = 256 << 10
"""Bytes of records.jsonl read at a time: some ten milliseconds of work."""
CHUNKS = 8
"""Read ahead of the screen at the most."""
LOOK_AGAIN_S = 0.25
"""Between two looks at a file that may grow."""
ATTACHED_S = 0.1
"""Likewise where keys act on the run: they should show their effect soon."""
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

    def __init__(self, folder: RunFolder, look_again_s: float = LOOK_AGAIN_S) -> None:
        self._folder = folder
        self._look_again_s = look_again_s
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
            elif state is not None and state.state in OVER and not lives:  # else it was resumed
                return
            elif not lives and not given_up and not mistaken:
                given_up = True
                self._put([State(time=last_time, state="failed", detail=WITHOUT_A_WORD)])
            else:
                self._closed.wait(self._look_again_s)

    def _put(self, records: list[Record]) -> None:
        while not self._closed.is_set():
            try:
                self._chunks.put(records, timeout=LOOK_AGAIN_S)
                return
            except queue.Full:
                continue


class AttachedSource:
    """A run in another process of this machine: its records from its folder, commands over its socket."""

    live = False
    read_only = ""

    def __init__(self, folder: RunFolder, remote: Remote) -> None:
        self._looked = FolderSource(folder, ATTACHED_S)
        self._remote = remote
        self._problems: list[str] = []

    def start(self) -> None:
        """Begin to read."""
        self._looked.start()

    def drain(self) -> list[Record]:
        """What was read since the last call, and what the run refused."""
        problems = self._problems + self._remote.errors()
        self._problems = []
        said = [Event(time=time.time(), level="warning", source="key", text=problem) for problem in problems]
        return [*self._looked.drain(), *said]

    def send(self, command: Command) -> None:
        """Send the command to the run."""
        try:
            self._remote.send(command)
        except RemoteError as error:
            self._problems.append(str(error))

    def close(self) -> None:
        """Leave the run to itself."""
        self._looked.close()
        self._remote.close()


def source_of(folder: RunFolder) -> tuple[FolderSource | AttachedSource, str]:
    """What stands behind a run folder: attached to a live run of this user; of one that can't be attached also why."""
    if not writer_lives(folder):
        return FolderSource(folder), ""
    path = folder.read_info().get("socket")
    if not isinstance(path, str) or not os.path.isabs(path):
        return FolderSource(folder), "This run has no socket: keys act in the terminal where it is."
    try:
        return AttachedSource(folder, Remote(Path(path), folder.path)), ""
    except RemoteError as error:
        return FolderSource(folder), str(error)


def writer_lives(folder: RunFolder) -> bool:
    """Whether the process that run.json names still runs on this machine, and the run is not over."""
    try:
        info: dict[str, Any] = folder.read_info()
        pid, started = info.get("pid"), info.get("pid_started")
        if info.get("exit_status") is not None:
            return False  # it may have turned into a look at itself
        if not isinstance(pid, int) or not isinstance(started, (int, float)):
            return False
        # a process number is given again: the time it started tells them apart
        return bool(abs(psutil.Process(pid).create_time() - started) < 1.0)
    except (RunFolderError, psutil.Error, ValueError, OverflowError):
        return False
