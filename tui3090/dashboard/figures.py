"""What the measuring panels share: whether a figure is still current, parts side by side, wrapping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import chop_cells

from tui3090.dashboard.text import Row, clean, clock, duration, fit_row, number, row_width, width
from tui3090.dashboard.view import View

PROFILE_OLD_S = 180.0
"""Age from which on a profiled step is no longer shown as current; by itself one comes every minute or so."""
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
STALE_S = 5.0
"""Age from which on a figure is no longer shown as current."""


def age(view: View, time: float, now: float) -> str:
    """How old a reading of `time` is: `0.5 s`, `stale: 12 s old`, or of a run that is over `at 02:19:39`."""
    if view.over or not view.live:
        return f"at {clock(time, seconds=True)}"
    seconds = max(0.0, now - time)
    return f"stale: {duration(seconds)} old" if seconds > STALE_S else duration(seconds)


def reading_age(view: View, now: float) -> str:
    """The age of the newest reading."""
    return age(view, view.reading.time, now) if view.reading else "no reading yet"


def is_stale(view: View, now: float) -> bool:
    """Whether the newest reading is too old to pass for the present."""
    return reading_age(view, now).startswith("stale")


def steps_note(view: View, now: float) -> str:
    """What a panel's means are over, and when the last step ended where that is long ago."""
    if not view.recent:
        return "no step since the change" if view.step else "before the first step"
    steps = view.recent.total("steps")
    mean = f"mean of {number(steps)} {'step' if steps == 1 else 'steps'}"
    last = view.recent[-1].time
    return f"{mean}, the last {duration(now - last)} ago" if steps_stale(view, now) else mean


def steps_stale(view: View, now: float) -> bool:
    """Whether the newest step is so old that rates are not the present's.

    A step may take longer than any reading: late is what takes far longer than the one before.
    """
    if view.over or not view.live or not view.recent:
        return False
    last = view.recent[-1]
    return now - last.time > max(STALE_S, 4 * last.seconds)


def shown(rows: Iterable[Row], cells: int, height: int, stale: bool = False) -> list[Row]:
    """The first `height` rows, each in `cells` cells; dim when what they tell is stale."""
    fitted = [fit_row(row, cells) for row, _ in zip(rows, range(height))]
    return [[(text, "dim") for text, _ in row] for row in fitted] if stale else fitted


def beside(parts: Sequence[Row], cells: int, gap: int = 3) -> Row:
    """Parts side by side: the first, and as many of the others as fit whole. Empty parts are left out."""
    row: Row = []
    taken = 0
    for part in parts:
        if not part:
            continue
        more = row_width(part)
        if not row:
            row, taken = list(part), more
        elif taken + gap + more <= cells:
            row += [(" " * gap, "plain"), *part]
            taken += gap + more
    return row


def wrapped(sentence: str, cells: int) -> list[str]:
    """A sentence from outside in lines of at most `cells` cells, broken at spaces where there are any."""
    lines = [""]
    for word in clean(sentence[:4000]).split():
        for piece in chop_cells(word, max(cells, 2)):
            if lines[-1] and width(lines[-1]) + 1 + width(piece) > cells:
                lines.append(piece)
            else:
                lines[-1] = f"{lines[-1]} {piece}".strip()
    return lines
