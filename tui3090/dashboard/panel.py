"""The widget that paints any panel: border, title, note, and the rows that the panel's module gives.

It paints line by line and only what changed: a frame in which one figure moved sends that figure's row to the terminal
and asks for no layout.
"""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from tui3090.dashboard.frame import Content, framed, unframed
from tui3090.dashboard.layout import Place
from tui3090.dashboard.text import Row
from tui3090.dashboard.view import View

DARK = {
    "plain": Style.null(),
    "dim": Style(dim=True),
    "bold": Style(bold=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "accent": Style(color="magenta", bold=True),
    "key": Style(color="cyan", bold=True),
    "raw": Style(color="cyan", dim=True),
    "smooth": Style(bold=True),
}
"""Role -> style: the terminal's own colours, so that they suit its background; weight tells them apart without any."""
LIGHT = DARK | {"warn": Style(color="red"), "key": Style(color="blue", bold=True), "raw": Style(color="blue", dim=True)}
"""The same on a light background, where yellow and cyan can't be read."""
COLOURLESS = {role: Style(bold=style.bold, dim=style.dim) for role, style in DARK.items()}
"""The same for NO_COLOR."""


class Panel(Widget):
    """One panel, where `put` places it. `show` brings it up to date."""

    def __init__(self, content: Content, name: str, number: str = "") -> None:
        super().__init__(id=name)
        self.content = content
        self._number = number
        self._place: Place | None = None
        self._rows: list[Row] = []
        self._strips: list[Strip] = []
        self._styles = DARK

    def put(self, place: Place | None) -> None:
        """Move to `place`; None: not shown."""
        if place == self._place:
            return
        self._place = place
        self._rows, self._strips = [], []
        self._styles = COLOURLESS if self.app.no_color else DARK if self.app.current_theme.dark else LIGHT
        self.display = place is not None
        if place is not None:
            self.styles.offset = (place.x, place.y)
            self.styles.width, self.styles.height = place.width, place.height

    def show(self, view: View, now: float) -> int:
        """Paint the rows that changed since the last time; how many they are."""
        place = self._place
        if place is None:
            return 0
        rows = unframed(self.content, self._number, place, view, now)
        if not self._rows:
            self._strips = [Strip.blank(place.width)] * place.height
            changed = list(range(place.height))
        else:
            changed = [y for y in range(place.height) if rows[y] != self._rows[y]]
        self._rows = rows
        for y in changed:
            row = framed(rows[y], y, place)
            self._strips[y] = Strip([Segment(text, self._styles[role]) for text, role in row], place.width)
        if changed:
            self.refresh(*(Region(0, y, place.width, 1) for y in changed))
        return len(changed)

    def render_lines(self, crop: Region) -> list[Strip]:
        """The rows of `crop` as Textual paints them.

        They are ready: going through Textual's cache of styled lines would cost as much again.
        """
        blank = Strip.blank(self.size.width)
        strips = self._strips
        return [(strips[y] if y < len(strips) else blank).crop(crop.x, crop.right) for y in crop.line_range]
