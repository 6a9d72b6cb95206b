"""The dashboard: records in, frames out, keys to commands."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual import events
from textual._ansi_sequences import SYNC_END, SYNC_START
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.geometry import Size
from textual.timer import Timer

from tui3090.dashboard.bindings import bindings
from tui3090.dashboard.dialogs import Dialog, HelpDialog, QuitDialog
from tui3090.dashboard.frame import CONTENTS, digit
from tui3090.dashboard.governor import Governor
from tui3090.dashboard.keys import SETTLE_S, Keys
from tui3090.dashboard.layout import places
from tui3090.dashboard.panel import Panel
from tui3090.dashboard.panels.footer import ANSWERED_S
from tui3090.dashboard.source import Source
from tui3090.dashboard.text import clean
from tui3090.dashboard.view import View
from tui3090.output import Tail
from tui3090.own import REST_S, Piece
from tui3090.records import Event, Record
from tui3090.runlog import RunFolder

LOOK_S = 0.5
"""Between two looks at what the source has; each costs, so there are no more than frames."""
READ_ON_S = 0.02
"""Between two looks at a run folder that gave something: a long run comes in many pieces."""
SOON_S = 0.05
"""Until the first look: a run folder has something to show by then."""
FORCED_S = 5.0
"""How long a forced stop may take before the screen is left all the same."""
TRAINS = ("training", "evaluating", "stopping")
"""States in which a frame takes time from training."""
WHILE_ASKED = ("close_dialog", "stop_training", "leave_running", "force", "picture", "repaint", "quit", "help_quit")
"""Actions that a dialog leaves alone; the others' keys do nothing while it is there."""


def theme() -> str:
    """`ansi-light` where TUI3090_THEME=light or COLORFGBG tells of a light background, else `ansi-dark`."""
    asked = os.environ.get("TUI3090_THEME", "")
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    light = asked == "light" or (asked != "dark" and background in ("7", "15"))
    return "ansi-light" if light else "ansi-dark"


HOME = "\x1b[H"
"""Puts the cursor into the upper left corner, where Textual leaves it after each update."""


class Dashboard(App[int]):
    """The screen of a run. `clock` gives the time of day; tests hold it still."""

    CSS_PATH = Path(__file__).with_name("app.tcss")
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = bindings()

    def __init__(self, source: Source, view: View, clock: Callable[[], float] = time.time) -> None:
        # the terminal's own colours; under NO_COLOR Textual then leaves out all of them, greys too
        super().__init__(ansi_color=True)
        self.theme = theme()
        self._source = source
        self._view = view
        self._clock = clock
        self._keys = Keys(view, source.send, source.read_only, self._now)
        self._governor = Governor(time.monotonic())
        self._panels = {name: Panel(content, name, digit(name)) for name, content in CONTENTS.items()}
        self._dialog: Dialog | None = None
        self._zoomed = ""
        self._current_look: Iterator[None] = iter(())
        self._look_began = 0.0
        """By the loop's clock."""
        self._next: asyncio.TimerHandle | None = None
        """The next look, or the next piece of the current one; the loop's timer, for Textual's is a task, which costs
        several times as much."""
        self._taken: deque[Record] = deque()
        """Records on their way to the view."""
        self._drawn: list[str] = []
        """Rows on their way to the terminal."""
        self._reading_on = False
        """Whether the last look at a run folder gave something."""
        self._forgetting: Timer | None = None
        self._output = Tail(RunFolder(Path(view.folder).absolute()).output) if view.folder else None

    def compose(self) -> ComposeResult:
        """All panels; the dialogs come when they are asked for."""
        yield from self._panels.values()

    def on_mount(self) -> None:
        """Paint, and only then start what stands behind it."""
        self._put()
        self._paint()
        self.call_after_refresh(self._start)

    def _start(self) -> None:
        self._source.start()
        self._governor.excuse()
        self._later(SOON_S, self._look)

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        self._next = asyncio.get_running_loop().call_later(seconds, do)

    def _now(self) -> float:
        """The time that ages on screen are counted to: of a run that ended before, when it did."""
        if not self._view.live and self._view.over:
            return self._view.state.time
        return self._clock()

    # frames

    def _look(self) -> None:
        """Take what came; paint when a frame is due. While something trains here, in pieces between which it rests."""
        self._look_began = asyncio.get_running_loop().time()
        self._current_look = self._looking()
        self._go_on()

    def _go_on(self) -> None:
        """A piece of the look, or all that is left of it."""
        piece = Piece(self._view.recent.median_s)
        try:
            for _ in self._current_look:
                if piece.over and not self._nothing_to_slow_down():
                    self._later(REST_S, self._go_on)
                    return
            self._write()
        except Exception as error:
            self.call_later(self._fail, error)
            return
        took = asyncio.get_running_loop().time() - self._look_began
        self._later(READ_ON_S if self._reading_on else max(0.0, LOOK_S - took), self._look)

    def _fail(self, error: Exception) -> None:
        """Where Textual sees it, and ends the screen."""
        raise error

    def on_unmount(self) -> None:
        """The screen may go in the middle of a look: what the run said last is not lost."""
        if self._next is not None:
            self._next.cancel()
        self._view.absorb(self._taken)
        self._taken.clear()

    def _nothing_to_slow_down(self) -> bool:
        return not self._source.live or self._view.state.state not in TRAINS

    def _looking(self) -> Iterator[None]:
        view = self._view
        was_over = view.over
        self._taken.extend(self._source.drain())
        came = bool(self._taken)
        while self._taken:
            view.absorb((self._taken.popleft(),))
            yield
        read_to_the_end = self._reading_on and not came
        self._reading_on = came and not self._source.live
        if self._output is not None:
            view.printed(self._output.read(), self._clock() if view.live else None)
            view.unfinished = self._output.unfinished
            yield
        if view.over and not was_over and not self._source.read_only:
            self.bell()
        if view.over and view.stop_asked:
            self.exit(0)
        now = time.monotonic()
        due = self._governor.rest(now) if self._nothing_to_slow_down() else self._governor.due(now)
        yield
        if due or read_to_the_end:
            self._governor.painted(now)
            yield from self._painting()

    def _paint(self) -> None:
        deque(self._painting(), maxlen=0)
        self._write()

    def _painting(self) -> Iterator[None]:
        """Bring panel after panel up to date; `_write` puts them on the terminal."""
        now = self._now()
        for panel in self._panels.values():
            changed = panel.show(self._view, now)
            if changed and self._dialog is None:
                self._drawn.append(panel.sequences(changed))
            else:
                panel.refresh_rows(changed)
            yield
        if self._dialog is not None:
            self._dialog.refresh_rows(self._dialog.show(self._view, now))

    def _write(self) -> None:
        """Put rows on the terminal, all at once where it can do that; the cursor rests where Textual leaves it."""
        sequences, self._drawn = "".join(self._drawn), []
        if sequences and self.is_running and self._driver is not None:
            whole = sequences + HOME
            self._driver.write(SYNC_START + whole + SYNC_END if self._sync_available else whole)

    def _answer(self) -> None:
        """Paint at once what a key did; that is not charged to the frames' budget."""
        if self._forgetting is not None:
            self._forgetting.stop()
        if self._view.answer:  # of a run that is over the time on screen stands still: it would never get old
            self._forgetting = self.set_timer(ANSWERED_S, partial(self._forget, self._view.answer))
        self._paint()
        self.call_after_refresh(self._governor.excuse)

    def _forget(self, answer: str) -> None:
        if self._view.answer == answer:
            self._view.answer = ""
            self._paint()

    def _put(self, size: Size | None = None) -> None:
        self._write()  # where it was drawn for
        width, height = size or self.size
        shown = places(width, height, self._zoomed)
        for name, panel in self._panels.items():
            panel.put(shown.get(name))
        if self._dialog is not None:
            self._dialog.put_over(width, height, self._view, self._now())

    def on_resize(self, event: events.Resize) -> None:
        """Place everything anew."""
        # the app's own size is still the one before
        self._put(event.size)
        self._paint()

    # keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """While a dialog is there, only what belongs to it acts."""
        return self._dialog is None or action in WHILE_ASKED

    def action_technique(self, name: str, backwards: bool) -> None:
        """A technique's key."""
        self._keys.press(name, backwards)
        self._settle_later()

    def action_undo(self) -> None:
        """Undo the last change."""
        self._keys.undo()
        self._settle_later()

    def _settle_later(self) -> None:
        self.set_timer(SETTLE_S + 0.01, self._settle)
        self._answer()

    def _settle(self) -> None:
        if self._keys.settle():
            self._answer()

    def action_cancel(self) -> None:
        """Cancel what is pending; when nothing is, leave a zoomed panel."""
        if not self._keys.cancel() and self._zoomed:
            self.action_zoom(self._zoomed)
        self._answer()

    def action_pause(self) -> None:
        """Pause, or go on."""
        self._keys.pause()
        self._answer()

    def action_evaluate(self) -> None:
        """Evaluate at the end of the step."""
        self._keys.evaluate()
        self._answer()

    def action_profile(self) -> None:
        """Read the Tensor Cores."""
        self._keys.profile()
        self._answer()

    def action_measure_activations(self) -> None:
        """Measure the activations by layer."""
        self._keys.measure_activations()
        self._answer()

    def action_save(self) -> None:
        """Save at the end of the step."""
        self._keys.save()
        self._answer()

    def action_go_back(self) -> None:
        """While paused: back to the last good save."""
        self._keys.go_back()
        self._answer()

    def action_lock(self) -> None:
        """Lock the keys, or unlock them."""
        self._keys.lock()
        self._answer()

    def action_zoom(self, panel: str) -> None:
        """Show a panel on the whole screen, or go back."""
        self._zoomed = "" if self._zoomed == panel else panel
        self._put()
        self._answer()

    def action_repaint(self) -> None:
        """Send every cell to the terminal again."""
        self.refresh(layout=True)
        self.screen.refresh()
        for panel in self._panels.values():
            panel.refresh()

    def action_picture(self) -> None:
        """Write the screen as SVG into the run folder; the log says where."""
        folder = Path(self._view.folder) if self._view.folder else Path()
        path = folder / f"screen-{time.strftime('%Y%m%d-%H%M%S')}.svg"
        level, sentence = "info", f"picture written to {path}"
        try:
            path.write_text(self.export_screenshot(title=f"tui3090 {clean(self._view.name)}"), "utf-8")
        except OSError as error:
            level, sentence = "warning", f"The picture can't be written to {path}: {error.strerror}."
        self._view.absorb([Event(time=self._now(), level=level, source="screen", text=sentence)])
        self._keys.answer(sentence)
        self._answer()

    # dialogs and leaving

    async def action_help(self) -> None:
        """Show the keys."""
        await self._open(HelpDialog())

    async def action_leave(self) -> None:
        """`q`: refused while the keys are locked."""
        if self._view.locked and not self._view.over:
            self._keys.answer("The keys are locked: n unlocks them; ctrl+q asks whether to leave.")
            self._answer()
            return
        await self.action_quit()

    async def action_quit(self) -> None:
        """`ctrl+q`: ask whether to stop training; where there is nothing to stop, leave."""
        if self._view.over or self._source.read_only:
            self.action_leave_running()
        elif not isinstance(self._dialog, QuitDialog):
            await self.action_close_dialog()
            await self._open(QuitDialog())

    def action_help_quit(self) -> None:
        """`ctrl+c`: as `ctrl+q`."""
        self.call_next(self.action_quit)

    async def action_stop_training(self) -> None:
        """Stop at the end of the step, then leave."""
        self._keys.stop()
        await self.action_close_dialog()

    def action_leave_running(self) -> None:
        """Close the screen; training, if there is any, goes on."""
        self._view.left = True
        self.exit(0)

    def action_force(self) -> None:
        """Stop now, and leave even when training does not."""
        if self._keys.force():
            self.set_timer(FORCED_S, lambda: self.exit(0))
            self._answer()

    async def _open(self, dialog: Dialog) -> None:
        self._write()  # before the dialog lies over it
        self._dialog = dialog
        await self.screen.mount(dialog)
        self._put()
        self._answer()

    async def action_close_dialog(self) -> None:
        """Take the dialog away."""
        dialog, self._dialog = self._dialog, None
        if dialog is not None:
            await dialog.remove()
        self._answer()
