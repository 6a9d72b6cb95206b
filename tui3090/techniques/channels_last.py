"""Convolutional models in torch.channels_last: NHWC in memory, as Tensor Cores take convolutions, without transposing.

Only the order in memory changes: shapes, names, values and what is saved stay. Gradients and the optimizer's state come
to lie as their weights do; activations follow from weights and batches.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn


def has_channels(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor [N, C, H, W] of floating-point numbers."""
    return isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()


def lay_out(model: nn.Module) -> int:
    """Put all of a model's 4-d weights and buffers in channels_last, where they are; how many weights those are."""
    weights = [parameter for parameter in model.parameters() if has_channels(parameter)]
    for tensor in (*weights, *filter(has_channels, model.buffers())):
        tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    return len(weights)
