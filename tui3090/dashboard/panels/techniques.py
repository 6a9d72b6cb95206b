"""The techniques: key, name, value in force, and what comes next or why there is nothing to come."""

from __future__ import annotations

from tui3090.dashboard.figures import SHORT_DTYPES
from tui3090.dashboard.keys import pending_text
from tui3090.dashboard.text import Row, brief, clean, fit, number, rounded
from tui3090.dashboard.view import View
from tui3090.settings import CORES, TECHNIQUES, Settings, Technique, Value

TITLE = "Techniques"
BEFORE_NEXT = 30
"""Cells of the table before its last column."""
UNTOUCHED = Settings()
CELL = 19
"""Cells of a technique in the short form."""
SHORT = {"checkpointing": "ckpt", "accumulate": "accum", "compile": "compile", "workers": "workers", "lr": "lr"}
"""Names where there is little room; the others are their titles' first words."""


def keys_of(technique: Technique) -> str:
    """The keys as the screen shows them: the capital letter goes backwards everywhere, so it is left out."""
    return technique.key if technique.back.lower() == technique.key.lower() else f"{technique.key} {technique.back}"


def is_off(technique: Technique, value: Value) -> bool:
    """Whether it is as it would be if nobody had touched it."""
    return bool(value == getattr(UNTOUCHED, technique.name))


def note(view: View, now: float) -> str:
    """Whether keys act."""
    return "keys locked: n unlocks" if view.locked else "≈ changes the numbers"


def rows(view: View, width: int, height: int, now: float) -> list[Row]:
    """A table with one technique a row; where the height is too small for it, several a row."""
    if height < len(TECHNIQUES):
        return _grid(view, width, height, now)
    table: list[Row] = [[(fit(f"{' key':5}{'technique':15}{'in force':10}next", width), "dim")]]
    table += [_table_row(view, technique, now, width - BEFORE_NEXT) for technique in TECHNIQUES]
    if len(table) < height - 1:
        table += [[("", "plain")]] * (height - 1 - len(table))
    hint = "u undo   esc cancel ▸   capital: backwards   n lock"
    return [*table, [(hint, "dim")]][:height] if height > len(TECHNIQUES) else table[1:]


def line(view: View, width: int, now: float) -> Row:
    """What is on."""
    on = [t for t in TECHNIQUES if not is_off(t, view.value(t.name)) or t.name in view.pending]
    row: Row = []
    for technique in on:
        row += [*_short(view, technique, now), ("  ", "plain")]
    return row or [("all off", "dim")]


def _table_row(view: View, technique: Technique, now: float, room: int) -> Row:
    mark = "≈" if technique.effect == "numbers" else " "
    missing = bool(view.available.get(technique.name))
    value = view.value(technique.name)
    off = is_off(technique, value)
    in_force = "–" if missing and off else clean(technique.label(value))
    role = "dim" if missing and off else "plain" if off else "good"
    return [
        (mark, "dim"),
        (f"{keys_of(technique):4}", "dim" if missing or view.locked else "key"),
        (f"{technique.title:15}", "dim" if missing else "plain"),
        (fit(in_force, 9) + " ", role),
        *_next(view, technique, now, room),
    ]


def _next(view: View, technique: Technique, now: float, room: int) -> Row:
    if pending := pending_text(view, technique, now):
        return [(pending if len(pending) <= room else pending.replace("from ", ""), "accent")]
    if reason := view.available.get(technique.name, ""):
        return [(brief(reason, room), "dim")]
    if technique.name == "amp" and view.started and view.started.weights_dtype != "float32":
        weights = clean(view.started.weights_dtype)
        return [(f"{SHORT_DTYPES.get(weights, weights)} weights", "warn")]
    if technique.name == "accumulate" and view.started:
        micro_batches = view.value("accumulate")
        if isinstance(micro_batches, int):
            return [(f"{number(view.started.batch_size * micro_batches)} samples a step", "dim")]
    if technique.name == "workers" and view.live:  # a run folder may come from another machine
        return [(f"of {CORES} core{'s' if CORES > 1 else ''}", "dim")]
    if technique.name == "lr" and view.step:
        return [(f"now {rounded(view.step.lr)}", "dim")]
    return []


def _grid(view: View, width: int, height: int, now: float) -> list[Row]:
    columns = max(1, width // CELL, -(-len(TECHNIQUES) // height))
    cells = width // columns
    grid: list[Row] = []
    for start in range(0, len(TECHNIQUES), columns):
        row: Row = []
        for technique in TECHNIQUES[start : start + columns]:
            row += _cell(_short(view, technique, now), cells)
        grid.append(row)
    return grid


def _cell(short: Row, cells: int) -> Row:
    room = cells - 1
    cell: Row = []
    for text, role in short:
        piece = fit(text, room) if len(text) > room else text
        cell.append((piece, role))
        room -= len(piece)
    return [*cell, (" " * (room + 1), "plain")]


def _short(view: View, technique: Technique, now: float) -> Row:
    name = SHORT.get(technique.name, technique.title.split()[0])
    missing = bool(view.available.get(technique.name))
    value = view.value(technique.name)
    off = is_off(technique, value)
    label = "–" if missing and off else clean(technique.label(value)).replace("every ", "")
    row: Row = [
        (keys_of(technique).replace(" ", ""), "dim" if missing or view.locked else "key"),
        (f" {name} ", "dim" if missing else "plain"),
        (label, "dim" if missing else "plain" if off else "good"),
    ]
    pending = view.pending.get(technique.name)
    if pending:
        row.append((f" ▸ {technique.label(pending.value).replace('every ', '')}", "accent"))
    return row
