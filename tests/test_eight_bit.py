"""Optimizers of bitsandbytes, whose state is quantized: driven, counted, saved and loaded like any other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Ran, Train
from tests.reference import Blocks, loss_of, plain_loop, samples
from tui3090.commands import GoBack, MakeSave, Stop
from tui3090.meters.allocator import held_by
from tui3090.optimizers import load_state, make_optimizer, of_bitsandbytes, waits_for_nothing
from tui3090.recipe import Recipe
from tui3090.records import StepRecord
from tui3090.savefolder import TRAINING, saves

LR, WIDTH = 1e-2, 64
"""A layer's weight has 4096 elements, the least that bitsandbytes quantizes."""
KINDS = ["AdamW8bit", "PagedAdamW8bit"]


@pytest.fixture
def bnb() -> Any:
    """bitsandbytes' optimizers; imported when a test runs, for that takes seconds."""
    return pytest.importorskip("bitsandbytes").optim


def recipe(optimizer: Callable[[nn.Module], torch.optim.Optimizer], **fields: Any) -> Recipe:
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Blocks(WIDTH),
        "train_data": samples(60, WIDTH),
        "loss": loss_of,
        "optimizer": optimizer,
        "batch_size": 4,
    }
    return Recipe(**{**options, **fields})


def made_by(bnb: Any, kind: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: getattr(bnb, kind)(model.parameters(), lr=LR)


def tensors(state: Any) -> list[Tensor]:
    """All of a state's, in their order."""
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else ()
    return [tensor for value in values for tensor in tensors(value)]


def equal(ran: Ran, other: Ran) -> None:
    """To the bit: weights, and the optimizer's state by parameter."""
    for name, value in ran.weights.items():
        assert torch.equal(value, other.weights[name]), name
    ours, theirs = (r.trainer.job.step.optimizer.state_dict()["state"] for r in (ran, other))
    assert ours.keys() == theirs.keys()
    for number, state in ours.items():
        assert state["step"] == theirs[number]["step"]
        mine = tensors(state)
        assert len(mine) in (2, 6), "two moments; or those with their maps and scales"
        assert all(torch.equal(a, b) for a, b in zip(mine, tensors(theirs[number]), strict=True))


def test_a_plain_loop_gives_the_same(train: Train, bnb: Any) -> None:
    batches = [torch.utils.data.default_collate(samples(60, WIDTH)[i : i + 4]) for i in range(0, 60, 4)]
    ours = recipe(made_by(bnb, "AdamW8bit"), train_data=samples(60, WIDTH), shuffle=False)
    model = copy.deepcopy(ours.model)
    losses = plain_loop(model, batches, bnb.AdamW8bit(model.parameters(), lr=LR), total_steps=15, base_lr=LR)
    ran = train(ours)
    assert ran.status == 0, ran.records[-1]
    assert ran.losses == pytest.approx(losses, abs=1e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ran.weights[name], value, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_resumed_to_the_bit(train: Train, tmp_path: Path, bnb: Any, kind: str) -> None:
    whole = train(recipe(made_by(bnb, kind)))
    train(recipe(made_by(bnb, kind)), {6: [Stop()]}, folder=tmp_path)
    (save,) = saves(tmp_path / "saves")[0]
    kept = tensors(torch.load(save.path / TRAINING, weights_only=True)["optimizer"]["state"])
    assert sum(tensor.dtype == torch.uint8 for tensor in kept) == 2 * 4
    ran = train(recipe(made_by(bnb, kind)), folder=tmp_path, resume=True)
    assert ran.status == 0, ran.records[-1]
    assert ran.losses == whole.losses[6:]
    equal(ran, whole)


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("kind", KINDS)
def test_going_back(train: Train, tmp_path: Path, bnb: Any, kind: str) -> None:
    whole = train(recipe(made_by(bnb, kind)))
    ran = train(recipe(made_by(bnb, kind)), {4: [MakeSave()], 8: [GoBack()]}, folder=tmp_path)
    assert ran.status == 0, ran.records[-1]
    assert ran.losses[8:] == whole.losses[4:]
    equal(ran, whole)


@pytest.mark.parametrize("state", ["keep", "matching"])
def test_the_state_of_another_kind_is_refused(
    train: Train, tmp_path: Path, bnb: Any, failure: Callable[[Ran], str], state: str
) -> None:
    train(recipe(lambda model: torch.optim.AdamW(model.parameters(), lr=LR)), {3: [Stop()]}, folder=tmp_path)
    ran = train(recipe(made_by(bnb, "AdamW8bit")), folder=tmp_path, resume=True, optimizer_state=state)
    assert ran.status == 2
    assert "The optimizer was AdamW and is now AdamW8bit, whose state is another: resume with" in failure(ran)
    anew = train(recipe(made_by(bnb, "AdamW8bit")), folder=tmp_path, resume=True, optimizer_state="new")
    assert anew.status == 0, anew.records[-1]
    assert {s["step"] for s in anew.trainer.job.step.optimizer.state_dict()["state"].values()} == {12}


def test_a_gradient_that_is_not_finite_leaves_weights_and_state_alone(train: Train, bnb: Any) -> None:
    calls: list[int] = []
    seen: list[list[Tensor]] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        seen.append([p.detach().clone() for p in model.parameters()])
        return loss_of(model, batch) * (float("inf") if len(calls) in (1, 7) else 1.0)

    made = recipe(made_by(bnb, "AdamW8bit"), loss=loss)
    ran = train(made)
    assert ran.status == 0, ran.records[-1]
    assert [bool(r.skipped) for r in ran.of(StepRecord)] == [i in (0, 6) for i in range(15)]
    for skipped, moved in ((0, 1), (6, 7)):
        assert all(map(torch.equal, seen[skipped], seen[skipped + 1]))
        assert not all(map(torch.equal, seen[moved], seen[moved + 1]))
    states = ran.trainer.job.step.optimizer.state_dict()["state"].values()
    assert {state["step"] for state in states} == {13}
    assert ran.trainer._poller.held.optimizer_state > 0, "counted after the first step that was taken"


def test_its_memory_is_about_a_quarter(bnb: Any) -> None:
    def state_of(kind: Any) -> int:
        model = nn.Linear(256, 256)
        optimizer = kind(model.parameters())
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        return held_by(model, optimizer).optimizer_state

    moments = 2 * (256 * 256 + 4 * 256 * 256 // 256)  # and a scale for each block of 256
    maps, bias = 2 * 256 * 4, 2 * 4 * 256  # the bias is too small to be quantized
    assert state_of(bnb.AdamW8bit) == moments + maps + bias
    assert state_of(bnb.AdamW8bit) / state_of(torch.optim.AdamW) == pytest.approx(0.26, abs=0.01)


def test_parameters_that_share_their_maps_count_them_once_and_what_lies_elsewhere_not_at_all(bnb: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizer = bnb.AdamW8bit(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    each = 2 * (4096 + 4 * 16)
    assert held_by(model, optimizer).optimizer_state == 2 * each + 2 * 256 * 4
    optimizer.state[model[0].weight]["state1"] = torch.zeros(4096, dtype=torch.uint8, device="meta")
    assert held_by(model, optimizer).optimizer_state == 2 * each + 2 * 256 * 4 - 4096


class Paged(torch.optim.Optimizer):
    """As bitsandbytes' paged ones: its large state is in memory of its own, and loading would leave it elsewhere."""

    is_paged = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.made: list[Tensor] = []

    def get_state_buffer(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """New memory that the card pages in."""
        self.made.append(torch.zeros_like(parameter, dtype=dtype))
        return self.made[-1]

    def load_state_dict(self, state: Any, move_to_device: bool = True) -> None:
        """Refuses what would fill the card."""
        assert not move_to_device
        self.state.update({self.param_groups[0]["params"][0]: copy.deepcopy(state["state"][0])})


def test_a_paged_state_comes_back_to_paged_memory_and_to_the_same_the_next_time() -> None:
    weight = nn.Parameter(torch.zeros(4, 2))
    optimizer = Paged([weight])
    for value in (3, 5):
        state = {"step": value, "state1": torch.full((4, 2), value, dtype=torch.uint8), "absmax1": torch.ones(1)}
        load_state(optimizer, {"state": {0: state}})
        assert optimizer.state[weight]["step"] == value
        assert optimizer.state[weight]["state1"] is optimizer.made[0]
        assert (optimizer.made[0] == value).all()
        assert optimizer.state[weight]["absmax1"].item() == 1
    assert len(optimizer.made) == 1


def test_it_is_known_by_its_package_and_waited_for(bnb: Any) -> None:
    class Own(bnb.AdamW8bit):  # type: ignore[name-defined,misc]
        """A train.py's."""

    made = recipe(lambda model: Own(model.parameters(), lr=LR))
    optimizer, note = make_optimizer(made, made.model, torch.device("cpu"))
    assert type(optimizer) is Own
    assert note == ""
    assert of_bitsandbytes(optimizer)
    assert not waits_for_nothing(optimizer)
    weight = nn.Parameter(torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    make_optimizer(recipe(lambda model: bnb.AdamW8bit([weight])), made.model, torch.device("cpu"))
    assert weight.is_contiguous(), "its first step would move it away from where graphs read it"
    assert not of_bitsandbytes(torch.optim.AdamW(made.model.parameters()))
