"""A process for one cell: what it is asked goes in as JSON, what it measured comes back, and nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from tui3090.recipe import harmless

PATIENCE_S = 600.0
"""How long a cell may take until it is given up."""
TICK_S = 0.5
"""Between two looks at the clock while waiting."""

# the child finds modules where this process does, whatever lies in the working directory
CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from tui3090.fit.cell import main
main(int(sys.argv[1]))
"""


class CellDied(Exception):
    """The process ended without an answer; the text says how, a harmless sentence."""


class Child:
    """A process that has begun to import torch, and what else will be needed, and answers one question."""

    def __init__(self, imports: Sequence[str]) -> None:
        read, write = os.pipe()
        self._pipe = os.fdopen(read, "rb", buffering=0)
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(write), json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                start_new_session=True,  # ctrl+c is this process's matter
            )
        finally:
            os.close(write)
        self._tell(list(imports))

    def ask(self, wanted: dict[str, Any]) -> None:
        """Ask the question."""
        self._tell(wanted)

    def _tell(self, what: dict[str, Any] | list[str]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: what it said tells why
            self._process.stdin.write((json.dumps(what) + "\n").encode())
            self._process.stdin.flush()

    def answer(self, tick: Callable[[], None], patience_s: float) -> dict[str, Any]:
        """Wait for the answer; `tick` is called now and then meanwhile. Raises CellDied."""
        got, until = b"", time.monotonic() + patience_s
        while time.monotonic() < until:
            if select.select([self._pipe], [], [], TICK_S)[0]:
                part = self._pipe.read(1 << 16)
                got += part
                if got.endswith(b"\n"):
                    answer: dict[str, Any] = json.loads(got)
                    return answer
                if not part:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(1.0)  # it closed the pipe, and is about to end
                    break
            elif self._process.poll() is not None:  # a worker that outlives it holds the pipe open
                break
            tick()
        raise CellDied(self._how_it_ended(patience_s))

    def end(self) -> None:
        """The process and its workers are gone afterwards; may be called again where it was interrupted."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._pipe.close()
        self._printed.close()

    def _how_it_ended(self, patience_s: float) -> str:
        status = self._process.poll()
        if status is None:
            return f"no answer within {patience_s:.0f} s"
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
            why = ": mostly the machine's memory ran out" if status == -signal.SIGKILL else ""
            return f"its process was ended by {name}{why}"
        self._printed.seek(0)
        said = [line for line in self._printed.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return f"its process ended with status {status}" + (f": {harmless(said[-1])}" if said else "")


class Processes:
    """Asks one process after another; every one is gone when the `with` is left, however that happens."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.ahead = False
        """Whether the next process is started while one measures, so that torch is imported when it is wanted. It does
        not touch the card before it is asked; where cores are few it would slow the measurement."""
        self.imports: Sequence[str] = ()
        """What the next processes import besides, before they are asked."""
        self._patience_s = patience_s
        self._children: list[Child] = []
        """The one that is asked, and the next."""

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._children:
            self._children[-1].end()
            self._children.pop()

    def ask(self, wanted: dict[str, Any], tick: Callable[[], None]) -> dict[str, Any]:
        """The answer of a process of its own, which is gone afterwards. Raises CellDied."""
        if not self._children:
            self._children.append(Child(self.imports))
        child = self._children[0]
        child.ask(wanted)
        if self.ahead:
            self._children.append(Child(self.imports))
        try:
            return child.answer(tick, self._patience_s)
        finally:
            child.end()
            self._children.remove(child)
