"""A braille chart of a curve over the steps of the whole run.

A cell holds 2 x 4 dots. The raw values are a band from the least to the greatest in each column of dots, filled like a
chessboard; the smoothed curve is a solid line which clears the band from the cells that it passes, so that the two are
told apart without colour.
"""

from __future__ import annotations

import math
import re
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, itemgetter

from tui3090.dashboard.curve import Curve, Drawn, Other, Point
from tui3090.dashboard.text import Row, number

GUTTER = 9
"""Cells of the y axis and its labels; always the same, so that the chart stands still when its range changes."""
LABELLED_WIDTH = 24
"""Cells from which on there is room for the y axis."""
AXIS_HEIGHT = 5
"""Rows from which on there is one for the labels of the marks, or else for the steps; with one more there are both."""
REDRAW_S = 2.0
"""Seconds between two drawings of a growing curve at the least."""
OUTLIERS = 0.02
"""Share of the columns on either side that may lie outside the range, so that one spike does not flatten the rest."""

LETTER_CELLS = 16
"""Cells from one letter of another run's curve to the next."""

_MARK = "┊"
_ABOVE = "↑"
_BRAILLES = [chr(0x2800 + bits) for bits in range(256)]
# The bits of a braille character for the four dots of its left and its right column, top dot in the lowest bit.
_LEFT = [sum(bit for i, bit in enumerate((0x01, 0x02, 0x04, 0x40)) if dots >> i & 1) for dots in range(16)]
_RUN = re.compile(r"(.)\1*")
_ROLES = {role[0]: role for role in ("plain", "dim", "raw", "smooth")}
_RIGHT = [sum(bit for i, bit in enumerate((0x08, 0x10, 0x20, 0x80)) if dots >> i & 1) for dots in range(16)]


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step, drawn as a vertical line with its label below."""

    step: int
    label: str


@dataclass(slots=True)
class _Columns:
    """The curve in columns of dots."""

    low: list[float]
    high: list[float]
    smooth: list[float]


def draw(
    curve: Curve,
    marks: Sequence[Mark],
    width: int,
    height: int,
    now: float = math.inf,
    behind: Sequence[Other] = (),
) -> list[Row]:
    """The chart, `height` rows of at most `width` cells. Blank rows where the curve has no finite value.

    The smoothed curves of the runs `behind` are dotted, with their letters along them; runs with letters are shown to
    their own ends, the last run as far as this one has come.

    Drawn anew when the marks or the size changed, and when the curve has grown, at most every `REDRAW_S` of `now`: it
    is the dearest part of a frame, and one value among hundreds does not show.
    """
    asked = (tuple(marks), width, height, tuple(other.curve.added for other in behind))
    last = curve.drawn
    if last is None or last.asked != asked or (last.added < curve.added and not 0 <= now - last.time < REDRAW_S):
        last = curve.drawn = Drawn(asked, curve.added, now, _draw(curve, marks, width, height, behind))
    return last.rows


def _draw(curve: Curve, marks: Sequence[Mark], width: int, height: int, behind: Sequence[Other]) -> list[Row]:
    if not curve.points or width < 1 or height < 1:
        return [[] for _ in range(height)]
    points = _by_step(curve)
    first = points[0].step
    last = max([points[-1].step, *(o.curve.points[-1].step for o in behind if o.letter and o.curve.points)])
    plot_height = height - (height >= AXIS_HEIGHT) - (height > AXIS_HEIGHT and bool(marks))
    gutter = GUTTER if width >= LABELLED_WIDTH else 0
    columns = _columns(points, (width - gutter) * 2, first, last)
    others = [
        (other.letter, _columns(_by_step(other.curve), (width - gutter) * 2, first, last).smooth)
        for other in behind
        if other.curve.points and other.curve.points[0].step <= last
    ]
    least, most = _with_others(*_range(columns), others)
    at = [(_place(mark.step, first, last, width - gutter), mark.label) for mark in marks]
    rows = _cells(columns, others, least, most, plot_height, {x for x, _ in at})
    if gutter:
        labels = _y_labels(least, most, plot_height)
        rows = [[(f"{labels.get(y, ''):>{GUTTER - 2}} ┤", "dim"), *row] for y, row in enumerate(rows)]
    below = [_mark_labels(at, width - gutter)] if marks else []
    below.append(_step_labels(first, last, width - gutter))
    del below[height - plot_height :]
    rows += [[(" " * gutter + text, "dim")] for text in below]
    return rows


def _by_step(curve: Curve) -> list[Point]:
    """The points in the order of their steps: a resumed run may have gone back some."""
    return sorted(curve.points, key=attrgetter("step"))


def _place(step: int, first: int, last: int, cells: int) -> int:
    """The column in which `step` stands."""
    return min(max((step - first) * (cells - 1) // max(last - first, 1), 0), cells - 1)


def _columns(points: Sequence[Point], count: int, first: int, last: int) -> _Columns:
    """Points, sorted by step, in `count` columns of dots from step `first` to `last`.

    Columns without any lie between their neighbours. Of points before `first` the last one counts.
    """
    steps = [point.step for point in points]
    scale = (count - 1) / max(last - first, 1)
    low = [math.inf] * count
    high = [-math.inf] * count
    smooth = [math.nan] * count
    start = 0
    for x in range(count):
        end = bisect_right(steps, first + (x + 0.5) / scale, start)
        if end > start:
            low[x] = min([point.low for point in points[start:end]])
            high[x] = max([point.high for point in points[start:end]])
            smooth[x] = points[end - 1].smooth
            start = end
    known = [x for x in range(count) if low[x] <= high[x]]
    for a, b in pairwise(known):
        for x in range(a + 1, b):
            share = (x - a) / (b - a)
            low[x] = low[a] * (1 - share) + low[b] * share
            high[x] = high[a] * (1 - share) + high[b] * share
            smooth[x] = smooth[a] * (1 - share) + smooth[b] * share
    drawn = known[-1] + 1
    return _Columns(low[:drawn], high[:drawn], smooth[:drawn])


def _range(columns: _Columns) -> tuple[float, float]:
    """The least and the greatest value on the y axis.

    By percentile, unless all values fit into twice that range: then nothing is cut.
    """
    lows, highs = sorted(columns.low), sorted(columns.high)
    cut = max(1, int(len(lows) * OUTLIERS)) if len(lows) > 4 else 0
    least, most = lows[cut], highs[-1 - cut]
    if least > most:
        least, most = lows[0], highs[-1]
    span = most - least
    if highs[-1] - most <= span:
        most = highs[-1]
    if least - lows[0] <= span:
        least = lows[0]
    if most - least <= max(1e-9 * max(abs(most), abs(least)), 1e-200):
        room = abs(most) * 0.05 if abs(most) > 1e-100 else 1.0
        return max(least - room, -sys.float_info.max), min(most + room, sys.float_info.max)
    return least, most


def _with_others(least: float, most: float, others: Sequence[tuple[str, list[float]]]) -> tuple[float, float]:
    """The range with room for the other runs' values.

    Of those that are compared for all but outliers; of the last run for what is near, so that it flattens nothing.
    """
    span = most - least
    seen = [least, most]
    for letter, smooth in others:
        values = sorted(value for value in smooth if not math.isnan(value))
        if letter:
            cut = int(len(values) * OUTLIERS)
            seen += values[cut : len(values) - cut]
        else:
            seen += [value for value in values if least - span <= value <= most + span]
    return min(seen), max(seen)


def _cells(
    columns: _Columns,
    others: Sequence[tuple[str, list[float]]],
    least: float,
    most: float,
    height: int,
    marks: set[int],
) -> list[Row]:
    """The plot itself, in this order: smoothed line, arrow where it leaves the range, other runs, raw band, marks."""
    raw = _band_dots(columns, least, most, height * 4)
    smooth = _line_dots(columns.smooth, least, most, height * 4)
    lines = [(letter, _line_dots(values, least, most, height * 4)) for letter, values in others]
    width = max([(len(raw) + 1) // 2, *(mark + 1 for mark in marks), *((len(dots) + 1) // 2 for _, dots in lines)])
    for dots in (raw, smooth, *(dots for _, dots in lines)):
        dots += [0] * (width * 2 - len(dots))
    above = {x // 2 for x, (high, line) in enumerate(zip(columns.high, columns.smooth)) if high > most or line > most}
    # what comes later lies over what came before
    grid = _Grid.blank(width, height)
    for x in marks:
        for y in range(height):
            grid.put(x, y, _MARK, "dim")
    grid.put_dots(raw, "raw")
    for y in range(height) if lines else ():
        for x, char in _behind(lines, y, width).items():
            grid.put(x, y, char, "dim")
    for x in above:
        grid.put(x, 0, _ABOVE, "raw")
    grid.put_dots(smooth, "smooth")
    return grid.rows()


@dataclass(slots=True)
class _Grid:
    """Cells of a plot, their characters and the initials of their roles apart; rows are cut into runs of one role."""

    chars: list[list[str]]
    roles: list[list[str]]

    @classmethod
    def blank(cls, width: int, height: int) -> _Grid:
        return cls([[" "] * width for _ in range(height)], [["p"] * width for _ in range(height)])

    def put(self, x: int, y: int, char: str, role: str) -> None:
        self.chars[y][x], self.roles[y][x] = char, role[0]

    def put_dots(self, dots: list[int], role: str) -> None:
        """Columns of dots, where there are any: a curve takes few of the cells."""
        chars, roles, initial = self.chars, self.roles, role[0]
        for x, (left, right) in enumerate(zip(dots[::2], dots[1::2])):
            both = left | right
            for y in range(((both & -both).bit_length() - 1) // 4, (both.bit_length() - 1) // 4 + 1) if both else ():
                if bits := _LEFT[left >> 4 * y & 15] | _RIGHT[right >> 4 * y & 15]:
                    chars[y][x], roles[y][x] = _BRAILLES[bits], initial

    def rows(self) -> list[Row]:
        rows: list[Row] = []
        for chars, initials in zip(self.chars, self.roles):
            text, runs = "".join(chars), _RUN.finditer("".join(initials))
            rows.append([(text[run.start() : run.end()], _ROLES[run[1]]) for run in runs])
        return rows


def _behind(lines: Sequence[tuple[str, list[int]]], y: int, width: int) -> dict[int, str]:
    """Cell -> what row `y` shows of other runs: every second dot of a line, and now and then its letter."""
    cells: dict[int, str] = {}
    for place, (letter, dots) in enumerate(lines):
        dotted = [bits if x % 4 == 0 else 0 for x, bits in enumerate(dots)]
        for x, (bits, line) in enumerate(zip(_braille(dotted, y), _braille(dots, y))):
            if letter and line and (x - 4 * place) % LETTER_CELLS == LETTER_CELLS // 2:
                cells[x] = letter
            elif bits:
                cells.setdefault(x, _BRAILLES[bits])
    return cells


def _braille(dots: list[int], y: int) -> list[int]:
    """The bits of the braille characters in row `y` of columns of dots."""
    shift = 4 * y
    return [_LEFT[left >> shift & 15] | _RIGHT[right >> shift & 15] for left, right in zip(dots[::2], dots[1::2])]


def _scale(least: float, most: float, height: int) -> float:
    """Dots for a difference of values of 2: halves, so that the difference of two huge numbers stays finite."""
    return (height - 1) / (most / 2 - least / 2)


def _places(values: Sequence[float], least: float, most: float, height: int) -> list[int]:
    """Which dots values are, from the top; what is outside the range lies at its edge."""
    scale, half, last = _scale(least, most, height), least / 2, height - 1
    return [
        last - int((value / 2 - half) * scale + 0.5) if least <= value <= most else last if value < least else 0
        for value in values
    ]


def _band_dots(columns: _Columns, least: float, most: float, height: int) -> list[int]:
    """Each column's dots of the raw band as the bits of a number, top dot in the lowest bit."""
    chessboard = [sum(1 << y for y in range(parity, height, 2)) for parity in (0, 1)]
    dots: list[int] = []
    tops, bottoms = (_places(values, least, most, height) for values in (columns.high, columns.low))
    above, below = tops[0], bottoms[0]
    for x, (top, bottom) in enumerate(zip(tops, bottoms)):
        # a band without holes: reach for the neighbour's
        reach_top = below if below < top else top
        reach_bottom = above if above > bottom else bottom
        filled = ((1 << (reach_bottom - reach_top + 1)) - 1) << reach_top
        dots.append(filled & chessboard[x & 1] | 1 << top | 1 << bottom)
        above, below = top, bottom
    return dots


def _line_dots(values: Sequence[float], least: float, most: float, height: int) -> list[int]:
    """Each column's dots of a line, likewise."""
    scale, half, last = _scale(least, most, height), least / 2, height - 1
    dots: list[int] = []
    line = -1
    for value in values:
        if not least <= value <= most:  # outside the range, or not a number: no line rather than one along the edge
            dots.append(0)
            line = -1
            continue
        here = last - int((value / 2 - half) * scale + 0.5)
        start, end = (here, here) if line < 0 else (here, line) if here < line else (line, here)
        dots.append(((1 << (end - start + 1)) - 1) << start)
        line = here
    return dots


def _nice_step(span: float, parts: int) -> float:
    """A round number (1, 2, 2.5 or 5 times a power of ten) that divides `span` into at most `parts` parts."""
    rough = span / max(parts, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next((power * factor for factor in (1, 2, 2.5, 5) if power * factor >= rough), power * 10)


def _y_labels(least: float, most: float, height: int) -> dict[int, str]:
    """Row -> round value that lies in it, about every third row."""
    if not math.isfinite(most - least) or most - least < 1e-300:
        return {}
    step = _nice_step(most - least, max(height // 3, 3))
    digits = next((d for d in range(GUTTER) if abs(round(step, d) - step) < step * 1e-6), GUTTER)
    labels: dict[int, str] = {}
    for i in range(math.ceil(least / step), math.floor(most / step) + 1):
        value = i * step
        y = (height * 4 - 1 - round((value - least) / (most - least) * (height * 4 - 1))) // 4
        text = f"{value:.{digits}f}"
        labels[y] = text if len(text) <= GUTTER - 3 else f"{value:.1g}"
    return labels


def _mark_labels(at: Sequence[tuple[int, str]], width: int) -> str:
    """The labels under their marks; from the newest back, one that does not fit is cut to its first word or dropped."""
    line = ""
    end = width
    for x, label in sorted(at, key=itemgetter(0))[::-1]:  # at one place the later mark comes first
        for text in (label, label.split(" ", 1)[0]):
            start = min(x, width - len(text)) if end == width else x
            if start >= 0 and start + len(text) + (end < width) <= end:
                line = text.ljust(end - start) + line
                end = start
                break
    return (" " * end + line).rstrip()


def _step_labels(first: int, last: int, width: int) -> str:
    """Round numbers of steps under their columns, as many as fit."""
    line = f"step {number(first)}"
    if len(line) > width:
        return ""
    step = max(1, math.ceil(_nice_step(last - first, max(width // 14, 1)))) if last > first else 1
    for tick in range((first // step + 1) * step, last + 1, step):
        text = number(tick)
        start = min(_place(tick, first, last, width) - len(text) // 2, width - len(text))
        if start >= len(line) + 3:
            line = line.ljust(start) + text
    return line
