"""Our loop under its techniques beside a hand-written one: GPT-2 124M in bf16, in turns in one process.

    python -m tests.bench.techniques [1x128] [8x1024]

The contenders take turns, `ROUNDS` times each: a plain loop with the same precision, optimizer and clipping, the same
with torch.compile of the whole model, and our engine (no screen) eagerly, with offload, by replay, compiled, and
compiled under replay, switched by its own commands. A turn's figure is the median step of its second half. Printed: the
median over the turns, the rate over the plain loop's in the same round with a 95 % interval (bootstrap of the median),
and model FLOPs per second.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.bench.loops import PlainLoop
from tests.bench.turns import interval
from tests.conftest import QuietPoller, ScriptedCommands
from tui3090 import assemble
from tui3090.recipe import Recipe
from tui3090.recipes import gpt
from tui3090.records import Change, Command, Record, StepRecord
from tui3090.settings import RunPlan, Settings
from tui3090.trainer import Trainer

ROUNDS = 7
"""The first warms up."""
WORKLOADS = {"1x128": (1, 128, 60), "8x1024": (8, 1024, 24)}
"""Batch, tokens, steps a turn."""
ENGINE: dict[str, dict[str, Any]] = {
    "eager": {},
    "offload": {"offload": True},
    "replay": {"graph": True},
    "compile": {"compile": True},
    "compile + replay": {"compile": True, "graph": True},
}
PLAIN, PLAIN_COMPILED = "plain loop", "plain loop, torch.compile"


def made(batch: int, tokens: int) -> Recipe:
    """GPT-2 124M on the bundled text."""
    return replace(
        gpt.recipe(size="gpt2", batch_size=batch, context=tokens, epochs=10_000), eval_data=None, metrics=None
    )


def steps_of(loop: PlainLoop, count: int) -> list[float]:
    """Seconds of each step; a step ends with its loss on the host."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        loop.step()
        taken.append(time.perf_counter() - began)
    return taken


class InTurns(ScriptedCommands):
    """Before the window that begins a turn: the plain loops' turns where they are due, then the engine's settings."""

    def __init__(self, steps: int, plain: Callable[[], None]) -> None:
        super().__init__({})
        self._steps, self._plain = steps, plain
        self._at = 0

    def take(self) -> list[Command]:
        """The changes of the turn that begins, if one does."""
        turn, into = divmod(self._at, self._steps)
        self._at += 1
        if into or turn == len(ENGINE) * ROUNDS:  # the latter: the run is over
            return []
        if turn % len(ENGINE) == 0:
            self._plain()
        on = ENGINE[list(ENGINE)[turn % len(ENGINE)]]
        off = [name for name in ("offload", "graph", "compile") if name not in on]
        return [*(Change(name, False) for name in off), *(Change(name, True) for name in on)]


def measure(workload: str) -> tuple[dict[str, list[float]], float]:
    """Seconds a step of each contender's turns, and the model FLOPs of a step."""
    batch, tokens, steps = WORKLOADS[workload]
    card, bf16 = torch.device("cuda:0"), Settings(amp="bf16")
    loops = {
        PLAIN: PlainLoop(made(batch, tokens), card, bf16),
        PLAIN_COMPILED: PlainLoop(made(batch, tokens), card, bf16, compiled=True),
    }
    turns: dict[str, list[float]] = {name: [] for name in (*loops, *ENGINE)}

    def plain() -> None:
        for name, loop in loops.items():
            steps_of(loop, steps // 2)
            turns[name].append(statistics.median(steps_of(loop, steps // 2)))
            loop.optimizer.zero_grad(set_to_none=True)

    recipe = made(batch, tokens)
    assemble.load_recipe = lambda path, options: recipe
    records: list[Record] = []
    windows = steps * len(ENGINE) * ROUNDS
    plan = RunPlan(Path("gpt.py"), "gpt", settings=bf16, device="cuda:0", steps=windows)
    status = Trainer(plan, InTurns(steps, plain), records.append, QuietPoller()).run()  # type: ignore[arg-type]
    assert status == 0, records[-1]
    taken = [record for record in records if isinstance(record, StepRecord)]
    for turn in range(len(ENGINE) * ROUNDS):
        name = list(ENGINE)[turn % len(ENGINE)]
        half = taken[steps * turn + steps // 2 : steps * (turn + 1) - 1]
        assert all(record.replayed == ("graph" in ENGINE[name]) for record in half), (name, half[0])
        turns[name].append(statistics.median(record.seconds for record in half))
    flops = taken[-1].flops
    assert flops is not None
    return turns, flops


def main() -> None:
    """Print a table for each workload."""
    torch.backends.cuda.matmul.allow_tf32 = True
    for workload in sys.argv[1:] or WORKLOADS:
        began = time.perf_counter()
        turns, flops = measure(workload)
        print(f"\n{torch.cuda.get_device_name(0)}, torch {torch.__version__}, GPT-2 124M, {workload}, bf16")
        print("| contender | ms a step | rate over the plain loop's | TFLOPS |")
        print("|---|---|---|---|")
        plain = turns[PLAIN][1:]
        for name, every in turns.items():
            seconds = every[1:]
            ratios = [a / b for a, b in zip(plain, seconds, strict=True)]
            low, high = interval(ratios)
            print(
                f"| {name} | {statistics.median(seconds) * 1e3:.2f} | {statistics.median(ratios):.3f} "
                f"({low:.3f} to {high:.3f}) | {flops / statistics.median(seconds) / 1e12:.1f} |"
            )
        print(f"({ROUNDS - 1} rounds in {time.perf_counter() - began:.0f} s)", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
