"""How what our loop adds to a step grows: with depth, batch, accumulation, batch shapes and the length of the run.

    python -m tests.bench.growth [--rounds N] [--to SVG]

What it adds is the step of our engine (no screen) less that of a plain loop with the same techniques, the two in turns
in one process, the median over the rounds with a 95 % interval (bootstrap). The models are so narrow that the host
is what takes the time. On a card it is time by the clock on the wall, on a CPU the thread's own CPU time, which leaves
out what other processes take. For the length of the run no model is trained: the trainer's records of so many steps go
to the run's log and the dashboard's view, and the CPU time of the whole process by step is taken.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.bench.long import long_run
from tests.bench.loops import PlainLoop, engine, prepared
from tests.bench.plot import Curve, Panel, picture
from tests.bench.turns import in_turns, interval
from tui3090.dashboard.view import View
from tui3090.link import Outlet
from tui3090.recipe import Recipe
from tui3090.recipes import gpt
from tui3090.records import StepRecord
from tui3090.runlog import RunFolder, RunLog
from tui3090.settings import Settings

DEPTHS, BATCHES, ACCUMULATIONS = (12, 24, 48), (1, 4, 16, 64), (1, 4, 16, 64)
SHAPES, LENGTHS = (1, 2, 8, 32), (1_000, 10_000, 100_000, 1_000_000)
STEPS = 24
"""Of a turn."""
TOKENS, TOKEN_KINDS, WIDTH = 16, 64, 16
TECHNIQUES = {
    "eager": Settings(),
    "checkpointing": Settings(checkpointing=1),
    "compile": Settings(compile=True),
}
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Samples:
    """Rows of tokens whose length goes through `shapes` lengths, one batch after the other."""

    batch: int
    shapes: int

    def __len__(self) -> int:
        return self.shapes * self.batch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = TOKENS + index // self.batch
        ids = torch.full((length,), index % TOKEN_KINDS)
        return {"input_ids": ids, "labels": ids}


class Block(nn.Module):
    """As little arithmetic as a block of several parameters can have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, width], in and out
        return x + self.linear(self.norm(x))


class Narrow(nn.Module):
    """Blocks of 16 features between an embedding and a head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKEN_KINDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, TOKEN_KINDS)

    def forward(self, ids: Tensor) -> Tensor:  # [batch, tokens] -> [batch, tokens, kinds]
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def narrow(depth: int = 12, batch: int = 1, shapes: int = 1) -> Recipe:
    """A model with next to no arithmetic, on samples that cost next to nothing."""
    samples: Any = Samples(batch, shapes)
    return prepared(Recipe(model=Narrow(depth), train_data=samples, loss=gpt.loss, batch_size=batch, shuffle=False))


@dataclass(frozen=True)
class Figure:
    """Milliseconds a step."""

    plain: float
    added: float
    low: float
    high: float


def added(settings: Settings, rounds: int, steps: int = STEPS, **shape: int) -> Figure:
    """What our loop adds to a step of a plain one."""
    plain = PlainLoop(narrow(**shape), DEVICE, settings)
    loops = {"plain": plain.run, "engine": engine(narrow(**shape), DEVICE, settings)}
    taken = in_turns(loops, steps, rounds, cpu=DEVICE.type == "cpu")
    more = [1e3 * (ours - theirs) for ours, theirs in zip(taken["engine"], taken["plain"], strict=True)]
    torch._dynamo.reset()  # what was compiled for one depth is of no use to the next
    return Figure(1e3 * statistics.median(taken["plain"]), statistics.median(more), *interval(more))


def of_length(steps: int) -> float:
    """Milliseconds of CPU time that log and view take for a step's records, in the last tenth of so many steps."""
    view, last = View(), steps - steps // 10
    with tempfile.TemporaryDirectory() as name:
        log = RunLog(RunFolder(Path(name)))
        outlet = Outlet(log)
        began, seen = 0.0, 0
        for record in long_run(steps / 30 / 3600, 30):
            outlet.emit(record)
            if not isinstance(record, StepRecord):
                continue
            seen += 1
            if seen % 100 == 0:  # as often as a screen at three frames a second takes them
                view.absorb(outlet.drain())
                while log._queue.qsize() > 500:  # made faster than any card would: the log is waited for
                    time.sleep(0.001)
            if seen == last:
                began = time.process_time()
        log.close()
        return 1e3 * (time.process_time() - began) / (steps - last)


def main() -> None:
    """Print the tables and draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--to", type=Path, default=Path("screenshots/growth.svg"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name(0) if DEVICE.type == "cuda" else f"{platform.machine()} CPU, one thread"
    clock = "by the clock" if DEVICE.type == "cuda" else "of CPU time"
    print(f"{where}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}: ms {clock} a step")
    print("| what grows | technique | plain loop | ours adds | 95 % |")
    print("|---|---|---|---|---|")
    panels = [
        Panel("Depth", "blocks", [_curve(name, "depth", DEPTHS, on, asked.rounds) for name, on in TECHNIQUES.items()]),
        Panel("Batch", "samples in a micro-batch", [_curve("eager", "batch", BATCHES, Settings(), asked.rounds)]),
        Panel("Accumulation", "micro-batches in a step", [_accumulating(asked.rounds)]),
        Panel("Batch shapes", "lengths that take turns", [_curve("eager", "shapes", SHAPES, Settings(), asked.rounds)]),
        Panel("Length of the run", "steps", [_lengths()]),
    ]
    title = f"What the engine adds to a step, ms {clock} ({where})"
    asked.to.write_text(picture(title, panels), encoding="utf-8")
    print(f"drawn: {asked.to}")


def _curve(name: str, what: str, values: tuple[int, ...], settings: Settings, rounds: int) -> Curve:
    curve = Curve(name)
    for value in values:
        figure = added(settings, rounds, **{what: value})
        _tell(f"{what} {value}", name, figure)
        curve.points.append((value, figure.added, figure.low, figure.high))
    return curve


def _accumulating(rounds: int) -> Curve:
    """For each micro-batch of a step, as the plain loop's step grows with them too."""
    curve = Curve("eager, for each micro-batch")
    for k in ACCUMULATIONS:
        whole = added(replace(Settings(), accumulate=k), rounds, steps=max(4, STEPS // k))
        figure = Figure(whole.plain / k, whole.added / k, whole.low / k, whole.high / k)
        _tell(f"accumulation {k}, a micro-batch", "eager", figure)
        curve.points.append((k, figure.added, figure.low, figure.high))
    return curve


def _lengths() -> Curve:
    curve = Curve("records, log and view")
    for steps in LENGTHS:
        every = [of_length(steps) for _ in range(1 if steps > 100_000 else 3)]
        figure = Figure(0.0, statistics.median(every), min(every), max(every))
        print(
            f"| {steps:,} steps, the last tenth | log and view | | {figure.added:.3f} | "
            f"{min(every):.3f} to {max(every):.3f} |",
            flush=True,
        )
        curve.points.append((steps, figure.added, figure.low, figure.high))
    return curve


def _tell(what: str, technique: str, figure: Figure) -> None:
    print(
        f"| {what} | {technique} | {figure.plain:.2f} | {figure.added:.3f} | {figure.low:.3f} to {figure.high:.3f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
