"""channels_last: another order in memory, the same numbers, and a save that knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from tests.conftest import Ran, Train
from tests.images import recipe
from tests.reference import Blocks, loss_of, samples
from tui3090.commands import GoBack, MakeSave, Stop
from tui3090.feed import move
from tui3090.recipe import Recipe
from tui3090.records import Evaluated, Event
from tui3090.savefolder import MODEL, TRAINING, saves
from tui3090.settings import Settings
from tui3090.techniques import compile
from tui3090.techniques.capture import copied, fill

NHWC = torch.channels_last
TOLERANCE = 1e-5
"""Of the losses, relatively; both orders are as far from float64's."""


def is_nhwc(tensor: Tensor) -> bool:
    """Whether it lies in channels_last and not as torch lays it out by itself."""
    return tensor.is_contiguous(memory_format=NHWC) and not tensor.is_contiguous()


def images_of(ran: Ran) -> dict[str, Tensor]:
    """The model's 4-d tensors whose order tells."""
    model = ran.trainer.job.step.model
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in named.items() if tensor.dim() == 4 and tensor.shape[1] > 1}


def close(ran: Ran, other: Ran) -> None:
    assert ran.losses == pytest.approx(other.losses, rel=TOLERANCE)
    for name, value in ran.weights.items():
        torch.testing.assert_close(value, other.weights[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_the_numbers_are_those_without_as_near_to_float64(train: Train) -> None:
    plain, ours = train(recipe()), train(recipe(), channels_last=True)
    exact = train(recipe(dtype=torch.float64))
    assert (plain.status, ours.status, exact.status) == (0, 0, 0)
    assert len(ours.losses) == 16
    close(ours, plain)
    assert ours.losses == pytest.approx(exact.losses, rel=TOLERANCE)
    assert plain.losses == pytest.approx(exact.losses, rel=TOLERANCE)
    assert not any(map(is_nhwc, images_of(plain).values()))


SETTINGS = [
    Settings(),
    Settings(checkpointing=1, accumulate=2),
    Settings(compile=True),
    Settings(amp="bf16"),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=Settings.short)
def test_all_that_is_4d_lies_in_nhwc(train: Train, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    seen: list[bool] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(is_nhwc(batch["x"]))
        return loss_of(model, batch)

    activations: list[bool] = []
    made = recipe(loss=loss, eval_data=recipe(8).train_data)
    made.model.blocks[-1].register_forward_hook(lambda block, given, out: activations.append(is_nhwc(out)))
    ran = train(made, settings=settings, channels_last=True, steps=6)
    assert ran.status == 0, ran.records[-1]
    assert ran.of(Evaluated)[-1].loss is not None
    assert seen
    assert all(seen), "batches, of evaluations too"
    assert activations
    assert all(activations)
    named = images_of(ran)
    assert [name for name, tensor in named.items() if not is_nhwc(tensor)] == []
    assert len(named) == 3
    state = ran.trainer.job.step.optimizer.state
    for parameter in ran.trainer.job.step.model.parameters():
        assert state[parameter]["exp_avg"].stride() == state[parameter]["exp_avg_sq"].stride() == parameter.stride()
    assert "channels_last: 3 weights and the images of the batches" in [e.text for e in ran.of(Event)]
    if settings == Settings(checkpointing=1, accumulate=2):
        close(ran, train(recipe(), settings=settings, steps=6))


def test_a_save_holds_the_same_bits_as_without(train: Train, tmp_path: Path) -> None:
    ran = train(recipe(), {5: [Stop()]}, channels_last=True, folder=tmp_path)
    (save,) = saves(tmp_path / "saves")[0]
    saved = safetensors.torch.load_file(save.path / MODEL)
    assert saved.keys() == ran.weights.keys()
    for name, value in ran.weights.items():
        assert torch.equal(saved[name], value), name
        assert saved[name].is_contiguous()
    held = ran.trainer.job.step.optimizer.state
    kept = torch.load(save.path / TRAINING, weights_only=True)["optimizer"]["state"]
    for number, parameter in enumerate(ran.trainer.job.step.model.parameters()):
        assert kept[number]["exp_avg"].is_contiguous()
        assert torch.equal(kept[number]["exp_avg"], held[parameter]["exp_avg"])


def own_format(model: nn.Module) -> torch.optim.Optimizer:
    """A train.py may lay its model out by itself."""
    model.to(memory_format=NHWC)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("before", "after"),
    [(True, True), (True, False), (False, True)],
    ids=["with and with", "with and without", "without and with"],
)
def test_resumed_with_or_without(train: Train, tmp_path: Path, before: bool, after: bool) -> None:
    whole = train(recipe(), channels_last=before)
    train(recipe(), {6: [Stop()]}, channels_last=before, folder=tmp_path)
    ran = train(recipe(), channels_last=after, folder=tmp_path, resume=True)
    assert ran.status == 0, ran.records[-1]
    assert all(is_nhwc(tensor) == after for tensor in images_of(ran).values())
    if before == after:
        assert ran.losses == whole.losses[6:]
        assert all(torch.equal(value, whole.weights[name]) for name, value in ran.weights.items())
    assert ran.losses == pytest.approx(whole.losses[6:], rel=TOLERANCE)


@pytest.mark.parametrize("plan", [{"channels_last": True}, {}], ids=["the option", "the train.py's own"])
def test_going_back(train: Train, tmp_path: Path, plan: dict[str, Any]) -> None:
    options: dict[str, Callable[..., Any]] = {} if plan else {"optimizer": own_format}
    whole = train(recipe(**options), **plan)
    ran = train(recipe(**options), {4: [MakeSave()], 8: [GoBack()]}, folder=tmp_path, **plan)
    assert ran.status == 0, ran.records[-1]
    assert ran.losses[8:] == whole.losses[4:]
    assert all(map(is_nhwc, images_of(ran).values()))


def test_a_model_without_images_is_told_so_and_left_alone(train: Train) -> None:
    def made() -> Recipe:
        torch.manual_seed(3)
        data = [{**sample, "mask": torch.ones(2, 3, 3)} for sample in samples(16)]

        def loss(model: nn.Module, batch: Any) -> Tensor:
            assert batch["mask"].is_contiguous()
            return loss_of(model, batch)

        return Recipe(model=Blocks(), train_data=data, loss=loss, batch_size=4)

    ran = train(made(), channels_last=True)
    assert ran.status == 0, ran.records[-1]
    assert ran.losses == train(made()).losses
    sentence = "--channels-last does nothing here: the model has no 4-d weight, as convolutions of images have"
    assert [e.text for e in ran.of(Event) if "channels" in e.text] == [sentence]


def test_an_optimizer_that_would_undo_it_is_refused(train: Train, failure: Callable[[Ran], str]) -> None:
    kind = type("AdamW8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.adamw"})
    ran = train(recipe(optimizer=lambda model: kind(model.parameters(), lr=0.1)), channels_last=True)
    assert ran.status == 2
    assert "--channels-last can't be used with bitsandbytes' AdamW8bit, which lays out every weight" in failure(ran)
    assert train(recipe(optimizer=lambda model: kind(model.parameters(), lr=0.1)), steps=1).status == 0


def test_only_images_of_floating_point_numbers_are_moved_so() -> None:
    batch = {"x": torch.rand(2, 3, 4, 4), "pair": (torch.ones(2, 3, 4, 4, dtype=torch.uint8), torch.rand(2, 3, 4))}
    moved = move(batch, torch.device("cpu"), channels_last=True)
    assert is_nhwc(moved["x"])
    assert torch.equal(moved["x"], batch["x"])
    assert moved["pair"][0] is batch["pair"][0]
    assert moved["pair"][1] is batch["pair"][1]
    assert move(batch, torch.device("cpu"))["x"] is batch["x"]


def test_the_memory_that_graphs_read_keeps_the_format() -> None:
    batch = move({"x": torch.rand(2, 3, 4, 4)}, torch.device("cpu"), channels_last=True)
    static = copied(batch)
    assert is_nhwc(static["x"])
    later = {"x": torch.rand(2, 3, 4, 4)}
    fill(static, later)
    assert is_nhwc(static["x"])
    assert torch.equal(static["x"], later["x"])
