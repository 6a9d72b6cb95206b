"""The model's random streams and running state at a window's start, so that a failed window can be run again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tui3090.sampling import host_states, restore_host

SMALL = 1 << 16
"""Elements of a buffer above which it is taken for a table or a mask, which no forward pass changes."""


def holders(model: nn.Module) -> list[nn.Module]:
    """Its modules that hold buffers; a transformer's have none. Looks at every module: not for each step."""
    return [module for module in model.modules() if next(module.buffers(recurse=False), None) is not None]


def forward_state(held: Iterable[nn.Module]) -> list[Tensor]:
    """What a forward pass in training may leave in the modules: running statistics, a spectral norm's vectors, counts.

    The tensors share the buffers' memory and not their version counters: writing back what is there already must not
    look to autograd as if it had been changed.
    """
    own = (buffer for module in held for buffer in module.buffers(recurse=False))
    return [buffer.data for buffer in own if buffer.numel() <= SMALL]


class Rewind:
    """Marks a moment, and goes back to it. Marking is cheap and waits for nothing: it comes with every window."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._state = forward_state(holders(model))
        self._kept = [buffer.clone() for buffer in self._state]
        self._card = torch.cuda.default_generators[device.index] if device.type == "cuda" else None
        self.mark()

    def mark(self) -> None:
        """From here a window may be run again."""
        self._host = host_states()  # the model may draw from any of them
        if self._card is not None:
            self._offset = self._card.get_offset()  # the seed does not move
        if self._state:
            torch._foreach_copy_(self._kept, self._state)

    def back(self) -> None:
        """Everything as it was at the mark."""
        restore_host(self._host)
        if self._card is not None:
            self._card.set_offset(self._offset)
        if self._state:
            torch._foreach_copy_(self._state, self._kept)
