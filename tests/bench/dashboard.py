"""What the dashboard costs training: the installed command, with the dashboard in a pty and headless, in turns.

    python -m tests.bench.dashboard [--cpu] [--pairs N] [--steps N] [--technique NAME]

GPT-2 124M at 1 x 128 tokens in bf16, under replay, under compile and under both, on a card; the small model, eagerly,
on a CPU. Steps are timed by the clock of a run's own records, from its first tenth on, and where a window was profiled
from there on, for the profiler's hooks may stay. What inductor compiles and chooses is kept from an uncounted run on,
so that both ways run the same kernels: what it chooses by is the moment's timing. Rate: runs are cut into ten pieces,
and a piece is compared with the same one of the other run; the interval is that of the pieces' median. The 99th
percentile is that of all pairs' steps; its interval comes from drawing steps with replacement. Beside them: the share
of CPU time that our threads other than the trainer's took, as the run recorded it.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from tests.bench.turns import interval
from tests.terminal.pty_shell import Shell
from tui3090.records import Profiled, Reading, StepRecord
from tui3090.runlog import RecordReader

CARD = "--amp bf16 --device cuda:0 --tf32", "--size gpt2 --batch-size 1 --context 128"
ON_CARD = {"replay": "--graph", "compile": "--compile", "compile + replay": "--graph --compile"}
CPU = "--device cpu", "--epochs 8"
ON_CPU = {"eager": ""}
PIECES = 10


@dataclass
class Runs:
    """Both ways of running, pair by pair."""

    headless: list[list[float]] = field(default_factory=list)
    """Seconds of each step."""
    dashboard: list[list[float]] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """Of CPU time, our threads' under the dashboard."""

    def rate(self) -> tuple[float, float, float]:
        """Under the dashboard over headless: the median of pieces, and its 95 % interval."""
        ratios = [
            statistics.fmean(a) / statistics.fmean(b)
            for headless, dashboard in zip(self.headless, self.dashboard, strict=True)
            for a, b in zip(_pieces(headless), _pieces(dashboard))
        ]
        return statistics.median(ratios), *interval(ratios)

    def p99(self) -> tuple[float, float, float]:
        """The 99th percentile of a step under the dashboard over that without, and its 95 % interval."""
        without = [step for run in self.headless for step in run]
        under = [step for run in self.dashboard for step in run]
        draw = random.Random(0)
        drawn = sorted(
            _p99(draw.choices(under, k=len(under))) / _p99(draw.choices(without, k=len(without))) for _ in range(400)
        )
        return _p99(under) / _p99(without), drawn[10], drawn[389]


def run_pairs(technique: str, pairs: int, steps: int, cpu: bool) -> Runs:
    """Run headless and under the dashboard, in turns; a row of a table for each pair."""
    options, recipe = CPU if cpu else CARD
    given = (ON_CPU if cpu else ON_CARD)[technique]
    command = f"{sys.executable} -m tui3090 run gpt {options} {given} --exit --steps"
    runs = Runs()
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=f"{name}/inductor"):
        if "--compile" in given:
            _headless(f"{command} 20", recipe, Path(name))
        for _ in range(pairs):
            folder = Path(tempfile.mkdtemp(dir=name))
            runs.headless.append(_seconds(_headless(f"{command} {steps}", recipe, folder)))
            runs.dashboard.append(_seconds(run := _dashboard(f"{command} {steps}", recipe, folder)))
            runs.shares.append(_share(run))
            rates = [1 / statistics.fmean(every[-1]) for every in (runs.headless, runs.dashboard)]
            tails = [_p99(every[-1]) * 1e3 for every in (runs.headless, runs.dashboard)]
            print(
                f"| {technique} | {rates[0]:.2f} | {rates[1]:.2f} | {rates[1] / rates[0]:.4f} | {tails[0]:.2f} "
                f"| {tails[1]:.2f} | {tails[1] / tails[0]:.3f} | {runs.shares[-1]:.2%} |",
                flush=True,
            )
    return runs


def header() -> None:
    """Of the table of pairs."""
    print("| technique | headless steps/s | dashboard | ratio | headless p99 ms | dashboard | ratio | our threads |")
    print("|---|---|---|---|---|---|---|---|", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--technique", help="one of the table's instead of all")
    asked = parser.parse_args()
    for technique in ON_CPU if asked.cpu else ON_CARD:
        if asked.technique not in (None, technique):
            continue
        header()
        runs = run_pairs(technique, asked.pairs, asked.steps or (250 if asked.cpu else 6000), asked.cpu)
        for what, (ratio, low, high) in (("rate", runs.rate()), ("99th percentile", runs.p99())):
            print(f"{technique}, {what} over headless: {ratio:.4f} ({low:.4f} to {high:.4f})", flush=True)


def _headless(command: str, recipe: str, folder: Path) -> Path:
    run = folder / "headless"
    line = shlex.split(f"{command} --headless --run-dir {run} -- {recipe}")
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    return run


def _dashboard(command: str, recipe: str, folder: Path) -> Path:
    shell = Shell(folder, columns=160, rows=50)
    shell.command(f"{command} --run-dir dashboard -- {recipe}")
    assert shell.status(600) == 0
    shell.close()
    return folder / "dashboard"


def _steps(run: Path) -> list[StepRecord]:
    records = RecordReader(run / "records.jsonl").read(1 << 30)
    steps = [r for r in records if isinstance(r, StepRecord)]
    profiled = [r.step + 1 for r in records if isinstance(r, Profiled)]
    return steps[max([len(steps) // 10, *profiled[:1]]) :]


def _seconds(run: Path) -> list[float]:
    return [step.seconds for step in _steps(run)]


def _pieces(seconds: Sequence[float]) -> list[Sequence[float]]:
    size = len(seconds) // PIECES
    return [seconds[size * at : size * (at + 1)] for at in range(PIECES)]


def _p99(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]


def _share(run: Path) -> float:
    began = _steps(run)[0].time
    readings = RecordReader(run / "records.jsonl").read(1 << 30)
    shares = [r.ui_share for r in readings if isinstance(r, Reading) and r.time > began and r.ui_share is not None]
    return statistics.fmean(shares) if shares else float("nan")


if __name__ == "__main__":
    main()
