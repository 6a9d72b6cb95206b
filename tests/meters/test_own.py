from __future__ import annotations

import threading
import time

import pytest

from tui3090 import own
from tui3090.meters.own import OwnShare


class Burner:
    """A thread that uses a given CPU time when told to, and waits."""

    def __init__(self, name: str) -> None:
        self._go, self.burnt, self._end = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def burn(self) -> None:
        self._go.set()
        assert self.burnt.wait(60)

    def end(self) -> None:
        self._go.set()
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        self._go.wait()
        start = time.thread_time()
        while time.thread_time() - start < 0.2:
            sum(range(1000))
        self.burnt.set()
        self._end.wait()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("poller", True),
        ("runlog", True),
        ("textual-output", True),
        ("trainer", False),
        ("Thread-1 (_pin_memory_loop)", False),
    ],
)
def test_only_our_threads_are_counted(name, ours):
    burner = Burner(name)
    try:
        meter, start = OwnShare(), time.monotonic()
        burner.burn()
        share = meter.read()["ui_share"]
        assert share is not None
        used = share * (time.monotonic() - start)
        assert (used > 0.15) == ours
    finally:
        burner.end()


def test_a_thread_that_came_since_the_last_reading_is_counted_and_one_that_ended_is_left_out():
    meter = OwnShare()
    burner = Burner("poller")
    start = time.monotonic()
    try:
        burner.burn()
        assert meter.read()["ui_share"] * (time.monotonic() - start) > 0.15
    finally:
        burner.end()
    assert 0 <= meter.read()["ui_share"] < 2


def test_the_clock_is_the_thread_s_own():
    mine = time.pthread_getcpuclockid(threading.get_ident())
    assert own._cpu_clock(threading.get_native_id()) == mine


def test_without_such_clocks_the_share_is_unknown(monkeypatch):
    def none(clock):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(own.time, "clock_gettime", none)
    assert OwnShare().read() == {"ui_share": None}


@pytest.mark.parametrize(
    ("step_s", "held_s"), [(None, 0.0003), (0.003, 0.0003), (0.015, 0.0003), (0.1, 0.002), (60.0, 0.005)]
)
def test_a_piece_is_short_and_of_a_long_step_a_fiftieth_as_far_as_no_key_waits(monkeypatch, step_s, held_s):
    now = 100.0
    monkeypatch.setattr(own.time, "perf_counter", lambda: now)
    piece = own.Piece(step_s)
    for _ in range(2):
        now += held_s * 0.99
        assert not piece.over
        now += held_s * 0.02
        assert piece.over
        piece.go_on()
