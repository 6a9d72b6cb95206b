"""Which kernels use the Tensor Cores, by their names; what a profiled window says; layers off 8."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType

from tui3090.meters import kernels
from tui3090.meters.kernels import (
    TEARDOWN_S,
    Kernel,
    Profiler,
    is_fp32_matmul,
    kernels_of,
    off_by_8,
    off_by_8_text,
    read,
    short_name,
    uses_tensor_cores,
)

NATIVE = "void at::native::"
GELU = (
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)::{{lambda()#2}}>"
)
ADAM = (
    f"{NATIVE}(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>(int)"
)
FFMA = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel"
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)"
)
SIMT = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(cutlass_80_simt_sgemm_128x64::Params)"


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        ("ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_f2f_stages_64x5_tn", "yes"),
        ("cutlass_80_tensorop_f16_s16816gemm_f16_256x128_32x3_nn_align8", "yes"),
        ("ampere_sgemm_128x64", "no"),
        ("vectorized_elementwise_kernel", "no"),
        (FFMA, "no"),
        (SIMT, "no"),
        ("sm80_xmma_gemm_tf32tf32_tf32f32_f32_tn_n_tilesize128x64x32", "yes"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64_warpgroupsize1x1x1_execute_segment_k_off", "yes"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "yes"),
        ("volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_nn", "yes"),
        ("turing_fp16_h1688gemm_128x128_ldg8_nn", "yes"),
        (FLASH, "yes"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "yes"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x64x64", "yes"),
        ("triton_poi_fused_add_gelu_0", "unknown"),
        ("triton_tem_fused_mm_1", "unknown"),
        ("void gemmSN_TN_kernel<float, 128, 16, 2>", "unknown"),
        ("void gemv2T_kernel_val<int, int, float, float>", "no"),
        ("a_kernel_of_tile_1884", "no"),
        (GELU, "no"),
        (ADAM, "no"),
        (f"{NATIVE}(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>", "no"),
    ],
)
def test_by_name(name: str, uses: str) -> None:
    assert uses_tensor_cores(name) == uses


def test_fp32_matmuls_are_told_from_everything_else_beside_the_tensor_cores() -> None:
    assert all(map(is_fp32_matmul, (FFMA, SIMT, "ampere_sgemm_128x64_tn", "implicit_convolve_sgemm")))
    others = (GELU, ADAM, FLASH, "nvjet_tst_128", "triton_poi_fused_0", "ampere_tf32_s1688gemm_128x64")
    assert not any(map(is_fp32_matmul, others))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "ampere_bf16_s16816gemm_bf16"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "nvjet_tst"),
        (SIMT, "cutlass_80_simt_sgemm"),
        (FLASH, "flash_fwd"),
        (GELU, "Gelu"),
        (ADAM, "FusedAdam"),
        (
            f"{NATIVE}vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>",
            "add",
        ),
        (
            f"{NATIVE}elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::BinaryFunctor<float, float, "
            "float, at::native::binary_internal::MulFunctor<float>>>(at::TensorIteratorBase&)>",
            "Mul",
        ),
        (
            f"{NATIVE}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
            "at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)>>>",
            "sum",
        ),
        (f"{NATIVE}(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)", "layer_norm"),
        (
            f"{NATIVE}unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
            "direct_copy",
        ),
        ("x" * 100, "x" * 32),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


def test_a_window_s_kernels() -> None:
    found = read(
        [
            Kernel("nvjet_tst_128x256", 0, 500),
            Kernel("nvjet_tst_64x64", 500, 700),
            Kernel(GELU, 600, 800),  # beside the one before, on another stream
            Kernel("ampere_sgemm_128x64_tn", 900, 950),
            Kernel("triton_red_fused_1", 950, 1000),
        ]
    )
    assert found == {
        "tensor_core_share": pytest.approx(0.7),
        "unknown_share": pytest.approx(0.05),
        "fp32_share": pytest.approx(0.05),
        "busy_share": pytest.approx(0.9),  # of 1000 ns a kernel ran in 800 and in 100
        "kernels": 5,
        "kernel_s": pytest.approx(1e-6),
        "with_tensor_cores": "nvjet_tst 70.0 %",
        "without": "Gelu 20.0 %, ampere_sgemm 5.0 %",
        "unknown": "triton_red_fused_1 5.0 %",
    }


def test_without_a_kernel_there_is_no_share() -> None:
    found = read([])
    assert (found["tensor_core_share"], found["busy_share"], found["kernels"]) == (None, None, 0)


class Event:
    """One of Kineto's."""

    def __init__(self, name: str, device: Any, annotation: bool = False) -> None:
        self._name, self._device, self._annotation = name, device, annotation

    def name(self) -> str:
        return self._name

    def device_type(self) -> Any:
        return self._device

    def is_user_annotation(self) -> bool:
        return self._annotation

    def start_ns(self) -> int:
        return 10

    def duration_ns(self) -> int:
        return 5


def test_only_kernels_count() -> None:
    events = [
        Event("nvjet", DeviceType.CUDA),
        Event("cudaLaunchKernel", DeviceType.CPU),
        Event("Memcpy HtoD (Pinned -> Device)", DeviceType.CUDA),
        Event("Memset (Device)", DeviceType.CUDA),
        Event("Optimizer.step#AdamW.step", DeviceType.CUDA, annotation=True),
    ]
    assert list(kernels_of(events)) == [Kernel("nvjet", 10, 15)]


class Conv1D(nn.Module):
    """GPT-2's linear layer in transformers: its weight is [in, out]."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(columns, rows).weight.detach())


def test_layers_off_8() -> None:
    model = nn.ModuleDict(
        {
            "wte": nn.Embedding(50257, 16),  # looked up, not multiplied
            "h": nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(16, 30), "norm": nn.LayerNorm(30), "odd": Conv1D(12, 16)})
                for _ in range(3)
            ),
            "fine": nn.Linear(16, 64),
            "lm_head": nn.Linear(16, 50257, bias=False),
        }
    )
    assert off_by_8(model)[-1] == "lm_head [50257 × 16]"
    assert len(off_by_8(model)) == 7
    assert off_by_8_text(model) == "h.*.up [30 × 16] (3 times), h.*.odd [12 × 16] (3 times), lm_head [50257 × 16]"
    assert off_by_8_text(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 50304))) == ""
    assert off_by_8(nn.Linear(768, 30522)) == ["Linear [30522 × 768]"]


def test_a_long_list_of_layers_is_cut() -> None:
    model = nn.ModuleDict({f"l{n}": nn.Linear(8, 8 * n + 1) for n in range(12)})
    assert off_by_8_text(model).endswith("l7 [57 × 8] and 4 more")


@pytest.mark.parametrize(
    ("asked", "cuda", "torn_down"),
    [(None, "13.0", "1"), (None, "12.6", "1"), (None, "12.4", "0"), (None, None, "0"), ("0", "13.0", "0")],
)
def test_the_profilers_hooks_go_with_it_where_graphs_survive_that(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, cuda: str | None, torn_down: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name in ("TEARDOWN_CUPTI", "KINETO_LOG_LEVEL"):
        monkeypatch.setenv(name, asked or "")  # put back afterwards
    if asked is None:
        del os.environ["TEARDOWN_CUPTI"]
    Profiler()
    assert os.environ["TEARDOWN_CUPTI"] == torn_down


@pytest.mark.parametrize(("torn_down", "calls"), [("1", 20), ("0", 0)])
def test_a_look_begins_when_the_last_ones_hooks_are_gone(
    monkeypatch: pytest.MonkeyPatch, torn_down: str, calls: int
) -> None:
    now, called = 100.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(kernels, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(kernels, "profile", lambda activities: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: called.append(now))
    monkeypatch.setattr(Profiler, "_last_ended", -math.inf)
    monkeypatch.setenv("TEARDOWN_CUPTI", torn_down)
    with Profiler():
        assert not called  # the first one
    with Profiler():
        assert len(called) == pytest.approx(calls, rel=0.06)
    called.clear()
    now += TEARDOWN_S
    with Profiler():
        assert not called
