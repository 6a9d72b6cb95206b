"""Checkpointing loses no gradient, draws the same dropout, and leaves the model as it was."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import Train
from tests.reference import Blocks, loss_of, samples
from tui3090.commands import Change
from tui3090.recipe import Recipe
from tui3090.records import StepRecord
from tui3090.settings import Settings
from tui3090.techniques import checkpointing
from tui3090.techniques.checkpointing import Checkpointing, find_blocks


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
    with Checkpointing(model, find_blocks(model)).in_force(1):
        model(x).sum().backward()
    assert [p.grad for p in model.parameters() if p.grad is not None]
    for got, wanted in zip([p.grad for p in model.parameters() if p.grad is not None], expected, strict=True):
        assert torch.equal(got, wanted)
    assert all("forward" not in vars(module) for module in model.modules())


def test_an_exception_leaves_nothing_on() -> None:
    model = Nested()
    model.config = type("Config", (), {"use_cache": True})()  # type: ignore[assignment]
    with suppress(ZeroDivisionError), Checkpointing(model, find_blocks(model)).in_force(2):
        assert not model.config.use_cache
        assert "forward" in vars(model.encoder[0])
        assert "forward" not in vars(model.encoder[1])
        raise ZeroDivisionError
    assert model.config.use_cache
    assert all("forward" not in vars(module) for module in model.modules())


class ByKeyword(nn.Module):
    """A block that takes its input and a mask by keyword alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, *, hidden: torch.Tensor, mask: torch.Tensor, context_fn: float, debug: bool = True) -> Any:
        """[batch, 4], [batch, 1] -> [batch, 4] and a flag; two names are those of torch's checkpoint too."""
        return nn.functional.dropout(self.linear(hidden) * mask, 0.3) * context_fn, debug


def test_what_a_block_takes_by_keyword_is_shown_to_torch_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only there does it look for the card whose random state is put back for the recomputation."""
    shown: list[tuple[Any, ...]] = []

    def watching(function: Any, *args: Any, **kwargs: Any) -> Any:
        shown.append(args)
        assert kwargs.keys() == {"use_reentrant", "context_fn"}
        return checkpoint(function, *args, **kwargs)

    monkeypatch.setattr(checkpointing, "checkpoint", watching)
    torch.manual_seed(0)
    blocks = nn.ModuleList(ByKeyword() for _ in range(2))
    x, mask = torch.randn(5, 4), torch.ones(5, 1)

    def gradients(every: int) -> list[torch.Tensor]:
        torch.manual_seed(1)
        blocks.zero_grad()
        with Checkpointing(blocks, list(blocks)).in_force(every):
            hidden = x
            for block in blocks:
                hidden, flag = block(hidden=hidden, mask=mask, context_fn=0.5, debug=False)
                assert flag is False
            hidden.sum().backward()
        return [p.grad for p in blocks.parameters() if p.grad is not None]

    for got, wanted in zip(gradients(1), gradients(0), strict=True):
        assert torch.equal(got, wanted)
    assert [args[1:] for args in shown] == [(mask, 0.5, False)] * 2
    assert shown[0][0] is x


class Repeating(nn.Module):
    """One block, run three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))] * 3)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 16] -> [batch, 4]."""
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_a_block_that_is_run_several_times_is_wrapped_once(train: Train) -> None:
    def recipe() -> Recipe:
        torch.manual_seed(0)
        return Recipe(model=Repeating(), train_data=samples(24), loss=loss_of, batch_size=4)

    plain, ran = train(recipe()), train(recipe(), settings=Settings(checkpointing=1))
    assert ran.status == 0, ran.records[-1]
    assert ran.losses == plain.losses
    for name, value in ran.weights.items():
        assert torch.equal(value, plain.weights[name])
    counted = [made.of(StepRecord)[0].hardware_flops for made in (plain, ran)]
    matmul = 2 * 4 * 16 * 16  # of a block's forward
    assert counted[1] - counted[0] == 3 * matmul


class Instance(nn.Module):
    """Blocks with an instance norm that keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.InstanceNorm1d
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Unflatten(1, (4, 4)), norm(4, track_running_stats=True), nn.Flatten(), nn.Linear(16, 16))
            for _ in range(2)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 16] -> [batch, 4]."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_running_statistics_of_instance_norms_see_a_batch_once(train: Train) -> None:
    def recipe() -> Recipe:
        torch.manual_seed(0)
        return Recipe(model=Instance(), train_data=samples(24), loss=loss_of, batch_size=4)

    plain, ran = train(recipe()), train(recipe(), settings=Settings(checkpointing=1))
    assert ran.losses == plain.losses
    assert ran.weights["blocks.0.1.running_mean"].any()
    for name, value in ran.weights.items():
        assert torch.equal(value, plain.weights[name]), name


class Spectral(nn.Module):
    """Blocks whose weight is divided by a norm that each forward estimates better, and a table that all read."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.linspace(0.5, 1.5, 16)
        self.blocks = nn.ModuleList(SpectralBlock(table) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 16] -> [batch, 4]."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SpectralBlock(nn.Module):
    """Its buffers change in a forward pass, all but the table."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.register_buffer("table", table)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 16] -> [batch, 16]."""
        self.seen.add_(1)
        return torch.tanh(self.linear(x * self.table)) / self.seen


@pytest.mark.parametrize("every", [1, 2])
def test_a_block_with_a_state_of_its_own_begins_its_recomputation_where_its_forward_began(
    train: Train, every: int
) -> None:
    def recipe() -> Recipe:
        torch.manual_seed(0)
        return Recipe(model=Spectral(), train_data=samples(24), loss=loss_of, batch_size=4)

    plain, ran = train(recipe()), train(recipe(), {2: [Change("checkpointing", every)]})
    assert ran.status == 0, ran.records[-1]
    assert ran.losses == plain.losses
    assert int(ran.weights["blocks.0.seen"]) == 6
    for name, value in ran.weights.items():
        assert torch.equal(value, plain.weights[name]), name


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
