"""What the engine is to reach beside other loops: each aim with what was measured, the weightiest first.

An aim is met where the interval's lower end reaches it, not met where the upper end does not, and open where it lies
within the interval.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from tests.bench.advised import advised
from tests.bench.race import (
    BOTH,
    CAPTURED,
    COMPILED,
    ENGINE,
    LIGHTNING,
    PLAIN,
    REPLAY,
    RESIDENT,
    TRACED,
    TRAINER,
    Race,
    clean_up,
    race,
)
from tests.bench.workloads import Workload
from tui3090.records import Phases, Profiled
from tui3090.settings import Settings


@dataclass(frozen=True)
class Aim:
    """One rate over another."""

    ours: str
    theirs: str
    least: float | None
    """None: it is only stated."""


@dataclass(frozen=True)
class Trial:
    """Contenders that take turns, and the aims that this shows."""

    workload: str
    amp: str
    contenders: tuple[str, ...]
    aims: tuple[Aim, ...]
    steps: int
    """Of a turn."""
    rounds: int
    mfu: bool = False
    """Whether MFU and where the time goes are told."""
    word: str = ""
    """What asks for it on the command line; empty: its workload."""

    @property
    def asked_by(self) -> str:
        """What asks for it on the command line."""
        return self.word or self.workload


@dataclass(frozen=True)
class Screen:
    """The dashboard beside none."""

    technique: str
    asked_by = "dashboard"


EAGER = Aim(ENGINE, PLAIN, 0.97)
HAND = (PLAIN, ENGINE, REPLAY, CAPTURED)
TRIALS: tuple[Trial | Screen, ...] = (
    Trial("1x128", "bf16", HAND, (Aim(REPLAY, CAPTURED, 0.95),), 60, 12),
    Trial("8x1024", "bf16", HAND, (Aim(REPLAY, CAPTURED, 0.98), EAGER), 16, 9),
    # launching takes the time, and the host's speed moves by a fifth within a second: many short turns meet the same
    Trial("1x128", "bf16", (PLAIN, ENGINE), (EAGER,), 6, 300, word="eager"),
    Trial(
        "1x128",
        "bf16",
        (REPLAY, TRAINER, LIGHTNING),
        (Aim(REPLAY, TRAINER, 3.0), Aim(REPLAY, LIGHTNING, 3.0)),
        30,
        6,
        word="libraries",
    ),
    Trial(
        "8x1024",
        "bf16",
        (PLAIN, ENGINE, BOTH, COMPILED, TRAINER, LIGHTNING),
        (Aim(BOTH, COMPILED, 1.0), Aim(ENGINE, TRAINER, 1.0), Aim(ENGINE, LIGHTNING, 1.0)),
        16,
        6,
        mfu=True,
        word="compile",
    ),
    Screen("replay"),
    Trial("loader", "bf16", (RESIDENT, ENGINE), (Aim(ENGINE, RESIDENT, 0.95),), 40, 8),
    Screen("compile + replay"),
    Trial("largest", "bf16", (PLAIN, ENGINE, BOTH, COMPILED), (Aim(BOTH, COMPILED, 1.0), EAGER), 10, 5, mfu=True),
    Trial("bert", "bf16", (PLAIN, ENGINE, TRAINER), (EAGER, Aim(ENGINE, TRAINER, 1.0)), 4, 80),
    Trial("1x128", "fp16", (REPLAY, CAPTURED), (Aim(REPLAY, CAPTURED, 0.95),), 40, 8, word="precisions"),
    Trial("1x128", "off", (REPLAY, CAPTURED), (Aim(REPLAY, CAPTURED, 0.95),), 40, 8, word="precisions"),
    Trial("8x1024", "fp16", (REPLAY, CAPTURED), (Aim(REPLAY, CAPTURED, 0.98),), 12, 6, word="precisions"),
    # the last, for what others.py says
    Trial("1x128", "bf16", (PLAIN, TRACED), (Aim(TRACED, PLAIN, None),), 60, 8, word="traceml"),
)
WORDS = {trial.asked_by for trial in TRIALS}
DASHBOARD_PAIRS, DASHBOARD_STEPS = 2, 1600


def judge(
    known: Mapping[str, Workload], wanted: Collection[str], small: bool, seconds: float, device: torch.device
) -> None:
    """Go through the trials (those that `wanted` asks for, if any): print at once what each shows, then all of it.

    A trial that fails is told, and the next one begins.
    """
    began, lines = time.perf_counter(), []
    for trial in TRIALS:
        if wanted and trial.asked_by not in wanted:
            continue
        name = f"{trial.asked_by}, {trial.technique if isinstance(trial, Screen) else _precision(trial.amp)}"
        spent = time.perf_counter() - began
        if spent > seconds:
            print(f"{name} is left out: {spent:.0f} s are over", flush=True)
            continue
        print(f"\n{name} ({spent:.0f} s so far)", flush=True)
        told = _screen(trial, device) if isinstance(trial, Screen) else _trial(trial, known, small, device)
        try:
            for line in told:
                print(line, flush=True)
                lines.append(line)
        except Exception as error:
            traceback.print_exc()
            lines.append(f"failed: {name}: {error}")
            clean_up(device)
    print(f"\nAll of it ({time.perf_counter() - began:.0f} s):", *lines, sep="\n", flush=True)


def verdict(figures: tuple[float, float, float], aim: float | None, what: str, at_most: bool = False) -> str:
    """A line of an aim: `figures` are the measured one and its interval's ends."""
    value, low, high = figures
    if aim is None:
        return f"measured{value:6.3f} ({low:.3f} to {high:.3f}): {what}"
    met, missed = (high <= aim, low > aim) if at_most else (low >= aim, high < aim)
    word = "met" if met else "not met" if missed else "open"
    return f"{word:8}{value:6.3f} ({low:.3f} to {high:.3f}), aim {'<=' if at_most else '>='} {aim:.2f}: {what}"


def _precision(amp: str) -> str:
    return "fp32" if amp == "off" else amp


def _trial(trial: Trial, known: Mapping[str, Workload], small: bool, device: torch.device) -> Iterable[str]:
    workload = known[trial.workload]
    settings = Settings(amp=trial.amp)
    steps, rounds = (workload.steps, 2) if small else (trial.steps, trial.rounds)
    workload = replace(workload, steps=steps)
    if workload.workers:
        settings = advised(workload.make(workload.batch), device, settings)
        clean_up(device)
        yield f"advised: {settings.workers} workers, prefetch {settings.prefetch or 'off'}"
    run = race(workload, settings, rounds, device, trial.contenders, look=trial.mfu)
    if run is None:
        return
    at = f"{workload.title}, {_precision(trial.amp)}"
    print(
        ", ".join(f"{name} {statistics.median(every) * 1e3:.2f} ms" for name, every in run.seconds.items()), flush=True
    )
    for aim in trial.aims:
        if aim.ours in run.seconds and aim.theirs in run.seconds:
            yield verdict(run.rate(aim.ours, aim.theirs), aim.least, f"{aim.ours} over {aim.theirs}: {at}")
        else:
            yield f"not run: {aim.ours} over {aim.theirs}: {at}"
    if workload.workers and ENGINE in run.seconds:
        yield verdict(run.stall(ENGINE), 0.05, f"data stall of the engine: {at}", at_most=True)
    if trial.mfu:
        yield from _mfu(run, at)


def _mfu(run: Race, at: str) -> Iterable[str]:
    for name, every in run.seconds.items():
        share = run.mfu(name)
        figure = "n/a" if share is None else f"{share:.1%}"
        yield f"MFU {figure}, {statistics.median(every) * 1e3:.2f} ms a step: {name}: {at}, batch {run.batch}"
    for name in (ENGINE, BOTH):
        if name in run.seconds:
            yield from (f"  {name}: {line}" for line in where_the_time_goes(run, name))


def where_the_time_goes(run: Race, name: str) -> Iterable[str]:
    """Of an engine contender: its phases by their medians, and its kernels by class in the window that was profiled.

    Phases are marked once a second at most: here in windows that begin a turn, whose first launches nothing hides.
    """
    step = statistics.median(run.seconds[name])
    phases = [record for record in run.records[name] if isinstance(record, Phases)]
    if phases:
        parts = {
            part: statistics.median(getattr(record, f"{part}_s") for record in phases)
            for part in ("data", "copy", "forward", "backward", "graph", "optimizer")
        }
        parts["other"] = max(0.0, step - sum(parts.values()))
        yield "phases: " + ", ".join(f"{part} {spent / step:.1%}" for part, spent in parts.items() if spent)
    for look in run.records[name]:
        if not isinstance(look, Profiled) or look.missing:
            continue
        shares = (
            ("Tensor Cores", look.tensor_core_share, look.with_tensor_cores),
            ("without them", _rest(look), look.without),
            ("Triton's, unknown", look.unknown_share, look.unknown),
        )
        told = "; ".join(f"{what} {share or 0:.1%} ({kernels or 'none'})" for what, share, kernels in shares)
        yield f"{look.kernels} kernels, {look.kernel_s * 1e3:.2f} ms, one runs {look.busy_share or 0:.1%} of the time"
        yield f"of the kernels' time: {told}; matmuls in fp32 {look.fp32_share or 0:.1%}"
        if look.tensor_core_share and (known := run.flops()):
            reached = known[0] / known[1] / (look.tensor_core_share * look.kernel_s)
            yield f"the Tensor Cores' kernels reach {reached:.1%} of the peak while they run, all model FLOPs theirs"


def _rest(look: Profiled) -> float:
    return max(0.0, 1 - (look.tensor_core_share or 0) - (look.unknown_share or 0))


def _screen(screen: Screen, device: torch.device) -> Iterable[str]:
    missing = [package for package in ("pexpect", "pyte") if find_spec(package) is None]
    if device.type != "cuda" or missing:
        needs = f"{' and '.join(missing)} (pip install)" if missing else "a card"
        yield f"not run, it needs {needs}: the dashboard over headless, {screen.technique}"
        return
    from tests.bench import dashboard

    dashboard.header()
    runs = dashboard.run_pairs(screen.technique, DASHBOARD_PAIRS, DASHBOARD_STEPS, cpu=False)
    at = f"GPT-2 124M, 1 x 128, bf16, {screen.technique}"
    yield verdict(runs.rate(), 0.99, f"the dashboard over headless: {at}")
    yield verdict(runs.p99(), 1.1, f"a step's 99th percentile under the dashboard over headless: {at}", at_most=True)
