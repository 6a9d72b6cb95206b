"""Nothing waits for the window in flight but the one wait for the outcome of the window before it, meters included."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.conftest import Train
from tests.gpu.test_graph import recipe
from tests.gpu.test_offload import recipe as large
from tui3090.commands import Command
from tui3090.link import Commands
from tui3090.recipe import Recipe
from tui3090.records import Phases
from tui3090.settings import Settings

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"), pytest.mark.timeout(300)]

FIRST, WINDOWS = 8, 50


class Traced(Commands):
    """Traces the CUDA calls of `WINDOWS` windows once captures and warming up are over."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 0
        self.trace: Any = None
        self.calls: Counter[str] = Counter()

    def take(self) -> list[Command]:
        """Called at each window's start."""
        if self.window == FIRST:
            torch.cuda.set_sync_debug_mode("error")
            self.trace = profile(activities=[ProfilerActivity.CUDA])
            self.trace.__enter__()
        if self.window == FIRST + WINDOWS:
            torch.cuda.set_sync_debug_mode("default")
            self.trace.__exit__(None, None, None)
            self.calls.update(event.name() for event in self.trace.profiler.kineto_results.events())
        self.window += 1
        return []


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(amp="bf16", tf32=True),
        Settings(amp="fp16"),
        Settings(checkpointing=1),
        Settings(accumulate=2),
        Settings(prefetch=2),
        Settings(workers=1),
        Settings(compile=True, lr=0.5),
        Settings(graph=True),
        Settings(graph=True, amp="fp16", accumulate=2, prefetch=2),
    ],
    ids=lambda settings: settings.short() or "plain",
)
def test_one_wait_a_window(train: Train, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    monkeypatch.setattr("tui3090.meters.phases.EVERY_S", 0.0)  # marks in every window
    monkeypatch.setattr("tui3090.meters.phases.SHARE", 1.0)
    traced(train, recipe(4 * settings.accumulate * (FIRST + WINDOWS + 8), epochs=1), settings)


def test_one_wait_a_window_while_activations_travel(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui3090.meters.phases.EVERY_S", 0.0)
    monkeypatch.setattr("tui3090.meters.phases.SHARE", 1.0)
    traced(train, large(), Settings(offload=True), steps=FIRST + WINDOWS + 8)


def traced(train: Train, given: Recipe, settings: Settings, **plan: Any) -> None:
    """Train, and count what waited."""
    commands = Traced()
    try:
        ran = train(given, settings=settings, device="cuda:0", commands=commands, **plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ran.status == 0, ran.records[-1]
    assert len(ran.of(Phases)) > WINDOWS
    calls = commands.calls
    assert sum(times for name, times in calls.items() if "Launch" in name) >= WINDOWS, calls
    assert calls["cudaStreamSynchronize"] == calls["cudaMemcpy"] == 0, calls
    assert calls["cudaDeviceSynchronize"] <= 2, calls  # the trace's own
    assert calls["cudaEventSynchronize"] <= WINDOWS, calls
