"""What layers keep for backward: models whose answer is known by hand."""

from __future__ import annotations

import torch
from torch import nn

from tests.reference import Blocks
from tui3090.meters.activations import ActivationMeter
from tui3090.techniques.checkpointing import Checkpointing, find_blocks


def measured(model: nn.Module, x: torch.Tensor, every: int = 0) -> tuple[int, dict[str, int]]:
    """The total, and each layer's bytes."""
    blocks = find_blocks(model)
    meter = ActivationMeter(model, blocks)
    with Checkpointing(model, blocks).in_force(every):
        meter.enter()
        loss = model(x).pow(2).sum()
        meter.exit()
        loss.backward()
    sizes = (line.split(" ", 1) for line in meter.layers().splitlines())
    return meter.total, {name: int(size) for size, name in sizes}


def test_each_piece_of_memory_counts_once_where_it_was_saved_first() -> None:
    model = nn.Sequential(nn.Linear(10, 1000), nn.ReLU(), nn.Linear(1000, 4))
    total, layers = measured(model, torch.randn(8, 10))
    # the first layer keeps its input for its weight's gradient, ReLU its result, which is the next layer's input too;
    # the loss keeps what it squares
    assert layers == {"1": 8 * 1000 * 4, "0": 8 * 10 * 4, "the loss": 8 * 4 * 4}
    assert total == sum(layers.values())
    assert model[0].weight.grad is not None


def test_parameters_do_not_count_and_a_frozen_layer_keeps_nothing() -> None:
    model = nn.Sequential(nn.Linear(10, 1000), nn.Linear(1000, 4))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    _, layers = measured(model, torch.randn(8, 10))
    assert layers == {"1": 8 * 1000 * 4, "the loss": 8 * 4 * 4}


def test_the_ten_layers_that_keep_most_are_told_and_all_count() -> None:
    model = nn.Sequential(*(nn.Linear(width, width + 100) for width in range(100, 1300, 100)))
    total, layers = measured(model, torch.randn(8, 100))
    # each keeps its input, the widest the last; the loss keeps the widest of all
    assert list(layers.items()) == [
        ("the loss", 8 * 1300 * 4),
        *((str(number), 8 * 100 * (number + 1) * 4) for number in range(11, 2, -1)),
    ]
    assert total == 8 * 4 * 100 * sum(range(1, 14))


def test_equal_layers_of_blocks_are_one_entry() -> None:
    total, layers = measured(Blocks(width=16, depth=4, dropout=0.0), torch.randn(5, 16))
    kept = 5 * 16 * 4
    # the linear keeps the block's input, the norm the linear's result, a mean and a deviation, the GELU the norm's
    assert layers["blocks.*.0 × 4"] == 4 * kept
    assert layers["blocks.*.1 × 4"] == 4 * (kept + 2 * 5 * 4)
    assert layers["blocks.*.2 × 4"] == 4 * kept
    assert layers["head"] == kept
    assert total == sum(layers.values())


def test_under_checkpointing_blocks_keep_their_inputs() -> None:
    model, x = Blocks(width=16, depth=4, dropout=0.0), torch.randn(5, 16)
    _, layers = measured(model, x, every=1)
    assert layers == {"blocks.* × 4": 4 * 5 * 16 * 4, "head": 5 * 16 * 4, "the loss": 5 * 4 * 4}


def test_the_model_is_left_as_it_was() -> None:
    model = Blocks()
    measured(model, torch.randn(5, 16))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
