"""The host memory that saves copy to: made ahead by a thread, for the tensors that are not in host memory already."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tui3090.host_copies import HostCopies


def on_card(*shape: int) -> torch.Tensor:
    """As far as the memory to make is concerned."""
    return torch.empty(shape, device="meta")


TREE: dict[str, Any] = {
    "model": {"weight": on_card(4, 3), "count": torch.zeros(2)},
    "training": {"optimizer": {"state": {0: {"moments": [on_card(4, 3), on_card(5)], "step": 7.0}}}, "scaler": {}},
}
PATHS = ["/model/weight", "/training/optimizer/state/0/moments/0", "/training/optimizer/state/0/moments/1"]


class Counted(HostCopies):
    """Makes memory as a machine without a card can, and knows which thread made it."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned = False
        self.made: list[tuple[tuple[int, ...], str]] = []
        self.copied: list[str] = []
        self.began, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        self.made.append((tuple(shape), threading.current_thread().name))
        self.began.set()
        assert self.may_go_on.wait(10)
        return super()._empty(shape, dtype)

    def _copy(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        self.copied.append(path)
        # what is not in host memory has nothing to copy here: as if it came from there
        return super()._copy(tensor, path) if tensor.is_cpu else self._into(tensor, path)

    def _into(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        found = self._copies.get(path)
        return found if found is not None else self._empty(tensor.shape, tensor.dtype)


def finished(copies: HostCopies) -> None:
    assert copies._maker is not None
    copies._maker.join(10)


def test_a_save_finds_the_memory_made() -> None:
    copies = Counted()
    copies.make_ready(TREE)
    finished(copies)
    assert list(copies._copies) == PATHS
    made = list(copies.made)
    assert made == [((4, 3), "save memory"), ((4, 3), "save memory"), ((5,), "save memory")]
    copies.take_over()
    found = copies.of(TREE)
    assert copies.made == made
    assert set(PATHS) < set(copies.copied)
    assert found["training"]["optimizer"]["state"][0]["step"] == 7.0


def test_a_save_that_comes_early_waits_for_one_tensor_and_makes_the_rest_itself() -> None:
    copies = Counted()
    copies.may_go_on.clear()
    copies.make_ready(TREE)
    assert copies.began.wait(10)
    threading.Timer(0.1, copies.may_go_on.set).start()
    copies.take_over()
    assert list(copies._copies) == PATHS[:1]
    copies.of(TREE)
    assert [name for _, name in copies.made] == ["save memory", "MainThread", "MainThread"]


def test_memory_that_can_t_be_had_ahead_is_asked_for_again(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    copies = Counted()

    def none(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("out of host memory")

    with monkeypatch.context() as context:
        context.setattr(copies, "_empty", none)
        copies.make_ready(TREE)
        finished(copies)
    assert "out of host memory" in capsys.readouterr().err
    copies.take_over()
    copies.of(TREE)
    assert [name for _, name in copies.made] == ["MainThread"] * 3


def test_what_is_in_host_memory_needs_no_thread() -> None:
    copies = Counted()
    copies.make_ready({"model": {"count": torch.zeros(2)}})
    assert copies._maker is None
    copies.take_over()
