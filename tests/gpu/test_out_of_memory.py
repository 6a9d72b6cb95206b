"""A card too small, by a cap on torch's allocator: the run goes on, with the steps that a bigger card gives."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.conftest import Train
from tui3090.recipe import Recipe
from tui3090.recipes import gpt
from tui3090.records import Changed, StepRecord
from tui3090.rewind import Rewind
from tui3090.settings import Settings
from tui3090.switching import Switches

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"), pytest.mark.timeout(300)]

SMALL_GIB = 5.0


def forget() -> None:
    """Give all of the card's memory back: an earlier run in this process had a stream, and so a cache, of its own."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # kept for each stream, in the middle of what would be free
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def whole_card_afterwards() -> Iterator[None]:
    """The cap is the process's: it must not outlive the test."""
    forget()
    assert torch.cuda.memory_reserved(0) < 64 << 20
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def recipe() -> Recipe:
    """GPT-2 124M with more samples in a micro-batch than 5 GiB hold in fp32."""
    torch.manual_seed(0)
    made = gpt.recipe(size="gpt2", batch_size=16, context=512)
    return replace(made, eval_data=None, metrics=None, scheduler="constant")


@pytest.mark.parametrize("settings", [Settings(), Settings(graph=True), Settings(amp="bf16", prefetch=2)])
def test_a_run_goes_on_in_smaller_micro_batches(train: Train, settings: Settings) -> None:
    whole = train(recipe(), settings=replace(settings, graph=False, prefetch=0), device="cuda:0", steps=6)
    del whole.trainer
    forget()
    ran = train(recipe(), settings=settings, device="cuda:0", steps=6, vram_gib=SMALL_GIB)
    assert ran.status == 0, ran.records[-1]
    changes = ran.of(Changed)
    print("\n", settings.short() or "fp32", [(c.technique, c.old, c.new) for c in changes])
    assert 1 <= len([c for c in changes if c.technique == "accumulate"]) <= 2, "no further than it has to"
    assert {c.technique for c in changes} <= {"graph", "accumulate", "prefetch"}
    assert all(change.origin == "out of memory" for change in changes)
    assert [r.samples for r in ran.of(StepRecord)] == [16] * 6
    assert ran.losses == pytest.approx(whole.losses, rel=2e-2 if settings.amp != "off" else 1e-4)


def test_what_a_failed_window_held_is_given_back(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a failed window was given up, the card holds what it did when the window began."""
    at_start: list[int] = []
    given_back: list[int] = []
    mark, give_back = Rewind.mark, Switches.give_memory_back

    def noting_start(self: Rewind) -> None:
        at_start.append(torch.cuda.memory_allocated(0))
        mark(self)

    def noting_end(self: Switches) -> None:
        give_back(self)
        given_back.append(torch.cuda.memory_allocated(0))

    monkeypatch.setattr(Rewind, "mark", noting_start)
    monkeypatch.setattr(Switches, "give_memory_back", noting_end)
    ran = train(recipe(), device="cuda:0", steps=4, vram_gib=SMALL_GIB)
    assert ran.status == 0, ran.records[-1]
    assert len(given_back) == len(ran.of(Changed)) >= 1
    before = at_start[1]  # the first window's; one mark before it when the run begins
    print("\nMiB at the window's start", before >> 20, "and once it was given up", [held >> 20 for held in given_back])
    for held in given_back:
        # besides what was there: workspaces that cuBLAS keeps, 32 MiB a handle on this card
        assert held <= before * 1.01 + (64 << 20)
    step = ran.trainer.job.step
    step.drop_gradients()
    gc.collect()
    held = sum(p.nbytes for p in step.model.parameters())
    held += sum(t.nbytes for state in step.optimizer.state.values() for t in state.values())
    assert torch.cuda.memory_allocated(0) <= held * 1.01 + (64 << 20)
