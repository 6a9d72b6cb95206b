"""Offload's policy, on the CPU, where its copies are copies like any other: what travels, when, and equal losses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Train
from tests.reference import Blocks, loss_of, samples
from tui3090.commands import Change
from tui3090.recipe import Recipe
from tui3090.records import Event
from tui3090.settings import Settings
from tui3090.techniques import compile, offload
from tui3090.techniques.checkpointing import Checkpointing
from tui3090.techniques.offload import Offload

ON, OFF = Settings(offload=True), Settings()
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small storages travel too."""
    monkeypatch.setattr(offload, "LEAST", 64)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be had without a card."""
    monkeypatch.setattr(offload, "unavailable", lambda machine, settings: None)


def recipe(**fields: Any) -> Recipe:
    """11 batches, six blocks: four of them travel."""
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Blocks(depth=6, batch_norm=fields.pop("batch_norm", False)),
        "train_data": samples(42),
        "loss": loss_of,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "batch_size": 4,
        "shuffle": False,
    }
    return Recipe(**{**options, **fields})


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    "settings", [Settings(), Settings(checkpointing=1), Settings(checkpointing=2, accumulate=2), Settings(amp="bf16")]
)
def test_losses_and_weights_are_equal_to_the_bit(
    train: Train, anywhere: None, settings: Settings, batch_norm: bool
) -> None:
    plain = train(recipe(batch_norm=batch_norm), settings=settings)
    script = {2: [Change("offload", True)], 4: [Change("offload", False)], 5: [Change("offload", True)]}
    ran = train(recipe(batch_norm=batch_norm), script, settings)
    assert ran.status == 0
    assert ran.losses == plain.losses
    for name, value in ran.weights.items():
        assert torch.equal(value, plain.weights[name]), name
    (told, *again) = [event.text for event in ran.of(Event) if event.text.startswith("offload: ")]
    assert "go to pinned host memory and back with each micro-batch" in told
    assert again == [told]


def test_with_the_compiler(train: Train, anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    monkeypatch.setattr(compile, "OPTIONS", {})
    plain = train(recipe())
    script = {4: [Change("offload", True)], 8: [Change("checkpointing", 1)]}
    ran = train(recipe(), script, Settings(compile=True))
    assert ran.losses == plain.losses
    told = [event.text for event in ran.of(Event) if event.source == "compile"]
    assert len(told) == 1, "offload and checkpointing compile nothing anew"


class Told(Offload):
    """Tells what it does: of each call that has something to do, its name and block."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__(model, blocks, CPU)
        self.did: list[tuple[str, int]] = []
        self.largest: dict[int, int] = {}

    def _send(self, block: Any) -> None:
        super()._send(block)
        if block.sent:
            self.did.append(("send", self._blocks.index(block)))
            self.largest[self._blocks.index(block)] = len(block.sent)

    def _let_go(self, number: int) -> None:
        if number >= 0 and self._blocks[number].sent:
            self.did.append(("let go", number))
        super()._let_go(number)

    def _fetch(self, number: int) -> None:
        if number >= 0 and self._blocks[number].sent:
            self.did.append(("fetch", number))
        super()._fetch(number)


class Block(nn.Module):
    """Saves the same activation twice, by two names; and a mask that all blocks share."""

    def __init__(self, number: int, did: list[tuple[str, int]]) -> None:
        super().__init__()
        self.number, self.did = number, did
        self.weight = nn.Parameter(torch.eye(32) * 1.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[8, 32] and [8, 32] -> [8, 32]."""
        self.did.append(("forward", self.number))
        y = (x @ self.weight) * mask
        z = y.view(-1).sin().view(8, 32) + y.cos()
        z.register_hook(lambda gradient: self.did.append(("backward", self.number)))
        return z


def made(depth: int = 5) -> tuple[nn.Module, list[nn.Module], Told]:
    """Blocks and an offload that tells what it does."""
    did: list[tuple[str, int]] = []
    blocks = nn.ModuleList(Block(number, did) for number in range(depth))
    told = Told(blocks, list(blocks))
    told.did = did
    return blocks, list(blocks), told


def passed(blocks: list[nn.Module], rows: int = 8) -> Tensor:
    """The sum behind all of them."""
    torch.manual_seed(0)
    x, mask = torch.randn(rows, 32, requires_grad=True), torch.ones(rows, 32)
    for block in blocks:
        x = block(x, mask)
    return x.sum()


def test_a_block_leaves_after_its_forward_and_is_back_one_block_early() -> None:
    model, blocks, told = made()
    passed(blocks).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    told.did.clear()
    model.zero_grad()
    with told.in_force(ON):
        loss = passed(blocks)
        loss.backward()
    assert [p.grad for p in model.parameters()] == [pytest.approx(e, abs=0) for e in expected]
    assert told.did == [
        *[("forward", 0), ("send", 0)],
        *[("forward", 1), ("send", 1)],
        *[("let go", 0), ("forward", 2), ("send", 2)],
        *[("let go", 1), ("forward", 3)],
        *[("let go", 2), ("forward", 4)],
        ("backward", 4),
        *[("backward", 3), ("fetch", 2)],
        *[("backward", 2), ("fetch", 1)],
        *[("backward", 1), ("fetch", 0)],
        ("backward", 0),
    ]


def test_what_travels() -> None:
    _, blocks, told = made()
    with told.in_force(ON):
        passed(blocks)
        # x and y, which two operations save under two names; and of the first block, before it is known to be shared,
        # the mask. The weight is the model's.
        assert told.largest == {0: 3, 1: 2, 2: 2}
        assert told.travelled == 7 * 8 * 32 * 4


def test_of_a_checkpointed_block_its_inputs_travel() -> None:
    model, blocks, told = made()
    with Checkpointing(model, blocks).in_force(1), told.in_force(ON):
        passed(blocks).backward()
    assert told.largest == {0: 2, 1: 1, 2: 1}
    assert told.did.count(("forward", 2)) == 2


def test_host_memory_is_lent_again_and_given_back() -> None:
    _, blocks, told = made()
    sizes = []
    for _ in range(3):
        with told.in_force(ON):
            passed(blocks).backward()
        sizes.append(sum(len(buffers) for buffers in told._pinned.values()))
    assert sizes == [7, 7, 7]
    with told.in_force(OFF):
        assert not told._pinned


def test_a_forward_that_fails_leaves_nothing_on() -> None:
    _, blocks, told = made()
    for rows in (8, 7, 8):  # in the second, forward fails at its view
        try:
            with told.in_force(ON):
                passed(blocks, rows).backward()
        except RuntimeError:
            assert rows == 7
    assert not [block for block in blocks if "forward" in vars(block)]
    assert sum(len(buffers) for buffers in told._pinned.values()) == 7
    assert told.did[-1] == ("backward", 0)


def test_where_the_host_has_no_room_activations_stay(
    train: Train, anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.psutil, "virtual_memory", lambda: SimpleNamespace(available=5000, total=10_000))
    plain, ran = train(recipe()), train(recipe(), settings=ON)
    assert ran.status == 0
    assert ran.losses == plain.losses
    told = [event.text for event in ran.of(Event) if event.text.startswith("offload")]
    assert told[1] == "offload: the host has no memory to pin for more: the rest stays on the card"


def test_small_activations_stay(train: Train, anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", 1 << 20)
    ran = train(recipe(), settings=ON)
    told = [event.text for event in ran.of(Event) if event.text.startswith("offload")]
    assert told == ["offload has nothing to move: no block saves 1 MiB or more at once"]
