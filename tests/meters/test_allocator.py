from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.dashboard.views import step
from tui3090.meters.allocator import Allocator, Held, held_by


class TestHeldBy:
    def test_weights_gradients_and_adamw_s_two_moments(self):
        model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Linear(20, 5))
        optimizer = torch.optim.AdamW(model.parameters())
        parameters = sum(p.numel() for p in model.parameters())
        buffers = 20 * 4 + 20 * 4 + 8  # running mean, running variance, batches seen
        assert held_by(model, optimizer) == Held(4 * parameters + buffers, 4 * parameters, 0)
        model(torch.randn(4, 10)).sum().backward()
        optimizer.step()
        steps = 4 * len(list(model.parameters()))
        assert held_by(model, optimizer) == Held(4 * parameters + buffers, 4 * parameters, 8 * parameters + steps)
        optimizer.zero_grad(set_to_none=True)
        assert held_by(model, optimizer).gradients == 4 * parameters

    def test_frozen_weights_have_no_gradients_and_tied_ones_count_once(self):
        model = nn.ModuleDict({"embed": nn.Embedding(100, 16), "head": nn.Linear(16, 100, bias=False)})
        model["head"].weight = model["embed"].weight
        model["adapter"] = nn.Linear(16, 2, bias=False, dtype=torch.bfloat16)
        model["embed"].weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model["adapter"].parameters(), lr=0.1)
        assert held_by(model, optimizer) == Held(weights=100 * 16 * 4 + 32 * 2, gradients=32 * 2, optimizer_state=0)

    def test_sparse_gradients(self):
        model = nn.Embedding(100, 4, sparse=True)
        model(torch.tensor([1, 2])).sum().backward()
        assert held_by(model, torch.optim.SparseAdam(model.parameters())) == Held(1600, 1600, 0)

    def test_state_that_nests(self):
        model = nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight] = {"history": [torch.zeros(4), (torch.zeros(2),)], "inner": {"m": torch.zeros(1)}}
        assert held_by(model, optimizer).optimizer_state == (4 + 2 + 1) * 4


STATS = {
    "allocated_bytes": {"all": {"current": 10, "peak": 20}},
    "reserved_bytes": {"all": {"current": 30, "peak": 40}},
    "num_alloc_retries": 2,
}


class TestAllocator:
    @pytest.fixture
    def asked(self, monkeypatch):
        """Devices that the counters were asked for; whatever would call the CUDA runtime fails."""
        asked: list[object] = []

        def stats(device):
            asked.append(device)
            return STATS

        def runtime(*_args, **_kwargs):
            raise AssertionError("called the CUDA runtime")

        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
        for name in (
            "mem_get_info",
            "synchronize",
            "empty_cache",
            "current_device",
            "set_device",
            "init",
            "ipc_collect",
        ):
            monkeypatch.setattr(torch.cuda, name, runtime)
        monkeypatch.setattr(torch.cuda.Event, "query", runtime)
        return asked

    def test_reads_counters_and_nothing_else(self, asked):
        assert Allocator(2).read() == {
            "allocated": 10,
            "reserved": 30,
            "peak_allocated": 20,
            "peak_reserved": 40,
            "graph_pools": 0,
            "retries": 2,
        }
        assert asked == [2]

    def test_before_cuda_has_started_there_are_none(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})
        assert Allocator(0).read() == {}

    def test_peaks_begin_anew(self, monkeypatch, asked):
        reset = []
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
        Allocator(1).reset_peak()
        assert reset == [1]

    def test_the_peak_of_steady_windows_leaves_warm_up_and_capture_out(self, monkeypatch):
        """Bytes are thousandths; `held` is what the card's counters say now."""
        held = {"peak": 0, "pools": 0}

        def stats(device):
            of = {"current": 1, "peak": held["peak"]}
            return {"allocated_bytes": {"all": of}, "reserved_bytes": {"all": of}, "num_alloc_retries": 0}

        def window(peak, pools=0, **changes):
            held.update(peak=max(peak, held["peak"]), pools=pools)
            allocator.window(step(seconds=2.0, **changes))
            return allocator.read()

        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: held.update(peak=1))
        allocator = Allocator(0, lambda: held["pools"])
        for peak in (900, 700, 500):  # settling
            assert "peak_steady" not in window(peak)
        assert "peak_steady" not in window(950, compiled=True)
        window(400)  # this one ends the settling
        figures = window(400)
        assert (figures["peak_allocated"], figures["peak_reserved"], figures["peak_steady"]) == (950, 950, 400)
        held.update(peak=1000, pools=300)  # a capture, before its window is over
        assert "peak_steady" not in allocator.read()
        window(10, pools=300)
        figures = window(50, pools=300)
        assert (figures["peak_allocated"], figures["peak_steady"]) == (1000, 350)
        allocator.interrupted()  # an evaluation takes more than any window
        held.update(peak=1200)
        assert "peak_steady" not in allocator.read()
        window(50, pools=300)
        figures = window(55, pools=300)
        assert (figures["peak_allocated"], figures["peak_steady"]) == (1200, 355)
        allocator.reset_peak()
        figures = window(60, pools=300)
        assert figures["peak_allocated"] == 60
        assert "peak_steady" not in figures
