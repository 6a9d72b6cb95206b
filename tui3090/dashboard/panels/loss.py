"""The loss over the whole run; before the first step what is being made ready, and how long each part took."""

from __future__ import annotations

import math
from itertools import islice

from rich.cells import chop_cells

from tui3090.dashboard.chart import Mark, draw
from tui3090.dashboard.curve import SMOOTHING, Other
from tui3090.dashboard.figures import beside, shown, wrapped
from tui3090.dashboard.text import UNKNOWN, Row, clean, cut, duration, number, rounded, row_width
from tui3090.dashboard.view import View
from tui3090.records import Changed, Evaluated, Stage
from tui3090.settings import BY_NAME

TITLE = "Loss"

STAGES = ("torch", "train.py", "model", "data", "device", "first step")
"""The start-up checklist, in the order in which it is gone through."""
WRITTEN_HEIGHT = 14
"""Rows from which on what the model wrote has two of them; from `ZOOMED_HEIGHT` on it has all it needs, up to half."""
ZOOMED_HEIGHT = 26
FLAT = 0.002
"""A smoothed loss that moved by less than this share over the last tenth of the run stands still."""


def note(view: View, now: float) -> str:
    """What the curves are."""
    if not view.step:
        return "before the first step"
    dotted = " · dotted: the last run" if any(not other.letter for other in view.others) else ""
    return f"raw · smoothed α {SMOOTHING}{dotted}"


def rows(view: View, width: int, height: int, now: float) -> list[Row]:
    """Figures, the chart, what the model wrote, figures."""
    if view.step is None:
        return shown(_checklist(view, width, now), width, height)
    top, bottom = [_figures(view, width), *_legend(view, width)], [_step_figures(view, width)]
    written = _written(view, width, height)
    left = height - len(top) - len(bottom) - len(written)
    if left < 1:
        return shown(top + bottom, width, height)
    # the chart's rows fit, and stay the same ones until it is drawn anew
    return [*shown(top, width, height), *_chart(view, width, left, now), *shown(written + bottom, width, height)]


def line(view: View, width: int, now: float) -> Row:
    """Now, smoothed, best and eval; before the first step the stage that is running."""
    if view.step is not None:
        return shown([_figures(view, width)], width, 1)[0]
    running = [stage for stage in view.stages.values() if stage.seconds is None]
    if view.over:
        row: Row = [(clean(view.state.detail) or f"{view.state.state} before the first step", "bad")]
    elif running:
        row = [(clean(running[-1].name), "bold"), (f"  {_elapsed(view, running[-1], now)}", "plain")]
    else:
        row = [("waiting for the first step", "plain")]
    return shown([row], width, 1)[0]


def _figures(view: View, width: int) -> Row:
    curve, step = view.loss, view.step
    assert step is not None
    if step.skipped == "no labels":
        latest: Row = [("now ", "dim"), (f"{UNKNOWN}: no labels", "warn")]
    else:
        latest = [("now ", "dim"), (rounded(step.loss, 4), "bold" if math.isfinite(step.loss) else "bad")]
    if math.isnan(curve.smooth):
        return beside([latest, _not_finite(view)], width)
    smooth: Row = [("smooth ", "dim"), (f"{rounded(curve.smooth, 4)} {_trend(view)}", "plain")]
    best: Row = [("best ", "dim"), (f"{rounded(curve.best, 4)} ({number(curve.best_step)})", "plain")]
    parts = [latest, _not_finite(view), smooth, best]
    room = width - row_width(beside(parts, width)) - 3
    evaluated = next((row for row in (_eval(view), _eval(view, brief=True)) if row_width(row) <= room), [])
    parts.append(evaluated)
    return beside([*parts, *(_last_run(other, step.step) for other in view.others if not other.letter)], width)


def _last_run(other: Other, step: int) -> Row:
    """What the last run of this recipe had at the same step."""
    then = other.at(step)
    ended = f"ended at {number(other.curve.points[-1].step)}"
    return [("last run ", "dim"), (ended if then is None else rounded(then, 4), "plain")]


def _legend(view: View, width: int) -> list[Row]:
    """Which runs are compared, and what each had at this one's step."""
    compared = [other for other in view.others if other.letter]
    if not compared or view.step is None:
        return []
    step = view.step.step
    parts: list[Row] = [[("A ", "key"), (f"{clean(view.name)} {rounded(view.loss.smooth, 4)}", "plain")]]
    for other in compared:
        then = other.at(step)
        loss = rounded(then, 4) if then is not None else f"no step {number(step)}"
        parts.append([(f"{other.letter} ", "key"), (f"{clean(other.name)} {loss}", "plain")])
    return [beside(parts, width)]


def _not_finite(view: View) -> Row:
    count = view.loss.not_finite
    return [(f"not finite: {number(count)} {'step' if count == 1 else 'steps'}", "bad")] if count else []


def _trend(view: View) -> str:
    """Where the smoothed loss went over the last tenth of the run."""
    points = view.loss.points
    before = points[-1 - max(1, len(points) // 10)].smooth if len(points) > 1 else math.nan
    change = view.loss.smooth - before
    if math.isnan(change):
        return "·"
    return "→" if abs(change) <= FLAT * abs(before) else "↘" if change < 0 else "↗"


def _eval(view: View, brief: bool = False) -> Row:
    """The last evaluation's loss and, unless `brief`, the recipe's own figures."""
    if not view.evaluated:
        return []
    last = view.evaluated[-1]
    loss = f"{UNKNOWN}: no labels" if last.loss is None else rounded(last.loss, 4)
    metrics = f" {cut(clean(last.metrics), 40)}" if last.metrics and not brief else ""
    return [("eval ", "dim"), (f"{loss}{metrics} ({number(last.step)})", "plain")]


def _step_figures(view: View, width: int) -> Row:
    step = view.step
    assert step is not None
    reasons = ", ".join(f"{clean(reason)} {number(count)}" for reason, count in view.skip_reasons.items())
    skipped = f"skipped {number(view.skipped)}" + (f": {reasons}" if reasons else "")
    parts: list[Row] = [
        [("grad ", "dim"), (rounded(step.grad_norm), "plain")],
        [("lr ", "dim"), (rounded(step.lr), "plain")],
        [(skipped, "warn" if view.skipped else "plain")],
    ]
    if step.loss_scale is not None:
        parts.append([("loss scale ", "dim"), (number(step.loss_scale), "plain")])
    if "no labels" in view.skip_reasons:
        parts.append([("no labels: a maximum length may cut the answers off", "dim")])
    return beside(parts, width)


def _chart(view: View, width: int, height: int, now: float) -> list[Row]:
    if not view.loss.points:
        return [[(cut("  no finite loss so far", width), "dim")], *([] for _ in range(height - 1))]
    marks = [Mark(change.step, _label(change)) for change in view.changes]
    return draw(view.loss, marks, width, height, now, tuple(view.others))


def _label(change: Changed) -> str:
    """The key and the new value: `a bf16`, `+ 2`, `- 1`."""
    technique = BY_NAME.get(change.technique)
    if technique is None:
        return cut(clean(f"{change.technique} {change.new}"), 20)
    down = (
        not technique.wraps
        and isinstance(change.old, (int, float))
        and isinstance(change.new, (int, float))
        and change.new < change.old
    )
    return f"{technique.back if down else technique.key} {cut(clean(technique.label(change.new)), 12)}"


def _written(view: View, width: int, height: int) -> list[Row]:
    """What the model wrote at the last evaluation that had it write."""
    last: Evaluated | None = next((e for e in reversed(view.evaluated) if e.text.strip()), None)
    if last is None or height < WRITTEN_HEIGHT:
        return []
    room = height // 2 if height >= ZOOMED_HEIGHT else 2
    label = f"model wrote ({number(last.step)})  "
    cells = max(width - len(label), 8)
    # a page of text is enough to fill the room, however much the model wrote
    text = last.text[: room * cells * 2].strip()
    lines = (piece for text_line in text.splitlines() for piece in chop_cells(clean(text_line), cells) or [""])
    found = list(islice(lines, room))
    return [[(label if n == 0 else " " * len(label), "dim"), (piece, "plain")] for n, piece in enumerate(found)]


def _checklist(view: View, width: int, now: float) -> list[Row]:
    names = [*STAGES, *(name for name in view.stages if name not in STAGES)]
    found: list[Row] = [_stage(view, name, now) for name in names]
    if view.over:
        sentence = view.state.detail or f"The run {view.state.state} before the first step."
        found += [[], *([(piece, "bad")] for piece in wrapped(sentence, width))]
    return found


def _stage(view: View, name: str, now: float) -> Row:
    stage = view.stages.get(name)
    label = f"{cut(clean(name), 12):<12}"
    if stage is None:
        return [(f" ·  {label}", "dim")]
    detail = cut(clean(stage.detail), 200) or _detail(view, name)
    if stage.seconds is not None:
        return [(" ✓  ", "good"), (f"{label}{duration(stage.seconds):>12}", "plain"), (f"   {detail}", "dim")]
    return [(" ▸  ", "accent"), (f"{label}{_elapsed(view, stage, now):>12}", "bold"), (f"   {detail}", "plain")]


def _elapsed(view: View, stage: Stage, now: float) -> str:
    """How long a stage has been running; of a run that is over it is not known when it ended."""
    return "not finished" if view.over or not view.live else duration(max(0.0, now - stage.time))


def _detail(view: View, name: str) -> str:
    if view.started is None:
        return ""
    if name == "model":
        return f"{number(view.started.parameters)} parameters"
    if name == "data" and view.started.rows is not None:
        return f"{number(view.started.rows)} rows"
    return ""
