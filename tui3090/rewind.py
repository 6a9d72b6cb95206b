"""The model's random streams and running statistics at a window's start, so that a failed window can be run again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


def running_statistics(model: nn.Module) -> list[Tensor]:
    """What a forward pass in training leaves in the model: the running statistics of batch and instance norms."""
    return [
        buffer
        for module in model.modules()
        if isinstance(module, _NormBase)
        for buffer in (module.running_mean, module.running_var, module.num_batches_tracked)
        if buffer is not None
    ]


class Rewind:
    """Marks a moment, and goes back to it. Marking is cheap and waits for nothing: it comes with every window."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._statistics = running_statistics(model)
        self._kept = [statistic.clone() for statistic in self._statistics]
        self._card = torch.cuda.default_generators[device.index] if device.type == "cuda" else None
        self.mark()

    def mark(self) -> None:
        """From here a window may be run again."""
        self._host = torch.get_rng_state()
        if self._card is not None:
            self._offset = self._card.get_offset()  # the seed does not move
        if self._statistics:
            torch._foreach_copy_(self._kept, self._statistics)

    def back(self) -> None:
        """Everything as it was at the mark."""
        torch.set_rng_state(self._host)
        if self._card is not None:
            self._card.set_offset(self._offset)
        if self._statistics:
            torch._foreach_copy_(self._statistics, self._kept)
