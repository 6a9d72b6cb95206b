"""Optimizers of bitsandbytes on a card: learning, a quarter of the state, replay beside them, saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Ran, Train
from tests.reference import Blocks, plain_loop, samples
from tests.test_eight_bit import KINDS, LR, WIDTH, bnb, equal, made_by, recipe  # noqa: F401 (a fixture)
from tui3090.commands import GoBack, MakeSave, Stop
from tui3090.recipe import Recipe
from tui3090.records import Event, StepRecord
from tui3090.settings import Settings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.timeout(300),
]

BIG = 512
"""A layer's weight has 262 144 elements: enough to be paged."""


def big(bnb: Any, kind: str, **fields: Any) -> Recipe:  # noqa: F811
    torch.manual_seed(3)
    return recipe(**{"optimizer": made_by(bnb, kind), "model": Blocks(BIG), "train_data": samples(60, BIG), **fields})


def state_held(ran: Ran) -> int:
    """Bytes of the optimizer's state on the card."""
    held: int = ran.trainer._poller.held.optimizer_state
    return held


def test_it_learns_with_a_quarter_of_the_state(train: Train, bnb: Any) -> None:  # noqa: F811
    def run(kind: str) -> Ran:
        ran = train(big(bnb, kind, epochs=4), settings=Settings(amp="bf16"), device="cuda:0")
        assert ran.status == 0, ran.records[-1]
        assert sum(ran.losses[-10:]) < 0.5 * sum(ran.losses[:10])
        return ran

    eight, paged = run("AdamW8bit"), run("PagedAdamW8bit")
    usual = train(big(bnb, "AdamW8bit", optimizer=None), device="cuda:0")
    print(f"\nstate: AdamW {state_held(usual)}, AdamW8bit {state_held(eight)}, PagedAdamW8bit {state_held(paged)}")
    assert state_held(eight) / state_held(usual) == pytest.approx(0.26, abs=0.02)
    assert state_held(paged) < 0.2 * state_held(eight), "the moments are in paged memory"
    assert paged.losses == eight.losses


def test_a_plain_loop_gives_the_same(train: Train, bnb: Any) -> None:  # noqa: F811
    """On the default stream, for which its kernels are made; ours has a stream of its own."""
    batches = [torch.utils.data.default_collate(samples(60, WIDTH)[i : i + 4]) for i in range(0, 60, 4)]
    ours = recipe(made_by(bnb, "AdamW8bit"), model=Blocks(WIDTH, dropout=0.0), shuffle=False)
    weights = {name: value.clone() for name, value in ours.model.state_dict().items()}
    ran = train(ours, device="cuda:0")
    with torch.cuda.stream(torch.cuda.default_stream()):
        model = Blocks(WIDTH, dropout=0.0).cuda()
        model.load_state_dict(weights)
        optimizer = bnb.AdamW8bit(model.parameters(), lr=LR)
        losses = plain_loop(model, batches, optimizer, total_steps=15, base_lr=LR, device="cuda")
    off = max(abs(a - b) for a, b in zip(ran.losses, losses, strict=True))
    print(f"\nfurthest from the plain loop {off:.3g}")
    assert off < 1e-3


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_forward_and_backward_are_replayed_beside_it(train: Train, bnb: Any, amp: str) -> None:  # noqa: F811
    eager = train(big(bnb, "AdamW8bit"), settings=Settings(amp=amp), device="cuda:0")
    ran = train(big(bnb, "AdamW8bit"), settings=Settings(amp=amp, graph=True), device="cuda:0")
    assert ran.status == 0, ran.records[-1]
    assert sum(record.replayed for record in ran.of(StepRecord)) >= 10, ran.of(Event)
    assert ran.losses == eager.losses
    equal(ran, eager)
    reason = "AdamW8bit waits on the host to learn whether the gradient is finite"
    assert f"the optimizer's step runs outside the graph: {reason}" in [event.text for event in ran.of(Event)]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "replay"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_resumed_to_the_bit(
    train: Train,
    tmp_path: Path,
    bnb: Any,  # noqa: F811
    kind: str,
    graph: bool,
) -> None:
    plan: dict[str, Any] = {"settings": Settings(graph=graph), "device": "cuda:0"}
    whole = train(big(bnb, kind), **plan)
    train(big(bnb, kind), {6: [Stop()]}, folder=tmp_path, **plan)
    ran = train(big(bnb, kind), folder=tmp_path, resume=True, **plan)
    assert ran.status == 0, ran.records[-1]
    assert ran.losses == whole.losses[6:]
    equal(ran, whole)
    states = ran.trainer.job.step.optimizer.state.values()
    assert any(getattr(state["state1"], "is_paged", False) for state in states) == (kind == "PagedAdamW8bit")


@pytest.mark.parametrize("kind", KINDS)
def test_going_back(train: Train, tmp_path: Path, bnb: Any, kind: str) -> None:  # noqa: F811
    script = {4: [MakeSave()], 8: [GoBack()]}
    whole = train(big(bnb, kind), device="cuda:0")
    ran = train(big(bnb, kind), script, Settings(graph=True), device="cuda:0", folder=tmp_path)
    assert ran.status == 0, ran.records[-1]
    assert ran.losses[8:] == whole.losses[4:]
    equal(ran, whole)
