"""The newest windows of a run, and sums over them that cost the same however many they are."""

from __future__ import annotations

import math
from collections import deque

from tui3090.records import Profiled, StepRecord


class Recent(deque[StepRecord]):
    """A deque of a bounded length that keeps its sums while windows come and go at its ends."""

    def __init__(self, most: int) -> None:
        super().__init__(maxlen=most)
        self._most = most
        self._sums: dict[str, float] = {}
        self._appended = 0

    def append(self, record: StepRecord) -> None:
        """The newest window; the oldest goes where there are too many."""
        gone = self[0] if len(self) == self._most else None
        super().append(record)
        self._appended += 1
        if self._appended % self._most == 0:
            self._sums.clear()  # or roundings would add up over a run
        for name, before in self._sums.items():
            self._sums[name] = before + _part(record, name) - (_part(gone, name) if gone is not None else 0)

    def clear(self) -> None:
        """No window."""
        super().clear()
        self._sums.clear()

    def total(self, name: str) -> float:
        """The sum of a figure of the windows, `seconds`, `tokens`, `replayed`, each times its steps; `steps`: of them.

        A window that lacks it counts as 0.
        """
        found = self._sums.get(name)
        if found is None or not math.isfinite(found):  # what is not finite would stay in a sum that is carried on
            found = self._sums[name] = sum([_part(record, name) for record in self])
        return found


def busy_share(look: Profiled, windows: Recent) -> float | None:
    """The share of a window's time, waiting for data left out, in which a kernel runs; None: no kernel was seen.

    What the kernels of the profiled window took over what `windows` take, or the share in the profiled window itself
    where that is more: the profiler makes launches dearer, and so the gaps between kernels longer.
    """
    if look.busy_share is None:
        return None
    busy_s = (windows.total("seconds") - windows.total("stall_s")) / max(1.0, windows.total("steps"))
    return max(look.busy_share, min(1.0, look.kernel_s / busy_s) if busy_s > 0 else 0.0)


def _part(record: StepRecord, name: str) -> float:
    if name == "steps":
        return record.steps
    value: float | None = getattr(record, name)
    return 0 if value is None else value * record.steps
