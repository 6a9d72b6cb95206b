"""The governor: however dear a frame, our threads stay within their share; a clock and costs of our own."""

from __future__ import annotations

import threading
import time

import pytest

from tui3090.dashboard.governor import BUDGET, FRAME_S, LONGEST_S, Governor
from tui3090.own import cpu_seconds


class Screen:
    """A screen whose frames and whose idling cost given CPU seconds, looked at four times a second."""

    def __init__(self, frame: float, idle: float = 0.0) -> None:
        self.frame, self.idle = frame, idle
        self.cpu = 0.0
        self.now = 100.0
        self.frames: list[float] = []
        self.governor = Governor(self.now, self.used)

    def used(self) -> float:
        self.cpu += 1e-6  # asking costs too
        return self.cpu

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            self.cpu += self.idle * 0.25
            if self.governor.due(self.now):
                self.governor.painted(self.now)
                self.frames.append(self.now)
                self.cpu += self.frame


def test_cheap_frames_come_twice_a_second() -> None:
    screen = Screen(frame=0.003)
    screen.run(60)
    assert len(screen.frames) == pytest.approx(60 / FRAME_S, abs=1)


@pytest.mark.parametrize("frame", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("idle", [0.0, 0.004])
def test_dear_frames_are_stretched_until_the_share_is_kept(frame: float, idle: float) -> None:
    screen = Screen(frame, idle)
    screen.run(600)
    # the first frame and the one that was just painted come on top
    assert screen.cpu <= BUDGET * 600 + 2 * frame
    assert len(screen.frames) == pytest.approx((BUDGET - idle) * 600 / frame, rel=0.15, abs=2)


def test_the_rate_comes_back_when_frames_are_cheap_again() -> None:
    screen = Screen(frame=0.05)
    screen.run(60)
    screen.frame = 0.002
    screen.run(30)
    screen.frames.clear()
    screen.run(30)
    assert len(screen.frames) == pytest.approx(30 / FRAME_S, abs=1)


def test_the_screen_never_stands_still() -> None:
    screen = Screen(frame=0.001, idle=0.5)
    screen.run(10 * LONGEST_S)
    assert len(screen.frames) >= 9


def test_what_is_excused_is_not_charged() -> None:
    screen = Screen(frame=0.004)
    screen.run(20)
    screen.cpu += 5.0
    assert screen.governor.excuse() == pytest.approx(5.0, abs=0.01)
    screen.frames.clear()
    screen.run(20)
    assert len(screen.frames) == pytest.approx(20 / FRAME_S, abs=1)


def test_while_nothing_trains_frames_come_and_nothing_is_saved_up() -> None:
    screen = Screen(frame=0.05)
    for _ in range(240):
        screen.now += 0.25
        screen.cpu += 1e-5  # whenever it is asked, something was used
        if screen.governor.rest(screen.now):
            screen.governor.painted(screen.now)
            screen.frames.append(screen.now)
            screen.cpu += screen.frame
    assert len(screen.frames) == pytest.approx(60 / FRAME_S, abs=2)
    screen.governor.rest(screen.now)
    screen.frames.clear()
    screen.run(20)
    assert len(screen.frames) <= BUDGET * 20 / screen.frame + 1


def _burn(seconds: float) -> None:
    while time.thread_time() < seconds:
        pass


def _run_thread(name: str, seconds: float) -> float:
    """What a thread of that name adds to our CPU time while it still lives."""
    before = cpu_seconds() - time.thread_time()
    burnt, done = threading.Event(), threading.Event()

    def work() -> None:
        _burn(seconds)
        burnt.set()
        done.wait(30)

    thread = threading.Thread(target=work, name=name)
    thread.start()
    assert burnt.wait(30)
    added = cpu_seconds() - time.thread_time() - before
    done.set()
    thread.join()
    return added


def test_our_threads_count_and_the_trainers_and_the_loaders_do_not() -> None:
    assert 0.05 <= _run_thread("poller", 0.05) < 0.1
    for name in ("trainer", "trainer-2", "QueueFeederThread", "Thread-3 (_pin_memory_loop)"):
        assert _run_thread(name, 0.05) < 0.02
