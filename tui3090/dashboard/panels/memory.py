"""Who holds the card's memory: what this run keeps there and for what, other processes, what is free."""

from __future__ import annotations

from dataclasses import dataclass

from tui3090.dashboard.figures import beside, is_stale, reading_age, shown, wrapped
from tui3090.dashboard.text import UNKNOWN, Row, clean, cut, gib, number, percent
from tui3090.dashboard.view import View
from tui3090.records import Reading

TITLE = "Memory"
LAYER_ROWS = 4
"""Rows of room from which on the layers' activations are shown."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A piece of the bar and its entry in the legend."""

    letter: str
    name: str
    size: int | None
    """Bytes; None: unknown."""
    role: str = "plain"


def note(view: View, now: float) -> str:
    """The unit, and how old the reading is."""
    return f"GiB, {reading_age(view, now)}"


def rows(view: View, width: int, height: int, now: float) -> list[Row]:
    """Scale, bar, legend, and the three figures that people compare; then what layers keep for backward.

    In little height the legend goes first.
    """
    reading = view.reading
    if reading is None:
        return shown([[(f"{UNKNOWN}: no reading yet", "dim")]], width, height)
    stale = is_stale(view, now)
    total = _card_total(view)
    if total <= 0:
        return _with_layers(shown(_host_rows(view, reading, width), width, height, stale), view, width, height)
    segments = _card(view, reading, total)
    bar, legend = _bar(segments, total, width), _legend(segments, width)
    figures = _figures(view, reading, width)
    room = height - 1 - len(figures) - len(legend)
    if room < 0:
        return shown([bar, *figures, *legend[:room]], width, height, stale)
    scale = [_scale(total, width)] if room else []
    return _with_layers(shown([*scale, bar, *legend, *figures], width, height, stale), view, width, height)


def line(view: View, width: int, now: float) -> Row:
    """The bar, and peak, reserved and total."""
    reading = view.reading
    if reading is None:
        return shown([[(f"{UNKNOWN}: no reading yet", "dim")]], width, 1)[0]
    stale = is_stale(view, now)
    total = _card_total(view)
    if total > 0:
        segments = _card(view, reading, total)
        figures = f"{gib(reading.peak_allocated)} peak  {gib(reading.reserved)} reserved  of {gib(total)} GiB"
    else:
        total = reading.host_total or 0
        segments = _host(reading)
        figures = f"{gib(reading.rss)} process  {gib(reading.host_available)} available of {gib(total)} GiB"
    cells = min(width - len(figures) - 2, 60)
    bar = _bar(segments, total, cells) if total > 0 and cells >= 8 else []
    old: Row = [(reading_age(view, now), "warn")] if stale else []
    return shown([beside([old, bar, [(figures, "plain")]], width, gap=2)], width, 1, stale)[0]


def _card_total(view: View) -> int:
    """The card's memory by NVML or else by torch, bytes; 0 where there is no card."""
    if view.reading is not None and view.reading.card_total is not None:
        return view.reading.card_total
    return view.started.memory if view.started is not None and view.started.device != "cpu" else 0


def _card(view: View, reading: Reading, total: int) -> list[_Segment]:
    """The card from the left: what tensors hold, what torch holds beyond, the context, others, free.

    In an eager step tensors count at their peak, for at the moment of a reading activations may be there or not. Under
    replay activations lie in the graphs' pools, which no tensor holds, and what tensors hold does not move.
    """
    held = _held(reading)
    kept = [reading.weights, reading.gradients, reading.optimizer_state]
    at_least = sum(size or 0 for size in kept)
    above = None if held is None else max(held - at_least, 0)
    pools, reserved = reading.graph_pools, reading.reserved
    replayed = view.step is not None and view.step.replayed
    activations = "other tensors" if replayed or pools or None in kept else "activations"
    cached = None if reserved is None or held is None else max(reserved - max(held, at_least) - (pools or 0), 0)
    context = None if reading.own is None or reserved is None else max(reading.own - reserved, 0)
    free = None if reading.card_used is None else max(total - reading.card_used, 0)
    graphs = [_Segment("p", "graph pools", pools, "smooth")] if pools else []
    return [
        _Segment("w", "weights", reading.weights, "accent"),
        _Segment("g", "gradients", reading.gradients),
        _Segment("s", "optimizer state", reading.optimizer_state, "bold"),
        *graphs,
        _Segment("a", f"{activations}{'' if pools else ', peak'}", above, "plain" if pools else "smooth"),
        _Segment("▒", "cached + graphs" if replayed and pools is None else "cached", cached, "raw"),
        _Segment("x", "CUDA context", context),
        _Segment("o", "other processes", reading.others, "warn"),
        _Segment("·", "free", free, "dim"),
    ]


def _held(reading: Reading) -> int | None:
    """What tensors hold of the memory that torch has now: their peak, with graphs what they hold now."""
    held = reading.allocated if reading.graph_pools else reading.peak_allocated
    # the cache may have been given back since the peak
    return held if held is None or reading.reserved is None else min(held, reading.reserved)


def _with_layers(found: list[Row], view: View, width: int, height: int) -> list[Row]:
    """The panel and, where it has room, what the layers keep for backward."""
    room = height - len(found)
    return [*found, *shown(_layers(view, width), width, room)] if room >= LAYER_ROWS else found


def _layers(view: View, width: int) -> list[Row]:
    found = view.activations
    if found is None:
        hint = "m measures with the next step what each layer keeps for backward"
        return [] if view.over else [[], [(hint, "dim")]]
    large = found.total >= 1 << 30
    unit, size_of = ("GiB", gib) if large else ("MiB", lambda size: number(size / (1 << 20), 1))
    of = f"kept for backward by one micro-batch, step {number(found.step)}: {size_of(found.total)} {unit}"
    table: list[Row] = [[], [(of, "bold")]]
    for entry in found.layers.splitlines():
        size, _, name = entry.partition(" ")
        held = int(size) if size.isdecimal() and len(size) < 20 else 0
        share = held / found.total if found.total > 0 else 0.0
        cells = round(min(share, 1.0) * max(min(width - 60, 40), 0))
        table.append(
            [(f"{size_of(held):>8} {percent(share):>5}  ", "plain"), (f"{cut(clean(name), 40):<40} ", "plain")]
        )
        table[-1].append(("a" * cells, "smooth"))
    return table


def _host(reading: Reading) -> list[_Segment]:
    others = None
    if None not in (reading.host_total, reading.host_available, reading.rss):
        mine = (reading.rss or 0) + (reading.worker_rss or 0)
        others = max((reading.host_total or 0) - (reading.host_available or 0) - mine, 0)
    return [
        _Segment("p", "process", reading.rss, "accent"),
        _Segment("w", "workers", reading.worker_rss if reading.worker_count else 0, "bold"),
        _Segment("o", "others", others, "warn"),
        _Segment("·", "available", reading.host_available, "dim"),
    ]


def _host_rows(view: View, reading: Reading, width: int) -> list[Row]:
    """The host's memory, and why there is no card's."""
    segments, total = _host(reading), reading.host_total or 0
    found: list[Row] = [[("host memory", "bold")]]
    if total > 0:
        found += [_scale(total, width), _bar(segments, total, width)]
    found += _legend(segments, width)
    if view.started is not None and view.started.device == "cpu":
        found.append([("Training on the CPU: torch keeps no allocator figures there.", "dim")])
    return found + [[(text, "dim")] for text in wrapped(reading.card_missing, width) if text]


def _scale(total: int, width: int) -> Row:
    """0, quarters and the whole of `total` over the bar."""
    marks = [f"{total / (1 << 30) * quarter / 4:.3g}" for quarter in range(5)]
    text = ""
    for quarter, mark in enumerate(marks):
        start = min(max(quarter * width // 4 - len(mark) // 2, 0), width - len(mark))
        if not text or start > len(text):
            text = text.ljust(start) + mark
    return [(text, "dim")]


def _bar(segments: list[_Segment], total: int, width: int) -> Row:
    """Every piece to scale, the free one, which is the last, at the right end; '?' for what nobody answers for."""
    *held, free = segments
    row: Row = []
    end = upto = 0
    for segment in held:
        upto += segment.size or 0
        start, end = end, min(max(round(upto / total * width), end), width)
        row.append((segment.letter * (end - start), segment.role))
    left = width - end
    empty = 0 if free.size is None else min(max(round(free.size / total * width), 0), left)
    if free.size is not None and left - empty == 1:
        empty = left  # one cell is rounding
    return [*row, ("?" * (left - empty), "dim"), (free.letter * empty, free.role)]


def _legend(segments: list[_Segment], width: int) -> list[Row]:
    """Letter, name and GiB of each, in as many columns (4, 2 or 1) as fit."""
    for columns in (4, 2, 1):
        parts = [segments[start::columns] for start in range(columns)]
        names = [max(len(segment.name) for segment in part) for part in parts]
        sizes = [max(len(gib(segment.size)) for segment in part) for part in parts]
        gap = (width - sum(names) - sum(sizes) - 3 * columns) // max(columns - 1, 1)
        if gap >= 1:
            break
    found: list[Row] = []
    for start in range(0, len(segments), columns):
        row: Row = []
        for column, segment in enumerate(segments[start : start + columns]):
            space = " " * min(max(gap, 0), 4) if column else ""
            name = f" {segment.name:<{names[column]}} "
            row += [
                (space + segment.letter, segment.role),
                (name, "dim"),
                (f"{gib(segment.size):>{sizes[column]}}", "plain"),
            ]
        found.append(row)
    return found


def _figures(view: View, reading: Reading, width: int) -> list[Row]:
    """What tensors hold, what torch took, what nvidia-smi shows."""
    if reading.card_used is None and reading.card_missing:
        everybody = cut(clean(reading.card_missing), 120)
    else:
        everybody = "all of it + other processes"
        if reading.holders:
            everybody += f": {cut(clean(reading.holders), 60)}"
        elif reading.others is None and reading.card_used is not None:  # in a container process numbers are others
            everybody += f" ({UNKNOWN}: processes are hidden here)"
    since = f"peak since step {number(view.changes[-1].step)}" if view.changes else "peak since the start"
    held, fragmented = _held(reading), None
    unknown = reading.graph_pools is None and view.step is not None and view.step.replayed  # they would count as unused
    if held is not None and reading.reserved and not unknown:
        fragmented = max(1 - (held + (reading.graph_pools or 0)) / reading.reserved, 0.0)
    retries = reading.retries
    return [
        beside(
            [
                [_name("allocated"), _size(reading.allocated), (f" now, {gib(reading.peak_allocated)} peak", "plain")],
                [("what tensors hold" if reading.allocated is not None else "torch has not used the card yet", "dim")],
                [(since, "dim")],
            ],
            width,
        ),
        beside(
            [
                [_name("reserved"), _size(reading.reserved)],
                [("what torch took", "dim")],
                [(f"fragmentation {percent(fragmented)}", "plain")],
                [(f"retries {number(retries)}", "warn" if retries else "plain")],
            ],
            width,
        ),
        [_name("nvidia-smi"), _size(reading.card_used), (f"   {everybody}", "dim")],
    ]


def _name(text: str) -> tuple[str, str]:
    return f"{text:<11}", "plain"


def _size(size: int | None) -> tuple[str, str]:
    return f"{gib(size):>6}", "bold"
