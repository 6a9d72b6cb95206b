"""Keeps what the dashboard costs training under 1 % of the time, by painting less often when it would cost more.

The CPU time of all our threads is counted and spent like money: it comes in at 1 % of the wall clock, and a frame is
due only when what was spent is paid off.
"""

from __future__ import annotations

from collections.abc import Callable

from tui3090.own import cpu_seconds

BUDGET = 0.009
"""Share of the wall clock that our threads may take: a little under 1 %, for the last frame is paid for afterwards."""
FRAME_S = 0.5
"""Between two frames, while that is within the budget."""
LONGEST_S = 30.0
"""Between two frames at the most, so that the screen does not stand still whatever they cost."""
SAVED_S = 10.0
"""How much of the budget may be saved up for a dearer frame."""


class Governor:
    """Says when a frame is due. Times are in seconds; `now` is that of a clock that never jumps."""

    def __init__(self, now: float, cpu: Callable[[], float] = cpu_seconds) -> None:
        self._cpu = cpu
        self._spent = cpu()
        self._balance = 0.0
        self._time = now
        self._painted = float("-inf")

    def due(self, now: float) -> bool:
        """Charge what was used since the last call; whether a frame is due."""
        # a thread that ended takes its time with it: the sum may fall
        used = max(0.0, self.excuse())
        self._balance += BUDGET * (now - self._time) - used
        self._balance = min(BUDGET * SAVED_S, max(-BUDGET * LONGEST_S, self._balance))
        self._time = now
        return self._is_time(now) and (self._balance >= 0 or now - self._painted >= LONGEST_S)

    def _is_time(self, now: float) -> bool:
        """Whether the last frame is long enough ago; a timer that fires a little early still is this frame's."""
        return now - self._painted >= FRAME_S * 0.9

    def rest(self, now: float) -> bool:
        """Nothing trains: what was used is not charged, and nothing is saved up either. Whether a frame is due."""
        self.excuse()
        self._time = now
        return self._is_time(now)

    def painted(self, now: float) -> None:
        """A frame was painted."""
        self._painted = now

    def excuse(self) -> float:
        """The CPU seconds used since the last call; of a key's answer or the start they are left out by that."""
        before, self._spent = self._spent, self._cpu()
        return self._spent - before
