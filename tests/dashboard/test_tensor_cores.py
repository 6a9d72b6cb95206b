"""The Tensor Core panel: FLOPs over the right peak, counters by name and age, and never a figure from elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from tests.dashboard.views import HOSTILE, NOW, SIZES, any_view, assert_fits, role_of, started, step, texts, view
from tui3090.dashboard.panels import techniques, tensor_cores
from tui3090.dashboard.view import View
from tui3090.records import Changed, Profiled, Reading, State

GEFORCE = Reading(time=NOW - 0.5, tensor_core_source="a GeForce has no such counters")


def test_the_whole_panel() -> None:
    seen = view(
        started(),
        step(1, flops=30e12, hardware_flops=30e12, peak_flops_s=71e12, precision="bf16"),
        step(2, flops=36e12, hardware_flops=36e12, peak_flops_s=71e12, precision="bf16"),
        GEFORCE,
    )
    assert tensor_cores.note(seen, NOW) == "mean of 2 steps"
    assert texts(tensor_cores.rows(seen, 56, 5, NOW)) == [
        "33.0 TFLOPS = 46.5 % of the card's 71 (MFU = HFU)",
        "kernels n/a: none profiled yet, r reads now",
        "counters n/a: a GeForce has no such counters",
        "matmuls in bf16: the Tensor Cores can take them",
    ]
    assert texts([tensor_cores.line(seen, 69, NOW)]) == ["33.0 TFLOPS = 46.5 % of the card's 71 (MFU = HFU)"]


def test_without_the_executed_flops_of_every_window_there_is_no_hfu() -> None:
    counted = {"flops": 30e12, "peak_flops_s": 71e12}
    seen = view(started(), step(1, hardware_flops=40e12, **counted), step(2, hardware_flops=None, **counted))
    rows = texts(tensor_cores.rows(seen, 56, 5, NOW))
    assert rows[0] == "30.0 TFLOPS = 42.3 % of the card's 71 (MFU)"
    assert "HFU" not in " ".join(rows)


def test_recomputation_is_in_hfu_and_not_in_mfu() -> None:
    counted = step(flops=30e12, hardware_flops=40e12, peak_flops_s=71e12)
    seen = view(started(settings="checkpointing=1"), counted)
    plain = texts(tensor_cores.rows(view(started(), counted), 56, 5, NOW))[1]
    assert plain == "with attention recomputed 40.0 TFLOPS = 56.3 % (HFU)"  # a fused kernel does, unasked
    assert texts(tensor_cores.rows(seen, 56, 5, NOW))[:2] == [
        "30.0 TFLOPS = 42.3 % of the card's 71 (MFU)",
        "with recomputation 40.0 TFLOPS = 56.3 % (HFU)",
    ]


def test_the_rate_is_weighted_by_time_over_the_counted_steps() -> None:
    counted = step(1, flops=20e12, hardware_flops=20e12, peak_flops_s=71e12, seconds=1.0, steps=3)
    slow = step(2, flops=20e12, hardware_flops=20e12, peak_flops_s=71e12, seconds=2.0)
    seen = view(started(), step(0, flops=None, seconds=100.0), counted, slow)
    # (3 x 20 + 20) TFLOP in 3 x 1 + 2 seconds
    assert texts(tensor_cores.rows(seen, 56, 5, NOW))[0].startswith("16.0 TFLOPS = 22.5 %")


def test_an_unknown_card_has_no_percentage() -> None:
    seen = view(started(), step(flops=30e12, hardware_flops=30e12))
    assert texts(tensor_cores.rows(seen, 56, 5, NOW))[0] == "30.0 TFLOPS   MFU n/a: this card's peak is not known"


def test_on_a_cpu() -> None:
    seen = view(started(device="cpu"), step(flops=40e9, hardware_flops=40e9), Reading(time=NOW))
    assert texts(tensor_cores.rows(seen, 56, 5, NOW)) == [
        "40.0 GFLOPS   MFU n/a: a CPU's peak is not known",
        "kernels n/a: needs an NVIDIA card",
        "counters n/a: needs an NVIDIA card",
        "matmuls in fp32 on a CPU: no Tensor Cores",
    ]


def test_why_there_are_no_counters_is_said() -> None:
    gone = Reading(time=NOW, card_missing="NVML: driver/library version mismatch.")
    rows = texts(tensor_cores.rows(view(started(), step(), gone), 56, 5, NOW))
    assert "counters n/a: NVML: driver/library version mismatch." in rows
    assert "counters n/a: this machine gives none" in texts(
        tensor_cores.rows(view(started(), step(), Reading(time=NOW)), 56, 5, NOW)
    )


def test_flops_that_can_not_be_counted_are_not_promised() -> None:
    rows = texts(tensor_cores.rows(view(started(), step()), 56, 5, NOW))
    assert rows[0] == "TFLOPS n/a: not counted for this batch shape"
    assert texts(tensor_cores.rows(view(started()), 56, 5, NOW))[0] == "TFLOPS n/a: not counted yet"
    empty = view(started(), step(skipped="no labels", micro_batches=0))
    assert texts(tensor_cores.rows(empty, 56, 5, NOW))[0] == "TFLOPS n/a: not counted yet"


@pytest.mark.parametrize(
    ("weights", "amp", "precision", "words"),
    [
        ("float32", "off", "fp32", "matmuls in fp32: the Tensor Cores don't take them"),
        ("float32", "off", "tf32", "matmuls in tf32: the Tensor Cores can take them"),
        ("float32", "bf16", "bf16", "bf16 matmuls, fp32 weights: Tensor Cores can take them"),
        ("bfloat16", "off", "bf16", "bf16 matmuls, bf16 weights: Tensor Cores can take them"),
    ],
)
def test_autocast_and_weights_in_16_bits_are_told_apart(weights: str, amp: str, precision: str, words: str) -> None:
    seen = view(started(weights_dtype=weights, settings=f"amp={amp}"), step(precision=precision))
    assert words in texts(tensor_cores.rows(seen, 56, 5, NOW))
    amp_row = next(row for row in texts(techniques.rows(seen, 56, 12, NOW)) if "AMP" in row)
    assert amp_row.endswith("bf16 weights") is (weights == "bfloat16")


def test_counters_have_source_and_age_and_the_units_beside_them() -> None:
    reading = Reading(
        time=NOW - 0.5,
        util=1.0,
        tensor_core=0.78,
        tensor_core_source="NVML GPM",
        tensor_core_time=NOW - 2,
        sm_util=0.92,
        dram_util=0.41,
    )
    rows = texts(tensor_cores.rows(view(started(), step(), reading), 56, 5, NOW))
    assert rows[1:4] == [
        "Tensor Cores busy 78 % (NVML GPM, 2.0 s)",
        "kernels n/a: none profiled yet, r reads now",
        "SMs busy 92 %   memory bandwidth 41 %",
    ]


def test_a_long_source_is_not_cut() -> None:
    reading = Reading(
        time=NOW - 0.5, util=1.0, tensor_core=0.15, tensor_core_source="GPM counters, whole card", tensor_core_time=NOW
    )
    seen = view(started(), step(), reading, State(time=NOW, state="stopped"))
    told = texts(tensor_cores.rows(seen, 56, 5, NOW))[1]
    assert told.startswith("TC busy 15 % (GPM counters, whole card, at ")
    assert told.endswith(")")


def profiled(**changes: Any) -> Profiled:
    given_: dict[str, Any] = {
        "time": NOW - 41,
        "step": 1390,
        "tensor_core_share": 0.78,
        "unknown_share": 0.02,
        "fp32_share": 0.06,
        "busy_share": 0.97,
        "kernels": 1400,
        "kernel_s": 0.4,
        "with_tensor_cores": "nvjet_tst 61.2 %, flash_bwd 9.0 %",
        "without": "layer_norm 9.1 %, Gelu 6.0 %, FusedAdam 5.0 %",
        "unknown": "triton_poi_fused 2.0 %",
        "off_by_8": "classifier [2 × 1024]",
        "seconds": 0.12,
    }
    return Profiled(**given_ | changes)


def test_a_profiled_step() -> None:
    seen = view(started(), step(flops=33e12, hardware_flops=33e12, peak_flops_s=71e12), GEFORCE, profiled())
    assert texts(tensor_cores.rows(seen, 56, 5, NOW)) == [
        "33.0 TFLOPS = 46.5 % of the card's 71 (MFU = HFU)",
        "78 % of kernel time in TC kernels (profile, 41 s ago)",
        "without: layer_norm 9.1 %, Gelu 6.0 %   unknown 2 %",
        "fp32 matmuls 6 %   not by 8: classifier [2 × 1024]",
        "counters n/a: a GeForce has no such counters",
    ]
    assert texts([tensor_cores.line(seen, 69, NOW)]) == [
        "33.0 TFLOPS = 46.5 % of 71   TC kernels 78 % (profile, 41 s ago)"
    ]
    whole = texts(tensor_cores.rows(seen, 130, 30, NOW))
    assert "on the Tensor Cores: nvjet_tst 61.2 %, flash_bwd 9.0 %" in whole
    assert "unknown (Triton's and others whose names don't tell): triton_poi_fused 2.0 %" in whole
    assert "layers with a dimension that 8 does not divide: classifier [2 × 1024]" in whole
    assert any("mask the padding's logits" in row and "labels stay" in row for row in whole)
    assert "1 400 kernels of step 1 390 took 400 ms, 97 % of a step's time; the rest is gaps between launches" in whole
    assert "the look cost 120 ms; the next comes by itself, or with r" in whole


def test_counters_come_before_the_profiled_step() -> None:
    counters = Reading(time=NOW, tensor_core=0.5, tensor_core_source="GPM", tensor_core_time=NOW - 1)
    seen = view(started(), step(), counters, profiled())
    assert [row.split(" (")[0] for row in texts(tensor_cores.rows(seen, 56, 5, NOW))[1:3]] == [
        "Tensor Cores busy 50 %",
        "78 % of kernel time in TC kernels",
    ]
    assert "Tensor Cores busy 50 % (GPM, 1.0 s)" in texts([tensor_cores.line(seen, 90, NOW)])[0]


def test_an_old_profile_is_not_shown_as_current_and_none_outlives_a_change() -> None:
    assert role_of(tensor_cores.rows(view(started(), step(), profiled()), 56, 5, NOW), "78 %") == "bold"
    old = tensor_cores.rows(view(started(), step(), profiled(time=NOW - 200)), 56, 5, NOW)
    assert role_of(old, "TC kernels") == "dim"
    change = Changed(time=NOW, step=2, technique="amp", old="off", new="bf16")
    rows = texts(tensor_cores.rows(view(started(), step(), profiled(), change), 56, 5, NOW))
    assert rows[1] == "kernels n/a: none profiled since the change, r reads now"


def test_a_profiler_that_saw_nothing_says_so() -> None:
    none = profiled(tensor_core_share=None, unknown_share=None, fp32_share=None, without="", missing="no kernel seen")
    assert texts(tensor_cores.rows(view(started(), step(), none), 56, 5, NOW))[1] == "kernels n/a: no kernel seen"


def test_names_from_the_profiler_are_harmless() -> None:
    rows = texts(tensor_cores.rows(view(started(), profiled(without=HOSTILE, off_by_8=HOSTILE)), 56, 5, NOW))
    assert rows[2].startswith("without: [/data/train] [b]x ␛[31m")


def test_an_old_counter_reading_is_shown_as_stale() -> None:
    reading = Reading(time=NOW, tensor_core=0.78, tensor_core_source="NVML GPM", tensor_core_time=NOW - 41)
    rows = tensor_cores.rows(view(started(), step(), reading), 56, 5, NOW)
    assert texts(rows)[1] == "Tensor Cores busy 78 % (NVML GPM, stale: 41 s old)"
    assert role_of(rows, "busy 78 %") == "dim"


def test_utilisation_is_never_a_tensor_core_figure() -> None:
    rows = texts(tensor_cores.rows(view(started(), step(), Reading(time=NOW, util=0.99)), 56, 5, NOW))
    assert not any("99" in row for row in rows)


def test_figures_do_not_outlive_a_change() -> None:
    change = Changed(time=NOW, step=2, technique="amp", old="off", new="bf16")
    seen = view(started(), step(flops=30e12, hardware_flops=30e12, peak_flops_s=71e12), change)
    assert texts(tensor_cores.rows(seen, 56, 5, NOW))[0] == "TFLOPS n/a: no step since the change"


def test_before_the_first_step() -> None:
    assert texts(tensor_cores.rows(View(), 56, 5, NOW)) == [
        "TFLOPS n/a: not counted yet",
        "kernels n/a: none profiled yet, r reads now",
        "counters n/a: no reading yet",
        "precision n/a: no step so far",
    ]


def test_a_source_from_outside_is_harmless() -> None:
    reading = Reading(time=NOW, tensor_core_source=HOSTILE)
    row = texts(tensor_cores.rows(view(reading), 56, 5, NOW))[2]
    assert row == "counters n/a: [/data/train] [b]x ␛[31m red  漢字🙂�yyyy…"


@given(any_view(), SIZES)
def test_it_fits(seen: View, size: tuple[int, int]) -> None:
    assert_fits(tensor_cores, seen, *size, NOW)
