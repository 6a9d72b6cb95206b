"""`tui3090 show`: the dashboard on a run, without torch: at its end, or live and with its keys."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tui3090.compare import LETTERS, table
from tui3090.dashboard.curve import Other
from tui3090.dashboard.others import read_last_run, read_others
from tui3090.dashboard.terminal import open_terminal
from tui3090.dashboard.view import View
from tui3090.headless import PlainOutput
from tui3090.output import plain
from tui3090.records import Event
from tui3090.runlog import RecordReader, RunFolder, RunFolderError
from tui3090.runplan import near, resume_command
from tui3090.signals import Interrupts
from tui3090.summary import ending, summary

HUNG_UP = 129
"""128 + SIGHUP."""
GARBAGE = 50_000
"""Objects between two collections: a hundred thousand records are read, and few of them are in cycles."""
LONGEST_NAME = 200
"""Characters of a run's name that are shown."""
LONGEST_PATH = 4096
"""Likewise of its train.py's path: the system takes no more."""


def name_of(folder: RunFolder) -> str:
    """The run's name by its run.json, else the folder's."""
    name = folder.read_info().get("name")
    return name[:LONGEST_NAME] if isinstance(name, str) else folder.path.name


def find(run: Path | None) -> RunFolder:
    """The folder `run`, or this user's newest live run, or else the newest under runs/. Raises RunFolderError."""
    if run is None:
        from tui3090.remote import live_runs

        for live in live_runs():
            try:
                return RunFolder.find(live)
            except RunFolderError:
                continue  # another machine's, or removed
    return RunFolder.find(run)


def show(folders: Sequence[RunFolder], status: int | None = None) -> int:
    """Show the first run until the user leaves, with the losses of the others; the exit status.

    Without a terminal print its summary, or a table of several. `status` is that of a run which has turned
    into its own show: it ends with it, and says how it went.
    """
    interrupts = Interrupts()
    gc.set_threshold(GARBAGE)
    folder, *others = folders
    terminal = open_terminal()
    if terminal is None:
        views = [view_at_end(each) for each in folders]
        _say(table(views) if others else summary(views[0]))
        return status or 0
    view = view_of(folder)
    if others:
        view.name = folder.path.name
        view.others = [Other(letter, each.path.name) for letter, each in zip(LETTERS[1:], others)]
        read_others(list(zip(view.others, others)))
    else:
        read_last_run(folder.path, folder.read_info(), view.others, rest_s=0.0)
    from tui3090.dashboard.app import Dashboard
    from tui3090.dashboard.driver import run_on
    from tui3090.dashboard.source import AttachedSource, source_of

    source, problem = source_of(folder)
    view.live = isinstance(source, AttachedSource)
    if problem:
        view.absorb([Event(time=time.time(), level="warning", source="key", text=problem)])
    app = Dashboard(source, view)
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
        source.close()
        if status is not None:
            terminal.title_back()
        terminal.close()
    if status is not None or view.stop_asked:
        # it may have been left before all was read
        _say(ending(view if view.over else view_at_end(folder), folder.output))
    elif view.live and view.left and not view.over:
        _say([f"tui3090: {plain(view.name)} goes on.  Come back: tui3090 show"])
    if interrupts.first is not None:
        return 128 + interrupts.first
    return HUNG_UP if terminal.gone else app.return_code or status or 0


def view_of(folder: RunFolder) -> View:
    """A view of the run that knows what run.json says."""
    name, recipe = name_of(folder), folder.read_info().get("recipe")
    if not isinstance(recipe, str) or len(recipe) > LONGEST_PATH:
        recipe = "TRAIN.PY"
    again = resume_command(recipe, name, folder.path)
    return View(name=name, folder=near(folder.path), again=again, live=False)


def view_at_end(folder: RunFolder) -> View:
    """A view of all that the run has logged."""
    view = view_of(folder)
    reader = RecordReader(folder.records)
    while not reader.at_end:
        view.absorb(reader.read())
    return view


def _say(lines: list[str]) -> None:
    out = PlainOutput(1)
    for line in lines:
        out.say(line, patience_s=1.0)
