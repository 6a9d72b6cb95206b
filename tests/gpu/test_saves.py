"""Save and resume on a card: with and without replay on either side, in every precision, in no more memory."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Train
from tests.reference import Blocks, loss_of, samples
from tui3090.commands import GoBack, MakeSave, Stop
from tui3090.host_copies import HostCopies
from tui3090.recipe import Recipe
from tui3090.records import Saved, StepRecord
from tui3090.settings import Settings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.timeout(300),
]

STEPS, AT = 20, 10


def recipe(width: int = 64, **fields: Any) -> Recipe:
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Blocks(width=width, batch_norm=True),
        "train_data": samples(96, width=width),
        "loss": loss_of,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "batch_size": 4,
    }
    return Recipe(**{**options, **fields})


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("before", [False, True], ids=["saved eager", "saved under replay"])
@pytest.mark.parametrize("after", [False, True], ids=["resumed eager", "resumed under replay"])
def test_the_next_losses_are_those_of_the_uninterrupted_run(
    train: Train, tmp_path: Path, amp: str, before: bool, after: bool
) -> None:
    plan: dict[str, Any] = {"device": "cuda:0", "steps": STEPS}
    whole = train(recipe(), settings=Settings(amp=amp), **plan)
    train(recipe(), {AT: [Stop()]}, Settings(amp=amp, graph=before, prefetch=2), folder=tmp_path, **plan)
    ran = train(recipe(), settings=Settings(amp=amp, graph=after), folder=tmp_path, resume=True, **plan)
    assert ran.status == 0, ran.records[-1]
    assert [r.step for r in ran.of(StepRecord)] == [r.step for r in whole.of(StepRecord)][AT:]
    assert any(r.replayed for r in ran.of(StepRecord)) == after
    assert ran.losses == whole.losses[AT:]
    assert {float(s["step"]) for s in ran.trainer.job.step.optimizer.state_dict()["state"].values()} == {STEPS}
    for name, value in whole.weights.items():
        assert torch.equal(ran.weights[name], value), name


def test_going_back_and_saving_under_replay(train: Train, tmp_path: Path) -> None:
    whole = train(recipe(), device="cuda:0", steps=STEPS)
    script = {6: [MakeSave()], 9: [MakeSave()], 12: [GoBack()]}
    ran = train(recipe(), script, Settings(graph=True), device="cuda:0", steps=STEPS, folder=tmp_path)
    assert [r.step for r in ran.of(StepRecord)] == [*range(1, 13), *range(10, STEPS + 1)]
    assert ran.losses[12:] == whole.losses[9:]
    assert [r.replayed for r in ran.of(StepRecord)][6:12] == [True] * 6, "a save needs no new capture"


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "replay"])
def test_resuming_and_going_back_need_no_more_memory_than_the_run_had(
    train: Train, tmp_path: Path, graph: bool
) -> None:
    def peak(**plan: Any) -> tuple[int, list[Saved]]:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        ran = train(recipe(width=2048), device="cuda:0", settings=Settings(graph=graph), folder=tmp_path, **plan)
        assert ran.status == 0, ran.records[-1]
        assert ran.trainer.allocator is not None
        return ran.trainer.allocator.read()["peak_allocated"], ran.of(Saved)

    run, saved = peak(script={AT: [Stop()]})
    print("\nsaves", [(r.bytes >> 20, r.seconds, r.waited_s) for r in saved])
    resumed, _ = peak(resume=True, steps=STEPS)
    back, _ = peak(script={AT: [MakeSave()], AT + 1: [GoBack()], AT + 3: [Stop()]})
    print("MiB at the most: run", run >> 20, "resumed", resumed >> 20, "gone back", back >> 20)
    assert resumed <= run * 1.01
    assert back <= run * 1.01


def test_the_first_save_finds_its_memory_pinned(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else training would wait for the pinning, which takes longer than the copy."""
    made: list[tuple[str, bool]] = []
    empty = HostCopies._empty

    def told(self: HostCopies, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        memory = empty(self, shape, dtype)
        made.append((threading.current_thread().name, memory.is_pinned()))
        return memory

    monkeypatch.setattr(HostCopies, "_empty", told)
    settings = Settings(graph=True)
    ran = train(recipe(), {190: [MakeSave()]}, settings, device="cuda:0", steps=200, folder=tmp_path)
    assert ran.status == 0, ran.records[-1]
    assert ran.of(Saved)
    assert set(made) == {("save memory", True)}
