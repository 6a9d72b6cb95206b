"""channels_last on a card: the same numbers under AMP and replay, and convolutions that transpose nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.conftest import Train
from tests.images import Convolutions, recipe
from tests.reference import loss_of
from tests.test_channels_last import images_of, is_nhwc
from tui3090.commands import Stop
from tui3090.records import Event, StepRecord
from tui3090.settings import Settings
from tui3090.techniques.channels_last import lay_out
from tui3090.techniques.graph import Replay

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"), pytest.mark.timeout(300)]

WIDTH = 64
TOLERANCE = {"off": 1e-4, "bf16": 3e-2, "fp16": 5e-3}
"""Of the losses of 16 windows, relatively, against the other order in memory."""


@pytest.fixture(autouse=True)
def convolutions_in_fp32() -> Iterator[None]:
    """By torch's default cuDNN takes TF32 for them, with another rounding in each order."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("amp", TOLERANCE)
def test_replay_gives_eager_s_numbers_and_both_those_without(train: Train, deterministic: None, amp: str) -> None:
    plain = train(recipe(width=WIDTH), settings=Settings(amp=amp), device="cuda:0")
    eager = train(recipe(width=WIDTH), settings=Settings(amp=amp), device="cuda:0", channels_last=True)
    settings = Settings(amp=amp, graph=True, prefetch=2)
    ran = train(recipe(width=WIDTH), settings=settings, device="cuda:0", channels_last=True)
    assert ran.status == 0, ran.records[-1]
    assert sum(record.replayed for record in ran.of(StepRecord)) >= 10, ran.of(Event)
    furthest = max(abs(a / b - 1) for a, b in zip(eager.losses, plain.losses, strict=True))
    beside = max(abs(a / b - 1) for a, b in zip(ran.losses, eager.losses, strict=True))
    print(f"\n{amp}: furthest from the other order {furthest:.3g}, replay from eager {beside:.3g}")
    assert furthest < TOLERANCE[amp]
    assert beside < (1e-5 if amp == "off" else 1e-3)
    assert isinstance(ran.trainer.runner, Replay)
    (capture,) = ran.trainer.runner._captures.values()
    assert is_nhwc(capture.static["x"])
    assert all(map(is_nhwc, images_of(ran).values()))
    state = ran.trainer.job.step.optimizer.state
    for parameter in ran.trainer.job.step.model.parameters():
        assert state[parameter]["exp_avg"].stride() == parameter.stride() == parameter.grad.stride()


@pytest.mark.parametrize("settings", [Settings(checkpointing=1), Settings(compile=True)], ids=Settings.short)
def test_with_the_other_techniques(train: Train, settings: Settings) -> None:
    plain = train(recipe(width=WIDTH), device="cuda:0", channels_last=True)
    ran = train(recipe(width=WIDTH), settings=settings, device="cuda:0", channels_last=True)
    assert ran.status == 0, ran.records[-1]
    assert ran.losses == pytest.approx(plain.losses, rel=1e-4)
    assert ran.trainer.job.settings == settings, ran.of(Event)


@pytest.mark.parametrize("after", [True, False], ids=["with", "without"])
def test_resumed(train: Train, tmp_path: Path, deterministic: None, after: bool) -> None:
    plan: dict[str, Any] = {"settings": Settings(graph=True), "device": "cuda:0"}
    whole = train(recipe(width=WIDTH), channels_last=True, **plan)
    train(recipe(width=WIDTH), {8: [Stop()]}, channels_last=True, folder=tmp_path, **plan)
    ran = train(recipe(width=WIDTH), channels_last=after, folder=tmp_path, resume=True, **plan)
    assert ran.status == 0, ran.records[-1]
    if after:
        assert ran.losses == whole.losses[8:]
    assert ran.losses == pytest.approx(whole.losses[8:], rel=TOLERANCE["off"])


def test_laying_batches_out_waits_for_nothing(train: Train) -> None:
    calls: list[int] = []

    def strict(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 6:
            torch.cuda.set_sync_debug_mode("error")
        return loss_of(model, batch)

    for settings in (Settings(), Settings(prefetch=2)):
        calls.clear()
        try:
            ran = train(recipe(width=WIDTH, loss=strict), settings=settings, device="cuda:0", channels_last=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert ran.status == 0, (settings, ran.records[-1])


def test_cudnn_reads_and_writes_nhwc() -> None:
    """A block alone, in fp16: its convolution's output, its gradients, and no kernel that transposes for cuDNN."""

    def kernels(channels_last: bool) -> tuple[set[str], Tensor, Tensor]:
        block = Convolutions(WIDTH).cuda().blocks[0]
        x = torch.randn(16, WIDTH, 32, 32, device="cuda")
        if channels_last:
            lay_out(block)
            x = x.contiguous(memory_format=torch.channels_last)

        def step() -> Tensor:
            with torch.autocast("cuda", torch.float16):
                out: Tensor = block[0](x)
                out.float().square().mean().backward()
            return out

        step()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
            out = step()
            torch.cuda.synchronize()
        names = {e.name for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA}
        return names, out, block[0].weight.grad

    plain, _, _ = kernels(False)
    ours, out, gradient = kernels(True)
    print("\nplain:", *sorted(plain), "channels_last:", *sorted(ours), sep="\n  ")
    assert is_nhwc(out)
    assert is_nhwc(gradient)
    assert ours
    assert [name for name in ours if "nchwtonhwc" in name.lower() or "nhwctonchw" in name.lower()] == []
