"""What to try next. Its place is here; the advice itself is not in this version."""

from __future__ import annotations

from tui3090.dashboard.keys import LATER
from tui3090.dashboard.text import Row
from tui3090.dashboard.view import View

TITLE = "Try next"


def note(view: View, now: float) -> str:
    """Nothing."""
    return ""


def rows(view: View, width: int, height: int, now: float) -> list[Row]:
    """That there is none yet."""
    return [line(view, width, now)]


def line(view: View, width: int, now: float) -> Row:
    """That there is none yet."""
    return [(f"advice from this run's figures: {LATER}", "dim")]
