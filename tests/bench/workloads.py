"""What the contenders train: the sizes to compare at, and small ones that show on any CPU that all of it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

from tests.bench import bert_large
from tests.bench.loops import prepared
from tui3090.recipe import Recipe
from tui3090.recipes import gpt


@dataclass(frozen=True)
class Workload:
    """One row of comparisons."""

    title: str
    make: Callable[[int], Recipe]
    """Of the batch size: the recipe, its weights drawn anew."""
    batch: int
    """0: the largest of the plain loop's under 24 GiB."""
    steps: int
    """Of a turn."""
    workers: int = 0


class Slow(Dataset[Any]):
    """Samples that take real Python work: each byte of a row goes through a loop, `times` over."""

    def __init__(self, samples: Any, times: int) -> None:
        self.samples, self.times = samples, times

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        mixed = 0
        for _ in range(self.times):
            for byte in sample["input_ids"].tolist():
                mixed = (mixed * 31 + byte) % 65_521
        return sample  # type: ignore[no-any-return]


def _gpt(size: Any, tokens: int, times: int = 0) -> Callable[[int], Recipe]:
    def make(batch: int) -> Recipe:
        recipe = prepared(gpt.recipe(size=size, batch_size=batch, context=tokens))
        return replace(recipe, train_data=Slow(recipe.train_data, times)) if times else recipe

    return make


def _bert_large(batch: int) -> Recipe:
    return prepared(bert_large.recipe(batch_size=batch))


def _bert_small(batch: int) -> Recipe:
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=99)
    rows = [{"input_ids": torch.randint(99, (16,)), "labels": torch.tensor(i % 2)} for i in range(8)]
    data: Any = rows
    return prepared(Recipe(model=BertForSequenceClassification(config), train_data=data, batch_size=batch))


def workloads(small: bool, workers: int) -> dict[str, Workload]:
    """By name. `workers` are the loader-bound case's processes."""
    if small:
        return {
            "1x128": Workload("GPT small, 1 x 16", _gpt("small", 16), 1, 8),
            "8x1024": Workload("GPT small, 2 x 64", _gpt("small", 64), 2, 8),
            "largest": Workload("GPT small, 4 x 64, in place of the largest batch", _gpt("small", 64), 4, 8),
            "bert": Workload("BERT of 2 layers, 4 x 16", _bert_small, 4, 8),
            "loader": Workload("GPT small, 4 x 16, Python work per sample", _gpt("small", 16, 100), 4, 8, workers),
        }
    return {
        "1x128": Workload("GPT-2 124M, 1 x 128", _gpt("gpt2", 128), 1, 80),
        "8x1024": Workload("GPT-2 124M, 8 x 1024", _gpt("gpt2", 1024), 8, 24),
        "largest": Workload("GPT-2 124M, the largest batch under 24 GiB x 1024", _gpt("gpt2", 1024), 0, 16),
        "bert": Workload("BERT-large, 16 x 512", _bert_large, 16, 16),
        # the card is the limit once the data are there, so that launching does not blur what loading costs
        "loader": Workload("GPT-2 124M, 20 x 1024, Python work per sample", _gpt("gpt2", 1024, 120), 20, 60, workers),
    }
