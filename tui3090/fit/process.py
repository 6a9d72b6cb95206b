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
from collections.abc import Callable
from typing import Any

from tui3090.recipe import harmless

PATIENCE_S = 600.0
"""How long a cell may take until it is given up."""
TICK_S = 0.5
"""Between two looks at the clock while waiting."""

# the child finds modules where this process does, whatever lies in the working directory
CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from tui3090.fit.cell import main; main(int(sys.argv[1]))"


class CellDied(Exception):
    """The process ended without an answer; the text says how, a harmless sentence."""


def ask(wanted: dict[str, Any], tick: Callable[[], None], patience_s: float = PATIENCE_S) -> dict[str, Any]:
    """Start a process, ask it, and wait for its answer. `tick` is called now and then meanwhile.

    The process and its workers are gone afterwards, however this ends. Raises CellDied.
    """
    read, write = os.pipe()
    with tempfile.TemporaryFile() as printed, os.fdopen(read, "rb", buffering=0) as pipe:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(write), json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                start_new_session=True,  # ctrl+c is this process's matter
            )
        finally:
            os.close(write)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died at once: what it said tells why
                process.stdin.write((json.dumps(wanted) + "\n").encode())
                process.stdin.flush()
            answer = _answer(process, pipe.fileno(), tick, time.monotonic() + patience_s)
            if answer is None and process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)  # it closed the pipe, and is about to end
            if answer is None:
                raise CellDied(_how_it_ended(process.poll(), printed, patience_s))
            return answer
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]


def _answer(
    process: subprocess.Popen[bytes], pipe: int, tick: Callable[[], None], until: float
) -> dict[str, Any] | None:
    """What comes on the pipe; None: the process ended without a whole line, or the time is up."""
    got = b""
    while time.monotonic() < until:
        if select.select([pipe], [], [], TICK_S)[0]:
            part = os.read(pipe, 1 << 16)
            got += part
            if got.endswith(b"\n"):
                answer: dict[str, Any] = json.loads(got)
                return answer
            if not part:
                return None
        elif process.poll() is not None:  # a worker that outlives it holds the pipe open
            return None
        tick()
    return None


def _how_it_ended(status: int | None, printed: Any, patience_s: float) -> str:
    if status is None:
        return f"no answer within {patience_s:.0f} s"
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        why = ": mostly the machine's memory ran out" if status == -signal.SIGKILL else ""
        return f"its process was ended by {name}{why}"
    printed.seek(0)
    said = [line for line in printed.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return f"its process ended with status {status}" + (f": {harmless(said[-1])}" if said else "")
