"""The changes of techniques in this run and what each brought, the newest at the bottom."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tui3090.dashboard.keys import next_window
from tui3090.dashboard.text import GIB, UNKNOWN, Row, clean, cut, duration, fit, number, percent, rounded, width
from tui3090.dashboard.view import View
from tui3090.records import Changed, Gain
from tui3090.settings import BY_NAME, Technique, Value

TITLE = "Changes"
COUNTDOWN_S = 2.0
"""Shown for steps that are longer."""
STILL_SAME = 0.01
"""Share by which memory may differ and be called the same."""
HEADED = 4
"""Rows from which on one is a heading."""
GAP = 2
"""Cells between columns."""

Cell = tuple[str, str]
Column = tuple[str, Callable[[Gain], Cell]]


def note(view: View, now: float) -> str:
    """How the figures are to be read."""
    return "before → after, equal work" if view.changes else ""


def depends(view: View, now: float) -> tuple[object, ...] | None:
    """The changes and how far the newest is measured; what is pending counts down."""
    if view.pending:
        return None
    return view.happened, view.measuring.progress, bool(view.recent)


def rows(view: View, cells: int, height: int, now: float) -> list[Row]:
    """A heading and the newest changes, as many as fit; what is pending comes last."""
    room = height - len(view.pending) - (height >= HEADED)
    shown = list(view.changes)[-room:] if room > 0 else []
    if not shown and not view.pending:
        return [[("none yet: a technique's key makes one while it trains", "dim")]]
    gains = [gain for change in shown if (gain := view.gains.get(_key(change))) is not None]
    start = max((width(_what(change.technique, change.old, change.new)) for change in shown), default=6)
    start = min(max(start, 6), 16)
    steps = max([len("step"), *(width(number(change.step)) for change in shown)])
    columns = _columns(view, shown, gains, cells - steps - GAP - start)
    table = [_changed(view, change, (steps, start), columns) for change in shown]
    table += [_pending(view, name, steps, now) for name in view.pending]
    if height < HEADED:
        return table[-height:]
    heading = f"{'step':>{steps}}{' ' * GAP}{fit('key', start)}"
    heading += "".join(" " * GAP + fit(title, size) for title, _, size in columns)
    return [[(fit(heading, cells), "dim")], *table]


def line(view: View, cells: int, now: float) -> Row:
    """The newest one."""
    return rows(view, cells, 1, now)[0]


def key_of(technique: Technique, old: Value, new: Value) -> str:
    """The key that led from `old` to `new`, where two keys go opposite ways; else the technique's."""
    opposite = technique.key.lower() != technique.back.lower()
    backwards = opposite and isinstance(old, (int, float)) and isinstance(new, (int, float)) and new < old
    return technique.back if backwards else technique.key


def _key(record: Changed | Gain) -> tuple[int, str, Value]:
    """What a change and its gain have in common."""
    return record.step, record.technique, record.new


def _what(name: str, old: Value, new: Value) -> str:
    """`a bf16`, `c all`, `+ 2`."""
    technique = BY_NAME.get(name)
    if technique is None:
        return clean(f"{name} {new}")
    return f"{key_of(technique, old, new)} {clean(technique.label(new)).replace('× ', '×').removeprefix('every ')}"


def _columns(
    view: View, shown: Sequence[Changed], gains: Sequence[Gain], cells: int
) -> list[tuple[str, Callable[[Gain], Cell], int]]:
    """Title, cell and width of as many columns as fit, in the order of the screen."""
    measured = [gain for gain in gains if gain.verdict != "noisy"]
    if not measured:
        return []
    by = {_key(change): change.origin for change in shown if change.origin != "key"}
    unit, scale = ("TFLOPS", 1e12) if max(gain.flops_s_after or 0.0 for gain in measured) >= 1e11 else ("GFLOPS", 1e9)
    possible: list[Column] = [
        (f"{clean(measured[-1].unit)}/s", _rate),
        ("peak GiB", _peak),
        ("ms/step", lambda gain: _two(rounded(gain.step_s_before * 1e3), rounded(gain.step_s_after * 1e3))),
        ("loss", _loss),
        ("change", _change),
        ("stall %", lambda gain: _shares(gain.stall_before, gain.stall_after)),
        ("MFU %", lambda gain: _shares(gain.mfu_before, gain.mfu_after)),
        (unit, lambda gain: _two(_in(gain.flops_s_before, scale), _in(gain.flops_s_after, scale))),
        ("TC busy %", lambda gain: _shares(gain.tensor_core_before, gain.tensor_core_after)),
        ("by", lambda gain: (clean(by.get(_key(gain), "key")), "dim")),
    ]
    order = ("by", "loss", "peak GiB", "ms/step", "change", "stall %", "MFU %", "TC busy %", unit)
    wanted = [possible[0], *sorted(possible[1:], key=lambda column: order.index(column[0]))]
    taken: list[str] = []
    sizes: dict[str, int] = {}
    for title, cell in wanted:
        texts = [cell(gain)[0] for gain in measured]
        if (title == "by" and not by) or all(UNKNOWN in text for text in texts):
            continue
        size = max(width(text) for text in (title, *texts))
        if not taken or sum(sizes.values()) + size + GAP * (len(taken) + 1) <= cells:
            taken.append(title)
            sizes[title] = min(size, max(1, cells - GAP))
    return [(title, cell, sizes[title]) for title, cell in possible if title in taken]


def _changed(
    view: View, change: Changed, sizes: tuple[int, int], columns: Sequence[tuple[str, Callable[[Gain], Cell], int]]
) -> Row:
    row: Row = [
        (f"{number(change.step):>{sizes[0]}}{' ' * GAP}", "plain"),
        (fit(_what(change.technique, change.old, change.new), sizes[1]), "bold"),
    ]
    gain = view.gains.get(_key(change))
    origin = f"  by {clean(change.origin)}" if change.origin != "key" else ""
    if gain is None:
        return [*row, (f"{' ' * GAP}{_unmeasured(view, change)}{origin}", "dim")]
    if gain.verdict == "noisy":
        row.append((f"{' ' * GAP}too noisy to tell (±{percent(gain.noise)})", "dim"))
        for text, role in (_peak(gain), _loss(gain)):
            if UNKNOWN not in text and "same" not in text:
                unit = " GiB" if "→" in text else ""
                row.append((f"{' ' * GAP}{'' if unit else 'loss '}{text}{unit}", role))
        return [*row, (origin, "dim")]
    for _, cell, size in columns:
        text, role = cell(gain)
        row.append((" " * GAP + fit(text, size), role))
    return row


def _unmeasured(view: View, change: Changed) -> str:
    """How far the measurement of a change is, or why there is none."""
    if view.changes and change is not view.changes[-1]:
        later = list(view.changes)
        following = later[later.index(change) + 1]
        same = following.step == change.step
        return "together with the next one" if same else "not measured: the next one came too soon"
    if view.over:
        return "not measured: too few steps"
    progress = view.measuring.progress
    if progress is None:
        return "not measured: too few steps before it"
    done, samples = progress
    return f"measuring {done} of {samples}" if done or view.recent else "waiting for its first step"


def _rate(gain: Gain) -> Cell:
    role = {"faster": "good", "slower": "bad"}.get(gain.verdict, "plain")
    return _digits(gain.rate_before) + "→" + _digits(gain.rate_after), role


def _change(gain: Gain) -> Cell:
    if gain.verdict == "same":
        return "same", "dim"
    share = gain.rate_after / gain.rate_before - 1 if gain.rate_before else 0.0
    text = f"{'+' if share > 0 else '−'}{rounded(abs(share) * 100, 2)} %"
    return text, _rate(gain)[1]


def _peak(gain: Gain) -> Cell:
    before, after = gain.peak_before, gain.peak_after
    if before is None or after is None:
        return UNKNOWN, "dim"
    if abs(after - before) <= STILL_SAME * before:
        return f"{number(after / GIB, 1)} same", "dim"
    role = "good" if after < before else "plain"
    return f"{number(before / GIB, 1)}→{number(after / GIB, 1)}", role


def _loss(gain: Gain) -> Cell:
    if gain.loss == "same":
        return "same", "dim"
    return (clean(gain.loss), "bad") if gain.loss else (UNKNOWN, "dim")


def _two(before: str, after: str) -> Cell:
    return f"{before}→{after}", "plain"


def _shares(before: float | None, after: float | None) -> Cell:
    if before is None or after is None:
        return UNKNOWN, "dim"
    return _two(number(before * 100, 1), number(after * 100, 1))


def _in(flops: float | None, scale: float) -> str:
    return UNKNOWN if flops is None else rounded(flops / scale)


def _digits(rate: float) -> str:
    return rounded(rate, 4 if rate >= 1000 else 3)


def _pending(view: View, name: str, steps: int, now: float) -> Row:
    pending = view.pending[name]
    step, seconds = next_window(view, now)
    wait = f", {duration(seconds)}" if seconds >= COUNTDOWN_S else ""
    return [
        (f"{number(step):>{steps}}{' ' * GAP}", "plain"),
        (cut(_what(name, view.value(name), pending.value), 16) + " ", "bold"),
        ("▸ ", "accent"),
        (f"waiting for the step to end{wait}" if pending.sent else "esc cancels", "dim"),
    ]
