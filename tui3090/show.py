"""`tui3090 show`: the dashboard on a run folder, without torch."""

from __future__ import annotations

import threading

from tui3090.dashboard.terminal import open_terminal
from tui3090.dashboard.view import View
from tui3090.headless import PlainOutput
from tui3090.runlog import RecordReader, RunFolder
from tui3090.signals import Interrupts
from tui3090.summary import summary

HUNG_UP = 129
"""128 + SIGHUP."""
LONGEST_NAME = 200
"""Characters of a run's name that are shown."""


def name_of(folder: RunFolder) -> str:
    """The run's name by its run.json, else the folder's."""
    name = folder.read_info().get("name")
    return name[:LONGEST_NAME] if isinstance(name, str) else folder.path.name


def show(folder: RunFolder) -> int:
    """Show the run until the user leaves; without a terminal print its summary. The exit status."""
    view = View(name=name_of(folder), folder=str(folder.path), live=False)
    terminal = open_terminal()
    if terminal is None:
        reader = RecordReader(folder.records)
        while not reader.at_end:
            view.absorb(reader.read())
        out = PlainOutput(1)
        for line in summary(view):
            out.say(line, patience_s=1.0)
        return 0

    from tui3090.dashboard.app import Dashboard
    from tui3090.dashboard.driver import run_on
    from tui3090.dashboard.source import FolderSource

    interrupts = Interrupts()
    app = Dashboard(FolderSource(folder), view)
    left = threading.Event()

    def leave_when_told() -> None:
        while not left.wait(0.1):
            if interrupts.first is not None:
                app.exit()
                return

    threading.Thread(target=leave_when_told, name="watch", daemon=True).start()
    try:
        run_on(terminal, app)
    finally:
        left.set()
        terminal.close()
    if interrupts.first is not None:
        return 128 + interrupts.first
    return HUNG_UP if terminal.gone else app.return_code or 0
