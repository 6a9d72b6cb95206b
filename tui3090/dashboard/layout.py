"""Where each panel stands on a terminal of any size: two columns of boxes, or one column with rules and single rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal["bare", "box", "ruled", "line"]
"""How a panel is painted: its rows alone, inside a border, under a rule with its title, or as one row."""

TWO_COLUMNS = 110
"""Cells of width from which on there are two columns."""
HEADER, FOOTER = 2, 1

LEFT = ("loss", "step", "memory", "log")
RIGHT = ("techniques", "changes", "tensor_cores", "gpu", "try_next")
ONE_COLUMN = ("loss", "step", "memory", "tensor_cores", "gpu", "techniques", "changes", "try_next", "log")

ROWS = {
    "loss": 18,
    "step": 4,
    "memory": 7,
    "log": 10,
    "techniques": 12,
    "changes": 8,
    "tensor_cores": 5,
    "gpu": 4,
    "try_next": 6,
}
"""Rows inside each panel where there is room."""

SHRINK = (
    ("log", 4),
    ("loss", 10),
    ("try_next", 3),
    ("changes", 5),
    ("try_next", 1),
    ("changes", 4),
    ("gpu", 1),
    ("tensor_cores", 1),
    ("step", 1),
    ("memory", 1),
    ("log", 1),
    ("loss", 7),
    ("changes", 2),
    ("techniques", 3),
    ("try_next", 0),
    ("log", 0),
    ("gpu", 0),
    ("tensor_cores", 0),
    ("step", 0),
    ("memory", 0),
    ("loss", 0),
    ("changes", 1),
    ("techniques", 1),
)
"""What gives way, in this order, until all fits: the rows that a panel is left with, 1 being its one-row form."""

GROW = {"loss": 2, "log": 1, "changes": 1}
"""Who takes the rows that are left over, and in which proportion."""


@dataclass(frozen=True, slots=True)
class Place:
    """A panel's rectangle in cells, border included, and its form."""

    x: int
    y: int
    width: int
    height: int
    form: Form


def places(width: int, height: int, zoomed: str = "") -> dict[str, Place]:
    """The places on a terminal of `width` x `height` cells; panels that have none are not shown.

    `zoomed` names a panel that takes all that header and footer leave.
    """
    header = min(HEADER, height)
    footer = min(FOOTER, height - header)
    body = height - header - footer
    shown = {"header": Place(0, 0, width, header, "bare"), "footer": Place(0, height - footer, width, footer, "bare")}
    if zoomed:
        shown[zoomed] = Place(0, header, width, body, "box" if width > 4 and body > 2 else "bare")
    elif width >= TWO_COLUMNS:
        right = min(72, max(52, round(width * 0.375)))
        shown |= _column(LEFT, 0, header, width - right, body, "box")
        shown |= _column(RIGHT, width - right, header, right, body, "box")
    else:
        shown |= _column(ONE_COLUMN, 0, header, width, body, "ruled")
    return {name: place for name, place in shown.items() if place.width > 0 and place.height > 0}


def _column(names: tuple[str, ...], x: int, y: int, width: int, height: int, form: Form) -> dict[str, Place]:
    frame = 2 if form == "box" else 1
    rows = {name: ROWS[name] for name in names}

    def outer(name: str) -> int:
        return rows[name] + frame if rows[name] > 1 else rows[name]

    for name, least in SHRINK:
        if sum(map(outer, names)) <= height:
            break
        if name in rows:
            rows[name] = min(rows[name], least)
    growing = [name for name in names if name in GROW and rows[name] > 1]
    spare = max(0, height - sum(map(outer, names)))
    for number, name in enumerate(growing):
        share = spare * GROW[name] // sum(GROW[other] for other in growing[number:])
        rows[name] += share
        spare -= share
    column: dict[str, Place] = {}
    bottom = y + height
    for name in names:
        tall = min(outer(name), bottom - y)
        column[name] = Place(x, y, width, tall, "line" if tall == 1 else form)
        y += tall
    return column
