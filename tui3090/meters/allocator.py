"""torch's caching allocator, by its own counters, and what a model and its optimizer hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tui3090.gains import Settling, measured
from tui3090.records import StepRecord


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes."""

    weights: int
    """Parameters and buffers."""
    gradients: int
    """Of the trainable parameters, as if all were there: between two steps they may be freed, at a peak they are."""
    optimizer_state: int
    """On the device; what a paged optimizer keeps elsewhere is not in it."""


def held_by(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """What a model and its optimizer hold; cheap, and the device is not asked."""
    parameters = list(model.parameters())
    # by identity: parameters may share a tensor of their state
    state = {id(tensor): tensor for tensor in _tensors(optimizer.state.values())}
    devices = {parameter.device for parameter in parameters}
    return Held(
        weights=sum(tensor.nbytes for tensor in (*parameters, *model.buffers())),
        gradients=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        optimizer_state=sum(t.nbytes for t in state.values() if t.device in devices),
    )


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    """The tensors in an optimizer's state, which may nest."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class Allocator:
    """The counters of one card. Nothing here calls the CUDA runtime, so that a graph capture is never disturbed."""

    def __init__(self, device: int, graph_pools: Callable[[], int] = lambda: 0) -> None:
        """`graph_pools` gives what captured graphs keep, bytes."""
        self.device = device
        """CUDA's number of the card: for anything else torch asks the runtime which one is meant."""
        self._graph_pools = graph_pools
        self._one = threading.RLock()
        """The poller reads while the trainer begins peaks anew."""
        self._settling = Settling()
        self._steady_pools: int | None = None
        """What graphs kept when the peak was begun anew for steady windows; None: they are not steady yet."""
        self._earlier = 0, 0
        """Peaks of allocated and reserved since the change, before that."""

    def read(self) -> dict[str, int]:
        """The allocator's fields of a `Reading`; none before CUDA has started."""
        with self._one:
            return self._read()

    def _read(self) -> dict[str, int]:
        # Unlike memory_stats(), this does not spell out some 200 counters in Python.
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        if not stats:
            return {}
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        pools = self._graph_pools()
        figures = {
            "allocated": allocated["current"],
            "reserved": reserved["current"],
            "peak_allocated": max(allocated["peak"], self._earlier[0]),
            "peak_reserved": max(reserved["peak"], self._earlier[1]),
            "graph_pools": pools,
            "retries": stats["num_alloc_retries"],
        }
        if self._steady_pools == pools:  # after a capture, the peak is the capture's until a window is over
            figures["peak_steady"] = allocated["peak"] + pools
        return figures

    def window(self, record: StepRecord) -> None:
        """A window is over. Once they are steady, and after each capture, the peak of steady windows begins."""
        if not measured(record) or not self._settling.over(record) or self._steady_pools == self._graph_pools():
            return
        with self._one:
            if seen := self._read():
                self._earlier = seen["peak_allocated"], seen["peak_reserved"]
                torch.cuda.reset_peak_memory_stats(self.device)
                self._steady_pools = seen["graph_pools"]

    def interrupted(self) -> None:
        """Something other than a window comes, an evaluation or a save: what it takes is no window's."""
        with self._one:
            self._steady_pools = None

    def reset_peak(self) -> None:
        """Begin the peaks anew, from what is held now: a technique was switched."""
        with self._one:
            self._settling, self._steady_pools, self._earlier = Settling(), None, (0, 0)
            torch.cuda.reset_peak_memory_stats(self.device)
