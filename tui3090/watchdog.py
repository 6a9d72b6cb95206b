"""What the loop should notice: divergence, batches without labels, a failing loss scale, weights and gradients that
stand still.

All of it is judged from what the host has anyway; nothing here waits for the device.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tui3090.meters.unmoved import EVERY
from tui3090.records import StepRecord

NOT_FINITE = 10
"""Windows in a row whose loss or gradient is not finite: training has diverged."""
EXPLODING = 20
"""Steps in a row whose loss is beyond `exploded`'s limit: training has diverged."""
HISTORY, LEAST_HISTORY = 100, 20
"""Losses that the limit is drawn from, and how many there must be. Exploding ones are no part of it."""
OVERFLOWS = 10
"""In a row, after which the loss scaler is spoken of; the few at its start are how it finds its scale."""
STUCK = 0.9
"""Share of unchanged bf16 weights above which it is spoken of."""
GRADIENT_WINDOWS = 10
"""Windows for which a missing gradient is awaited: an expert of a mixture has one only when it is chosen."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Training has diverged."""

    reason: str
    keys: str
    """What to press, apart from space and q."""
    restart: str
    """How to start again."""

    def paused(self, saved: int | None) -> str:
        """For somebody who can press a key; `saved` is the step of the last good save, None: there is none."""
        back = f"b goes back to the last good save (step {saved})" if saved is not None else "there is no good save"
        return f"Training is paused: {self.reason}. {back}, space goes on, {self.keys}, q leaves."

    @property
    def ended(self) -> str:
        """For a run that nobody can press a key of."""
        return f"Training diverged: {self.reason}. Without a screen there is no pause: start again {self.restart}."


def explosion_limit(median: float) -> float:
    """The loss above which a step counts as exploding, given the median of the losses before.

    Three times the median and at least 5 above it: single batches of a noisy loss get there, 20 in a row do not; and a
    loss near 0, or below it, may move by as much as a cross entropy does.
    """
    return max(3 * median, median + 5)


class Watchdog:
    """Looks at the record of every window; tells what it notices by `say` (source, text, level), and raises an alarm.

    A window counts as not finite if its loss or gradient is; an fp16 overflow does only at a loss scale below 1.
    """

    def __init__(self, say: Callable[[str, str, str], None]) -> None:
        self.alarm: Alarm | None = None
        """Why training should pause; None: it need not."""
        self._say = say
        self._unlabelled, self._unlabelled_due = 0, 1
        self._overflows, self._scale_warned = 0, False
        self._stuck = False
        self.reset()

    @property
    def calm(self) -> bool:
        """Whether nothing points to divergence: then a save is one to go back to."""
        return self.alarm is None and not self._not_finite and not self._exploding

    def reset(self) -> None:
        """Training goes on after an alarm: what counts is what comes now."""
        self.alarm = None
        self._not_finite = self._exploding = 0
        self._losses: deque[float] = deque(maxlen=HISTORY)

    def look(self, record: StepRecord, unlabelled: int) -> None:
        """Judge a window, of whose micro-batches `unlabelled` had no label."""
        self._look_at_labels(unlabelled)
        self._look_at_scale(record)
        self._look_at_loss(record)

    def unmoved(self, share: float) -> None:
        """Judge the share of bf16 weights that the last steps left as they were."""
        stuck = share > STUCK
        if stuck and not self._stuck:
            text = (
                f"{math.floor(100 * share)} % of the bf16 weights did not change in the last {EVERY} steps: their "
                "updates round away. Load the model in float32 (dtype=torch.float32) and use --amp bf16"
            )
            self._say("train", text, "warning")
        self._stuck = stuck

    def _look_at_labels(self, unlabelled: int) -> None:
        self._unlabelled += unlabelled
        if self._unlabelled < self._unlabelled_due:
            return
        while self._unlabelled_due <= self._unlabelled:
            self._unlabelled_due *= 10
        batches = "1 batch" if self._unlabelled == 1 else f"{self._unlabelled} batches"
        self._say("data", f"no labels: {batches} so far, left out: the max length may cut the answers", "info")

    def _look_at_scale(self, record: StepRecord) -> None:
        if record.loss_scale is None:
            return
        self._overflows = self._overflows + 1 if record.skipped == "overflow" else 0
        failing = self._overflows >= OVERFLOWS or record.loss_scale < 1
        if failing and not self._scale_warned:
            reason = f"{self._overflows} windows in a row overflowed" if self._overflows else "windows keep overflowing"
            text = (
                f"fp16: {reason} and changed no weight, the loss scale is down to {record.loss_scale:g}. "
                "Use bf16, which has fp32's range (key a, --amp bf16), or look for nan in the loss"
            )
            self._say("train", text, "warning")
        self._scale_warned = failing

    def _look_at_loss(self, record: StepRecord) -> None:
        if record.skipped == "no labels":
            return
        if record.skipped == "overflow" and record.loss_scale is not None and record.loss_scale >= 1:
            return  # the scaler is at work
        if record.skipped or not math.isfinite(record.loss):
            self._not_finite += 1
            if self._not_finite >= NOT_FINITE:
                self.alarm = self._not_finite_alarm(overflow=record.skipped == "overflow")
            return
        self._not_finite = 0
        median = statistics.median(self._losses) if len(self._losses) >= LEAST_HISTORY else math.inf
        if record.loss <= explosion_limit(median):
            self._exploding = 0
            self._losses.append(record.loss)
            return
        self._exploding += 1
        if self._exploding >= EXPLODING:
            self.alarm = Alarm(
                f"the loss was above {explosion_limit(median):.4g} for {self._exploding} steps in a row, after a "
                f"median of {median:.4g}",
                "[ lowers the learning rate",
                "with a lower learning rate",
            )

    def _not_finite_alarm(self, overflow: bool) -> Alarm:
        if overflow:
            return Alarm(
                f"{self._not_finite} windows in a row overflowed fp16 even at a loss scale below 1",
                "a leaves fp16",
                "with --amp bf16 or without AMP",
            )
        return Alarm(
            f"the loss or its gradient was not finite in {self._not_finite} windows in a row (a division by 0 or "
            "log of 0 in the loss, nan in the samples, or too high a learning rate)",
            "[ lowers the learning rate",
            "with a lower learning rate, or mend the loss or the samples",
        )


class Gradients:
    """Whether all parameters that had a gradient before checkpointing came on still get one. Looks on the host only."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._had = 0
        self._awaited: list[str] = []
        """Had a gradient before the change, and none yet since."""
        self._windows = 0

    def remember(self) -> None:
        """Checkpointing is about to change, and the gradients are those of the last window before."""
        self._awaited = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        self._had, self._windows = len(self._awaited), 0

    def lost(self) -> str:
        """Look at the gradients of a window after the change: what is amiss, once; empty: nothing, or not known yet."""
        if not self._awaited or all(parameter.grad is None for parameter in self._parameters.values()):
            return ""  # the second: a window given up, for which memory was full, has dropped them
        self._awaited = [name for name in self._awaited if self._parameters[name].grad is None]
        self._windows += 1
        if not self._awaited or self._windows < GRADIENT_WINDOWS:
            return ""
        lost, self._awaited = self._awaited, []
        names = ", ".join(lost[:3]) + (" …" if len(lost) > 3 else "")
        return (
            f"checkpointing loses gradients: {self._had} parameters had one before it, {self._had - len(lost)} have "
            f"one in the {GRADIENT_WINDOWS} windows since; {names} had none. Switch it off (key c)"
        )
