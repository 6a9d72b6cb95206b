"""Goes through the table's cells, says how far it is, and writes the table, also when it is interrupted."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tui3090.fit.cells import Cell, Column, Look
from tui3090.fit.planning import Fit, gib
from tui3090.fit.process import CellDied, Processes
from tui3090.fit.table import Asked, as_json, lines, milliseconds
from tui3090.recipe import RecipeError, harmless
from tui3090.settings import CORES
from tui3090.source import parse_options, read_options

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOKED_AT = 6
"""Samples in the batch of the first look, from which bigger ones are predicted."""
ENOUGH_CORES = 4
"""With fewer, one process's imports would slow another's measurement."""


class Interrupted(BaseException):
    """A signal asks to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def noting_signals() -> Iterator[Callable[[], None]]:
    """Inside, signals are noted; the function that this gives raises Interrupted when one has come.

    An exception from a handler could come while a process is being started, and leave it behind.
    """
    noted: list[int] = []

    def check() -> None:
        if noted:
            raise Interrupted(noted[0])

    before = {number: signal.signal(number, lambda number, frame: noted.append(number)) for number in SIGNALS}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Progress:
    """How far it is: a line that is written over on a terminal, else a line when a cell is done."""

    def __init__(self) -> None:
        self.what_is_left = ""
        """What the time left is for, where that is not the whole table."""
        self._terminal = sys.stderr.isatty()
        self._began = self._done = time.monotonic()
        self._cells = 0
        self._doing = ""
        self._left: int | None = None

    def begin(self, what: str, cells_left: int | None = None) -> None:
        """What is being measured from here on; `cells_left` with it, None: unknown."""
        self._doing, self._left = what, cells_left
        self.tick()

    def tick(self) -> None:
        """Time goes by."""
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{f'{self._doing}{self._time_left()} …'[:width]}", end="", file=sys.stderr, flush=True)

    def done(self, result: str) -> None:
        """A cell is done."""
        self._cells += 1
        self._done = time.monotonic()
        if self._left is not None:
            self._left -= 1
        self.say(result if self._terminal else f"{result}{self._time_left()}")

    def say(self, line: str) -> None:
        """A line that stays."""
        self.end()
        print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Nothing more comes."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _time_left(self) -> str:
        if not self._cells or self._left is None:
            return ""
        a_cell = (self._done - self._began) / self._cells
        seconds = max(0.0, a_cell * self._left - (time.monotonic() - self._done))
        about = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        return f", about {about} left{self.what_is_left}"


def run_fit(asked: Asked, path: Path, as_object: bool, processes: Processes | None = None) -> int:
    """`tui3090 fit`: measure and print; the exit status. Raises RecipeError where the recipe can't be run."""
    batch_option = any(option.name == "batch_size" and option.type is int for option in read_options(path))
    given = any(word.split("=")[0] == "--batch-size" for word in asked.argv)
    filled = [*asked.argv, *(["--batch-size", "1"] if batch_option and not given else [])]
    options = parse_options(path, filled)  # a mistyped option is told before anything starts
    start = int(options["batch_size"]) if batch_option else 1
    wanted = {
        "recipe": str(path),
        "argv": list(asked.argv),
        "batch_option": batch_option,
        "device": asked.device,
        "vram_gib": asked.vram_gib,
    }
    progress, fit, number = Progress(), None, None
    try:
        with noting_signals() as check, processes or Processes() as processes:

            def tick() -> None:
                check()
                progress.tick()

            progress.begin(f"{harmless(asked.recipe)}: a first look")
            fit = Fit(_look(wanted, processes, tick), start)
            progress.what_is_left = "" if fit.look.on_card else " in this row"
            processes.ahead = fit.look.on_card and CORES >= ENOUGH_CORES
            processes.imports = fit.look.imports
            if predictions := _predictions(fit):
                progress.say(predictions)
            while (following := fit.next()) is not None:
                check()
                batch, column = following
                predicted = fit.predicted(batch, column)
                expected = f", predicted {gib(predicted)} GiB" if predicted is not None else ""
                progress.begin(f"batch {batch}, {column.title}{expected}", fit.cells_left())
                fit.add(_measured(fit, batch, column, wanted, processes, tick))
                progress.done(_said(fit, fit.cells[following]))
    except Interrupted as interrupt:
        number = interrupt.number
    finally:
        progress.end()
    if fit is None:
        print("tui3090: interrupted before anything was measured", file=sys.stderr)
        return 128 + (number or 0)
    if as_object:
        print(json.dumps(as_json(fit, asked, number is not None)))
    else:
        print("\n".join(harmless_lines(fit, asked)))
        if number is not None:
            print("Interrupted: the table is what was known by then.")
    if number is not None:
        return 128 + number
    return 0 if any(cell.status == "ok" for cell in fit.cells.values()) else 1


def harmless_lines(fit: Fit, asked: Asked) -> list[str]:
    """The table's lines, safe for a terminal whatever the names in them hold."""
    return ["".join(c if c.isprintable() else "?" for c in line) for line in lines(fit, asked)]


def _look(wanted: dict[str, Any], processes: Processes, tick: Callable[[], None]) -> Look:
    try:
        told = processes.ask({**wanted, "look": True, "batch": LOOKED_AT}, tick)
    except CellDied as error:
        raise RecipeError(f"{wanted['recipe']} can't be measured: {error}.") from None
    if "error" in told:
        raise RecipeError(told["error"])
    return Look.from_json(told)


def _predictions(fit: Fit) -> str:
    """What is predicted to fit, in a line before anything is run; empty: nothing is known."""
    known = [column for column in fit.columns if fit.predicted(1, column) is not None]
    fitting = [f"{c.title} up to batch {fit.fits_up_to(c)}" if fit.fits_up_to(c) else f"{c.title} not" for c in known]
    return f"predicted to fit {gib(fit.look.room)} GiB: {', '.join(fitting)}" if fitting else ""


def _measured(
    fit: Fit, batch: int, column: Column, wanted: dict[str, Any], processes: Processes, tick: Callable[[], None]
) -> Cell:
    predicted = fit.predicted(batch, column)
    question = {
        **wanted,
        "look": False,
        "batch": batch,
        "samples": batch,
        "device": fit.look.device,
        "amp": column.amp,
        "technique": column.technique,
    }
    try:
        told = processes.ask(question, tick)
    except CellDied as error:
        return Cell(batch, column, "died", predicted, sentence=str(error))
    if "error" in told:
        return Cell(batch, column, "failed", predicted, sentence=told["error"].rstrip("."))
    if told.get("sentence"):
        told = {**told, "sentence": harmless(told["sentence"]).rstrip(".")}
    return Cell(batch, column, predicted=predicted, **told)


def _said(fit: Fit, cell: Cell) -> str:
    """A cell in a line of progress."""
    predicted = f", predicted {gib(cell.predicted)}" if cell.predicted is not None else ""
    head = f"batch {cell.batch}, {cell.column.title}: "
    if cell.status == "oom":
        return f"{head}out of memory{predicted}"
    if cell.memory is None or cell.step_s is None:
        return f"{head}{cell.sentence}"
    speed = fit.speed(cell)
    return f"{head}{gib(cell.memory)} GiB{predicted}, {milliseconds(cell.step_s)} a step" + (
        f", x {speed[0]:.2f}" if speed is not None else ""
    )
