"""What a step takes, how much of it is waiting for data, and what the host does meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tui3090.dashboard.figures import PROFILE_OLD_S, beside, is_stale, shown, steps_note, steps_stale
from tui3090.dashboard.panels import breakdown
from tui3090.dashboard.text import UNKNOWN, Row, duration, gib, number, percent, rounded, spread
from tui3090.dashboard.view import View
from tui3090.recent import busy_share

TITLE = "Step and data"


def note(view: View, now: float) -> str:
    """Where the times come from, of how many steps they are the mean, and how old they are."""
    return breakdown.note(view, now) or steps_note(view, now)


def rows(view: View, width: int, height: int, now: float) -> list[Row]:
    """Where a step's time goes in figures and as a bar, what of it is waiting for data, the host; rates if there is
    room."""
    pace, old = _pace(view), steps_stale(view, now)
    parts = breakdown.parts(view)
    first = breakdown.figures(parts, width) if parts else spread(_rates(view, pace, width), _no_phases(view), width)
    of_steps = [first, breakdown.bar(parts, width), _data(pace, [*_shapes(view), _gaps(view, now)], width)]
    if parts and height > len(of_steps) + 1:
        of_steps.append(_rates(view, pace, width))
    host = shown([_host(view, width)], width, height - len(of_steps), is_stale(view, now))
    return [*shown(of_steps, width, height, old), *host]


def line(view: View, width: int, now: float) -> Row:
    """The bar, shares, the stall and the rate."""
    pace, parts = _pace(view), breakdown.parts(view)
    if pace is None:
        return shown([[(_no_step(view), "dim")]], width, 1)[0]
    found: list[Row] = [
        breakdown.bar(parts, max(min(24, width - 45), 0)),
        breakdown.shares(parts),
        [(f"stall {_percent(pace.stall)}", "plain")],
        [(f"wait {_percent(pace.wait)}", "plain")],
        [(f"{rounded(pace.seconds)} s/step", "plain")],
        [(f"{rounded(pace.rate)} {pace.unit}", "plain")],
    ]
    return shown([beside(found, width, gap=2)], width, 1, steps_stale(view, now))[0]


def _no_phases(view: View) -> Row:
    return [(f"by phase {UNKNOWN}: not sampled yet", "dim")] if view.recent else []


@dataclass(frozen=True, slots=True)
class _Pace:
    """The windows since the last change; shares are fractions of their time."""

    seconds: float
    """Of a window, the mean."""
    rate: float
    """Tokens or samples per second."""
    unit: str
    stall: float | None
    """Without windows in which loader workers had to start; None: there is no other window."""
    worst: float | None
    """The stall's share in the worst window."""
    wait: float | None
    """The host's wait for the loader."""
    start_s: float | None
    """The last wait for loader workers to start; None: they did not."""


def _pace(view: View) -> _Pace | None:
    """None: there was no window since the change."""
    tokens = view.started.unit == "tokens" if view.started else bool(view.step and view.step.tokens)
    recent = view.recent
    seconds, stall, wait = (recent.total(name) for name in ("seconds", "stall_s", "wait_s"))
    if not (seconds > 0 and math.isfinite(seconds + stall + wait)):
        return None
    starts = [step for step in recent if step.loader_start] if recent.total("loader_start") else []
    fed = seconds - sum(step.seconds * step.steps for step in starts) if len(starts) < len(recent) else 0.0
    stall -= sum(step.stall_s * step.steps for step in starts)
    wait -= sum(step.wait_s * step.steps for step in starts)
    unit = "tok/s" if tokens else "samples/s"
    return _Pace(
        seconds=seconds / recent.total("steps"),
        rate=recent.total("tokens" if tokens else "samples") / seconds,
        unit=unit,
        stall=_share(stall, fed),
        worst=min(max(recent.worst_stall, 0.0), 1.0) if fed > 0 else None,
        wait=_share(wait, fed),
        start_s=starts[-1].wait_s if starts else None,
    )


def _share(part: float, whole: float) -> float | None:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else None


def _no_step(view: View) -> str:
    return f"{UNKNOWN}: no step since the change" if view.step else f"{UNKNOWN}: no step so far"


def _percent(share: float | None) -> str:
    """With a decimal below ten."""
    return percent(share, 1 if share is not None and share < 0.0995 else 0)


def _rates(view: View, pace: _Pace | None, width: int) -> Row:
    if pace is None:
        return [(f"rates {_no_step(view)}", "dim")]
    micro_batches = view.recent[-1].micro_batches
    return beside(
        [
            [(f"{rounded(pace.rate)} {pace.unit}", "bold")],
            [(f"{rounded(pace.seconds)} s/step", "plain"), (f", median {rounded(view.recent.median_s)}", "dim")],
            [(f"{number(micro_batches)} micro-batch{'' if micro_batches == 1 else 'es'}", "plain")],
        ],
        width,
    )


def _shapes(view: View) -> list[Row]:
    """What batches of different lengths cost: the share of padding, and of the windows that hit a captured graph."""
    windows, padding, tokens, hits = (view.recent.total(name) for name in ("steps", "padding", "tokens", "replayed"))
    replay: Row = [(f"replay hits {number(hits)} of {number(windows)}", "plain")]
    return [
        [(f"padding {_percent(padding / (tokens + padding))}", "plain")] if padding else [],
        replay if view.value("graph") else [],
    ]


def _gaps(view: View, now: float) -> Row:
    """Gaps between kernels, which are inside the phases: only a profiled step tells them."""
    found = view.profiled
    busy = busy_share(found, view.recent) if found is not None else None
    if found is None or busy is None or not 0 <= busy <= 0.98:
        return []
    role = "warn" if busy < 0.8 else "plain"
    if view.live and not view.over and now - found.time > PROFILE_OLD_S:
        role = "dim"
    return [(f"launch gaps {percent(1 - busy)} (profile)", role)]


def _data(pace: _Pace | None, more: list[Row], width: int) -> Row:
    """How much the device waited for data: the mean, the worst, the start of workers apart; the host's wait, and more,
    beside it."""
    if pace is None:
        return []
    hidden = max((pace.wait or 0.0) - (pace.stall or 0.0), 0.0)
    stalled = pace.stall is not None and pace.stall >= 0.05
    hiding = f", {_percent(hidden)} hidden" if hidden >= 0.001 else ""
    return beside(
        [
            [
                (f"data stall {_percent(pace.stall)}", "warn" if stalled else "bold"),
                (f", worst {_percent(pace.worst)}", "plain"),
            ],
            [("loader's wait ", "plain"), (_percent(pace.wait), "plain"), (hiding, "plain")],
            [(f"workers' start {duration(pace.start_s)}", "plain")] if pace.start_s is not None else [],
            *more,
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
