"""Checkpointing loses no gradient, draws the same dropout, and leaves the model as it was."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from tests.conftest import Train
from tests.reference import Blocks, loss_of, samples
from tui3090.recipe import Recipe
from tui3090.records import StepRecord
from tui3090.settings import Settings
from tui3090.techniques.checkpointing import checkpointed, find_blocks


class Expert(nn.Module):
    """A block whose inside is a list of equal modules too."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> tuple[torch.Tensor, int]:
        """[batch, 4] and a keyword -> a tuple."""
        return x + scale * sum(expert(x) for expert in self.experts), 7


class Nested(nn.Module):
    """Two lists of blocks beside a list of one and a list of mixed modules."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Expert() for _ in range(2))
        self.decoder = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.single = nn.ModuleList([nn.Linear(4, 4)])
        self.mixed = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 4] -> [batch, 4]."""
        for block in self.encoder:
            x, seven = block(x, scale=0.5)
            assert seven == 7
        return self.decoder(x)


def test_blocks_are_those_of_the_outermost_lists() -> None:
    model = Nested()
    assert find_blocks(model) == [*model.encoder, *model.decoder]
    assert find_blocks(nn.Sequential(nn.ReLU(), nn.ReLU())) == []


def test_tuples_and_keywords_pass_and_everything_is_put_back() -> None:
    model, x = Nested(), torch.randn(5, 4)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with checkpointed(model, find_blocks(model), 1):
        model(x).sum().backward()
    assert [p.grad for p in model.parameters() if p.grad is not None]
    for got, wanted in zip([p.grad for p in model.parameters() if p.grad is not None], expected, strict=True):
        assert torch.equal(got, wanted)
    assert all("forward" not in vars(module) for module in model.modules())


def test_an_exception_leaves_nothing_on() -> None:
    model = Nested()
    model.config = type("Config", (), {"use_cache": True})()  # type: ignore[assignment]
    with suppress(ZeroDivisionError), checkpointed(model, find_blocks(model), 2):
        assert not model.config.use_cache
        assert "forward" in vars(model.encoder[0])
        assert "forward" not in vars(model.encoder[1])
        raise ZeroDivisionError
    assert model.config.use_cache
    assert all("forward" not in vars(module) for module in model.modules())


class Adapted(nn.Module):
    """A frozen embedding and frozen layers with trainable adapters, and a trainable head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"base": nn.Linear(8, 8), "adapter": nn.Linear(8, 8)}) for _ in range(3)
        )
        self.head = nn.Linear(8, 2)
        for frozen in (self.embedding, *(layer["base"] for layer in self.layers)):
            frozen.requires_grad_(False)
        self.blocks = nn.ModuleList(Layer(layer) for layer in self.layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] -> [batch, 2]."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Layer(nn.Module):
    """Base plus adapter."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 8] -> [..., 8]."""
        return x + self.layer["base"](x) + self.layer["adapter"](x)


def test_adapters_behind_frozen_embeddings_keep_their_gradients(train: Train) -> None:
    def recipe() -> Recipe:
        torch.manual_seed(0)
        model = Adapted()
        return Recipe(
            model=model,
            train_data=[torch.randint(0, 10, (6,)) for _ in range(16)],
            loss=lambda model, ids: model(ids).pow(2).mean(),
            blocks=list(model.blocks),
            batch_size=4,
        )

    plain, ran = train(recipe()), train(recipe(), settings=Settings(checkpointing=1))
    assert ran.losses == plain.losses
    born = recipe().model.state_dict()
    for name, value in ran.weights.items():
        assert torch.equal(value, plain.weights[name])
        assert torch.equal(value, born[name]) == (".base." in name or "embedding" in name), name


def test_recomputation_is_executed_but_is_no_model_flop(train: Train) -> None:
    recipe = Recipe(model=Blocks(dropout=0.1), train_data=samples(8), loss=loss_of, batch_size=4)
    plain, ran = train(recipe), train(recipe, settings=Settings(checkpointing=1))
    of_plain, of_ran = plain.of(StepRecord)[0], ran.of(StepRecord)[0]
    assert of_plain.flops == of_plain.hardware_flops == of_ran.flops
    assert of_ran.hardware_flops > of_ran.flops
