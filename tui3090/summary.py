"""What a run came to, in five lines for the shell."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from tui3090.dashboard import text
from tui3090.dashboard.view import View
from tui3090.output import plain


def throughput(view: View) -> str:
    """Tokens (or samples) a second over the steps since the last change; empty before there are any."""
    seconds = view.recent.total("seconds")
    if not seconds:
        return ""
    tokens, padding = view.recent.total("tokens"), view.recent.total("padding")
    done, unit = (tokens, "tokens") if tokens else (view.recent.total("samples"), "samples")
    padded = f" ({text.percent(padding / (tokens + padding))} padding)" if padding else ""
    return f"{text.rounded(done / seconds)} {unit}/s{padded}"


def step_time(view: View) -> str:
    """The mean time of the steps since the last change; empty before there are any."""
    mean = view.seconds_per_step()
    return f"{text.rounded(mean * 1000)} ms/step" if mean is not None else ""


def progress(view: View) -> str:
    """`step 120/600`."""
    if view.step is None:
        return "step 0"
    planned = f"/{text.number(view.step.planned_steps)}" if view.step.planned_steps else ""
    return f"step {text.number(view.step.step)}{planned}"


def summary(view: View) -> list[str]:
    """How the run ended, its loss, its time, its techniques, its folder and what it left there: a line each."""
    rows = (
        ("loss", _loss(view)),
        ("time", _time(view)),
        ("techniques", _techniques(view)),
        ("run folder", view.folder),
        ("saved", _saved(view)),
        *([("result", str(result))] if (result := Path(view.folder) / "result").is_dir() else []),
    )
    return [f"tui3090: {_ended(view)}", *(f"  {name:<10}  {plain(words)}" for name, words in rows if words)]


def ending(view: View, output: Path) -> list[str]:
    """What the shell is told when a run is over: the summary, or of a run that failed before its first step why."""
    failed = view.state.state == "failed"
    lines = summary(view)
    if failed and view.first_step_time is None:
        lines = [f"tui3090: {plain(view.state.detail)}"]
    if failed:
        lines.append(f"What training printed, tracebacks included, is in {plain(str(output))}")
    return lines


def _ended(view: View) -> str:
    how = view.state.state if view.over else f"left while {view.state.state}"
    reason = f": {view.state.detail}" if view.state.state == "failed" else ""
    return plain(f"{view.name} {how} at {progress(view)}{reason}")


def _saved(view: View) -> str:
    if view.saved is None:
        return ""
    how = f"--resume {shlex.quote(view.folder)} goes on from it"
    return f"step {text.number(view.saved.step)} ({view.saved.reason}); {how}"


def _loss(view: View) -> str:
    points = view.loss.points
    parts = [f"{points[0].smooth:.4g} → {view.loss.smooth:.4g} (smoothed)"] if points else ["no step was taken"]
    if view.loss.not_finite:
        parts.append(f"{text.number(view.loss.not_finite)} not finite")
    if view.evaluated:
        last = view.evaluated[-1]
        loss = "n/a" if last.loss is None or not math.isfinite(last.loss) else f"{last.loss:.4g}"
        parts.append(plain(f"eval {loss} {last.metrics}").rstrip() + f" at step {text.number(last.step)}")
    return ", ".join(parts)


def _time(view: View) -> str:
    if view.step is None or view.first_step_time is None:
        return "none spent in steps"
    spent = text.duration(view.step.time - view.first_step_time)
    return ", ".join(part for part in (spent, step_time(view), throughput(view)) if part)


def _techniques(view: View) -> str:
    in_force = view.step.settings if view.step is not None else view.started.settings if view.started else ""
    count = len(view.changes)
    changes = "no change" if not count else "1 change" if count == 1 else f"{count} changes"
    return f"{plain(in_force) or 'all off'}; {changes} during the run"
