"""`tui3090 show A B …`: runs side by side, as a table in plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from textwrap import wrap

from tui3090.dashboard import text
from tui3090.dashboard.curve import Other
from tui3090.dashboard.view import View
from tui3090.output import plain
from tui3090.summary import progress, step_time, throughput

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WIDEST = 28
"""Characters of a column at the most; what is longer goes on in the next line."""


def table(views: Sequence[View]) -> list[str]:
    """A legend of the runs' letters, then a row for each figure. `views` have absorbed all records."""
    legend = [f"{letter}  {plain(view.folder)}" for letter, view in zip(LETTERS, views)]
    common = min((view.step.step for view in views if view.step is not None), default=0)
    rows: list[tuple[str, list[str]]] = [
        ("state", [view.state.state for view in views]),
        ("steps", [progress(view).removeprefix("step ") for view in views]),
        ("loss, smoothed", [_figure(view.loss.smooth) for view in views]),
        (f"… at step {text.number(common)}", [_figure(Other("", "", view.loss).at(common)) for view in views]),
        ("best loss", [_best(view) for view in views]),
        ("eval", [_eval(view) for view in views]),
        ("time in steps", [_time(view) for view in views]),
        ("pace at the end", [step_time(view) or "n/a" for view in views]),
        ("throughput", [throughput(view) or "n/a" for view in views]),
        ("peak at the end", [_peak(view) for view in views]),
        ("techniques", [plain(view.step.settings if view.step else "") or "all off" for view in views]),
    ]
    cells = [["", *LETTERS[: len(views)]]]
    for label, values in rows:
        columns = zip_longest([label], *(wrap(value, WIDEST) for value in values), fillvalue="")
        cells += [list(column) for column in columns]
    widths = [max(len(row[column]) for row in cells) for column in range(len(views) + 1)]
    return [
        *legend,
        "",
        *("  ".join(f"{cell:<{wide}}" for cell, wide in zip(row, widths)).rstrip() for row in cells),
    ]


def _figure(value: float | None) -> str:
    return "n/a" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _best(view: View) -> str:
    best = _figure(view.loss.best)
    return best if best == "n/a" else f"{best} ({text.number(view.loss.best_step)})"


def _eval(view: View) -> str:
    if not view.evaluated:
        return "n/a"
    last = view.evaluated[-1]
    return f"{_figure(last.loss)} ({text.number(last.step)})"


def _time(view: View) -> str:
    if view.step is None or view.first_step_time is None:
        return "n/a"
    return text.duration(view.step.time - view.first_step_time)


def _peak(view: View) -> str:
    peaks = [reading.peak_allocated for reading in view.readings if reading.peak_allocated is not None]
    return f"{text.gib(max(peaks))} GiB" if peaks else "n/a"
