"""What becomes of records in the log: a change, a save, an evaluation as a line each."""

from __future__ import annotations

from tui3090.dashboard.text import UNKNOWN, number
from tui3090.records import Changed, Evaluated, Event, Saved
from tui3090.settings import named


def in_force(change: Changed) -> Event:
    """A change that has come into force."""
    title, old, new = named(change.technique, change.old, change.new)
    text = f"{title} {old} → {new}, in force from step {number(change.step)}"
    return Event(time=change.time, level="info", source=change.origin, text=text)


def saved(save: Saved) -> Event:
    """A save that is on the disk."""
    text = (
        f"step {number(save.step)} in {save.seconds:.1f} s, training waited {save.waited_s:.2f} s → saves/{save.name} "
        f"({save.reason})"
    )
    return Event(time=save.time, level="info", source="save", text=text)


def evaluated(evaluation: Evaluated) -> Event:
    """An evaluation that is over."""
    loss = f"{UNKNOWN}: no batch has a label" if evaluation.loss is None else f"{evaluation.loss:.4g}"
    metrics = f", {evaluation.metrics}" if evaluation.metrics else ""
    text = f"step {number(evaluation.step)}: loss {loss}{metrics}, {evaluation.seconds:.1f} s"
    return Event(time=evaluation.time, level="info", source="eval", text=text)
