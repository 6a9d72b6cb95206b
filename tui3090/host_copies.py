"""Host memory that tensors of the card are copied to, again and again, without training waiting for more than that."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
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
        wanted = [(path, tensor.shape, tensor.dtype) for path, tensor in _on_card(tree)]
        if wanted:
            self._maker = threading.Thread(target=self._make, args=(wanted,), name="save memory", daemon=True)
            self._maker.start()

    def take_over(self) -> None:
        """End that thread; what it has not made is made when it is copied to."""
        if self._maker is not None:
            self._stop.set()
            self._maker.join()
            self._maker = None

    def _make(self, wanted: Sequence[tuple[str, torch.Size, torch.dtype]]) -> None:
        for path, shape, dtype in wanted:
            began = time.perf_counter()
            try:
                self._copies[path] = self._empty(shape, dtype)
            except Exception:  # the save will say what is the matter
                traceback.print_exc()
                return
            # the driver may hold launches up meanwhile: for half of the time at the most
            if self._stop.wait(time.perf_counter() - began):
                return

    def of(self, tree: Any, path: str = "") -> Any:
        """The same dicts, lists and numbers with each tensor replaced by its copy; on its way until the device is
        waited for.
        """
        if isinstance(tree, Tensor):
            return self._copy(tree.detach(), path)
        if isinstance(tree, Mapping):
            return {key: self.of(value, f"{path}/{key}") for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.of(value, f"{path}/{i}") for i, value in enumerate(tree))
        return tree

    def _copy(self, tensor: Tensor, path: str) -> Tensor:
        if tensor.is_cpu:
            return tensor.clone(memory_format=torch.contiguous_format)
        copy = self._copies.get(path)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._copies[path] = self._empty(tensor.shape, tensor.dtype)
        return copy.copy_(tensor, non_blocking=True)

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        # pinned memory can't be swapped out: never take the last half of what there is
        size = shape.numel() * dtype.itemsize
        if self._pinned and psutil.virtual_memory().available < 2 * size + (4 << 30):
            self._pinned = False
        return torch.empty(shape, dtype=dtype, pin_memory=self._pinned)


def _on_card(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested dicts and lists that are not in host memory, by the paths that `HostCopies` gives them."""
    if isinstance(tree, Tensor):
        if not tree.is_cpu:
            yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _on_card(value, f"{path}/{key}")
    elif isinstance(tree, (list, tuple)):
        for i, value in enumerate(tree):
            yield from _on_card(value, f"{path}/{i}")
