"""The thread that looks at the card and the host twice a second and tells what it saw.

It starts before torch is imported: the card, its memory and who holds it need no torch. Which card it really is, the
trainer tells it later by `Poller.watch`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tui3090.records import Event, Reading, Record

if TYPE_CHECKING:
    from tui3090.meters.allocator import Allocator, Held
    from tui3090.meters.counters import PipeMeter
    from tui3090.meters.watched import WatchedCard

STOPPED_S = 3.0
"""How long `stop` waits: a reading takes some hundredths, and nothing is lost with a thread that stands in a driver."""
_ON_CPU = "Training runs on the CPU."
ALARM_S = 60.0
"""Between two alarms that memory is short."""


class Poller:
    """Emits a `Reading` every `interval_s` seconds from a daemon thread, from `start` to `stop`.

    `device` is what the command line asked for: cpu, cuda:N, or empty for the card with most free memory. That card is
    read until `watch` is called. `counters` asks for CUPTI's besides, opt-in as they may hold the card's clocks. A
    meter that fails leaves its figures out and is told of once; it never ends the readings.
    """

    def __init__(
        self, emit: Callable[[Record], None], interval_s: float = 0.5, device: str = "", counters: bool = False
    ) -> None:
        self.held: Held | None = None
        """What model and optimizer hold; the trainer sets it when that has changed."""
        self._emit = emit
        self._interval_s = interval_s
        self._device = device
        self._pipe: PipeMeter | None = None
        self._counters = counters
        self._watched: tuple[str, Allocator | None] | None = None
        self._followed: tuple[str, Allocator | None] | None = None
        self._allocator_free = threading.Lock()
        self._stop = threading.Event()
        self._told: set[str] = set()
        self._retries = 0
        self._retries_due = 0.0
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)

    def start(self) -> None:
        """Begin; the first reading follows at once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it, but not for an NVML that hangs."""
        self._stop.set()
        self._thread.join(STOPPED_S)

    def watch(self, device_uuid: str, allocator: Allocator | None) -> None:
        """From the next reading on look at this card: its UUID as torch gives it; empty: training runs on the CPU."""
        self._watched = (device_uuid, allocator)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """For a CUDA graph capture: inside, nothing is asked of torch. NVML goes on: it is not the CUDA runtime."""
        with self._allocator_free:
            yield

    def _run(self) -> None:
        # Imported here, in the thread: psutil and pynvml take longer than the first paint should wait for.
        from tui3090.meters.cards import find
        from tui3090.meters.host import Host
        from tui3090.meters.own import OwnShare
        from tui3090.meters.watched import WatchedCard

        card, host, own = WatchedCard(), Host(), OwnShare()
        if self._counters:
            from tui3090.meters.counters import PipeMeter

            self._pipe = PipeMeter()
        if self._device == "cpu":
            card.missing = _ON_CPU
        else:
            self._measure("card", lambda: card.follow(lambda: find(self._device)))
        while not self._stop.is_set():
            figures: dict[str, Any] = {}
            for name, read in (
                ("allocator", self._read_allocator),
                ("card", lambda: self._read_card(card)),
                ("counters", self._read_counters),
                ("host", host.read),
                ("own time", own.read),
            ):
                figures |= self._measure(name, read) or {}
            self._emit(Reading(time=time.time(), **figures))
            self._stop.wait(self._interval_s)
        if self._pipe is not None:
            self._pipe.close()
        card.close()

    def _measure(self, name: str, read: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """What a meter reads. One that fails must end neither the readings nor the training beside them."""
        try:
            return read()
        except Exception as error:
            self._tell_once(name, "warning", f"The {name} meter does not work: {type(error).__name__}: {error}")
            return None

    def _tell_once(self, matter: str, level: str, sentence: str) -> None:
        if matter not in self._told:
            self._told.add(matter)
            self._emit(Event(time=time.time(), level=level, source="meters", text=sentence))

    def _read_allocator(self) -> dict[str, Any]:
        held = asdict(self.held) if self.held is not None else {}
        allocator = self._watched[1] if self._watched is not None else None
        # A capture takes a few tenths of a second: waiting for it costs a late reading, not one without these figures.
        if allocator is None or not self._allocator_free.acquire(timeout=self._interval_s):
            return held
        try:
            figures = allocator.read()
        finally:
            self._allocator_free.release()
        self._watch_retries(figures.get("retries", 0))
        return {**held, **figures}

    def _watch_retries(self, retries: int) -> None:
        """An alarm, once a minute at the most, when the allocator had to give its cache back to satisfy a request."""
        now = time.monotonic()
        if retries <= self._retries or now < self._retries_due:
            return
        more, self._retries, self._retries_due = retries - self._retries, retries, now + ALARM_S
        sentence = (
            f"The card's memory is full: {more} time{'' if more == 1 else 's'} torch gave its cache back to find room, "
            "and each time training waits. c (checkpointing), a (AMP) or a smaller batch size take less."
        )
        self._emit(Event(time=time.time(), level="warning", source="memory", text=sentence))

    def _read_counters(self) -> dict[str, Any]:
        """CUPTI's, where they were asked for and the card is known; the last ones while a graph is captured."""
        allocator = self._watched[1] if self._watched is not None else None
        if self._pipe is None or allocator is None:
            return {}
        if not self._allocator_free.acquire(blocking=False):
            return self._pipe.last
        try:
            return self._pipe.read(allocator.device)
        finally:
            self._allocator_free.release()

    def _read_card(self, card: WatchedCard) -> dict[str, Any]:
        watched, was_there = self._watched, not card.missing
        if watched is not None and watched is not self._followed:
            self._followed = watched
            if watched[0]:
                card.follow(lambda: watched[0])
            else:
                card.close()
                card.missing = card.missing or _ON_CPU
        figures = card.read(on_card=watched is not None and watched[1] is not None)
        if card.missing and card.missing != _ON_CPU:
            self._tell_once(card.missing, "warning" if was_there else "info", card.missing)
        return figures
