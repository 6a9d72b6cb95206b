"""What connects the trainer with whoever watches it: records one way, commands the other.

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import threading
from collections import deque

from tui3090.records import Change, Command, Reading, Record, StepRecord, Stop, Withdraw
from tui3090.runlog import RunLog

QUEUED = 4096
"""Step records and readings that wait for the dashboard at the most; older ones are dropped."""


class Commands:
    """The trainer's mailbox. Any thread sends; the trainer takes all of it at a window's start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Command] = []
        self.arrived = threading.Event()
        """Set while something waits, for a trainer that is paused."""
        self.stop = threading.Event()
        """Set once a stop was asked for: evaluation ends early."""
        self.stop_now = threading.Event()
        """Set once the window in flight may be abandoned."""
        self.saving = threading.Event()
        """Set while a save is being written: whoever leaves waits for it."""
        self.unattended = threading.Event()
        """Set once nobody can press a key: training that would pause by itself ends instead."""

    def send(self, command: Command) -> None:
        """Leave a command; a change takes the place of an earlier one of the same technique."""
        if isinstance(command, Stop):
            self.stop.set()
            if command.now:
                self.stop_now.set()
        with self._lock:
            if isinstance(command, (Change, Withdraw)):
                self._waiting = [
                    c for c in self._waiting if not (isinstance(c, Change) and c.technique == command.technique)
                ]
            if not isinstance(command, Withdraw):
                self._waiting.append(command)
            self.arrived.set()

    def leave_unattended(self) -> None:
        """From here on nobody can press a key; a trainer that is paused looks again."""
        with self._lock:
            self.unattended.set()
            self.arrived.set()

    def take(self) -> list[Command]:
        """All that waits, oldest first."""
        with self._lock:
            taken, self._waiting = self._waiting, []
            self.arrived.clear()
            return taken


class Outlet:
    """Takes the trainer's and the poller's records to the run log, which loses nothing, and to a watcher.

    The watcher's queue is bounded: step records and readings that it had no time for are dropped, oldest first, so that
    a stalled terminal never holds training or the log. Other records are few and are kept.
    """

    def __init__(self, log: RunLog | None = None) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, Record]] = deque()
        self._repeating: deque[tuple[int, Record]] = deque(maxlen=QUEUED)
        self._count = 0
        if log is not None:
            log.tell = self._pass_on

    def emit(self, record: Record) -> None:
        """Pass a record on; never waits."""
        if self._log is not None:
            self._log.put(record)
        self._pass_on(record)

    def _pass_on(self, record: Record) -> None:
        with self._lock:
            self._count += 1
            queue = self._repeating if isinstance(record, (StepRecord, Reading)) else self._kept
            queue.append((self._count, record))

    def drain(self) -> list[Record]:
        """The records since the last call, in the order in which they were emitted."""
        with self._lock:
            records = sorted([*self._kept, *self._repeating], key=lambda numbered: numbered[0])
            self._kept.clear()
            self._repeating.clear()
        return [record for _, record in records]
