"""Replay over eager: GPT-2 124M at 1 x 128 tokens, in turns in one run, by the run's own key.

    python -m tests.bench.replay

One process, no screen. The technique is switched on and off by its command every `TURN` windows; a turn's figure is the
median step of its second half. Printed: the medians over the turns, their spread, and the ratio.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import torch

from tests.conftest import QuietPoller, ScriptedCommands
from tui3090 import assemble
from tui3090.commands import Change
from tui3090.recipes import gpt
from tui3090.records import Record, StepRecord
from tui3090.settings import RunPlan, Settings
from tui3090.trainer import Trainer

TURN, TURNS = 120, 14


def turns(settings: Settings) -> tuple[list[float], list[float]]:
    """Seconds a step of each turn, eager and replayed."""
    made = gpt.recipe(size="gpt2", batch_size=1, context=128)
    recipe = replace(made, eval_data=None, metrics=None)
    assemble.load_recipe = lambda path, options: recipe
    script = {TURN * turn: [Change("graph", turn % 2 == 1)] for turn in range(1, TURNS)}
    records: list[Record] = []
    plan = RunPlan(Path("gpt.py"), "gpt", settings=settings, device="cuda:0", steps=TURN * TURNS)
    status = Trainer(plan, ScriptedCommands(script), records.append, QuietPoller()).run()  # type: ignore[arg-type]
    assert status == 0, records[-1]
    steps = [record for record in records if isinstance(record, StepRecord)]
    medians = [
        statistics.median(step.seconds for step in steps[TURN * turn + TURN // 2 : TURN * (turn + 1) - 2])
        for turn in range(TURNS)
    ]
    assert all(step.replayed for step in steps[TURN + 2 : 2 * TURN - 2])
    return medians[2::2], medians[1::2]  # the first eager turn warms up


def main() -> None:
    """Print the table."""
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, GPT-2 124M, 1 x 128 tokens, ms a step")
    print("| precision | eager | replay | replay over eager |")
    print("|---|---|---|---|")
    for name, settings in (
        ("fp32", Settings()),
        ("TF32", Settings(tf32=True)),
        ("bf16", Settings(amp="bf16", tf32=True)),
        ("fp16", Settings(amp="fp16", tf32=True)),
    ):
        eager, replay = turns(settings)
        ratios = [a / b for a, b in zip(eager, replay)]
        print(
            f"| {name} | {_spread(eager)} | {_spread(replay)} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ({min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f})"


if __name__ == "__main__":
    main()
