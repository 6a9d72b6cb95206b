"""Random keys at random windows on a card, AMP and replay among them, against a plain loop with the same changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from tests.conftest import Train
from tests.reference import Blocks, loss_of, plain_loop, samples
from tui3090.commands import Change
from tui3090.recipe import Recipe
from tui3090.settings import Settings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.timeout(400),
]

LR, COUNT, BATCH, WIDTH = 1e-2, 162, 8, 64
CHANGES_NUMBERS = ("amp", "accumulate", "lr", "tf32", "checkpointing")
"""What the plain loop does as well; the others must not show."""

presses = st.one_of(
    st.tuples(st.just("amp"), st.sampled_from(["off", "bf16", "fp16"])),
    st.tuples(st.just("checkpointing"), st.sampled_from([0, 1, 2])),
    st.tuples(st.just("accumulate"), st.sampled_from([1, 2, 3])),
    st.tuples(st.just("lr"), st.sampled_from([0.5, 1.0, 2.0])),
    st.tuples(st.just("tf32"), st.booleans()),
    st.tuples(st.just("graph"), st.booleans()),
    st.tuples(st.just("prefetch"), st.sampled_from([0, 2])),
)


def model() -> Blocks:
    torch.manual_seed(3)
    return Blocks(width=WIDTH)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.integers(0, 15), st.lists(presses, min_size=1, max_size=3), max_size=7), st.booleans())
def test_random_keys_equal_a_plain_loop(
    train: Train, pressed: dict[int, list[tuple[str, Any]]], replayed: bool
) -> None:
    recipe = Recipe(
        model=model(),
        train_data=samples(COUNT, width=WIDTH),
        loss=loss_of,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=LR),
        batch_size=BATCH,
        shuffle=False,
        scheduler="constant",
    )
    script = {window: [Change(name, value) for name, value in keys] for window, keys in pressed.items()}
    ran = train(recipe, script, Settings(graph=replayed), device="cuda:0")
    assert ran.status == 0, ran.records[-1]

    plain = model().to("cuda:0")
    rows = samples(COUNT, width=WIDTH)
    losses = plain_loop(
        plain,
        [default_collate(rows[i : i + BATCH]) for i in range(0, COUNT, BATCH)],
        torch.optim.AdamW(plain.parameters(), lr=torch.tensor(LR, device="cuda:0"), fused=True, capturable=True),
        total_steps=len(rows),
        changes={w: {n: v for n, v in keys if n in CHANGES_NUMBERS} for w, keys in pressed.items()},
        device="cuda",
        base_lr=LR,
        factor=lambda step, total: 1.0,
    )
    assert ran.losses == pytest.approx(losses, abs=1e-6, nan_ok=True)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ran.weights[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
