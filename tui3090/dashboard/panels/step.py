"""What a step takes, how much of it is waiting for data, and what the host does meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from tui3090.dashboard.figures import beside, is_stale, shown, steps_note, steps_stale
from tui3090.dashboard.text import UNKNOWN, Row, gib, number, percent, rounded, spread
from tui3090.dashboard.view import View

TITLE = "Step and data"

_STALL, _HIDDEN, _REST = "▒", "░", "█"


def note(view: View, now: float) -> str:
    """What the figures are the mean of, and how old they are."""
    return steps_note(view, now)


def rows(view: View, width: int, height: int, now: float) -> list[Row]:
    """Rates, a bar of what a step's time goes to, its legend, the host."""
    pace = _pace(view)
    later: Row = [("by phase: not in this version", "dim")]
    of_steps = [spread(_rates(view, pace, width), later, width), _bar(pace, width), _shares(pace, width)]
    host = shown([_host(view, width)], width, height - len(of_steps), is_stale(view, now))
    return [*shown(of_steps, width, height, steps_stale(view, now)), *host]


def line(view: View, width: int, now: float) -> Row:
    """The bar, the stall and the rate."""
    pace = _pace(view)
    if pace is None:
        return shown([[(_no_step(view), "dim")]], width, 1)[0]
    parts: list[Row] = [
        _bar(pace, max(min(24, width - 46), 0)),
        [(f"stall {_percent(pace.stall)}", "plain")],
        [(f"wait {_percent(pace.wait)}", "plain")],
        [(f"{rounded(pace.seconds)} s/step", "plain")],
        [(f"{rounded(pace.rate)} {pace.unit}", "plain")],
    ]
    return shown([beside(parts, width, gap=2)], width, 1, steps_stale(view, now))[0]


@dataclass(frozen=True, slots=True)
class _Pace:
    """The windows since the last change; shares are fractions of their time."""

    seconds: float
    """Of a window, the mean."""
    rate: float
    """Tokens or samples per second."""
    unit: str
    stall: float
    worst: float
    """The stall's share in the worst window."""
    wait: float
    """The host's wait for the loader."""


def _pace(view: View) -> _Pace | None:
    """None: there was no window since the change."""
    tokens = view.started.unit == "tokens" if view.started else bool(view.step and view.step.tokens)
    windows = 0
    seconds = done = stall = worst = wait = 0.0
    for step in view.recent:
        windows += step.steps
        seconds += step.seconds * step.steps
        done += (step.tokens if tokens else step.samples) * step.steps
        stall += step.stall_s * step.steps
        wait += step.wait_s * step.steps
        if step.seconds > 0:
            worst = max(worst, step.stall_s / step.seconds)
    if not (seconds > 0 and math.isfinite(seconds + stall + wait)):
        return None
    unit = "tok/s" if tokens else "samples/s"
    shares = [min(max(share, 0.0), 1.0) for share in (stall / seconds, worst, wait / seconds)]
    return _Pace(seconds / windows, done / seconds, unit, *shares)


def _no_step(view: View) -> str:
    return f"{UNKNOWN}: no step since the change" if view.step else f"{UNKNOWN}: no step so far"


def _percent(share: float | None) -> str:
    """With a decimal below ten."""
    return percent(share, 1 if share is not None and share < 0.0995 else 0)


def _rates(view: View, pace: _Pace | None, width: int) -> Row:
    if pace is None:
        return [(f"rates {_no_step(view)}", "dim")]
    middle = median(step.seconds for step in view.recent)
    micro_batches = view.recent[-1].micro_batches
    return beside(
        [
            [(f"{rounded(pace.rate)} {pace.unit}", "bold")],
            [(f"{rounded(pace.seconds)} s/step", "plain"), (f", median {rounded(middle)}", "dim")],
            [(f"{number(micro_batches)} micro-batch{'' if micro_batches == 1 else 'es'}", "plain")],
            *_shapes(view),
        ],
        width,
    )


def _shapes(view: View) -> list[Row]:
    """What batches of different lengths cost: the share of padding, and of the windows that hit a captured graph."""
    windows = sum(step.steps for step in view.recent)
    padding = sum(step.padding * step.steps for step in view.recent)
    tokens = sum(step.tokens * step.steps for step in view.recent)
    hits = sum(step.steps for step in view.recent if step.replayed)
    replay: Row = [(f"replay hits {number(hits)} of {number(windows)}", "plain")]
    return [
        [(f"padding {_percent(padding / (tokens + padding))}", "plain")] if padding else [],
        replay if view.value("graph") else [],
    ]


def _bar(pace: _Pace | None, width: int) -> Row:
    """A step's time: stall, the rest of the loader's wait (hidden behind the device's work), everything else."""
    if pace is None or width < 1:
        return []
    stalled = round(pace.stall * width)
    waited = max(round(pace.wait * width), stalled)
    return [(_STALL * stalled, "warn"), (_HIDDEN * (waited - stalled), "dim"), (_REST * (width - waited), "accent")]


def _shares(pace: _Pace | None, width: int) -> Row:
    """The bar's legend: the stall, and the host's wait beside it."""
    if pace is None:
        return []
    hidden = max(pace.wait - pace.stall, 0.0)
    worst = f", worst {_percent(pace.worst)}"
    return beside(
        [
            [(f"{_STALL} ", "warn"), (f"data stall {_percent(pace.stall)}", "bold"), (worst, "plain")],
            [("loader's wait ", "plain"), (_percent(pace.wait), "plain")],
            [(f"{_HIDDEN} hidden {_percent(hidden)}", "plain")] if hidden >= 0.001 else [],
            [(f"{_REST} ", "accent"), (f"rest {_percent(1 - max(pace.wait, pace.stall))}", "plain")],
        ],
        width,
    )


def _host(view: View, width: int) -> Row:
    reading = view.reading
    if reading is None:
        return [(f"host {UNKNOWN}: no reading yet", "dim")]
    workers = f"workers {number(reading.worker_count)}"
    if reading.worker_count:
        workers += f", {percent(reading.worker_cpu)} CPU each"
    used = None
    if reading.host_total is not None and reading.host_available is not None:
        used = reading.host_total - reading.host_available
    share = reading.ui_share
    return beside(
        [
            [(workers, "plain")],
            [(f"process {percent(reading.cpu)} CPU", "plain")],
            [(f"host RAM {gib(used)} of {gib(reading.host_total)} GiB", "plain")],
            [(f"dashboard {_percent(share)} CPU", "warn" if share is not None and share > 0.01 else "dim")],
        ],
        width,
    )
