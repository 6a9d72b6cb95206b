"""A small convolutional model with BatchNorm, and images to train it on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.reference import loss_of, samples
from tui3090.recipe import Recipe


class Convolutions(nn.Module):
    """Equal residual blocks of convolution, BatchNorm and ReLU, and a fixed blur whose kernel is a buffer."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.register_buffer("blur", torch.full((width, 1, 3, 3), 1 / 9))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3, height, width] -> [batch, 4]."""
        x = self.stem(x)
        x = nn.functional.conv2d(x, self.blur, padding=1, groups=x.shape[1])
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def images(count: int, size: int = 8, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """`samples` whose x is [3, size, size]."""
    return [
        {"x": sample["x"].view(3, size, size).to(dtype), "labels": sample["labels"]}
        for sample in samples(count, width=3 * size * size)
    ]


def recipe(count: int = 64, dtype: torch.dtype = torch.float32, width: int = 16, **fields: Any) -> Recipe:
    """16 windows of four."""
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Convolutions(width).to(dtype),
        "train_data": images(count, dtype=dtype),
        "loss": loss_of,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        "batch_size": 4,
    }
    return Recipe(**{**options, **fields})
