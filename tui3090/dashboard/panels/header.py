"""The two rows at the top: what the run is doing, how far it is, when it ends, on what it runs."""

from __future__ import annotations

import math

from tui3090.dashboard.figures import beside, wrapped
from tui3090.dashboard.text import (
    GIB,
    UNKNOWN,
    Row,
    clean,
    clock,
    duration,
    number,
    percent,
    rounded,
    row_width,
    spread,
)
from tui3090.dashboard.view import View
from tui3090.records import Started, StepRecord

TITLE = "Run"

ROLES = {
    "loading": "accent",
    "training": "good",
    "paused": "warn",
    "evaluating": "accent",
    "stopping": "warn",
    "finished": "good",
    "stopped": "warn",
    "failed": "bad",
}
BAR = 32
"""Cells of the progress bar at the most."""
LEAST_BAR = 10
"""Cells under which it is left out."""
EIGHTHS = " ▏▎▍▌▋▊▉"
WIDE = 110
"""Cells from which on the roomy form is used."""


def note(view: View, now: float) -> str:
    """Nothing: it has no border."""
    return ""


def line(view: View, width: int, now: float) -> Row:
    """The first row alone."""
    return rows(view, width, 1, now)[0]


def rows(view: View, width: int, height: int, now: float) -> list[Row]:
    """State, progress and end; device, throughput, time gone and run folder. At the end the sentence why."""
    if view.over and view.state.detail:
        return _over(view, width, now)[:height]
    return [_first(view, width, now), _second(view, width, now)][:height]


def _badge(view: View, wide: bool) -> Row:
    state = view.doing
    badge: Row = [(" ■ " if view.over else " ● ", ROLES.get(state, "plain")), (clean(state.upper()), "bold")]
    if not view.live and not view.over:
        badge.append((" (a look)", "dim"))
    return [(" tui3090 ", "accent"), *badge] if wide else badge


def _over(view: View, width: int, now: float) -> list[Row]:
    """The sentence takes the room of what stood there, of the second row too where it is long."""
    start: Row = [*_badge(view, width >= WIDE), ("  ", "plain")]
    role = ROLES[view.state.state]
    lines = wrapped(view.state.detail, max(1, width - row_width(start)))
    if len(lines) == 1:
        return [[*start, (lines[0], role)], _second(view, width, now)]
    rest = clean(" ".join(lines[1:]))
    return [[*start, (lines[0], role)], [(" " * row_width(start), "plain"), (rest, role)]]


def _first(view: View, width: int, now: float) -> Row:
    wide = width >= WIDE
    gap = 3 if wide else 2
    start: Row = [*_badge(view, wide), (" " * gap, "plain"), (clean(view.name), "bold")]
    if view.state.state == "training" and view.state.detail:
        start += [("  ", "plain"), (clean(view.state.detail), "accent")]
    parts = [part for part in (*_progress(view, wide), _end(view, now)) if part]
    row = beside([start, *parts], width, gap)
    room = width - row_width(row) - gap
    if wide and view.step and view.step.planned_steps and room >= LEAST_BAR:
        # the bar stands before the percentage, and takes what the figures leave it
        share = min(1.0, view.step.step / view.step.planned_steps)
        row = beside([start, *parts[:-2], bar(share, min(BAR, room)), *parts[-2:]], width, gap)
        room = width - row_width(row)
    if wide and view.started and len(model := f" · {clean(view.started.model)}") < room:
        row = beside([[*start, (model, "dim")], row[len(start) + 1 :]], width, gap)
    return row


def _progress(view: View, wide: bool) -> list[Row]:
    step = view.step
    if step is None:
        return []
    done, planned = number(step.step), step.planned_steps
    if not planned:
        return [[(f"step {done}", "plain"), (" of an unknown number", "dim")]]
    share = min(1.0, step.step / planned)
    if not wide:
        return [[(f"{done}/{number(planned)}", "plain")], [(percent(share), "bold")]]
    epochs: Row = []
    if view.started and view.started.epochs:
        epochs = [(f"epoch {_epoch(view.started, step)} of {view.started.epochs}", "plain")]
    return [[(f"step {done} / {number(planned)}", "plain")], epochs, [(percent(share, 1), "bold")]]


def _epoch(started: Started, step: StepRecord) -> int:
    """The epoch that the run is in, counted from 1; at its very end the last one."""
    return min(started.epochs, int(step.epoch) + 1) if math.isfinite(step.epoch) else 0


def bar(share: float, cells: int) -> Row:
    """`███▍····`: a share of 1 in eighths of a cell."""
    eighths = int(share * cells * 8)
    full, part = divmod(eighths, 8)
    filled = "█" * full + (EIGHTHS[part] if part and full < cells else "")
    return [(filled, "good"), ("·" * (cells - len(filled)), "dim")]


def seconds_left(view: View) -> float | None:
    """By the pace since the last change, evaluations counted as the last one; pauses don't. None: not known yet."""
    step = view.step
    pace = view.seconds_per_step()
    if step is None or not step.planned_steps or pace is None:
        return None
    left = max(0, step.planned_steps - step.step)
    evaluations = _evaluations_left(view, step, left) * view.evaluated[-1].seconds if view.evaluated and left else 0.0
    return left * pace + evaluations


def _evaluations_left(view: View, step: StepRecord, left: int) -> int:
    """One at each epoch's end, and at the run's."""
    first = view.recent[0]
    ahead = (step.epoch - first.epoch) / (step.step - first.step) * left if step.step > first.step else 0.0
    if not math.isfinite(step.epoch + ahead):
        return 1
    return max(1, math.ceil(step.epoch + ahead - 1e-3) - math.floor(step.epoch + 1e-3))


def _end(view: View, now: float) -> Row:
    if view.over:
        return [(f"at {clock(view.state.time)}", "dim")]
    if view.step is None:
        return [(clean(view.state.detail), "dim")]
    left = seconds_left(view)
    if left is None:
        return [("left n/a", "dim")]
    if view.state.state == "paused":
        return [(f"left {duration(left)} of training", "plain"), (" · space goes on", "dim")]
    return [(f"left {duration(left)}", "plain"), (f" → {_end_clock(now + left, now)}", "bold")]


def _end_clock(end: float, now: float) -> str:
    days = (end - now) / 86400
    return f"{clock(end)} in {number(days)} d" if days >= 1 else clock(end)


def _second(view: View, width: int, now: float) -> Row:
    wide = width >= WIDE
    device, speed = _device(view, wide), _speed(view, wide, now)
    parts = [*device, *speed] if wide else [*speed, *device]
    if view.first_time is not None:
        end = view.state.time if view.over else now
        parts.append([(f"elapsed {duration(end - view.first_time)}", "plain")])
    if wide:
        parts.append(_saved(view, wide, now))
    indent = " " * 11 if wide else " " * 3
    row = beside([[(indent, "plain"), *parts[0]], *parts[1:]], width)
    folder = clean(view.folder)
    if wide and folder and row_width(row) + len(folder) + 4 <= width:
        return spread(row, [(f"{folder} ", "dim")], width)
    return row


def _saved(view: View, wide: bool, now: float) -> Row:
    """How much work is safe."""
    if view.saved is None:
        return []
    if view.over:
        return [(f"saved: step {number(view.saved.step)}", "good")]
    ago = f"saved {duration(max(0.0, now - view.saved.time))} ago"
    return [(f"{ago} (step {number(view.saved.step)})" if wide else ago, "plain")]


def _device(view: View, wide: bool) -> list[Row]:
    if view.started is None:
        return [[("device: not chosen yet", "dim")]]
    name = clean(view.started.device_name).removeprefix("NVIDIA ").removeprefix("GeForce ")
    text = f"{clean(view.started.device)} {name}"
    if wide and view.started.memory:
        text += f" {number(view.started.memory / GIB)} GiB"
    if wide and view.reading and view.reading.holders:
        text += f" ({clean(view.reading.holders)})"
    return [[(text, "plain")]]


def _speed(view: View, wide: bool, now: float) -> list[Row]:
    if view.step is None:
        return []
    rate, unit = view.throughput()
    if rate is None:
        return [[(f"speed {UNKNOWN}: no step since the change", "plain")], *([] if wide else [_saved(view, wide, now)])]
    parts: list[Row] = [
        [(f"{number(rate, 0 if rate >= 100 else 1)} {unit}", "bold")],
        [(f"{rounded(view.seconds_per_step())} s/step", "plain")],
    ]
    if not wide:
        parts.append(_saved(view, wide, now))
        if view.skipped:
            parts.append([(f"{number(view.skipped)} skipped", "warn")])
        if view.started:
            parts.append([(f"epoch {_epoch(view.started, view.step)}/{view.started.epochs}", "plain")])
    return parts
