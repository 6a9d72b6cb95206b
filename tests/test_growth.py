"""What a step costs beside the model's own work does not grow with the model or with what a window holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.conftest import Train
from tui3090 import sampling
from tui3090.feed import Window
from tui3090.recipe import Recipe, default_loss
from tui3090.sampling import SeededCollate, SeededDataset
from tui3090.settings import Settings
from tui3090.techniques.checkpointing import find_blocks
from tui3090.techniques.compile import Compiled


class Residual(nn.Sequential):
    """A block."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return]


def recipe(steps: int) -> Recipe:
    """Four blocks, one of them with running statistics."""
    blocks = [Residual(nn.Linear(4, 4), nn.BatchNorm1d(4) if n == 1 else nn.ReLU()) for n in range(4)]
    rows: Any = [{"x": torch.full((4,), float(i)), "y": torch.tensor(i % 4)} for i in range(4)] * 40
    return Recipe(
        model=nn.Sequential(*blocks),
        train_data=rows,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        batch_size=2,
        max_steps=steps,
    )


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the modules of a model were gone through."""
    count: Counter[str] = Counter()
    named_modules = nn.Module.named_modules

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        count["walks"] += 1
        return named_modules(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    return count


@pytest.mark.parametrize("settings", [Settings(), Settings(checkpointing=1), Settings(checkpointing=2, accumulate=3)])
def test_no_step_goes_through_the_models_modules(train: Train, walks: Counter[str], settings: Settings) -> None:
    counts = []
    for steps in (3, 9):
        walks.clear()
        assert train(recipe(steps), settings=settings).status == 0
        counts.append(walks["walks"])
    assert counts[0] == counts[1] > 0


def test_nor_does_compile(walks: Counter[str]) -> None:
    model = recipe(1).model
    compiled = Compiled(model, find_blocks(model), default_loss)
    walks.clear()
    with compiled.in_force(Settings(compile=True)):
        pass
    assert walks["walks"] == 0


def test_a_window_is_weighed_once(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, asked = Window.weight, []
    monkeypatch.setattr(Window, "weight", property(lambda self: asked.append(len(self.weighed)) or weight.fget(self)))
    assert train(recipe(2), settings=Settings(accumulate=10)).status == 0
    assert asked == [10, 10]


def test_a_collate_that_draws_nothing_leaves_the_random_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = SeededDataset([{"x": torch.tensor(i)} for i in range(3)]).__getitems__((0, [2, 0]))  # type: ignore[arg-type]
    kept = []
    apart = sampling._apart
    monkeypatch.setattr(sampling, "_apart", lambda: kept.append(1) or apart())
    assert SeededCollate(default_collate)(samples)["x"].tolist() == [2, 0]
    assert not kept
    before = torch.get_rng_state()
    drawn = SeededCollate(lambda given: torch.rand(len(given)))(samples)
    assert kept == [1]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(drawn, SeededCollate(lambda given: torch.rand(len(given)))(samples))
