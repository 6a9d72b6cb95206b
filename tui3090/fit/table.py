"""The table as text and as JSON, and the command that starts the best combination."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from tui3090.fit.cells import Cell, all_columns
from tui3090.fit.planning import MARGIN, Fit, gib
from tui3090.settings import BY_NAME

WIDTH = 12
"""Of a column; with six of them and the batch size the table is 80 wide."""
WIDEST = 80
"""Of the text below it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asked for, as far as the command at the end repeats it."""

    recipe: str
    """As it was typed: a file or a bundled recipe's name."""
    argv: tuple[str, ...] = ()
    """The recipe's options."""
    device: str = ""
    vram_gib: float | None = None


def command(fit: Fit, asked: Asked, cell: Cell) -> str:
    """The command line that runs a cell's combination."""
    words = ["tui3090", "run", asked.recipe, *cell.column.flags]
    if asked.device:
        words += ["--device", asked.device]
    if asked.vram_gib is not None:
        words += ["--vram", f"{asked.vram_gib:g}"]
    options = _without_batch(asked.argv) if fit.look.by_option else list(asked.argv)
    if fit.look.by_option:
        options += ["--batch-size", str(cell.batch)]
    return shlex.join(words + (["--", *options] if options else []))


def _without_batch(argv: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for word in argv:
        if skip:
            skip = False
        elif word == "--batch-size":
            skip = True
        elif not word.startswith("--batch-size="):
            kept.append(word)
    return kept


def lines(fit: Fit, asked: Asked) -> list[str]:
    """The table, what its figures mean, and what follows from it."""
    look = fit.look
    room = f"{gib(look.room)} GiB" + ("" if look.on_card else " of memory available")
    below = [*_legend(fit), *_left_out(fit), *_sentences(fit)]
    if (off := fit.deviation()) is not None:
        below.append(f"Predicted within {off[0]:.1%} of measured ({off[1]} cells).")
    for column, batch, share in fit.savings() if look.on_card else ():  # a process's memory is mostly libraries
        change = f"saves {share:.0%}" if share >= 0 else f"adds {-share:.0%}"
        below.append(f"Checkpointing {change} of {column.precision}'s memory at batch {batch}.")
    head = f"{asked.recipe} on {look.device_name}, {room}, torch {look.torch}"
    return [
        head,
        "",
        *_table(fit),
        "",
        *(part for text in below for part in textwrap.wrap(text, WIDEST)),
        *_ending(fit, asked),
    ]


def _left_out(fit: Fit) -> list[str]:
    """Why columns can't be had, each reason once."""
    reasons: dict[str, list[str]] = {}
    for column in all_columns(fit.look.amp):
        if column.name in fit.look.refused:
            reasons.setdefault(fit.look.refused[column.name], []).append(column.title)
    return [f"Without {', '.join(titles)}: {reason}" for reason, titles in reasons.items()]


def _table(fit: Fit) -> list[str]:
    second = {"": "", "checkpointing": "+ checkpt.", "graph": "+ replay"}
    rows = [
        _row("batch", [column.precision for column in fit.columns]),
        _row("", [second[column.technique] for column in fit.columns]),
    ]
    for batch in fit.rows:
        texts = [_cell(fit, cell) if (cell := fit.cells.get((batch, column))) else [] for column in fit.columns]
        for number, line in enumerate(zip_longest(*texts, fillvalue="")):
            if any(line):
                rows.append(_row(str(batch) if not number else "", line))
        rows.append("")
    return rows[:-1]


def _row(first: str, others: Sequence[str]) -> str:
    return f"{first:>7} " + "".join(f"{other:>{WIDTH}}" for other in others).rstrip()


def _cell(fit: Fit, cell: Cell) -> list[str]:
    """A cell's lines, the prediction always second; it is left out where the whole row has none."""
    predicted = f"~{gib(cell.predicted)}" if cell.predicted is not None else ""
    if cell.status == "oom":
        return ["(OOM)" if cell.sentence else "OOM", predicted]
    if cell.status != "ok" or cell.memory is None or cell.step_s is None:
        return ["-" if cell.status == "not run" else cell.status, predicted]
    speed = fit.speed(cell)
    against = "" if speed is None else f"x {speed[0]:.2f}" + ("*" if speed[1] != cell.batch else "")
    return [f"{gib(cell.memory)} GiB", predicted, milliseconds(cell.step_s), against]


def milliseconds(seconds: float) -> str:
    """A step's time."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _legend(fit: Fit) -> list[str]:
    memory = "peak allocated by torch" if fit.look.on_card else "peak memory of the process (RSS)"
    source = "small batches" if fit.look.points else "the column's smaller batches"
    cells = fit.cells.values()
    told = [f"A cell: {memory}"]
    if any(cell.predicted is not None for cell in cells):
        told.append(f"~ what it was predicted, before it ran, from {source}")
    told += ["the median step", "speed against plain FP32 at the same batch, by samples a second"]
    starred = {speed[1] for cell in cells if (speed := fit.speed(cell)) is not None and speed[1] != cell.batch}
    if starred:
        told.append(f"* where FP32 was not measured, against its batch {max(starred)}")
    if any(cell.status == "oom" and cell.sentence for cell in cells):
        told.append("(OOM) not run, for a smaller batch did not fit or the prediction is far beyond the memory")
    notes = ["; ".join(told) + "."]
    if fit.look.weights_dtype != "float32":
        notes.append(f"The trainable weights are {fit.look.weights_dtype}: the columns FP32 run in it.")
    if fit.look.tf32:
        notes.append("The train.py switches TF32 on: the columns FP32 use it.")
    if fit.look.fixed:
        notes.append("The DataLoader's own sampler makes the batches: their size was left as it is.")
    return notes


def _sentences(fit: Fit) -> list[str]:
    """Why cells have no figures, each reason once."""
    return [
        f"{cell.column.title}, batch {cell.batch}: {cell.sentence}."
        for cell in fit.cells.values()
        if cell.sentence and cell.status in ("failed", "died", "not run") and cell.batch == _first(fit, cell)
    ]


def _first(fit: Fit, cell: Cell) -> int:
    return min(c.batch for c in fit.cells.values() if c.column == cell.column and c.sentence == cell.sentence)


def _ending(fit: Fit, asked: Asked) -> list[str]:
    best = fit.best()
    if best is None or best.needs is None or best.samples_s is None:
        if any(cell.status == "ok" for cell in fit.cells.values()):
            return ["", f"What fits leaves less than {MARGIN:.0%} of the memory free: use a smaller batch."]
        return ["", "Nothing that fits was measured: use shorter samples or a smaller model, or train part of it."]
    took = f"{gib(best.needs)} GiB" + (" reserved, graphs included" if best.column.technique == "graph" else "")
    told = [
        "",
        f"Fastest with {MARGIN:.0%} of the memory to spare: {best.column.title} at batch {best.batch}",
        f"({best.samples_s:.1f} samples/s, {took}, {1 - best.needs / fit.look.room:.0%} to spare):",
        "",
        f"    {command(fit, asked, best)}",
    ]
    if not fit.look.by_option and not fit.look.fixed:
        told += ["", f"Set the batch size to {best.batch} in the train.py first: it has no option --batch-size for it."]
    return told


def as_json(fit: Fit, asked: Asked, interrupted: bool) -> dict[str, Any]:
    """The table as an object; memory in bytes, times in seconds, speeds as factors."""
    look, best = fit.look, fit.best()
    return {
        "recipe": asked.recipe,
        "options": list(asked.argv),
        "device": look.device,
        "device_name": look.device_name,
        "torch": look.torch,
        "vram_gib": asked.vram_gib,
        "room": look.room,
        "margin": MARGIN,
        "rows": look.rows,
        "weights_dtype": look.weights_dtype,
        "tf32": look.tf32,
        "batch_size_fixed": look.fixed,
        "batch_size_by_option": look.by_option,
        "left_out": look.refused,
        "cells": [_cell_as_json(fit, cell) for cell in fit.cells.values()],
        "best": None
        if best is None
        else {"batch": best.batch, "column": best.column.name, "command": command(fit, asked, best)},
        "interrupted": interrupted,
    }


def _cell_as_json(fit: Fit, cell: Cell) -> dict[str, Any]:
    speed = fit.speed(cell)
    settings = cell.column.settings
    return {
        **asdict(cell),
        "column": cell.column.name,
        "settings": {name: BY_NAME[name].label(getattr(settings, name)) for name in ("amp", "checkpointing", "graph")},
        "samples_s": cell.samples_s,
        "speed": speed[0] if speed is not None else None,
        "speed_against_batch": speed[1] if speed is not None else None,
    }
