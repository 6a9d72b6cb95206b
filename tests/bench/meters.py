"""What all meters cost: on against off, in turns in one run; GPT-2 124M.

    python -m tests.bench.meters [WORKLOAD ...]

Workloads: tf32 and bf16 (eager, 8 x 1024 tokens) and replay (bf16, 1 x 128); without any: all. In tf32 the card is what
takes the time, in bf16 launching, whose time varies from turn to turn with whatever else the machine does.

Off: no poller (NVML, counters, allocator, host), no sampled phases, no profiled step. A turn's figure is the mean step
of its second half. Printed are the rate with the meters on over that with them off in the neighbouring turn, the median
of the turns with a 95 % interval (bootstrap of the median), and what a profiled step costs, which comes once a minute.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.bench.turns import interval
from tests.conftest import QuietPoller
from tui3090 import assemble
from tui3090.commands import Command, Profile
from tui3090.feed import Window
from tui3090.link import Commands
from tui3090.meters.poller import Poller
from tui3090.recipe import Recipe
from tui3090.recipes import gpt
from tui3090.records import Profiled, Record, StepRecord
from tui3090.settings import RunPlan, Settings
from tui3090.trainer import Trainer


class NoLooks:
    """In place of the trainer's looks while the meters are off."""

    @contextmanager
    def at(self, window: Window) -> Iterator[bool]:
        """Nothing is looked at."""
        yield False

    def sample(self, window: Window, before: Any) -> None:
        """No marks."""

    def changed(self) -> None:
        """Nothing to do."""


class Turns(Commands):
    """Switches the meters at the start of every `turn` windows, on first; the last window but two is profiled."""

    trainer: Trainer

    def __init__(self, turn: int, turns: int) -> None:
        super().__init__()
        self.turn, self.turns = turn, turns
        self.window = 0
        self._looks: Any = None
        self._poller: Poller | None = None

    def take(self) -> list[Command]:
        """Called at each window's start."""
        number, within = divmod(self.window, self.turn)
        self.window += 1
        if within == 0:
            self._looks = self._looks or self.trainer.looks
            self.switch(on=number % 2 == 0)
        if self.window == self.turn * self.turns - 2:
            self.trainer.looks = self._looks
            return [Profile()]
        return []

    def switch(self, on: bool) -> None:
        """All meters."""
        self.trainer.looks = self._looks if on else NoLooks()
        if self._poller is not None:
            self._poller.stop()
            self._poller = None
        if on:
            self._looks._due = float("inf")  # a turn is too short for its share of a profiled step
            self._poller = Poller(lambda record: None)
            self._poller.watch(self.trainer.job.device_uuid, self.trainer.allocator)
            self._poller.start()


def measure(recipe: Recipe, settings: Settings, turn: int, turns: int, device: str = "cuda:0") -> str:
    """A line of the table."""
    assemble.load_recipe = lambda path, options: recipe
    records: list[Record] = []
    commands = Turns(turn, turns)
    plan = RunPlan(Path("gpt.py"), "gpt", settings=settings, device=device, steps=turn * turns)
    commands.trainer = Trainer(plan, commands, records.append, QuietPoller())  # type: ignore[arg-type]
    status = commands.trainer.run()
    commands.switch(on=False)
    assert status == 0, records[-1]
    steps = [record for record in records if isinstance(record, StepRecord)]
    means = [
        statistics.fmean(step.seconds for step in steps[turn * number + turn // 2 : turn * (number + 1) - 3])
        for number in range(2, turns)  # the first two warm up
    ]
    ratios = [off / on for on, off in zip(means[::2], means[1::2])]
    low, high = interval(ratios)
    looks = [f"{record.seconds * 1e3:.0f} ms" for record in records if isinstance(record, Profiled)]
    return (
        f"{statistics.median(means[::2]) * 1e3:.2f} | {statistics.median(means[1::2]) * 1e3:.2f} | "
        f"{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f}) | {', '.join(looks) or 'n/a'} |"
    )


def made(batch: int, tokens: int) -> Recipe:
    """GPT-2 124M on the bundled text."""
    recipe = gpt.recipe(size="gpt2", batch_size=batch, context=tokens, epochs=10_000)
    return replace(recipe, eval_data=None, metrics=None)


def main() -> None:
    """Print the table."""
    bf16 = Settings(amp="bf16", tf32=True)
    workloads = {
        "tf32": ("eager 8 x 1024, TF32", (8, 1024), Settings(tf32=True), 20, 42),
        "bf16": ("eager 8 x 1024, bf16", (8, 1024), bf16, 20, 62),
        "replay": ("replay 1 x 128, bf16", (1, 128), bf16.having("graph", True), 200, 22),
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", nargs="*", choices=[*workloads, []], help="without any: all")
    asked = parser.parse_args().workload
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, GPT-2 124M, ms a step")
    print("| workload | meters on | off | rate on over off | a profiled step |")
    print("|---|---|---|---|---|")
    for name in asked or workloads:
        title, shape, settings, turn, turns = workloads[name]
        print(f"| {title} | {measure(made(*shape), settings, turn, turns)}", flush=True)


if __name__ == "__main__":
    main()
