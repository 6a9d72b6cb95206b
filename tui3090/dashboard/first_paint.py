"""The first picture of a run, on screen before Textual is imported, which takes longer than a person waits gladly."""

from __future__ import annotations

import time

from tui3090.dashboard.frame import CONTENTS, digit, paint
from tui3090.dashboard.layout import places
from tui3090.dashboard.terminal import Terminal
from tui3090.dashboard.view import View

TAKE = "\x1b[?1049h\x1b[?25l\x1b[2J"
"""The alternate screen, empty, without a cursor: as Textual takes it a moment later."""
WEIGHTS = {"dim": "2", "bold": "1", "key": "1", "accent": "1", "bad": "1"}
"""Role -> SGR code. Colours come with Textual, which knows what the terminal can show."""


def first_paint(terminal: Terminal, view: View) -> None:
    """Draw all panels as they stand. Whoever runs the terminal afterwards gives the screen back."""
    now = time.time()
    drawn = [TAKE]
    for name, place in places(*terminal.size()).items():
        for y, row in enumerate(paint(CONTENTS[name], digit(name), place, view, now), start=place.y + 1):
            drawn.append(f"\x1b[{y};{place.x + 1}H")
            drawn += (f"\x1b[{WEIGHTS[role]}m{text}\x1b[m" if role in WEIGHTS else text for text, role in row)
    terminal.taken = True
    terminal.write("".join(drawn))
    terminal.flush()
