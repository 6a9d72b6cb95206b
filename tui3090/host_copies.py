"""Host memory that tensors of the card are copied to, again and again, without training waiting for more than that."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor


class HostCopies:
    """Copies of tensors in host memory, which the next save uses again; pinned while memory is plentiful."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._pinned = True
        self._maker: threading.Thread | None = None
        self._stop = threading.Event()

    def make_ready(self, tree: Any) -> None:
        """Let a thread make the memory that the copies of `tree` will take: pinning takes longer than copying."""
        wanted: list[tuple[str, torch.Size, torch.dtype]] = []
        _mapped(tree, lambda t, path: None if t.is_cpu else wanted.append((path, t.shape, t.dtype)))
        if wanted:
            self._maker = threading.Thread(target=self._make, args=(wanted,), name="save memory", daemon=True)
            self._maker.start()

    def of(self, tree: Any) -> Any:
        """The same dicts, lists and numbers with each tensor replaced by its copy; on its way until the device is
        waited for.
        """
        if self._maker is not None:  # what it has not made is made now
            self._stop.set()
            self._maker.join()
            self._maker = None
        return _mapped(tree, lambda tensor, path: self._copy(tensor.detach(), path))

    def _make(self, wanted: Sequence[tuple[str, torch.Size, torch.dtype]]) -> None:
        for path, shape, dtype in wanted:
            began = time.perf_counter()
            try:
                self._memory(path, shape, dtype)
            except Exception:  # the save will say what is the matter
                traceback.print_exc()
                return
            # the driver may hold launches up meanwhile: for half of the time at the most
            if self._stop.wait(time.perf_counter() - began):
                return

    def _copy(self, tensor: Tensor, path: str) -> Tensor:
        if tensor.is_cpu:
            return tensor.clone(memory_format=torch.contiguous_format)
        return self._memory(path, tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)

    def _memory(self, path: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """That of the copy before, if it fits; else it is made."""
        memory = self._copies.get(path)
        if memory is None or memory.shape != shape or memory.dtype != dtype:
            memory = self._copies[path] = self._empty(shape, dtype)
        return memory

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        # pinned memory can't be swapped out: never take the last half of what there is
        size = shape.numel() * dtype.itemsize
        if self._pinned and psutil.virtual_memory().available < 2 * size + (4 << 30):
            self._pinned = False
        return torch.empty(shape, dtype=dtype, pin_memory=self._pinned)


def _mapped(tree: Any, leaf: Callable[[Tensor, str], Any], path: str = "") -> Any:
    """`tree`, of dicts, lists and tuples, with each tensor replaced by what `leaf` makes of it and its path."""
    if isinstance(tree, Tensor):
        return leaf(tree, path)
    if isinstance(tree, Mapping):
        return {key: _mapped(value, leaf, f"{path}/{key}") for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(value, leaf, f"{path}/{i}") for i, value in enumerate(tree))
    return tree
