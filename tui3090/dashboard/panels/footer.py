"""The bottom row: what the last key brought, for some seconds, else the keys."""

from __future__ import annotations

from tui3090.dashboard.text import Row, clean, row_width
from tui3090.dashboard.view import View

TITLE = "Keys"
ANSWERED_S = 6.0
"""How long an answer stands."""

KEYS = (
    ("q", "leave"),
    ("?", "help"),
    ("n", "lock"),
    ("u", "undo"),
    ("1-7", "zoom"),
    ("space", "pause"),
    ("s", "save"),
    ("l", "log"),
    ("b", "back to the last save"),
    ("e", "evaluate"),
    ("x", "picture"),
    ("r", "Tensor Cores"),
    ("m", "activations"),
)
"""The most important first: from the end they give way where there is little room."""
SHOWN = ("space", "b", "s", "e", "r", "m", "l", "1-7", "u", "n", "x", "?", "q")
"""From left to right."""
OVER = ("l", "1-7", "x", "?", "q")
"""What a run that is over still answers to."""


def note(view: View, now: float) -> str:
    """Nothing: it has no border."""
    return ""


def depends(view: View, now: float) -> tuple[object, ...]:
    """The answer while it stands, and what decides which keys there are."""
    return _answer(view, now), view.locked, view.over, view.doing


def rows(view: View, width: int, height: int, now: float) -> list[Row]:
    """One row."""
    return [line(view, width, now)]


def line(view: View, width: int, now: float) -> Row:
    """The answer or the keys."""
    if answer := _answer(view, now):
        return [(f" {clean(answer)}", "bold")]
    if view.locked:
        return [(" keys locked", "warn"), ("   n unlocks   1-7 zoom   ? help   ctrl+q leave", "dim")]
    words = dict(KEYS) | _words(view)
    wanted = [key for key, _ in KEYS if (key in OVER if view.over else key != "b" or view.doing == "paused")]
    while wanted and row_width(_row(wanted, words)) > width:
        wanted.pop()
    return _row(wanted, words)


def _answer(view: View, now: float) -> str:
    """While it stands."""
    return view.answer if 0 <= now - view.answer_time < ANSWERED_S else ""


def _words(view: View) -> dict[str, str]:
    """The words that depend on the state."""
    words: dict[str, str] = {}
    if view.doing == "paused":
        words["space"] = "go on"
    if view.doing == "stopping":
        words["q"] = "leave   Q stop now, losing the step"
    return words


def _row(keys: list[str], words: dict[str, str]) -> Row:
    row: Row = []
    for key in SHOWN:
        if key in keys:
            row += [(f" {key}", "key"), (f" {words[key]}  ", "plain")]
    return row
