"""What key presses ask for: presses settle into one change, are cancelled, undone, refused, and answered in a sentence.

Nothing here imports Textual; app.py binds the keys.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from tui3090.commands import (
    Change,
    Command,
    Evaluate,
    GoBack,
    MakeSave,
    MeasureActivations,
    Pause,
    Profile,
    Stop,
    Withdraw,
)
from tui3090.dashboard.text import clean, number
from tui3090.dashboard.view import Pending, View
from tui3090.settings import BY_NAME, Technique, Value

SETTLE_S = 0.4
"""After the last press of a technique's key; several presses within it are one change."""
LATER = "not in this version"


def next_window(view: View, now: float) -> tuple[int, float]:
    """The optimizer step that the next window will be, and in how many seconds it starts, by the pace so far."""
    if view.step is None:
        return 1, 0.0
    pace = view.seconds_per_step() or view.step.seconds
    since = max(0.0, now - view.step.time)
    if view.state.state != "training" or not (pace > 0 and math.isfinite(since / pace)):
        return view.step.step + 1, 0.0
    gone, into = divmod(since, pace)
    # a window that takes much longer than the others is still one window
    return view.step.step + 2 + min(int(gone), 10), pace - into


def pending_text(view: View, technique: Technique, now: float) -> str:
    """`▸ bf16, from step 1 413`; empty where nothing is pending."""
    pending = view.pending.get(technique.name)
    if pending is None:
        return ""
    return f"▸ {technique.label(pending.value)}, from step {number(next_window(view, now)[0])}"


def refusal(view: View, technique: Technique, value: Value) -> str:
    """Why `technique` can't be set to `value`, a sentence; empty: it can. What is on can always be switched off."""
    reason = view.available.get(technique.name, "")
    return "" if value == technique.values[0] else clean(reason)


class Keys:
    """Turns presses into commands for `send`. `view.answer` says what each one did.

    `read_only` is a sentence that refuses every key that acts on training; empty: they act. `clock` gives the time of
    day on screen, `steady` seconds that never jump, by which presses settle.
    """

    def __init__(
        self,
        view: View,
        send: Callable[[Command], None],
        read_only: str = "",
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._send = send
        self._read_only = read_only
        self._clock = clock
        self._steady = steady

    def answer(self, sentence: str) -> None:
        """Show what a key brought."""
        self._view.answer, self._view.answer_time = sentence, self._clock()

    def refuses(self) -> bool:
        """Whether keys that act on training are refused now; the answer says why."""
        view = self._view
        if view.over:
            self.answer(f"The run is over ({view.state.state}): q leaves.")
        elif self._read_only:
            self.answer(self._read_only)
        elif view.locked:
            self.answer("The keys are locked: n unlocks them.")
        else:
            return False
        return True

    def press(self, name: str, backwards: bool) -> None:
        """A technique's key: ask for its next value, counted from the one that is pending or in force."""
        if self.refuses():
            return
        view, technique = self._view, BY_NAME[name]
        pending = view.pending.get(name)
        value = pending.value if pending else view.value(name)
        wanted = technique.after(value, backwards)
        if refused := refusal(view, technique, wanted):
            self._refused(technique, refused)
        elif wanted == value:
            end = "least" if backwards else "most"
            self.answer(f"{technique.title}: {technique.label(value)} is the {end}.")
        else:
            self._ask(technique, wanted)

    def undo(self) -> None:
        """Ask for the value that the last change took away."""
        if self.refuses():
            return
        if not self._view.changes:
            self.answer("Nothing to undo: no technique was changed in this run.")
            return
        last = self._view.changes[-1]
        technique = BY_NAME.get(last.technique)
        if technique is None:
            self.answer(f"{clean(last.technique)}: {LATER}")
        elif refused := refusal(self._view, technique, last.old):
            self._refused(technique, refused)
        else:
            self._ask(technique, last.old)

    def _refused(self, technique: Technique, reason: str) -> None:
        self.answer(reason if technique.title.lower() in reason.lower() else f"{technique.title}: {reason}")

    def _ask(self, technique: Technique, value: Value) -> None:
        view, name = self._view, technique.name
        self._withdraw(name)
        if value == view.value(name):
            self.answer(f"{technique.title} stays {technique.label(value)}.")
            return
        view.pending[name] = Pending(value, self._steady())
        self.answer(f"{technique.title} {pending_text(view, technique, self._clock())}   esc cancels")

    def settle(self) -> bool:
        """Send the changes whose last press is `SETTLE_S` ago. Returns whether there were any."""
        due = {
            name: pending
            for name, pending in self._view.pending.items()
            if not pending.sent and self._steady() - pending.pressed >= SETTLE_S
        }
        for name, pending in due.items():
            self._view.pending[name] = replace(pending, sent=True)
            self._send(Change(name, pending.value))
        return bool(due)

    def cancel(self) -> bool:
        """Withdraw all that is pending. Returns whether there was anything."""
        names = list(self._view.pending)
        for name in names:
            self._withdraw(name)
        if names:
            self.answer(f"Cancelled: {', '.join(BY_NAME[name].title for name in names)}.")
        return bool(names)

    def _withdraw(self, name: str) -> None:
        pending = self._view.pending.pop(name, None)
        if pending and pending.sent:
            self._send(Withdraw(name))

    def pause(self) -> None:
        """Pause at the end of the step, or go on."""
        if self.refuses():
            return
        state = self._view.doing
        if state in ("loading", "stopping"):
            self.answer(f"Not while {state}.")
            return
        on = state != "paused"
        self._send(Pause(on))
        self.answer("Pausing at the end of the step: space goes on." if on else "Going on.")

    def evaluate(self) -> None:
        """Evaluate at the end of the step."""
        if self.refuses():
            return
        if self._view.started is not None and self._view.started.eval_rows == 0:
            self.answer("This recipe has no eval_data to evaluate on.")
            return
        self._send(Evaluate())
        self.answer(f"Evaluating {self._when()}.")

    def profile(self) -> None:
        """Read with the next step which kernels run and whether they use the Tensor Cores."""
        if self.refuses():
            return
        if self._view.started is not None and self._view.started.device == "cpu":
            self.answer("Reading Tensor Cores needs an NVIDIA card, and training runs on the CPU.")
            return
        self._send(Profile())
        self.answer("The Tensor Cores are read with the next step.")

    def measure_activations(self) -> None:
        """Measure with the next step what each layer keeps for backward."""
        if self.refuses():
            return
        self._send(MeasureActivations())
        self.answer("What layers keep for backward is measured with the next step; 3 shows it.")

    def save(self) -> None:
        """Save at the end of the step."""
        if self.refuses():
            return
        self._send(MakeSave())
        self.answer(f"Saving {self._when()}; training waits for the copy alone.")

    def _when(self) -> str:
        """When a command is obeyed."""
        return {"loading": "before the first step", "paused": "now"}.get(self._view.doing, "at the end of the step")

    def go_back(self) -> None:
        """While paused: back to the last good save, which costs the steps since."""
        if self.refuses():
            return
        if self._view.doing != "paused":
            self.answer("b goes back to the last good save, losing the steps since: space pauses first.")
            return
        self._send(GoBack())
        self.answer("Going back to the last good save; the techniques stay as they are.")

    def lock(self) -> None:
        """Refuse keys, or take them again."""
        self._view.locked = not self._view.locked
        self.answer("Keys locked: n unlocks them." if self._view.locked else "Keys unlocked.")

    def stop(self) -> None:
        """Stop training at the end of the step."""
        self._view.stop_asked = True
        self._send(Stop())
        self.answer("Stopping at the end of the step. Q stops at once and loses that step.")

    def force(self) -> bool:
        """Stop now: only while stopping. Returns whether it does."""
        if self._view.doing != "stopping":
            return False
        self._send(Stop(now=True))
        self.answer("Stopping now: the step in flight is lost.")
        return True
