"""A run that is over turns into `tui3090 show` of itself, which holds nothing on the card, not even a CUDA context."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import tui3090
from tui3090.dashboard.first_paint import first_paint
from tui3090.dashboard.terminal import Terminal
from tui3090.dashboard.view import View
from tui3090.guardian import HELD_BACK
from tui3090.output import plain

START = "import sys; sys.path.append(sys.argv.pop(1)); from tui3090.cli import main; sys.exit(main())"
"""With the folder that this package lies in as first argument: python -m would look in the working directory first."""


def become_show(terminal: Terminal, view: View, folder: Path, status: int) -> None:
    """Replace this process by `tui3090 show` of `folder` on the same terminal, with the run's exit status.

    The terminal's title says how the run ended. Returns only where the process can't be replaced.
    """
    import multiprocessing  # not at the top, where the first paint would wait for it

    terminal.title(f"tui3090: {plain(view.name)} {view.state.state}")
    first_paint(terminal, view)  # the new process needs a moment: nobody should see the shell meanwhile
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # ctrl+c waits until the new process can note it
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    root = str(Path(tui3090.__file__).parents[1])
    try:
        os.execv(
            sys.executable, [sys.executable, "-P", "-c", START, root, "show", "--status", str(status), str(folder)]
        )
    except OSError:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
