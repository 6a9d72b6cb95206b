"""Events of the run and lines that training printed, newest first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from tui3090.dashboard.figures import shown
from tui3090.dashboard.text import Row, clean, clock, cut, fit, number, row_width
from tui3090.dashboard.view import View

TITLE = "Log"

SOURCE = 8
"""Cells of the source's name."""
_ROLES = {"info": "plain", "warning": "warn", "error": "bad"}


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of the log."""

    time: float
    """inf: right now; -inf: not known."""
    source: str
    text: str
    times: int
    role: str = "plain"


def note(view: View, now: float) -> str:
    """How many lines and warnings there are."""
    count = len(view.events) + len(view.output)
    warnings = f", {number(view.warnings)} warning{'' if view.warnings == 1 else 's'}" if view.warnings else ""
    return f"l unfolds · {number(count)} line{'' if count == 1 else 's'}{warnings}"


def depends(view: View, now: float) -> tuple[object, ...]:
    """Events and lines, and the one that is being printed."""
    return view.happened, view.unfinished, view.live


def rows(view: View, width: int, height: int, now: float) -> list[Row]:
    """As many lines as fit."""
    if not view.events and not view.output and not view.unfinished:
        return shown([[("nothing yet", "dim")]], width, height)
    return shown([_row(entry, width) for entry in islice(_lines(view), height)], width, height)


def line(view: View, width: int, now: float) -> Row:
    """The newest line."""
    if not view.events and not view.output and not view.unfinished:
        return shown(rows(view, width, 1, now), width, 1)[0]
    newest = next(_lines(view), None)
    return shown([_row(newest, width, brief=True)] if newest else [], width, 1)[0]


def _lines(view: View) -> Iterator[_Line]:
    """Newest first; what is being printed right now before all, lines of unknown time after all."""
    if view.unfinished.strip():
        yield _Line(math.inf if view.live and not view.over else -math.inf, "output", view.unfinished, 1)
    events = (_Line(e.time, e.source, e.text, 1, _ROLES.get(e.level, "plain")) for e in reversed(view.events))
    output = (
        _Line(-math.inf if p.time is None else p.time, "output", p.text, p.times, "dim")
        for p in reversed(view.output.values())
    )
    # not sorted, merged: both are in order already, and only the newest few are looked at
    merged = heapq.merge(events, output, key=lambda entry: -entry.time)
    held: _Line | None = None
    for entry in merged:
        if held and (held.source, held.text) == (entry.source, entry.text):
            held = _Line(held.time, held.source, held.text, held.times + entry.times, held.role)
            continue
        if held:
            yield held
        held = entry
    if held:
        yield held


@lru_cache(64)
def _row(entry: _Line, width: int, brief: bool = False) -> Row:
    """Time, source and text; `brief`: no seconds and no columns, as it stands alone."""
    row: Row = []
    if width >= 24:
        words = {math.inf: "now", -math.inf: ""}
        when = words[entry.time] if entry.time in words else clock(entry.time, seconds=not brief)
        row.append((f"{when:{5 if brief else 8}} ", "dim"))
    if width >= 40:
        source = cut(clean(entry.source), SOURCE) if brief else fit(clean(entry.source), SOURCE)
        row.append((f"{source} ", "dim"))
    times = f" ({number(entry.times)} times)" if entry.times > 1 else ""
    # of a line that a progress bar wrote over itself only the last state counts; more than a screen is not shown anyway
    text = entry.text.replace("\r\n", "\n").rstrip("\r\n").rpartition("\r")[2][: 2 * width]
    left = width - row_width(row) - len(times)
    return [*row, (cut(clean(text), max(left, 1)), entry.role), (times, "plain")]
