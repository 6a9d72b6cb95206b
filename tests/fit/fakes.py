"""Stand-ins for a card: one that fits so much, without processes, and an allocator's counters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tui3090.fit.cells import Column
from tui3090.fit.prediction import Point
from tui3090.fit.process import Processes

GIB = 2**30
SLOPES = {"off": 1.5, "bf16": 0.75}
"""GiB a sample, by precision; with checkpointing a fifth."""
FIXED = 6.0
"""GiB that every cell takes."""


def gib_of(batch: int, amp: str, technique: str) -> float:
    """What a cell takes."""
    return FIXED + batch * SLOPES[amp] * (0.2 if technique == "checkpointing" else 1.0)


class FakeCard(Processes):
    """Answers what the processes would. `answers` replaces the answer of (batch, column's name)."""

    def __init__(self, room: float = 24.0, predicts: bool = True, **look: Any) -> None:
        super().__init__()
        self.room = room
        self.look = look
        self.predicts = predicts
        self.answers: dict[tuple[int, str], Callable[[], dict[str, Any]]] = {}
        self.wanted: list[dict[str, Any]] = []

    @property
    def ran(self) -> list[tuple[int, str]]:
        """The cells that were run, in order."""
        return [(w["samples"], Column(w["amp"], w["technique"]).name) for w in self.wanted[1:]]

    def ask(self, wanted: dict[str, Any], tick: Callable[[], None]) -> dict[str, Any]:
        """Without a process."""
        tick()
        self.wanted.append(wanted)
        if wanted["look"]:
            return self._looked(wanted)
        batch, amp, technique = wanted["samples"], wanted["amp"], wanted["technique"]
        if (instead := self.answers.get((batch, Column(amp, technique).name))) is not None:
            answer = instead()
            tick()
            return answer
        needs = gib_of(batch, amp, technique)
        if needs > self.room:
            return {"status": "oom"}
        slower = (1.3 if technique == "checkpointing" else 1.0) * (1.0 if amp == "off" else 0.5)
        step = (0.02 * batch + (0.004 if technique == "graph" else 0.01)) * slower
        memory = {"peak_allocated": int(needs * GIB), "peak_reserved": int((needs + 1) * GIB), "peak_rss": GIB}
        return {"status": "ok", "step_s": step, "steps": 10, **memory}

    def _looked(self, wanted: dict[str, Any]) -> dict[str, Any]:
        points = {
            Column(amp, technique).name: [
                asdict(Point(10.0 * n, (int(gib_of(n, amp, technique) * GIB),), (0,))) for n in (2, 4)
            ]
            for amp in SLOPES
            for technique in ("", "checkpointing")
        }
        return {
            "device": "cuda:0",
            "device_name": "Fake 3090",
            "torch": "2.11",
            "room": int(self.room * GIB),
            "amp": "bf16",
            "rows": 1000,
            "batch_size": wanted["batch"],
            "fixed": False,
            "by_option": wanted["batch_option"],
            "weights_dtype": "float32",
            "tf32": False,
            "refused": {},
            "points": points if self.predicts else {},
            "elements": 10.0,
            **self.look,
        }


class LiveBytes(TorchDispatchMode):
    """Stands in for the card's allocator: the bytes of every tensor that operators made and that is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._now = self._peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._now += size
        self._peak = max(self._peak, self._now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size

    def peak(self) -> int:
        """The most since the last call."""
        most, self._peak = self._peak, self._now
        return most
