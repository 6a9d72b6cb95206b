"""Signals that are counted: a second one leaves at once, a doubled one does not."""

from __future__ import annotations

import signal
import subprocess
import sys

COUNTS = """
import os, signal, time
from tui3090 import signals

now = 100.0
time.monotonic = lambda: now
interrupts = signals.Interrupts()
for now in (100.0, 100.0 + signals.SAME_S / 2, 101.0):
    os.kill(os.getpid(), signal.SIGTERM)
    print(interrupts.count, end=" ")
print(int(interrupts.first))
"""


def test_two_at_once_are_one_and_a_later_one_is_the_second() -> None:
    ran = subprocess.run([sys.executable, "-c", COUNTS], capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == ["1", "1", "2", str(int(signal.SIGTERM))], ran.stderr
