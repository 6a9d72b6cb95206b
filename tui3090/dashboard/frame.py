"""The rows of a panel at its place: border, title, note, and what the panel's module gives, or the one-row form.

Nothing here imports Textual.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Protocol

from tui3090.dashboard.layout import Place
from tui3090.dashboard.panels import (
    changes,
    footer,
    gpu,
    header,
    log,
    loss,
    memory,
    step,
    techniques,
    tensor_cores,
    try_next,
)
from tui3090.dashboard.text import Row, clean, cut, fit, fit_row, width
from tui3090.dashboard.view import View

TITLE_CELLS = 11
"""What number and title take in the one-row form."""


class Content(Protocol):
    """What a panel's module exports."""

    @property
    def TITLE(self) -> str:  # noqa: N802
        """Its name on screen."""

    def note(self, view: View, now: float) -> str:
        """The words at the right end of the border."""

    def rows(self, view: View, width: int, height: int, now: float) -> list[Row]:
        """The inside of the box; shorter lists are padded, longer are cut."""

    def line(self, view: View, width: int, now: float) -> Row:
        """The one-row form."""


class Still(Protocol):
    """What the module of a panel that stands still for long exports besides."""

    def depends(self, view: View, now: float) -> Hashable:
        """What its rows and note depend on, its place apart: while that is the same, so are they. None: on the time."""


CONTENTS: dict[str, Content] = {
    "header": header,
    "loss": loss,
    "step": step,
    "memory": memory,
    "log": log,
    "techniques": techniques,
    "changes": changes,
    "tensor_cores": tensor_cores,
    "gpu": gpu,
    "try_next": try_next,
    "footer": footer,
}
STILL: dict[str, Still] = {"log": log, "changes": changes, "footer": footer}
NUMBERS = {"1": "loss", "2": "step", "3": "memory", "4": "changes", "5": "tensor_cores", "6": "gpu", "7": "log"}
"""Digit -> the panel that it zooms."""


def digit(panel: str) -> str:
    """The digit that zooms a panel; empty: it has none."""
    return next((key for key, name in NUMBERS.items() if name == panel), "")


def paint(content: Content, number: str, place: Place, view: View, now: float) -> list[Row]:
    """All rows of a panel at `place`, border included, each exactly as wide as it is."""
    return [framed(row, y, place) for y, row in enumerate(unframed(content, number, place, view, now))]


def unframed(content: Content, number: str, place: Place, view: View, now: float) -> list[Row]:
    """What the rows at `place` say, not cut or padded yet: cheap to compare with what is on screen."""
    cells, height = place.width, place.height
    match place.form:
        case "line":
            title = content.TITLE.split()[0]
            label = f" {number} {title}" if number else f" {title}"
            return [[(fit(label, TITLE_CELLS), "bold"), *content.line(view, max(0, cells - TITLE_CELLS), now)]]
        case "bare":
            above, inside, below = [], content.rows(view, cells, height, now), 0
        case "ruled":
            above = [_border(content.TITLE, number, "─", "─", cells, content.note(view, now))]
            inside, below = content.rows(view, max(0, cells - 2), height - 1, now), 0
        case "box":
            above = [_border(content.TITLE, number, "╭─", "─╮", cells, content.note(view, now))]
            inside, below = content.rows(view, max(0, cells - 4), height - 2, now), 1
    inside = inside[: height - len(above) - below]
    return [*above, *inside, *([[]] * (height - len(above) - len(inside)))]


def framed(row: Row, y: int, place: Place) -> Row:
    """Row `y` of a panel at `place` with its part of the frame, exactly as wide as the place.

    Every row of every panel passes here on its way to the terminal, which therefore never gets a control character.
    """
    cells = place.width
    row = [(clean(text), role) for text, role in row]
    if place.form == "ruled" and y > 0:
        row = [(" ", "plain"), *row]
    elif place.form == "box" and y == place.height - 1:
        row = [("╰" + "─" * (cells - 2) + "╯", "dim")]
    elif place.form == "box" and y > 0:
        return [("│ ", "dim"), *fit_row(row, cells - 4), (" │", "dim")]
    return fit_row(row, cells)


@lru_cache(64)
def _border(title: str, number: str, start: str, end: str, cells: int, note: str) -> Row:
    """The upper edge: `╭─ 1 Loss ─────── raw · smoothed ─╮`."""
    room = cells - len(start) - len(end)
    label = f" {number} " if number else " "
    title = cut(title, max(0, room - len(label) - 1)) + " "
    left = room - width(label) - width(title)
    note = f" {cut(note, left - 4)} " if note and left > 8 else ""
    return [
        (start, "dim"),
        (label, "key"),
        (title, "bold"),
        ("─" * max(0, left - width(note)), "dim"),
        (note, "dim"),
        (end, "dim"),
    ]
