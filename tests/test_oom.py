"""The message of an OutOfMemoryError, read: memory in pieces is told apart from memory that is full."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Train
from tests.reference import Blocks, loss_of, samples
from tui3090 import oom
from tui3090.recipe import Recipe
from tui3090.records import Event

GIB, MIB = 1 << 30, 1 << 20

IN_PIECES = (
    "CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.50 GiB of which 12.73 GiB is "
    "free. Including non-PyTorch memory, this process has 18.75 GiB memory in use. Of the allocated memory 9.08 GiB is "
    "allocated by PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
FULL = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1023.00 MiB of which 15.06 MiB is "
    "free. 850.00 MiB allowed; Including non-PyTorch memory, this process has 1007.94 MiB memory in use. Of the "
    "allocated memory 825.15 MiB is allocated by PyTorch, with 60.00 MiB allocated in private pools (e.g., CUDA "
    "Graphs), and 24.85 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
REMEDY = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for the next start (it can't be changed in a running process)."
)


@pytest.fixture(autouse=True)
def plain_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's environment says."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def test_the_figures_are_read() -> None:
    assert oom.parse(IN_PIECES) == oom.Shortage(round(22.78 * GIB), round(9.08 * GIB), round(9.35 * GIB))
    assert oom.parse(FULL) == oom.Shortage(20 * MIB, round(825.15 * MIB), round(24.85 * MIB))
    assert oom.parse("CUDA out of memory. Tried to allocate 512 bytes. Whatever else.") is None
    assert oom.parse("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.") is None


def test_memory_in_pieces_is_told_with_the_remedy_for_the_next_start() -> None:
    sentence = oom.explained(IN_PIECES)
    assert "9.35 GiB cached but unusable for this request of 22.78 GiB" in sentence
    assert REMEDY in sentence


def test_memory_that_is_full_is_not_blamed_on_pieces() -> None:
    sentence = oom.explained(FULL)
    assert sentence == "The request was for 20.00 MiB; tensors held 825.15 MiB, and 24.85 MiB were cached."


def test_a_fifth_of_what_is_reserved_is_the_limit() -> None:
    assert oom.Shortage(1, allocated=80, unallocated=20).fragmented
    assert not oom.Shortage(1, allocated=81, unallocated=19).fragmented


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_remedy_that_is_in_force_is_not_proposed_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    assert "9.35 GiB cached but unusable" in oom.explained(IN_PIECES)
    assert "next start" not in oom.explained(IN_PIECES)


def recipe(**fields: Any) -> Recipe:
    torch.manual_seed(3)
    options: dict[str, Any] = {"model": Blocks(), "train_data": samples(24), "loss": loss_of, "batch_size": 8}
    return Recipe(**{**options, **fields})


def told(ran: Any) -> list[str]:
    return [event.text for event in ran.of(Event) if event.source == "memory"]


@pytest.mark.parametrize("text", [IN_PIECES, FULL])
def test_a_run_that_survives_it_tells_of_it(train: Train, text: str) -> None:
    def small(model: nn.Module, batch: Any) -> torch.Tensor:
        if len(batch["labels"]) > 4:
            raise torch.OutOfMemoryError(text)
        return loss_of(model, batch)

    ran = train(recipe(loss=small))
    assert ran.status == 0
    assert oom.explained(text) in told(ran)
    assert any(line.startswith("out of memory: micro-batches of 4 instead of 8") for line in told(ran))


def test_a_run_that_does_not_ends_with_it(train: Train, failure: Any) -> None:
    def none(model: nn.Module, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError(IN_PIECES)

    ran = train(recipe(loss=none))
    assert ran.status == 2
    assert "too small for this model even with micro-batches of 1" in failure(ran)
    assert oom.explained(IN_PIECES) in failure(ran)


def test_in_the_optimizers_step_too(train: Train, failure: Any) -> None:
    class Full(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise torch.OutOfMemoryError(IN_PIECES)

    ran = train(recipe(optimizer=lambda model: Full(model.parameters(), lr=0.1)))
    assert "in the optimizer's step 1" in failure(ran)
    assert oom.explained(IN_PIECES) in failure(ran)


def test_in_an_evaluation_too(train: Train) -> None:
    def metrics(model: nn.Module, batches: Any) -> dict[str, float]:
        raise torch.OutOfMemoryError(IN_PIECES)

    ran = train(recipe(eval_data=samples(8), metrics=metrics))
    assert ran.status == 0
    assert oom.explained(IN_PIECES) in told(ran)
