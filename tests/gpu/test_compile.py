"""torch.compile on a card: a small GPT, switched on and off in mid-run, alone and under replay.

Run with -s to see how far its losses are from eager's.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from tests.conftest import Ran, Train
from tui3090.commands import Change
from tui3090.recipe import Recipe
from tui3090.recipes import gpt
from tui3090.records import Event, StepRecord
from tui3090.settings import Settings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.timeout(300),
]

WINDOWS = 24
TWICE = {5: [Change("compile", True)], 10: [Change("compile", False)], 15: [Change("compile", True)]}
TOLERANCE = {"off": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
"""Of a loss, relatively, after 24 steps: fused kernels round otherwise, and under AMP less often."""


def recipe() -> Recipe:
    """Four blocks of 128 dimensions, dropout, unshuffled."""
    torch.manual_seed(0)
    made = gpt.recipe(batch_size=8, dropout=0.1)
    return replace(made, shuffle=False, eval_data=None, metrics=None, scheduler="constant")


def run(train: Train, settings: Settings, script: dict[int, list[Change]] | None = None, **fields: object) -> Ran:
    """24 windows of it."""
    ran = train(replace(recipe(), **fields), script, settings, device="cuda:0", steps=WINDOWS)  # type: ignore[arg-type]
    assert ran.status == 0, ran.records[-1]
    return ran


def compilations(ran: Ran) -> int:
    """In how many windows something was compiled; that nothing else was told."""
    told = [event.text for event in ran.of(Event) if event.source in ("compile", "graph")]
    assert all(re.match(r"compiled in \d+ s, ", text) for text in told), told
    return len(told)


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_equals_eager_and_is_compiled_once(train: Train, amp: str) -> None:
    plain, ran = run(train, Settings(amp=amp)), run(train, Settings(amp=amp), TWICE)
    furthest = max(abs(a - b) / b for a, b in zip(ran.losses, plain.losses, strict=True))
    print(f"\namp {amp}: furthest loss {furthest:.3g}")
    assert furthest <= TOLERANCE[amp]
    assert ran.weights.keys() == plain.weights.keys()
    assert compilations(ran) == 1


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(amp="bf16", tf32=True),
        Settings(amp="fp16", accumulate=2),
        Settings(amp="bf16", checkpointing=1),
    ],
)
def test_replay_of_it_equals_it_to_the_bit(train: Train, settings: Settings) -> None:
    compiled = settings.having("compile", True)
    eager = run(train, compiled)
    ran = run(train, compiled.having("graph", True))
    replayed = [record.replayed for record in ran.of(StepRecord)]
    assert sum(replayed) >= WINDOWS - 3, [event.text for event in ran.of(Event)]
    assert ran.losses == eager.losses
    for name, value in ran.weights.items():
        assert torch.equal(value, eager.weights[name]), name


def test_switched_on_and_off_under_replay(train: Train) -> None:
    plain, ran = run(train, Settings(graph=True, amp="bf16")), run(train, Settings(graph=True, amp="bf16"), TWICE)
    furthest = max(abs(a - b) / b for a, b in zip(ran.losses, plain.losses, strict=True))
    assert furthest <= TOLERANCE["bf16"]
    assert compilations(ran) == 1
    replayed = [record.replayed for record in ran.of(StepRecord)]
    for first, last in ((2, 5), (7, 10), (12, 15), (17, WINDOWS)):  # after a change one window is seen, then captured
        assert all(replayed[first:last]), replayed


class Lengths(Dataset[dict[str, torch.Tensor]]):
    """Batches of another length each."""

    def __init__(self, rows: Dataset[dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 8 * WINDOWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[: 64 + 4 * (index // 8 % 12)] for name, value in self.rows[index].items()}


def test_lengths_are_generalized(train: Train) -> None:
    data = Lengths(recipe().train_data)  # type: ignore[arg-type]
    plain = run(train, Settings(), train_data=data)
    ran = run(train, Settings(compile=True), train_data=data)
    assert ran.losses == pytest.approx(plain.losses, rel=TOLERANCE["off"])
    assert compilations(ran) <= 4


WORKERS = """
import os, signal, sys, time
from tui3090.signals import Interrupts
Interrupts()
import psutil, torch
from tui3090.techniques.compile import _bound_workers
_bound_workers()
linear = torch.nn.Linear(64, 64).cuda()
torch.compile(lambda x: torch.nn.functional.gelu(linear(x)).sin())(torch.randn(8, 64).cuda()).sum().backward()
torch.cuda.synchronize()
for child in psutil.Process().children(recursive=True):
    if "compile_worker" not in " ".join(child.cmdline()):
        continue
    ignored = next(line for line in open(f"/proc/{child.pid}/status") if line.startswith("SigIgn")).split()[1]
    print(child.pid, int(ignored, 16) >> (signal.SIGHUP - 1) & 1, flush=True)
os._exit(0)
"""


def test_the_compilers_processes_ignore_a_hang_up_and_end_with_the_run() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", WORKERS], cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows, "inductor has started its processes"
    assert {ignores for _, ignores in rows} == {"1"}
    until = time.monotonic() + 60
    while any(psutil.pid_exists(int(pid)) for pid, _ in rows):
        assert time.monotonic() < until, "they outlive the run"
        time.sleep(0.1)
