"""What NVML tells of the card: whether it is busy, and what holds it back."""

from __future__ import annotations

import math

from tui3090.dashboard.figures import beside, is_stale, reading_age, shown, wrapped
from tui3090.dashboard.text import UNKNOWN, Row, clean, cut, duration, number, percent
from tui3090.dashboard.view import View
from tui3090.records import Reading

TITLE = "GPU"

HISTORY_S = 120.0
"""Seconds that the history goes back."""
_BLOCKS = "▁▂▃▄▅▆▇█"


def note(view: View, now: float) -> str:
    """The source, by its UUID's end which card it is, how old the reading is, and why a figure is not there."""
    if view.reading is not None and view.reading.card_missing:
        return "no card"
    uuid = clean(view.started.device_uuid.rpartition("-")[2][-6:]) if view.started is not None else ""
    untold = f", {UNKNOWN}: not told" if view.reading is not None and _untold(view.reading) else ""
    return f"NVML{f' …{uuid}' if uuid else ''}, {reading_age(view, now)}{untold}"


def _untold(reading: Reading) -> bool:
    """Whether NVML leaves a figure of the panel out: a card without a fan has no speed of it."""
    told = (reading.util, reading.power_w, reading.clock_mhz, reading.temperature_c, reading.fan)
    return None in (*told, reading.pcie_in_s, reading.pcie_out_s)


def rows(view: View, width: int, height: int, now: float) -> list[Row]:
    """Utilisation and power, clocks, temperature and transfers, the last two minutes."""
    reading = view.reading
    if reading is None:
        return shown([[(f"{UNKNOWN}: no reading yet", "dim")]], width, height)
    if reading.card_missing:
        return shown([[(text, "dim")] for text in wrapped(reading.card_missing, width)], width, height)
    found: list[Row] = [
        beside([_busy(reading), [("'a kernel was running'", "dim")], _power(reading)], width),
        _clock(reading),
        beside([_temperature(reading), _pcie(reading)], width),
        _history(view, width, now),
    ]
    if is_stale(view, now):
        warning: Row = [(f"no reading for {duration(now - reading.time)}; the last one was:", "warn")]
        return [*shown([warning], width, height), *shown(found, width, height - 1, stale=True)]
    return shown(found, width, height)


def line(view: View, width: int, now: float) -> Row:
    """Utilisation, power, temperature and clock."""
    reading = view.reading
    if reading is None:
        return shown([[(f"{UNKNOWN}: no reading yet", "dim")]], width, 1)[0]
    if reading.card_missing:
        return shown([[(clean(reading.card_missing), "dim")]], width, 1)[0]
    stale = is_stale(view, now)
    old: Row = [(reading_age(view, now), "warn")] if stale else []
    parts = [old, _busy(reading), _power(reading), [(_celsius(reading), "plain")], _clock(reading, brief=True)]
    if any(UNKNOWN in text for part in parts for text, _ in part):
        parts.append([(f"{UNKNOWN}: NVML does not tell", "dim")])
    return shown([beside(parts, width, gap=2)], width, 1, stale)[0]


def _busy(reading: Reading) -> Row:
    return [(f"busy {percent(reading.util)}", "bold")]


def _power(reading: Reading) -> Row:
    limit = f" of {number(reading.power_limit_w)}" if reading.power_limit_w is not None else ""
    return [(f"{number(reading.power_w)}{limit} W" if reading.power_w is not None else f"power {UNKNOWN}", "plain")]


def _clock(reading: Reading, brief: bool = False) -> Row:
    if reading.clock_mhz is None:
        return [(f"clock {UNKNOWN}", "plain")]
    top = f" of {number(reading.clock_max_mhz)}" if reading.clock_max_mhz is not None and not brief else ""
    held_back = f": held by {cut(clean(reading.held_back), 80)}" if reading.held_back else ""
    return [(f"clock {number(reading.clock_mhz)}{top} MHz", "plain"), (held_back, "warn")]


def _celsius(reading: Reading) -> str:
    return f"{number(reading.temperature_c)} °C" if reading.temperature_c is not None else f"temperature {UNKNOWN}"


def _temperature(reading: Reading) -> Row:
    return [(f"{_celsius(reading)}, fan {percent(reading.fan)}", "plain")]


def _pcie(reading: Reading) -> Row:
    if reading.pcie_in_s is None and reading.pcie_out_s is None:
        return [(f"PCIe {UNKNOWN}", "plain")]
    return [(f"PCIe {_gigabytes(reading.pcie_in_s)} in, {_gigabytes(reading.pcie_out_s)} out GB/s", "plain")]


def _gigabytes(per_second: float | None) -> str:
    return number(None if per_second is None else per_second / 1e9, 1)


def _history(view: View, width: int, now: float) -> Row:
    """Utilisation in blocks, the newest at the right; cells without a reading stay blank."""
    label = "busy, 2 min "
    cells = min(width - len(label), 60)
    known = [(r.time, r.util) for r in view.readings if r.util is not None and math.isfinite(r.util + r.time)]
    if cells < 4 or not known:
        return []
    end = now if view.live and not view.over else known[-1][0]
    sums: list[float] = [0.0] * cells
    counts = [0] * cells
    for moment, util in known:
        x = cells - 1 - int((end - moment) / HISTORY_S * cells)
        if 0 <= x < cells:
            sums[x] += util
            counts[x] += 1
    text = "".join(_block(total / count) if count else " " for total, count in zip(sums, counts))
    return [(label, "dim"), (text, "accent")]


def _block(share: float) -> str:
    return _BLOCKS[min(int(min(max(share, 0.0), 1.0) * len(_BLOCKS)), len(_BLOCKS) - 1)]
