"""SIGINT, SIGTERM and SIGHUP for a process that trains in a thread and draws in another."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

from tui3090.guardian import HELD_BACK, PASSED_ON

FORCE_AFTER_S = 10.0
"""From the first SIGINT or SIGTERM until the process leaves although training has not stopped."""


SAME_S = 0.3
"""Within it two are one: timeout(1), systemd and batch systems send one to the process and one to its group."""


class Interrupts:
    """Notes SIGINT and SIGTERM instead of obeying them, and ignores SIGHUP. Made in the main thread.

    A handler runs between two instructions of the main thread, which may hold any lock: it notes the signal and
    nothing else; whoever waits for the run looks here.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        """The first signal that came; the exit status is 128 more."""
        self._came: Counter[int] = Counter()
        self._counted: dict[int, float] = {}
        """When the last one of each was counted."""
        for number in (signal.SIGINT, signal.SIGTERM, *PASSED_ON):
            signal.signal(number, self._note)
        # A closed terminal sends it to the whole group. Ignored, it is so in loader workers too, also after exec.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.register_at_fork(after_in_child=_in_forked_child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)

    @property
    def count(self) -> int:
        """How many came: the second means that waiting for training is over.

        One to the whole process group comes twice, directly and passed on by the guardian, and counts once.
        """
        came = dict(self._came)
        return sum(max(came.get(number, 0), came.get(passed_on, 0)) for passed_on, number in PASSED_ON.items())

    def _note(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if now - self._counted.get(number, -SAME_S) >= SAME_S:
            self._counted[number] = now
            self._came[number] += 1
        if self.first is None:
            self.first = PASSED_ON.get(number, number)


def _in_forked_child() -> None:
    """A loader worker must not run our handlers: they would speak for the parent, or raise inside a dataset."""
    signal.set_wakeup_fd(-1)
    for name in ("SIGTERM", "SIGTSTP", "SIGCONT", "SIGWINCH", "SIGTTIN", "SIGTTOU"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl+c reaches the whole group: the parent decides
