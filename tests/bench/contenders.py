"""Our engine beside the loops that people train with, in turns in one process.

    python -m tests.bench.contenders [WORKLOAD ...] [--amp off bf16 fp16] [--rounds N] [--small]

Workloads: 1x128, 8x1024 and largest (GPT-2 124M), bert (BERT-large, 16 x 512), loader (Python work per sample, loaded
by `--workers` processes). The contenders: our engine without a screen, eagerly and on a card by replay, and on a card
with compile and replay; a loop written by hand, on a card also with torch.compile; transformers' Trainer, accelerate,
Lightning. In the loader-bound case the hand-written loop also runs on one batch that is on the device already. Each
trains a model of its own with the same optimizer, clipping and precision; TF32 is off. Only Lightning's AdamW is not
fused under AMP, where it can't clip with a fused one. A turn's figure is the mean step of its second half by the clock
on the wall, all launched work done. Printed: the median of the turns, and the rate over the hand-written loop's in the
same round, its median with a 95 % interval (bootstrap). A library that runs another precision than it was asked for
(fp16 on a CPU) is left out. `--small` shows on any CPU that it works; its figures say nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from tests.bench.loops import PlainLoop, engine
from tests.bench.others import accelerate_loop, lightning_trainer, transformers_trainer
from tests.bench.turns import Loop, in_turns, interval
from tests.bench.workloads import Workload, workloads
from tui3090.recipe import Recipe
from tui3090.settings import CORES, Settings

PLAIN, RESIDENT = "plain loop", "plain loop, data on the device"
LIMIT = 24 << 30
"""Bytes that the largest batch may take."""
LIBRARIES = {
    "transformers Trainer": ("transformers", transformers_trainer),
    "accelerate": ("accelerate", accelerate_loop),
    "Lightning": ("lightning", lightning_trainer),
}


def loops(workload: Workload, batch: int, settings: Settings, device: torch.device) -> dict[str, Loop]:
    """The contenders by name."""

    def made() -> Recipe:
        return workload.make(batch)

    def plain(compiled: bool = False, resident: bool = False) -> Loop:
        def run(boundary: Callable[[], bool]) -> None:
            PlainLoop(made(), device, settings, compiled, resident).run(boundary)

        return run

    def ours(settings: Settings) -> Loop:
        return lambda boundary: engine(made(), device, settings)(boundary)

    cuda = device.type == "cuda"
    found: dict[str, Loop] = {PLAIN: plain()}
    if workload.workers:
        found[RESIDENT] = plain(resident=True)
        settings = settings.having("prefetch", 2 if cuda else 0)
    found["engine"] = ours(settings)
    if cuda:
        found["engine, replay"] = ours(settings.having("graph", True))
        found["engine, compile + replay"] = ours(settings.having("graph", True).having("compile", True))
        found["plain loop, torch.compile"] = plain(compiled=True)
    for name, (package, make) in LIBRARIES.items():
        if find_spec(package) is None:
            print(f"{name} is left out: {package} is not installed (pip install {package})", flush=True)
        else:
            found[name] = lambda boundary, make=make: make(made(), device, settings)(boundary)  # type: ignore[misc]
    return found


def largest_batch(workload: Workload, settings: Settings, device: torch.device) -> int:
    """Of the plain loop, so that torch reserves at most 24 GiB for it."""
    most = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT / most), device)
    fits, fails = 0, 257
    while fails - fits > 1:
        batch = (fits + fails) // 2
        if _runs(workload.make(batch), settings, device):
            fits = batch
        else:
            fails = batch
        gc.collect()
        torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    return fits


def _runs(recipe: Recipe, settings: Settings, device: torch.device) -> bool:
    try:
        loop = PlainLoop(recipe, device, settings)
        for _ in range(3):
            loop.step()
    except torch.OutOfMemoryError:
        return False
    return True


def compare(workload: Workload, amp: str, rounds: int, device: torch.device) -> None:
    """Print a table."""
    began = time.perf_counter()
    settings = Settings(amp=amp, workers=workload.workers)
    batch = workload.batch or (largest_batch(workload, settings, device) if device.type == "cuda" else 0)
    if not batch:
        print(f"\n{workload.title} is left out: the largest batch is that of a card", flush=True)
        return
    print(f"\n**{workload.title}{'' if workload.batch else f': {batch}'}, {'fp32' if amp == 'off' else amp}**\n")

    def left_out(name: str, problem: BaseException | None) -> None:
        why = " ".join(str(problem).split())[:200] if problem else "it ended before its time"
        print(f"{name} is left out: {why}", flush=True)

    taken = in_turns(loops(workload, batch, settings, device), workload.steps, rounds, left_out=left_out)
    if PLAIN not in taken:
        return
    print("\n| contender | ms a step | rate over the plain loop's | 95 % |\n|---|---|---|---|")
    for name, seconds in taken.items():
        ratios = [plain / other for plain, other in zip(taken[PLAIN], seconds, strict=True)]
        low, high = interval(ratios)
        middle = statistics.median(seconds) * 1e3
        print(f"| {name} | {middle:.2f} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} |")
    print(f"\n({rounds} rounds of {workload.steps} steps in {time.perf_counter() - began:.0f} s)", flush=True)


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
    asked = parser.parse_args()
    known = workloads(asked.small, asked.workers)
    if unknown := set(asked.workload) - set(known):
        parser.error(f"no workload {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name(0) if device.type == "cuda" else f"{platform.machine()} CPU, {CORES} cores"
    print(f"{where}, load {os.getloadavg()[0]:.1f}; {versions()}", flush=True)
    for name in asked.workload or known:
        for amp in asked.amp:
            compare(known[name], amp, asked.rounds, device)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if find_spec("accelerate"):
                from accelerate.state import AcceleratorState

                AcceleratorState._reset_state(reset_partial_state=True)  # it holds the precision of the process


if __name__ == "__main__":
    main()
