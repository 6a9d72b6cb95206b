"""`--notify CMD`: a command of the user's that hears of the run's end, of the first nan, of a pause and of a stall.

It runs by the shell, with the facts in its environment and its output in output.log, and training never waits for it.
This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import math
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tui3090.output import plain
from tui3090.records import Event, Record, State, StepRecord
from tui3090.runlog import RunFolder

EVENTS = ("finished", "failed", "nan", "paused", "stall")
"""What TUI3090_EVENT may be. The other facts are TUI3090_RUN (the folder), _NAME, _STEP, _LOSS and _DETAIL."""
STALLED_S = 120.0
"""Without a step for so long, and for `STALLED_STEPS` times as long as a step took, training stalls."""
STALLED_STEPS = 10
PATIENCE_S = 60.0
"""How long a command is waited for before the next one starts; nothing else waits for it."""


def start(
    command: str, folder: Path, name: str, event: str, step: int | None, loss: float | None, detail: str
) -> subprocess.Popen[bytes]:
    """Run the command beside the run, in a session of its own so that it outlives it. Raises OSError.

    What is not known (None) is empty in its environment.
    """
    facts = {
        "TUI3090_EVENT": event,
        "TUI3090_RUN": str(folder),
        "TUI3090_NAME": plain(name),
        "TUI3090_STEP": "" if step is None else str(step),
        "TUI3090_LOSS": "" if loss is None else f"{loss:.6g}",
        "TUI3090_DETAIL": plain(detail),
    }
    with RunFolder(folder).output.open("ab") as output:
        return subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **facts},
            start_new_session=True,
        )


class Notifier:
    """Looks at the records of a run and starts `command` from a thread of its own. `say` takes what went wrong."""

    def __init__(
        self, command: str, folder: Path, name: str, say: Callable[[Record], None], stalled_s: float = STALLED_S
    ) -> None:
        self._command = command
        self._folder = folder
        self._name = name
        self._say = say
        self._stalled_s = stalled_s
        self._due: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._closing = False
        self._state = ""
        self._step, self._pace = 0, 0.0
        self._loss: float | None = None
        self._moved = time.monotonic()
        """When something last went on."""
        self._nan_told = self._stall_told = False
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        self._thread.start()

    def look(self, record: Record) -> None:
        """Take a record; never waits."""
        if isinstance(record, StepRecord):
            self._step, self._loss = record.step, record.loss
            self._pace += 0.1 * (record.seconds - self._pace)
            self._moved, self._stall_told = time.monotonic(), False
            if not self._nan_told and (
                record.skipped == "not finite" or (not record.skipped and math.isnan(record.loss))
            ):
                self._nan_told = True
                self._due.put(("nan", "the loss or its gradient is not finite"))
        elif isinstance(record, State):
            self._state, self._moved = record.state, time.monotonic()
            if record.state in ("finished", "failed") or (record.state == "paused" and record.detail):
                self._due.put((record.state, record.detail))

    def close(self) -> None:
        """Start what is due still; what runs goes on without us."""
        self._closing = True
        self._due.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        every = self._stalled_s / 4
        while True:
            asked = time.monotonic()
            try:
                due = self._due.get(timeout=every)
            except queue.Empty:
                if time.monotonic() - asked > 2 * every:
                    self._moved = time.monotonic()  # the whole process stood still: SIGSTOP
                due = self._stall()
                if due is None:
                    continue
            if due is None:
                return
            self._tell(*due)

    def _stall(self) -> tuple[str, str] | None:
        """The event of a stall that nobody was told of yet."""
        stood = time.monotonic() - self._moved
        limit = max(self._stalled_s, STALLED_STEPS * self._pace)
        if self._state != "training" or not self._step or self._stall_told or stood < limit:
            return None
        self._stall_told = True
        return "stall", f"no step for {stood:.0f} s; one took {self._pace:.3g} s"

    def _tell(self, event: str, detail: str) -> None:
        try:
            started = start(self._command, self._folder, self._name, event, self._step, self._loss, detail)
            end = time.monotonic() + PATIENCE_S
            while started.poll() is None and time.monotonic() < end and not self._closing:
                time.sleep(0.05)
            problem = f"ended with status {started.returncode}" if started.returncode else ""
        except OSError as error:
            problem = f"can't be run: {error.strerror}"
        if problem:
            text = f"--notify for {event!r} {problem}; output.log has what it said"
            self._say(Event(time=time.time(), level="warning", source="run", text=text))
