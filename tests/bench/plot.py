"""Curves with their intervals as an SVG: panels beside one another, no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
WIDE, HIGH, LEFT, TOP, BOTTOM = 250, 190, 46, 64, 66
"""Of a panel's field, and what is left of, above and below it; pixels."""


@dataclass(frozen=True)
class Curve:
    """Points (x, y, low, high) of one contender."""

    name: str
    points: list[tuple[float, float, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Panel:
    """Curves over one x, which is drawn by its logarithm; y begins at 0."""

    title: str
    x: str
    curves: Sequence[Curve]
    y: str = "ms a step"


def picture(title: str, panels: Sequence[Panel], columns: int = 3) -> str:
    """The panels in rows of so many."""
    rows = -(-len(panels) // columns)
    cell_w, cell_h = WIDE + LEFT + 24, HIGH + TOP + BOTTOM
    width, height = cell_w * columns + 10, cell_h * rows + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width / 2}" y="22" font-size="15" text-anchor="middle">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        parts.append(f'<g transform="translate({column * cell_w + LEFT + 8},{row * cell_h + TOP + 20})">')
        parts += _panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel) -> list[str]:
    points = [point for curve in panel.curves for point in curve.points]
    xs = sorted({point[0] for point in points})
    first, last = math.log(xs[0]), math.log(xs[-1])
    ticks = _ticks(min(0.0, *(point[2] for point in points)), max(point[3] for point in points))
    low, high = ticks[0], ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        return (math.log(x) - first) / (last - first) * WIDE, HIGH * (1 - (y - low) / (high - low))

    parts = [
        f'<text x="{WIDE / 2}" y="-36" font-size="13" font-weight="bold" text-anchor="middle">{panel.title}</text>'
    ]
    for tick in ticks:
        y = at(xs[0], tick)[1]
        parts.append(f'<path d="M0 {y:.1f}H{WIDE}" stroke="#ddd"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for value in xs:
        x = at(value, low)[0]
        label = f"{value:,.0f}" if value < 1e5 else f"10^{round(math.log10(value))}"
        parts.append(f'<path d="M{x:.1f} {HIGH}v4" stroke="black"/>')
        parts.append(f'<text x="{x:.1f}" y="{HIGH + 17}" text-anchor="middle">{label}</text>')
    parts.append(f'<path d="M0 0V{HIGH}H{WIDE}" fill="none" stroke="black"/>')
    parts.append(f'<text x="{WIDE / 2}" y="{HIGH + 36}" text-anchor="middle">{escape(panel.x)}</text>')
    parts.append(f'<text transform="translate(-36,{HIGH / 2}) rotate(-90)" text-anchor="middle">{panel.y}</text>')
    for number, curve in enumerate(panel.curves):
        colour = COLOURS[number]
        line = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y, _, _ in curve.points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, least, most in curve.points:
            across, down = at(x, y)
            parts.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>')
            bar = f"M{across:.1f} {at(x, least)[1]:.1f}V{at(x, most)[1]:.1f}"
            parts.append(f'<path d="{bar}" stroke="{colour}"/>')
        place = number * WIDE / len(panel.curves)
        parts.append(f'<path d="M{place:.0f} -18h14" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{place + 18:.0f}" y="-14" font-size="11">{escape(curve.name)}</text>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Round values from at most `low` to at least `high`, five or so."""
    rough = max(high - low, 1e-9) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [round(number * step, 9) for number in range(math.floor(low / step), math.ceil(high / step) + 1)]
