"""Our engine beside the loops that people train with, in turns in one process.

    python -m tests.bench.contenders [WORKLOAD ...] [--amp off bf16 fp16] [--only CONTENDER ...] [--rounds N]
        [--seconds N] [--small]
    python -m tests.bench.contenders --aims [TRIAL ...] [--seconds N] [--small]

Workloads: 1x128, 8x1024 and largest (GPT-2 124M), bert (BERT-large, 16 x 512), loader (Python work per sample, loaded
by `--workers` processes). The contenders: our engine without a screen, eagerly and on a card by replay, with offload,
with compile, and with compile and replay; a loop written by hand, on a card also with torch.compile, and with the whole
step captured in a CUDA graph; transformers' Trainer, accelerate, Lightning. In the loader-bound case the hand-written
loop also runs on one batch that is on the device already. Each trains a model of its own, from the same weights, with
the same optimizer, clipping and precision; TF32 is off. Only Lightning's AdamW is not fused under AMP, where it can't
clip with a fused one. A turn's figure is the mean step of its second half by the clock on the wall, all launched work
done. Printed: the median of the turns, the rate over the hand-written loop's in the same round, its median with a 95 %
interval (bootstrap), and MFU: the model FLOPs that the engine counts over the card's peak. A library that runs another
precision than it was asked for (fp16 on a CPU) is left out. `--only`: these contenders; `--seconds`: the tables share
so many, and take fewer rounds, three at least, where that is not enough. `--small` shows on any CPU that it works; its
figures say nothing.

`--aims` runs only what the aims need (aims.py has the names of the trials), the weightiest first, and says of each
whether it is met; `--seconds`: after so many none is begun.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import time
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

import torch

from tests.bench import aims
from tests.bench.race import CONTENDERS, LIBRARIES, PLAIN, race
from tests.bench.workloads import Workload, workloads
from tui3090.settings import CORES, Settings


def compare(
    workload: Workload, amp: str, rounds: int, device: torch.device, only: Collection[str] | None, seconds: float
) -> None:
    """Print a table, after `seconds` if it can be."""
    began = time.perf_counter()
    settings = Settings(amp=amp, workers=workload.workers)
    if workload.workers and device.type == "cuda":
        settings = settings.having("prefetch", 2)
    print(f"\n**{workload.title}, {'fp32' if amp == 'off' else amp}**\n", flush=True)
    run = race(workload, settings, rounds, device, only, deadline=began + seconds)
    if run is None or PLAIN not in run.seconds:
        return
    print(f"\nBatch {run.batch}.\n\n| contender | ms a step | rate over the plain loop's | 95 % | MFU |")
    print("|---|---|---|---|---|")
    for name, taken in run.seconds.items():
        ratio, low, high = run.rate(name, PLAIN)
        mfu = run.mfu(name)
        print(
            f"| {name} | {statistics.median(taken) * 1e3:.2f} | {ratio:.3f} | {low:.3f} to {high:.3f} "
            f"| {'n/a' if mfu is None else f'{mfu:.1%}'} |"
        )
    print(
        f"\n({len(run.seconds[PLAIN])} rounds of {workload.steps} steps in {time.perf_counter() - began:.0f} s)",
        flush=True,
    )


def versions() -> str:
    """Of what is compared."""
    found = []
    for package in ("torch", *(package for package, _ in LIBRARIES.values())):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", nargs="*", help="1x128, 8x1024, largest, bert, loader; without any: all")
    parser.add_argument("--amp", nargs="+", default=["off", "bf16", "fp16"], choices=["off", "bf16", "fp16"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=max(1, min(8, CORES - 1)))
    parser.add_argument("--small", action="store_true", help="small sizes: to see that it works")
    parser.add_argument("--aims", action="store_true", help="only what the aims need, and whether they are met")
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help="of the tables, by their names")
    parser.add_argument("--seconds", type=float, help="for all of it; of --aims (600): after so many nothing is begun")
    asked = parser.parse_args()
    known = workloads(asked.small, asked.workers)
    words = aims.WORDS if asked.aims else set(known)
    if unknown := set(asked.workload) - words:
        parser.error(f"no workload {', '.join(sorted(unknown))}: there are {', '.join(sorted(words))}")
    if unknown := set(asked.only or ()) - set(CONTENDERS):
        parser.error(f"no contender {'; '.join(sorted(unknown))}: there are {'; '.join(CONTENDERS)}")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name(0) if device.type == "cuda" else f"{platform.machine()} CPU, {CORES} cores"
    print(f"{where}, load {os.getloadavg()[0]:.1f}; {versions()}", flush=True)
    if asked.aims:
        aims.judge(known, asked.workload, asked.small, asked.seconds or 600, device)
        return
    end = time.perf_counter() + (asked.seconds or math.inf)
    tables = [(known[name], amp) for name in asked.workload or known for amp in asked.amp]
    for number, (workload, amp) in enumerate(tables):
        share = (end - time.perf_counter()) / (len(tables) - number)
        compare(workload, amp, asked.rounds, device, asked.only, share)


if __name__ == "__main__":
    main()
