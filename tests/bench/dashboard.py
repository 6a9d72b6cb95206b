"""What the dashboard costs training: the installed command, with the dashboard in a pty and headless, in turns.

    python -m tests.bench.dashboard [--cpu] [--pairs N]

GPT-2 124M at 1 x 128 tokens in bf16 under replay on a card; the small model on a CPU. A run's rate is that of its steps
from the first tenth on, by the clock of its own records. Beside it: the share of CPU time that our threads other
than the trainer's took, as the run recorded it.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.terminal.pty_shell import Shell
from tui3090.records import Reading, StepRecord
from tui3090.runlog import RecordReader

CARD = "--graph --amp bf16 --device cuda:0 --tf32 --steps 3200", "--size gpt2 --batch-size 1 --context 128"
CPU = "--device cpu --steps 250", "--epochs 8"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    options, recipe = CPU if arguments.cpu else CARD
    print(
        "| pair | headless steps/s | dashboard steps/s | ratio | p99 step ratio | our threads, dashboard | headless |"
    )
    print("|---|---|---|---|---|---|---|")
    ratios: list[float] = []
    for pair in range(arguments.pairs):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            command = f"{sys.executable} -m tui3090 run gpt {options} --exit"
            headless = _headless(command, recipe, folder)
            dashboard = _dashboard(command, recipe, folder)
            rates = [_rate(run) for run in (headless, dashboard)]
            ratios.append(rates[1] / rates[0])
            p99 = _p99(dashboard) / _p99(headless)
            shares = [_share(run) for run in (dashboard, headless)]
            print(
                f"| {pair + 1} | {rates[0]:.2f} | {rates[1]:.2f} | {ratios[-1]:.4f} | {p99:.3f} "
                f"| {shares[0]:.2%} | {shares[1]:.2%} |",
                flush=True,
            )
    print(f"median ratio {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})")


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
    records = [r for r in RecordReader(run / "records.jsonl").read(1 << 30) if isinstance(r, StepRecord)]
    return records[len(records) // 10 :]


def _rate(run: Path) -> float:
    steps = _steps(run)
    return len(steps) / sum(step.seconds for step in steps)


def _p99(run: Path) -> float:
    return statistics.quantiles([step.seconds for step in _steps(run)], n=100)[98]


def _share(run: Path) -> float:
    began = _steps(run)[0].time
    readings = RecordReader(run / "records.jsonl").read(1 << 30)
    shares = [r.ui_share for r in readings if isinstance(r, Reading) and r.time > began and r.ui_share is not None]
    return statistics.fmean(shares) if shares else float("nan")


if __name__ == "__main__":
    main()
