"""The meters on a real card."""

from __future__ import annotations

from contextlib import nullcontext

import pynvml
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tui3090.meters.allocator import Allocator
from tui3090.meters.flops import FlopCounter, recompute_context
from tui3090.meters.nvml import text
from tui3090.meters.watched import WatchedCard

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")


def test_nvml_finds_the_card_by_torch_s_uuid(uuid, handle):
    assert text(pynvml.nvmlDeviceGetUUID(handle)) in (f"GPU-{uuid}", f"MIG-{uuid}")
    assert text(pynvml.nvmlDeviceGetName(handle)) == torch.cuda.get_device_name(0)


def test_the_card_s_figures_are_there(uuid):
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    card = WatchedCard()
    card.follow(lambda: uuid)
    figures = card.read(on_card=True)
    card.close()
    assert card.missing == ""
    assert figures["card_used"] >= held.nbytes
    assert figures["card_total"] == pytest.approx(torch.cuda.mem_get_info(0)[1], rel=0.05)
    assert 0 < figures["clock_mhz"] <= figures["clock_max_mhz"]
    assert figures["power_w"] is None or 0 < figures["power_w"] < 2000


def test_the_allocator_s_figures_are_torch_s():
    torch.cuda.empty_cache()
    allocator = Allocator(0)
    before = torch.cuda.memory_allocated(0)
    held = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    allocator.reset_peak()
    spike = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
    del spike
    figures = allocator.read()
    assert figures["allocated"] == torch.cuda.memory_allocated(0) == before + held.nbytes
    assert figures["reserved"] == torch.cuda.memory_reserved(0)
    assert figures["peak_allocated"] == before + held.nbytes + (300 << 20)
    assert figures["peak_reserved"] == torch.cuda.max_memory_reserved(0)
    allocator.reset_peak()
    assert allocator.read()["peak_allocated"] == before + held.nbytes


def test_the_allocator_can_be_read_during_a_capture():
    allocator, x = Allocator(0), torch.ones(64, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    x @ x  # cuBLAS starts, which it can't under capture
    with torch.cuda.graph(graph):
        y = x @ x
        assert allocator.read()["allocated"] > 0
    graph.replay()
    assert y[0, 0].item() == 64


def test_a_recomputation_on_autograd_s_thread_is_not_the_model_s():
    block = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3))).cuda()
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    counter = FlopCounter()
    with counter:
        checkpoint(
            block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), recompute_context())
        ).sum().backward()
    product = 2 * 32 * 64 * 64
    assert counter.count is not None
    assert counter.count.model == 3 * 3 * product
    assert counter.count.hardware > counter.count.model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_s_flops_are_those_of_the_closed_form(dtype):
    """Whichever kernel the card takes, and though backward runs on a thread of autograd's."""
    query, key, value = (torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    counter = FlopCounter()
    with counter:
        torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    assert counter.count is not None
    assert counter.count.model == 12 * (4 * 64) * 128 * (2 * 128)
