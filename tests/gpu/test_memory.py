"""What memory is held for, on a card: activations by layer against the allocator, graph pools against its segments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.conftest import Train
from tests.gpu.test_graph import recipe
from tui3090.commands import Change, MeasureActivations
from tui3090.meters.activations import ActivationMeter
from tui3090.meters.allocator import Allocator
from tui3090.records import Activations, StepRecord
from tui3090.settings import Settings

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"), pytest.mark.timeout(300)]


def test_layers_keep_what_the_allocator_says() -> None:
    model = nn.Sequential(nn.Linear(512, 8192), nn.GELU(), nn.LayerNorm(8192), nn.Linear(8192, 512)).cuda()
    x = torch.randn(1024, 512, device="cuda")
    model(x).sum().backward()  # cuBLAS has its workspace
    meter = ActivationMeter(model, [])
    before = torch.cuda.memory_allocated()
    meter.enter()
    loss = model(x).sum()
    meter.exit()
    grown = torch.cuda.memory_allocated() - before
    loss.backward()
    assert meter.total - x.nbytes == pytest.approx(grown, rel=0.01)
    kept = 1024 * 8192 * 4
    assert set(meter.layers().splitlines()) == {
        f"{x.nbytes} 0",
        f"{kept} 1",  # GELU its input
        f"{kept + 2 * 1024 * 4} 2",  # the norm its input, a mean and a deviation
        f"{kept} 3",
    }


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_measuring_in_a_run(train: Train, amp: str) -> None:
    ran = train(recipe(), {5: [MeasureActivations()]}, Settings(amp=amp), device="cuda:0")
    assert ran.status == 0
    (found,) = ran.of(Activations)
    assert found.total > 0
    assert len(ran.of(StepRecord)) == len(train(recipe(), settings=Settings(amp=amp), device="cuda:0").of(StepRecord))


def test_the_peak_of_replayed_windows_is_told_without_the_capture(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What graphs keep, and what tensors hold beside them: what is needed to go on, not what the start needed."""
    monkeypatch.setattr("tui3090.gains.SETTLING_S", 0.0)
    monkeypatch.setattr(Allocator, "interrupted", lambda allocator: None)  # so that it still stands after the end
    ran = train(recipe(count=800, batch_size=40, epochs=2), {10: [Change("graph", True)]}, device="cuda:0")
    assert sum(record.replayed for record in ran.of(StepRecord)) > 20
    assert ran.trainer.allocator is not None
    figures = ran.trainer.allocator.read()
    assert figures["graph_pools"] > 0
    assert figures["allocated"] <= figures["peak_steady"] - figures["graph_pools"] <= figures["peak_allocated"]


def test_graph_pools_are_what_is_reserved_and_no_tensor_s(train: Train) -> None:
    script = {4: [Change("accumulate", 2)]}
    ran = train(recipe(count=200, batch_size=40, epochs=2), script, Settings(graph=True), device="cuda:0")
    assert any(record.replayed for record in ran.of(StepRecord))
    replay, figures = ran.trainer.replay, Allocator(0).read()
    assert 0 < replay.pool_bytes <= figures["reserved"] - figures["allocated"]
    segments = torch.cuda.memory_snapshot()
    private = [s for s in segments if tuple(s["segment_pool_id"]) != (0, 0)]
    assert replay.pool_bytes <= sum(s["total_size"] - s["allocated_size"] for s in private)
    replay.release()
    assert replay.pool_bytes == 0
