"""torch's caching allocator, by its own counters, and what a model and its optimizer hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


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

    def read(self) -> dict[str, int]:
        """The allocator's fields of a `Reading`; none before CUDA has started."""
        # Unlike memory_stats(), this does not spell out some 200 counters in Python.
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        if not stats:
            return {}
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return {
            "allocated": allocated["current"],
            "reserved": reserved["current"],
            "peak_allocated": allocated["peak"],
            "peak_reserved": reserved["peak"],
            "graph_pools": self._graph_pools(),
            "retries": stats["num_alloc_retries"],
        }

    def reset_peak(self) -> None:
        """Begin the peaks anew, from what is held now."""
        torch.cuda.reset_peak_memory_stats(self.device)
