"""The changes of techniques in this run: step, key and value, the newest at the bottom."""

from __future__ import annotations

from tui3090.dashboard.keys import LATER, next_window
from tui3090.dashboard.panels.techniques import keys_of
from tui3090.dashboard.text import Row, clean, duration, fit, number
from tui3090.dashboard.view import View
from tui3090.records import Changed
from tui3090.settings import BY_NAME

TITLE = "Changes"
COUNTDOWN_S = 2.0
"""Shown for steps that are longer."""


def note(view: View, now: float) -> str:
    """Where the gains will be."""
    return f"measured gains: {LATER}"


def rows(view: View, width: int, height: int, now: float) -> list[Row]:
    """A heading and the newest changes, as many as fit; what is pending comes last."""
    entries = [_changed(view, change, width) for change in view.changes]
    entries += [_pending(view, name, now) for name in view.pending]
    if not entries:
        return [[("none yet: a technique's key, pressed while it trains, makes one", "dim")]]
    if height < 4:
        return entries[-height:]
    heading = fit(f"{'step':>6}  {'key':19}{'before → after':20}by", width)
    return [[(heading, "dim")], *entries[-(height - 1) :]]


def line(view: View, width: int, now: float) -> Row:
    """The newest one."""
    return rows(view, width, 1, now)[0]


def _changed(view: View, change: Changed, width: int) -> Row:
    technique = BY_NAME.get(change.technique)
    if technique is None:
        what, old, new = f"{clean(change.technique)}", clean(str(change.old)), clean(str(change.new))
    else:
        what = f"{keys_of(technique):4}{technique.title}"
        old, new = clean(technique.label(change.old)), clean(technique.label(change.new))
    mark = " ≈" if technique and technique.effect == "numbers" else ""
    return [
        (f"{number(change.step):>6}  ", "plain"),
        (fit(what, 19), "bold"),
        (fit(f"{old} → {new}{mark}", 20), "plain"),
        (clean(change.origin), "dim"),
    ]


def _pending(view: View, name: str, now: float) -> Row:
    technique, pending = BY_NAME[name], view.pending[name]
    step, seconds = next_window(view, now)
    wait = f", {duration(seconds)}" if seconds >= COUNTDOWN_S else ""
    return [
        (f"{number(step):>6}  ", "plain"),
        (fit(f"{keys_of(technique):4}{technique.title}", 19), "bold"),
        (f"▸ {technique.label(pending.value)} ", "accent"),
        (f"at the step's end{wait}" if pending.sent else "esc cancels", "dim"),
    ]
