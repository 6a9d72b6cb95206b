"""Whether the Tensor Cores work: by counters and by the kernels' names, of work whose answer is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Train
from tui3090.commands import Change, Profile
from tui3090.meters.gpm import SOURCE, TensorCores
from tui3090.meters.kernels import Profiler, read
from tui3090.meters.peaks import peak
from tui3090.meters.watched import WatchedCard
from tui3090.recipe import Recipe
from tui3090.records import Event, Profiled, StepRecord
from tui3090.settings import Settings

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"), pytest.mark.timeout(300)]

Work = Callable[[], Any]
SIDE = 4096


@pytest.fixture(autouse=True)
def _fp32_stays_fp32() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32


def elementwise() -> Work:
    a = torch.randn(1 << 26, device="cuda")
    return lambda: [torch.add(a, 1.0, out=a) for _ in range(50)]


def matmuls(dtype: torch.dtype) -> Work:
    a = torch.randn(SIDE, SIDE, device="cuda", dtype=dtype)
    out = torch.empty_like(a)
    return lambda: [torch.mm(a, a, out=out) for _ in range(50)]


def replayed(work: Work) -> Work:
    """The same by graph replay."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def by_counters(handle: Any, work: Work) -> float:
    """GPM's figure over two seconds of `work`."""
    settled = time.monotonic() + 1  # the counters lag a little: what ran before must be out of the first sample
    while time.monotonic() < settled:
        work()
        torch.cuda.synchronize()
    meter = TensorCores(handle)
    if meter.read()["tensor_core_source"] != SOURCE:
        pytest.skip(meter.read()["tensor_core_source"])
    share, deadline = None, time.monotonic() + 10
    while share is None and time.monotonic() < deadline:
        for _ in range(5):  # some are always waiting, so that the card does not pause
            work()
        torch.cuda.synchronize()
        share = meter.read().get("tensor_core")
    meter.close()
    assert share is not None
    return share


def by_names(work: Work) -> dict[str, Any]:
    work()
    torch.cuda.synchronize()
    with Profiler() as profiler:
        work()
        torch.cuda.synchronize()
    return read(profiler.kernels())


class TestCounters:
    def test_elementwise_work_does_not_use_them_though_the_card_is_busy(self, uuid: str, handle: Any) -> None:
        assert by_counters(handle, elementwise()) < 0.01
        card = WatchedCard()
        card.follow(lambda: uuid)
        assert card.read(on_card=True)["util"] > 0.5
        card.close()

    def test_fp32_matmuls_do_not(self, handle: Any) -> None:
        assert by_counters(handle, matmuls(torch.float32)) < 0.01

    def test_bf16_matmuls_do(self, handle: Any) -> None:
        assert by_counters(handle, matmuls(torch.bfloat16)) > 0.8

    def test_in_a_replayed_graph_too(self, handle: Any) -> None:
        assert by_counters(handle, replayed(matmuls(torch.bfloat16))) > 0.8


class TestNames:
    def test_elementwise_work_does_not_use_them(self) -> None:
        found = by_names(elementwise())
        assert (found["kernels"], found["tensor_core_share"], found["fp32_share"]) == (50, 0.0, 0.0)

    def test_fp32_matmuls_do_not_and_are_told(self) -> None:
        found = by_names(matmuls(torch.float32))
        assert found["tensor_core_share"] < 0.01, found
        assert found["fp32_share"] > 0.9, found

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_16_bit_matmuls_do(self, dtype: torch.dtype) -> None:
        found = by_names(matmuls(dtype))
        assert found["tensor_core_share"] > 0.9, found
        assert found["busy_share"] > 0.9

    def test_tf32_matmuls_do(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            assert by_names(matmuls(torch.float32))["tensor_core_share"] > 0.9
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    def test_in_a_replayed_graph_too(self) -> None:
        found = by_names(replayed(matmuls(torch.bfloat16)))
        assert found["kernels"] >= 50
        assert found["tensor_core_share"] > 0.9, found

    def test_a_look_prints_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
        by_names(elementwise())
        assert capfd.readouterr() == ("", "")

    def test_one_look_after_the_other_at_the_same_graph(self) -> None:
        work = replayed(matmuls(torch.bfloat16))
        for _ in range(3):
            assert by_names(work)["tensor_core_share"] > 0.9

    def test_looks_that_follow_at_once(self) -> None:
        work = elementwise()
        for _ in range(5):
            with Profiler() as profiler:
                work()
                torch.cuda.synchronize()
            assert len(profiler.kernels()) == 50


def recipe(count: int = 24) -> Recipe:
    """Three square layers on an input that stays on the card, so that no loader is in the way."""
    torch.manual_seed(0)
    x: list[torch.Tensor] = []

    def loss(model: nn.Module, sample: Any) -> torch.Tensor:
        if not x:
            x.append(torch.randn(SIDE, SIDE, device=sample["i"].device))
        return model(x[0]).float().pow(2).mean()

    return Recipe(
        model=nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(3))),
        train_data=[{"i": torch.zeros(1)}] * count,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5),
        batch_size=1,
        epochs=1,
    )


def profiled(train: Train, settings: Settings) -> Profiled:
    ran = train(recipe(), {8: [Profile()], 14: [Profile()]}, settings, device="cuda:0")
    assert ran.status == 0
    found = ran.of(Profiled)
    assert len(found) == 2, ran.of(Event)
    assert len(ran.of(StepRecord)) == 24
    assert found[1].tensor_core_share == pytest.approx(found[0].tensor_core_share, abs=0.05)
    return found[1]


def test_a_profiled_step_in_fp32(train: Train) -> None:
    found = profiled(train, Settings())
    assert found.tensor_core_share < 0.01, found
    assert found.fp32_share > 0.7, found
    assert not found.replayed


@pytest.mark.parametrize("graph", [False, True])
def test_a_profiled_step_in_bf16(train: Train, graph: bool) -> None:
    found = profiled(train, Settings(amp="bf16", graph=graph))
    assert found.tensor_core_share > 0.4, found
    assert found.fp32_share < 0.01
    assert "FusedAdam" in found.without
    assert found.replayed is graph
    assert found.kernels >= 8


def test_looks_between_captures_change_no_loss(train: Train) -> None:
    """The profiler's hooks go with it, and come back beside graphs that were captured without them."""
    switches = {8: [Change("graph", True)], 20: [Change("graph", False)], 28: [Change("graph", True)]}
    looks = {at: [Profile()] for at in (3, 5, 13, 16, 24, 33, 36)}
    settings = Settings(amp="bf16")
    plain = train(recipe(40), switches, settings, device="cuda:0")
    looked = train(recipe(40), switches | looks, settings, device="cuda:0")
    assert (plain.status, looked.status) == (0, 0)
    assert [record.loss for record in looked.of(StepRecord)] == [record.loss for record in plain.of(StepRecord)]
    found = looked.of(Profiled)
    assert [look.replayed for look in found] == [False, False, True, True, False, True, True]
    assert all(look.tensor_core_share > 0.4 for look in found), found


def test_mfu_equals_a_hand_count(train: Train) -> None:
    ran = train(recipe(count=120), settings=Settings(amp="bf16"), device="cuda:0")
    records = ran.of(StepRecord)[9:-1]  # warm; the last is drained
    # three layers: a product each forward, for the weights' gradient, and for the input's but the first layer's
    by_hand = (3 + 3 + 2) * 2 * SIDE**3
    assert {record.flops for record in records} == {by_hand}
    seconds = records[-1].time - records[0].time
    rate = by_hand * (len(records) - 1) / seconds
    shown = sum(record.flops for record in records[1:]) / sum(record.seconds for record in records[1:])
    assert shown == pytest.approx(rate, rel=0.02)
    dense = peak(torch.cuda.get_device_name(0), "bf16")
    if dense is not None:
        assert records[-1].peak_flops_s == dense
        assert 0.05 < shown / dense < 1.0
