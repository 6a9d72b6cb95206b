"""Contenders that take turns on a workload, and what came of it."""

from __future__ import annotations

import copy
import gc
import math
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from tests.bench.capture import CapturedLoop
from tests.bench.loops import PlainLoop, engine
from tests.bench.others import accelerate_loop, lightning_trainer, plain_under_traceml, transformers_trainer
from tests.bench.turns import Loop, in_turns, interval
from tests.bench.workloads import Workload
from tui3090.commands import Command, Profile
from tui3090.recipe import Recipe
from tui3090.records import Phases, Profiled, Record, StepRecord
from tui3090.settings import Settings

PLAIN, COMPILED, CAPTURED = "plain loop", "plain loop, torch.compile", "plain loop, whole step captured"
RESIDENT = "plain loop, data on the device"
ENGINE, REPLAY, BOTH = "engine", "engine, replay", "engine, compile + replay"
COMPILE, OFFLOAD = "engine, compile", "engine, offload"
TRAINER, ACCELERATE, LIGHTNING = "transformers Trainer", "accelerate", "Lightning"
TRACED = "plain loop under TraceML"
LIBRARIES = {
    TRAINER: ("transformers", transformers_trainer),
    ACCELERATE: ("accelerate", accelerate_loop),
    LIGHTNING: ("lightning", lightning_trainer),
    TRACED: ("traceml_ai", plain_under_traceml),
}
CONTENDERS = PLAIN, COMPILED, CAPTURED, RESIDENT, ENGINE, REPLAY, BOTH, COMPILE, OFFLOAD, *LIBRARIES
LIMIT = 24 << 30
"""Bytes that the largest batch may take."""
LOOK_AT = 6
"""The window before which a look at the kernels is asked for, in the round that warms up."""


@dataclass(frozen=True)
class Race:
    """What contenders did in turns."""

    workload: Workload
    batch: int
    seconds: dict[str, list[float]]
    """A step's, of each turn."""
    records: dict[str, list[Record]]
    """Steps, phases and profiles of our engine's contenders, the round that warms up included."""

    def rate(self, ours: str, theirs: str) -> tuple[float, float, float]:
        """One contender's rate over another's in the same round: the median, and its 95 % interval."""
        ratios = [b / a for a, b in zip(self.seconds[ours], self.seconds[theirs], strict=True)]
        return statistics.median(ratios), *interval(ratios)

    def flops(self) -> tuple[float, float] | None:
        """Model FLOPs of a step and the card's peak per second, as our engine counts them; None: not known."""
        for records in self.records.values():
            for record in reversed(records):
                if isinstance(record, StepRecord) and record.flops and record.peak_flops_s:
                    return record.flops, record.peak_flops_s
        return None

    def mfu(self, name: str) -> float | None:
        """Model FLOPs over what the card's peak allows in a step's time."""
        known = self.flops()
        return known[0] / known[1] / statistics.median(self.seconds[name]) if known else None

    def stall(self, name: str) -> tuple[float, float, float]:
        """An engine contender's data stall over the time of a turn's second half: the median, and its 95 % interval.

        A turn's last step is left out: the wait for the next turn is in it.
        """
        steps = self.workload.steps
        every = [record for record in self.records[name] if isinstance(record, StepRecord)]
        shares = []
        for begin in range(steps, len(every) - steps + 1, steps):  # the first turn warms up
            settled = every[begin + steps // 2 : begin + steps - 1]
            shares.append(sum(record.stall_s for record in settled) / sum(record.seconds for record in settled))
        return statistics.median(shares), *interval(shares)


def race(
    workload: Workload,
    settings: Settings,
    rounds: int,
    device: torch.device,
    only: Collection[str] | None = None,
    look: bool = False,
    deadline: float = math.inf,
) -> Race | None:
    """Let the contenders take turns, those in `only`, else all but TraceML's, which leaves the process changed.

    None: the workload can't be had here.
    `look`: our engine's ones are profiled in one window of the round that warms up. `deadline`: as `in_turns` takes it.
    """
    batch = workload.batch or (largest_batch(workload, settings, device) if device.type == "cuda" else 0)
    if not batch:
        print(f"{workload.title} is left out: the largest batch is that of a card", flush=True)
        return None

    def left_out(name: str, problem: BaseException | None) -> None:
        why = " ".join(str(problem).split())[:200] if problem else "it ended before its time"
        print(f"{name} is left out: {why}", flush=True)

    records: dict[str, list[Record]] = {}
    script: dict[int, Sequence[Command]] = {LOOK_AT: [Profile()]} if look else {}
    contenders = loops(workload, batch, settings, device, only, records, script)
    seconds = in_turns(contenders, workload.steps, rounds, left_out=left_out, deadline=deadline)
    clean_up(device)
    return Race(workload, batch, seconds, records)


def loops(
    workload: Workload,
    batch: int,
    settings: Settings,
    device: torch.device,
    only: Collection[str] | None,
    records: dict[str, list[Record]],
    script: Mapping[int, Sequence[Command]],
) -> dict[str, Loop]:
    """The contenders by name. They begin with the same weights."""
    base = workload.make(batch)

    def made() -> Recipe:
        return replace(base, model=copy.deepcopy(base.model))

    def plain(settings: Settings = settings, compiled: bool = False, resident: bool = False) -> Loop:
        return lambda boundary: PlainLoop(made(), device, settings, compiled, resident).run(boundary)

    def ours(name: str, *on: str) -> Loop:
        kept = records.setdefault(name, [])
        mine = settings
        for technique in on:
            mine = mine.having(technique, True)

        def keep(record: Record) -> None:
            if isinstance(record, StepRecord | Phases | Profiled):
                kept.append(record)

        return lambda boundary: engine(made(), device, mine, keep, script)(boundary)

    def captured(boundary: Callable[[], bool]) -> None:
        CapturedLoop(made(), device, settings).run(boundary)

    cuda = device.type == "cuda"
    found: dict[str, Loop] = {PLAIN: plain()}
    if workload.workers:
        found[RESIDENT] = plain(settings.having("workers", 0), resident=True)
    found[ENGINE] = ours(ENGINE)
    if cuda:
        found[REPLAY] = ours(REPLAY, "graph")
        found[CAPTURED] = captured
        found[OFFLOAD] = ours(OFFLOAD, "offload")
        found[COMPILE] = ours(COMPILE, "compile")
        found[BOTH] = ours(BOTH, "graph", "compile")
        found[COMPILED] = plain(compiled=True)
    for name, (package, make) in LIBRARIES.items():
        if name == TRACED if only is None else name not in only:
            continue
        if find_spec(package) is None:
            print(
                f"{name} is left out: {package} is not installed (pip install {package.replace('_', '-')})", flush=True
            )
        else:
            found[name] = lambda boundary, make=make: make(made(), device, settings)(boundary)  # type: ignore[misc]
    return {name: loop for name, loop in found.items() if only is None or name in only}


def largest_batch(workload: Workload, settings: Settings, device: torch.device) -> int:
    """Of the plain loop, so that torch reserves at most 24 GiB for it."""
    most = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT / most), device)
    base, fits, fails = workload.make(1), 0, 257
    while fails - fits > 1:
        batch = (fits + fails) // 2
        if _runs(replace(base, model=copy.deepcopy(base.model), batch_size=batch), settings, device):
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


def clean_up(device: torch.device) -> None:
    """What a race leaves in the process."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if "accelerate.state" in sys.modules:  # it holds the precision of the process
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
