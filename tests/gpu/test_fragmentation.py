"""Sequences of many lengths cut the allocator's memory into pieces; padding them to few lengths does not."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Train
from tui3090.recipe import Recipe

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"), pytest.mark.timeout(300)]

WIDTH, STEPS = 1024, 120


class Tokens(nn.Module):
    """Two wide layers over every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 100))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] -> [batch, tokens, 100]."""
        return self.layers(self.embed(ids))


def unused_share(train: Train, multiple: int) -> float:
    """1 - peak allocated / peak reserved over a run whose lengths are rounded up to `multiple`."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    draw = random.Random(3)
    lengths = [-(-draw.randint(100, 2000) // multiple) * multiple for _ in range(STEPS)]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    data = [torch.zeros(length, dtype=torch.int64) for length in lengths]
    ran = train(Recipe(model=Tokens(), train_data=data, loss=loss, batch_size=1, shuffle=False), device="cuda:0")
    assert ran.status == 0, ran.records[-1]
    assert ran.trainer.allocator is not None
    figures = ran.trainer.allocator.read()
    return 1 - figures["peak_allocated"] / figures["peak_reserved"]


def test_padding_to_a_multiple_lowers_fragmentation(train: Train) -> None:
    many, few = unused_share(train, 1), unused_share(train, 512)
    print(
        f"\nshare of what is reserved that no tensor ever held: {many:.1%} at any length, {few:.1%} at multiples of 512"
    )
    assert few < many
