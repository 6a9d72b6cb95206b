"""Loops that take turns in one process, and the interval of a median.

Each loop runs in a thread of its own and calls `boundary` between two of its steps; one thread runs at a time, the
others wait there. So a loop that is somebody else's (a Trainer with callbacks) takes its turn like one written here,
and what makes the machine slower for a while makes all of them slower.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch

LEAST = 3
"""Rounds that count, however long they take."""
Loop = Callable[[Callable[[], bool]], None]
"""Trains until `boundary()`, which it calls before each step, says False."""


def finish() -> None:
    """Wait until the card has done what was launched."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wall() -> float:
    """Seconds by the clock on the wall, all launched work done."""
    finish()
    return time.perf_counter()


class Contender:
    """A loop and its thread, which waits between its turns."""

    def __init__(self, name: str, loop: Loop, cpu: bool = False) -> None:
        """`cpu`: a turn's figure is the median step's CPU time of the loop's thread, which leaves out what other
        processes take; else it is the mean by the clock on the wall, all launched work done."""
        self.name = name
        self.ended = False
        self.problem: BaseException | None = None
        """What ended the loop before its time."""
        self._loop, self._cpu = loop, cpu
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._steps = self._at = 0
        self._over = False
        self._began = self._seconds = 0.0
        self._ends: list[float] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def turn(self, steps: int) -> float | None:
        """Let it take so many steps, two at least; seconds a step of their second half. None: the loop has ended."""
        self._steps = steps
        if not self._thread.is_alive() and not self.ended:
            self._thread.start()
        self._go.release()
        self._back.acquire()
        return None if self.ended else self._seconds

    def end(self) -> None:
        """Let the loop end, and wait for it."""
        self._over = True
        if self._thread.is_alive():
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._over:
                self._loop(self._boundary)
        except BaseException as problem:
            self.problem = problem
        self.ended = True
        self._back.release()

    def _boundary(self) -> bool:
        """Between two steps: whether there is another one. Here the loop waits until its next turn."""
        if self._over:
            return False
        half = self._steps // 2
        if self._cpu and self._at >= half:
            self._ends.append(time.thread_time())
        elif self._at == half:
            self._began = wall()
        if self._at == self._steps:
            if self._cpu:
                self._seconds = statistics.median(b - a for a, b in pairwise(self._ends))
                self._ends.clear()
            else:
                self._seconds = (wall() - self._began) / (self._steps - half)
            self._at = 0
            self._back.release()
            self._go.acquire()
        self._at += 1
        return not self._over


def in_turns(
    loops: Mapping[str, Loop],
    steps: int,
    rounds: int,
    cpu: bool = False,
    left_out: Callable[[str, BaseException | None], None] | None = None,
    deadline: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds a step of each loop's turns, A B A B …, without the first round, which warms up.

    After `deadline`, by `time.perf_counter`, no round is begun but the first `LEAST`.
    A loop that fails is left out, and `left_out` is told its name and the error; without it, the error is raised.
    """
    contenders = [Contender(name, loop, cpu) for name, loop in loops.items()]
    taken: dict[str, list[float]] = {name: [] for name in loops}
    try:
        for number in range(rounds + 1):
            if number > LEAST and time.perf_counter() > deadline:
                break
            for contender in list(contenders):
                seconds = contender.turn(steps)
                if seconds is not None:
                    taken[contender.name].append(seconds)
                    continue
                contenders.remove(contender)
                del taken[contender.name]
                if left_out is None:
                    raise contender.problem or RuntimeError(f"{contender.name} ended before its time")
                left_out(contender.name, contender.problem)
    finally:
        for contender in contenders:
            contender.end()
    return {name: every[1:] for name, every in taken.items()}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the median, 95 %, by bootstrap: of the medians of samples drawn with replacement."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]
