"""The recipe's optimizer: rebuilt where that changes nothing but speed, left alone otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tui3090.optimizers import load_state, make_optimizer, waits_for_nothing
from tui3090.recipe import Recipe, RecipeError

CPU = torch.device("cpu")


def recipe(optimizer: Any = None) -> Recipe:
    return Recipe(model=nn.Linear(2, 2), train_data=[torch.zeros(2)], optimizer=optimizer)


def test_the_default_is_fused_adamw() -> None:
    made = recipe()
    optimizer, note = make_optimizer(made, made.model, CPU)
    assert type(optimizer) is torch.optim.AdamW
    assert waits_for_nothing(optimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"], note) == (5e-5, 0.01, "")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_groups_survive_the_rebuilding(kind: Any) -> None:
    made = recipe(
        lambda m: kind(
            [{"params": [m.weight], "weight_decay": 0.1}, {"params": [m.bias], "lr": 1e-4, "name": "biases"}],
            lr=1e-3,
            betas=(0.8, 0.95),
            amsgrad=True,
        )
    )
    optimizer, note = make_optimizer(made, made.model, CPU)
    weight, bias = optimizer.param_groups
    assert type(optimizer) is kind
    assert (weight["lr"], weight["weight_decay"], weight["betas"], weight["fused"]) == (1e-3, 0.1, (0.8, 0.95), True)
    assert (bias["lr"], bias["name"], bias["amsgrad"]) == (1e-4, "biases", True)
    assert weight["params"] == [made.model.weight]
    assert "fused=True" in note


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_on_a_card_it_is_capturable_from_the_start_so_that_replay_need_not_change_a_flag(kind: Any) -> None:
    """A flag that changed with the graph key would find a step counter on the wrong device."""
    for device, capturable in (("cpu", False), ("cuda", True)):
        made = recipe(lambda m: kind([{"params": [m.weight]}, {"params": [m.bias], "lr": 1e-4}], lr=1e-3))
        optimizer, _ = make_optimizer(made, made.model, torch.device(device))
        assert [group["capturable"] for group in optimizer.param_groups] == [capturable] * 2
        assert [group["fused"] for group in optimizer.param_groups] == [True] * 2


class Own(torch.optim.AdamW):
    """A third party's."""


@pytest.mark.parametrize(
    "maker",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
        lambda m: torch.optim.AdamW(m.parameters(), fused=False),
        lambda m: Own(m.parameters()),
    ],
)
def test_others_stay_as_they_are(maker: Any) -> None:
    kept: list[Any] = []
    made = recipe(lambda m: kept.append(maker(m)) or kept[0])
    optimizer, note = make_optimizer(made, made.model, CPU)
    assert optimizer is kept[0]
    assert not waits_for_nothing(optimizer)
    assert note == ""


def test_what_is_no_optimizer_is_refused() -> None:
    made = recipe(lambda m: None)
    with pytest.raises(RecipeError, match="optimizer returned a NoneType: it must return a torch"):
        make_optimizer(made, made.model, CPU)


def test_state_that_belongs_to_no_weight_is_loaded_as_it_is() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    momentum = torch.ones(2)
    groups = optimizer.state_dict()["param_groups"]
    load_state(optimizer, {"state": {0: {"momentum_buffer": momentum}, "best": 3}, "param_groups": groups})
    assert optimizer.state["best"] == 3
    assert torch.equal(optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"], momentum)
