"""The widget that paints any panel: border, title, note, and the rows that the panel's module gives.

It paints line by line and only what changed. A frame in which one figure moved sends that figure's row straight to the
terminal: Textual's way there (messages, timers, the compositor) costs several times as much as what the row says. What
lies over the panels, moves them or takes a picture goes Textual's way, which asks `render_lines`.
"""

from __future__ import annotations

from collections.abc import Hashable

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from tui3090.dashboard.frame import STILL, Content, framed, unframed
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
        self._still = STILL.get(name)
        self._depends: Hashable = None
        """What the rows depend on; None: they are made anew for each frame."""
        self._styles = DARK
        self._codes: dict[str, list[str]] = {}

    def put(self, place: Place | None) -> None:
        """Move to `place`; None: not shown."""
        if place == self._place:
            return
        self._place = place
        self._rows = []
        self._styles = COLOURLESS if self.app.no_color else DARK if self.app.current_theme.dark else LIGHT
        self._codes = {role: _codes(style, self.app.console) for role, style in self._styles.items()}
        self.display = place is not None
        if place is not None:
            self.styles.offset = (place.x, place.y)
            self.styles.width, self.styles.height = place.width, place.height

    def show(self, view: View, now: float) -> list[int]:
        """Bring the rows up to date. Returns those that changed; of a panel that was moved none, Textual paints it."""
        place = self._place
        if place is None:
            return []
        before, depended = self._rows, self._depends
        self._depends = self._still.depends(view, now) if self._still is not None else None
        if before and self._depends is not None and self._depends == depended:
            return []
        self._rows = unframed(self.content, self._number, place, view, now)
        if not before:
            self.refresh()
            return []
        return [y for y, (old, new) in enumerate(zip(before, self._rows)) if old != new]

    def sequences(self, changed: list[int]) -> str:
        """What puts these rows on the terminal."""
        place, codes = self._place, self._codes
        assert place is not None
        drawn = []
        for y in changed:
            drawn.append(f"\x1b[{place.y + y + 1};{place.x + 1}H")
            drawn += [text.join(codes[role]) for text, role in framed(self._rows[y], y, place)]
        return "".join(drawn)

    def refresh_rows(self, changed: list[int]) -> None:
        """Have Textual paint these rows, where something may lie over them."""
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def render_lines(self, crop: Region) -> list[Strip]:
        """The rows of `crop` as Textual paints them.

        They are ready: going through Textual's cache of styled lines would cost as much again.
        """
        return [self._strip(y).crop(crop.x, crop.right) for y in crop.line_range]

    def _strip(self, y: int) -> Strip:
        place = self._place
        if place is None or y >= len(self._rows):
            return Strip.blank(self.size.width)
        row = framed(self._rows[y], y, place)
        return Strip([Segment(text, self._styles[role]) for text, role in row], place.width)


def _codes(style: Style, console: Console) -> list[str]:
    """What comes before and after a text in `style` on its way to the terminal, as Textual writes it."""
    return Strip([Segment("|", style)]).render(console).split("|")
