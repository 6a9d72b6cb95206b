"""The loop that our replay is compared with trains as the plain loop does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.bench.capture import WARM, CapturedLoop
from tests.bench.loops import PlainLoop
from tests.reference import Blocks, loss_of, samples
from tui3090.recipe import Recipe
from tui3090.settings import Settings

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"), pytest.mark.timeout(300)]

STEPS = WARM + 9


def trained(kind: type[PlainLoop], amp: str) -> tuple[list[float | None], dict[str, Any]]:
    """What each call of `step` gave, and the weights at the end."""
    torch.manual_seed(3)
    data: Any = samples(4 * (STEPS + 1), width=64)
    recipe = Recipe(model=Blocks(width=64, dropout=0.0), train_data=data, loss=loss_of, batch_size=4)
    torch.manual_seed(5)  # the order of the samples
    loop = kind(recipe, torch.device("cuda:0"), Settings(amp=amp))
    losses = [loop.step() for _ in range(STEPS)]
    torch.cuda.synchronize()
    return losses, loop.model.state_dict()


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_the_captured_loop_equals_the_plain_one(deterministic: None, amp: str) -> None:
    plain, weights = trained(PlainLoop, amp)
    captured, by_replay = trained(CapturedLoop, amp)
    assert len(set(plain)) == STEPS
    assert captured == [None, *plain[:-1]]
    for name, value in weights.items():
        assert torch.equal(by_replay[name], value), name
