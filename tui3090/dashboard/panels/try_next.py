"""What to try next, from this run's own figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui3090.dashboard.figures import wrapped
from tui3090.dashboard.text import Row, clean, fit_row
from tui3090.dashboard.view import View

if TYPE_CHECKING:
    from tui3090.advice import Advice

TITLE = "Try next"
INDENT = 3
"""Cells for the key."""


def note(view: View, now: float) -> str:
    """Whose figures they are."""
    return "from this run's figures"


def rows(view: View, width: int, height: int, now: float) -> list[Row]:
    """Each piece of advice, with its reason below it where there is room for those of all of them."""
    pieces = view.advice()
    if not pieces:
        return [[(_nothing(view), "dim")]]
    reasons = [wrapped(advice.reason, max(8, width - INDENT)) for advice in pieces]
    if len(pieces) + sum(map(len, reasons)) > height:
        reasons = [[line] for line, *_ in reasons]
    if len(pieces) + sum(map(len, reasons)) > height:
        return [fit_row([*_what(advice), (f"   {clean(advice.reason)}", "dim")], width) for advice in pieces]
    table: list[Row] = []
    for advice, lines in zip(pieces, reasons):
        table.append(_what(advice))
        table += [[(" " * INDENT + line, "dim")] for line in lines]
    return table


def line(view: View, width: int, now: float) -> Row:
    """The first piece, and how many more there are."""
    pieces = view.advice()
    if not pieces:
        return [(_nothing(view), "dim")]
    more = f"   {len(pieces) - 1} more" if len(pieces) > 1 else ""
    return [*fit_row(_what(pieces[0])[1 if not pieces[0].key else 0 :], max(0, width - len(more))), (more, "dim")]


def _what(advice: Advice) -> Row:
    """Key, what to do, what to expect."""
    gain = f"   {clean(advice.gain)}" if advice.gain else ""
    return [(f"{clean(advice.key):{INDENT}}", "key"), (clean(advice.what), "bold"), (gain, "good")]


def _nothing(view: View) -> str:
    if view.advisable:
        return "nothing: no figure of this run stands out"
    return "nothing: too few steps to tell" if view.over else "nothing yet: it takes the figures of some steps"
