"""Offload on a card: losses equal to the bit, memory less, nothing waits, and everything is given back."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Ran, Train
from tui3090.commands import Change
from tui3090.recipe import Recipe
from tui3090.recipes import gpt
from tui3090.records import Event, Refused
from tui3090.settings import Settings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.timeout(300),
]

WINDOWS = 16
ON, OFF = 4, 10


def recipe(**fields: Any) -> Recipe:
    """Eight blocks of 512 dimensions, 16 x 256 tokens: a block saves more than 100 MiB in fp32."""
    torch.manual_seed(0)
    data = gpt.recipe(batch_size=16, context=256)
    model = gpt.GPT(gpt.Size(layers=8, heads=8, width=512, context=256, vocabulary=256, lr=1e-3), dropout=0.1)
    fields = {"shuffle": False, "eval_data": None, "metrics": None, "scheduler": "constant", **fields}
    return replace(data, model=model, **fields)


def run(train: Train, settings: Settings, script: dict[int, list[Change]] | None = None, **fields: Any) -> Ran:
    """16 windows of it."""
    ran = train(recipe(**fields), script, settings, device="cuda:0", steps=WINDOWS)
    assert ran.status == 0, ran.records[-1]
    return ran


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(amp="bf16"),
        Settings(amp="fp16", accumulate=2),
        Settings(checkpointing=1),
        Settings(checkpointing=2, amp="bf16"),
        Settings(compile=True, amp="bf16"),
        Settings(compile=True, checkpointing=1),
    ],
)
def test_losses_and_weights_are_equal_to_the_bit(train: Train, settings: Settings) -> None:
    plain = run(train, settings)
    ran = run(train, settings, {ON: [Change("offload", True)], OFF: [Change("offload", False)]})
    assert ran.losses == plain.losses
    for name, value in ran.weights.items():
        assert torch.equal(value, plain.weights[name]), name
    (told,) = [event.text for event in ran.of(Event) if event.text.startswith("offload: ")]
    print(f"\n{settings.short() or 'fp32'}: {told}")


def peaks(train: Train, settings: Settings) -> tuple[list[int], Ran]:
    """Bytes allocated at the most in each window, from its loss to the next one's."""
    seen: list[int] = []

    def measured(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        return gpt.loss(model, batch)

    script = {ON: [Change("offload", True)], OFF: [Change("offload", False)]}
    ran = run(train, settings, script, loss=measured)
    return seen, ran


@pytest.mark.parametrize("settings", [Settings(), Settings(amp="bf16")])
def test_memory_is_saved_while_it_is_on(train: Train, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    monkeypatch.setattr("tui3090.gains.SETTLING_S", math.inf)  # the run itself begins no peak anew but at the changes
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    held = torch.cuda.memory_allocated()
    seen, ran = peaks(train, settings)
    # the change itself begins the peaks anew, so the last whole plain window is the one before the last
    plain, on, after = (peak - held for peak in (seen[ON - 1], min(seen[ON + 2 : OFF]), seen[OFF + 3]))
    print(f"\n{settings.short() or 'fp32'}: peak {plain / 2**20:.0f} MiB, with offload {on / 2**20:.0f}")
    assert on < 0.85 * plain
    assert after == pytest.approx(plain, rel=0.02)
    assert not ran.trainer.job.step.offload._pinned
    del ran
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each thread that multiplied matrices
    assert torch.cuda.memory_allocated() <= held + (1 << 20)


def test_nothing_waits_on_the_host(train: Train) -> None:
    calls: list[int] = []

    def strict(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 6:
            torch.cuda.set_sync_debug_mode("error")
        return gpt.loss(model, batch)

    try:
        run(train, Settings(offload=True), loss=strict)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(calls) == WINDOWS


def test_replay_and_offload_exclude_each_other(train: Train) -> None:
    ran = run(train, Settings(offload=True), {3: [Change("graph", True)]})
    (refused,) = ran.of(Refused)
    assert refused.technique == "graph"
    assert refused.reason.startswith("Offload and graph replay exclude each other")
