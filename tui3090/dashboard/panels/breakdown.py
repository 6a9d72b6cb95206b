"""Where the time of a step goes, for the Step panel: figures, a bar that adds up to the step, shares."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tui3090.dashboard.figures import STALE_S
from tui3090.dashboard.text import Row, clock, duration, number, row_width
from tui3090.dashboard.view import View

_PHASES = (
    # field of a Phases record, letter in the bar, name, short name, role
    ("data_s", "d", "data", "data", "warn"),
    ("copy_s", "c", "copy", "copy", "plain"),
    ("forward_s", "▒", "forward", "fwd", "smooth"),
    ("backward_s", "█", "backward", "bwd", "accent"),
    ("graph_s", "▓", "graph fwd+bwd", "graph", "accent"),
    ("optimizer_s", "o", "optimizer", "opt", "bold"),
    ("other_s", "·", "other", "other", "dim"),
)
_FIGURES = tuple(name for name, *_ in _PHASES)


@dataclass(frozen=True, slots=True)
class Part:
    """A phase of the step."""

    letter: str
    name: str
    short: str
    role: str
    seconds: float
    """The mean over the samples."""


def parts(view: View) -> list[Part]:
    """The phases, the mean of the last samples; empty: there are none since the change."""
    mean = dict(zip(_FIGURES, view.phases.means(_FIGURES)))
    if not mean or not all(0 <= seconds < math.inf for seconds in mean.values()):
        return []
    # a replayed graph is one piece: what can't be told is left out rather than shown as nothing
    out = {"forward_s", "backward_s"} if mean["graph_s"] else {"graph_s"}
    return [
        Part(letter, words, short, role, mean[name])
        for name, letter, words, short, role in _PHASES
        if mean[name] or name not in out
    ]


def note(view: View, now: float) -> str:
    """`CUDA events, mean of 32, 0.4 s ago`; empty: there is no sample."""
    if not parts(view):
        return ""
    last = view.phases[-1]
    source = "clock" if view.started is not None and view.started.device == "cpu" else "CUDA events"
    age = max(0.0, now - last.time)
    if view.over or not view.live:
        when = f"at {clock(last.time, seconds=True)}"
    elif age > max(STALE_S, 4 * last.seconds):
        when = f"stale: {duration(age)} old"
    else:
        when = f"{duration(age)} ago"
    return f"{source}, mean of {len(view.phases)}, {when}"


def figures(found: list[Part], width: int) -> Row:
    """`d data 4  c copy 6  ▒ forward 318 …  = 1 060 ms`, letters as in the bar; in little room short names, then
    without the least."""
    total = 1000 * sum(part.seconds for part in found)
    decimals = 0 if total >= 99.5 else 1 if total >= 9.95 else 2
    kept = found
    for short in (False, *(True for _ in found)):
        row: Row = []
        for part in kept:
            name = part.short if short else part.name
            row += [(f"{part.letter} ", part.role), (f"{name} {number(1000 * part.seconds, decimals)}  ", "plain")]
        row.append((f"= {number(total, decimals)} ms", "bold"))
        if row_width(row) <= width:
            break
        if short:
            least = min(kept, key=lambda part: part.seconds)
            kept = [part for part in kept if part is not least]
    return row


def bar(found: list[Part], width: int) -> Row:
    """The step's time to scale; every cell is some phase's."""
    total = sum(part.seconds for part in found)
    if total <= 0 or width < 1:
        return []
    row: Row = []
    upto, end = 0.0, 0
    for part in found:
        upto += part.seconds
        start, end = end, round(upto / total * width)
        row.append((part.letter * (end - start), part.role))
    return row


def shares(found: list[Part]) -> Row:
    """`fwd 30 bwd 62 opt 5 %`."""
    total = sum(part.seconds for part in found)
    words = [
        f"{part.short} {number(100 * part.seconds / total)}"
        for part in found
        if total > 0 and part.short in ("fwd", "bwd", "graph", "opt")
    ]
    return [(" ".join(words) + " %", "plain")] if words else []
