"""What connects the trainer with whoever watches it: records one way, commands the other.

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import threading
from collections import deque

from tui3090.commands import Change, Command, Stop, Withdraw
from tui3090.gains import Gains
from tui3090.records import Phases, Reading, Record, StepRecord
from tui3090.runlog import RunLog

MAILBOX = 64
"""Commands from other processes that wait at the most."""
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
        """Set while nobody can press a key: training that would pause by itself ends instead."""
        self._screen = True
        self._viewers = 0

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

    def offer(self, command: Command) -> bool:
        """Leave a command from another process. False: so many wait already that it is not taken."""
        with self._lock:
            if len(self._waiting) >= MAILBOX:
                return False
        self.send(command)
        return True

    def leave_unattended(self, seen: bool = False) -> None:
        """From here on this process has no screen; a trainer that is paused looks whether somebody is left.

        Unless the pause was `seen` by who closed the screen: then it stays one.
        """
        with self._lock:
            self._screen = False
            self._judge()
            if not seen:
                self.arrived.set()

    def attend(self, viewers: int) -> None:
        """So many screens of other processes can send commands. A pause that the last of them saw stays one."""
        with self._lock:
            self._viewers = viewers
            self._judge()

    def _judge(self) -> None:
        if self._screen or self._viewers:
            self.unattended.clear()
        else:
            self.unattended.set()

    def take(self) -> list[Command]:
        """All that waits, oldest first."""
        with self._lock:
            taken, self._waiting = self._waiting, []
            self.arrived.clear()
            return taken


class Outlet:
    """Takes the trainer's and the poller's records to the run log, which loses nothing, and to a watcher.

    The watcher's queue is bounded: step records and readings that it had no time for are dropped, oldest first, so that
    a stalled terminal never holds training or the log. Other records are few and are kept. The gains that the records
    complete are records too, so that a run without a screen has them in its log.
    """

    def __init__(self, log: RunLog | None = None) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, Record]] = deque()
        self._repeating: deque[tuple[int, Record]] = deque(maxlen=QUEUED)
        self._count = 0
        self._gains = Gains()
        if log is not None:
            log.tell = self._show

    def emit(self, record: Record) -> None:
        """Pass a record on, and the gain that it completes; never waits for long."""
        with self._lock:
            gain = self._gains.absorb(record)
            for each in (record, gain):
                if each is not None:
                    if self._log is not None:
                        self._log.put(each)
                    self._queue(each)

    def _show(self, record: Record) -> None:
        """Pass on what the log itself has to tell."""
        with self._lock:
            self._queue(record)

    def _queue(self, record: Record) -> None:
        self._count += 1
        queue = self._repeating if isinstance(record, (StepRecord, Reading, Phases)) else self._kept
        queue.append((self._count, record))

    def drain(self) -> list[Record]:
        """The records since the last call, in the order in which they were emitted."""
        with self._lock:
            records = sorted([*self._kept, *self._repeating], key=lambda numbered: numbered[0])
            self._kept.clear()
            self._repeating.clear()
        return [record for _, record in records]
