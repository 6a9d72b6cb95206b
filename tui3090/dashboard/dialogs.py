"""What lies over the panels: the help, and the one question before leaving."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from tui3090.dashboard.layout import Place
from tui3090.dashboard.panel import Panel
from tui3090.dashboard.panels.techniques import keys_of
from tui3090.dashboard.text import Row, row_width
from tui3090.dashboard.view import View
from tui3090.settings import TECHNIQUES

KEYS = (
    ("space", "pause at the end of the step, and go on"),
    ("s e b", "save, evaluate, at the end of the step; while paused: back to the last good save"),
    ("esc", "cancel what is pending (▸), leave a zoomed panel"),
    ("u", "undo the last change"),
    ("n", "lock the keys, for when you type into the wrong pane; n unlocks them"),
    ("1-7 l", "a panel (l: the log) on the whole screen, and back"),
    ("x", "a picture of the screen (SVG) in the run folder; ctrl+l paints all again"),
    ("q", "leave, after a question; ctrl+c and ctrl+q too"),
    ("Q", "while stopping: stop at once, losing the step in flight"),
    ("r m", "read with the next step: kernels on the Tensor Cores (5), what layers keep for backward (3)"),
)


class Help:
    """The keys and what they do."""

    TITLE = "Help"

    def note(self, view: View, now: float) -> str:
        """How to leave it."""
        return "esc or ? closes"

    def rows(self, view: View, width: int, height: int, now: float) -> list[Row]:
        """The techniques, then all other keys: 22 rows."""
        table: list[Row] = [
            [
                (f"{keys_of(technique):6} ", "key"),
                (f"{technique.title:15} ", "bold"),
                ("≈ " if technique.effect == "numbers" else "  ", "plain"),
                (technique.sentence, "plain"),
            ]
            for technique in TECHNIQUES
        ]
        table.append([("≈ changes the numbers. Capitals go backwards. Presses settle for 0.4 s.", "dim")])
        table += [[(f"{key:6} ", "key"), (words, "plain")] for key, words in KEYS]
        return table

    def line(self, view: View, width: int, now: float) -> Row:
        """How to leave it."""
        return [("esc or ? closes", "plain")]


class QuitQuestion:
    """Whether to stop training, or only to close the screen."""

    TITLE = "Leave"

    def note(self, view: View, now: float) -> str:
        """Nothing."""
        return ""

    def rows(self, view: View, width: int, height: int, now: float) -> list[Row]:
        """The choices."""
        return [
            [("s", "key"), ("    save and stop: training ends with the step in flight", "plain")],
            [("d", "key"), ("    leave it running: tui3090 show comes back to it", "plain")],
            [("esc", "key"), ("  stay", "plain")],
        ]

    def line(self, view: View, width: int, now: float) -> Row:
        """The choices in short."""
        return [
            *[("s", "key"), (" save and stop  ", "plain"), ("d", "key"), (" leave it running  ", "plain")],
            *[("esc", "key"), (" stay", "plain")],
        ]


class Dialog(Panel):
    """A panel over the others that takes the keys while it is there."""

    can_focus = True

    def put_over(self, width: int, height: int, view: View, now: float) -> None:
        """Stand in the middle of a screen of that size, as big as its rows need."""
        content = self.content.rows(view, width, height, now)
        wide = min(width, max(map(row_width, content)) + 4)
        tall = min(height, len(content) + 2)
        if wide > 4 and tall > 2:
            self.put(Place((width - wide) // 2, (height - tall) // 2, wide, tall, "box"))
        else:
            self.put(Place(0, 0, width, 1, "line"))
        self.focus()


class HelpDialog(Dialog):
    """The help."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,h,q", "app.close_dialog", show=False)]

    def __init__(self) -> None:
        super().__init__(Help(), "help")


class QuitDialog(Dialog):
    """The question before leaving."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "app.stop_training", show=False),
        Binding("d", "app.leave_running", show=False),
        Binding("escape", "app.close_dialog", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(QuitQuestion(), "quit")
