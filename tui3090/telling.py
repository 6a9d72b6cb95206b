"""What the training thread tells: its state when that is new, sentences, which techniques can be had."""

from __future__ import annotations

import time
from collections.abc import Callable

from tui3090.records import Available, Event, Record, State
from tui3090.settings import TECHNIQUES, Settings
from tui3090.techniques import Machine, reason_unavailable


class Teller:
    """Makes records of what is to be told."""

    def __init__(self, emit: Callable[[Record], None]) -> None:
        self.emit = emit
        """Takes a record."""
        self._told = ("", "")

    def state(self, state: str, detail: str = "") -> None:
        """What the run is doing now, if that is new."""
        if (state, detail) != self._told:
            self._told = (state, detail)
            self.emit(State(time=time.time(), state=state, detail=detail))

    def say(self, source: str, text: str, level: str = "info") -> None:
        """A sentence for the log; nothing where it is empty."""
        if text:
            self.emit(Event(time=time.time(), level=level, source=source, text=text))

    def available(self, machine: Machine, settings: Settings, no_replay: str) -> None:
        """Which techniques can be had from here; `no_replay`: why graph replay was given up, if it was."""
        for technique in TECHNIQUES:
            reason = reason_unavailable(technique.name, machine, settings)
            if technique.name == "graph" and no_replay:
                reason = no_replay
            self.emit(Available(time=time.time(), technique=technique.name, reason=reason))
