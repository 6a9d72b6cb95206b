"""The screen with the real trainer behind it, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from tests.terminal.pty_shell import TRAIN
from tui3090.dashboard.app import Dashboard
from tui3090.dashboard.source import LiveSource
from tui3090.dashboard.view import View
from tui3090.launch import TrainerThread, start_trainer
from tui3090.link import Commands, Outlet
from tui3090.settings import RunPlan


async def until(pilot: Pilot[Any], condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Let the app run until `condition` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await pilot.pause(0.05)


async def test_keys_reach_the_trainer_and_its_records_the_screen(tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text(TRAIN)
    plan = RunPlan(tmp_path / "watched.py", "watched", device="cpu")
    commands, outlet, view = Commands(), Outlet(), View(name="watched", folder=str(tmp_path))
    threads: list[TrainerThread] = []
    app = Dashboard(
        LiveSource(outlet, commands, lambda: threads.append(start_trainer(plan, commands, outlet.emit))), view
    )
    async with app.run_test(size=(160, 50)) as pilot:
        await until(pilot, lambda: view.step is not None and view.step.step > 3)
        await pilot.press("+")
        await until(pilot, lambda: view.value("accumulate") == 2)
        await until(pilot, lambda: view.step is not None and view.step.micro_batches == 2)
        await pilot.press("g")  # not on a CPU
        await until(pilot, lambda: "NVIDIA card" in view.answer)
        await pilot.press("space")
        await until(pilot, lambda: view.state.state == "paused")
        await pilot.press("space")
        await until(pilot, lambda: view.state.state == "training")
        await pilot.press("q", "s")
        await until(pilot, lambda: view.state.state == "stopped")
    threads[0].join(30)
    assert threads[0].exit_status == 0
