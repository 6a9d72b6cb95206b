"""The host memory that saves copy to: made ahead by a thread, for the tensors that are not in host memory already."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tui3090.host_copies import HostCopies


class OnCard(torch.Tensor):
    """Says that it is not in host memory."""

    is_cpu = False


TREE: dict[str, Any] = {
    "model": {"weight": torch.randn(4, 3).as_subclass(OnCard), "count": torch.ones(2)},
    "training": {
        "optimizer": {"state": {0: {"moments": (torch.randn(4, 3).as_subclass(OnCard),), "step": 7.0}}},
        "rates": [torch.randn(5).as_subclass(OnCard)],
    },
}
SHAPES = [(4, 3), (4, 3), (5,)]


class Counted(HostCopies):
    """Makes memory as a machine without a card can, and knows which thread made it."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned = False
        self.made: list[tuple[tuple[int, ...], str]] = []

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        self.made.append((tuple(shape), threading.current_thread().name))
        return super()._empty(shape, dtype)

    def finish(self) -> None:
        """Wait until the thread has made all."""
        assert self._maker is not None
        self._maker.join(10)


def by(*threads: str) -> list[tuple[tuple[int, ...], str]]:
    return list(zip(SHAPES, threads, strict=True))


def assert_copied(copies: HostCopies) -> None:
    found = copies.of(TREE)
    assert torch.equal(found["model"]["weight"], TREE["model"]["weight"])
    assert torch.equal(found["model"]["count"], torch.ones(2))
    assert found["model"]["count"] is not TREE["model"]["count"]
    state = found["training"]["optimizer"]["state"][0]
    assert torch.equal(state["moments"][0], TREE["training"]["optimizer"]["state"][0]["moments"][0])
    assert state["step"] == 7.0
    assert torch.equal(found["training"]["rates"][0], TREE["training"]["rates"][0])


def test_a_save_finds_the_memory_made_and_so_does_the_next() -> None:
    copies = Counted()
    copies.make_ready(TREE)
    copies.finish()
    for _ in range(2):
        assert copies.made == by("save memory", "save memory", "save memory")
        assert_copied(copies)


def test_a_save_that_comes_early_waits_for_one_tensor_and_makes_the_rest_itself() -> None:
    class UntilTheSave(Counted):
        def _empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
            made = super()._empty(shape, dtype)
            if threading.current_thread().name == "save memory":
                assert self._stop.wait(10)
            return made

    copies = UntilTheSave()
    copies.make_ready(TREE)
    assert_copied(copies)
    assert copies.made == by("save memory", "MainThread", "MainThread")


def test_memory_that_can_t_be_had_ahead_is_asked_for_again(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    copies = Counted()

    def none(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("out of host memory")

    with monkeypatch.context() as context:
        context.setattr(copies, "_empty", none)
        copies.make_ready(TREE)
        copies.finish()
    assert "out of host memory" in capsys.readouterr().err
    assert_copied(copies)
    assert copies.made == by("MainThread", "MainThread", "MainThread")


def test_what_is_in_host_memory_needs_no_thread() -> None:
    copies = Counted()
    copies.make_ready({"model": {"count": torch.zeros(2)}})
    assert copies._maker is None


def test_memory_of_another_shape_is_made_anew() -> None:
    copies = Counted()
    copies.of({"weight": torch.zeros(3).as_subclass(OnCard)})
    found = copies.of({"weight": torch.ones(2).as_subclass(OnCard)})
    assert [shape for shape, _ in copies.made] == [(3,), (2,)]
    assert found["weight"].tolist() == [1.0, 1.0]
