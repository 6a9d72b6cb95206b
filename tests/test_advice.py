"""Advice: for each rule a run that calls for it, runs that don't, and what the machine can't follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from tests.dashboard.views import GIB, NOW, gain, started, step
from tui3090 import advice as advice_module
from tui3090.advice import Advice, advise
from tui3090.facts import Facts
from tui3090.meters.unmoved import EVERY
from tui3090.records import Available, Changed, Event, Gain, Profiled, Reading, Record, State, StepRecord
from tui3090.settings import BY_NAME, TECHNIQUES, Settings
from tui3090.watchdog import Watchdog

OFFERED = [Available(time=NOW, technique=technique.name) for technique in TECHNIQUES]
PRE_AMPERE = Available(time=NOW, technique="tf32", reason="TF32 needs Ampere.")


def run(
    windows: list[StepRecord],
    *others: Record,
    settings: Settings | None = None,
    reading: dict[str, Any] | None = None,
    **begun: Any,
) -> Facts:
    """The facts of a settled run on a 3090 that offers everything; `reading` is seen eight times at its end."""
    facts = Facts()
    begun = {"settings": (settings or Settings()).short(), "device_name": "NVIDIA GeForce RTX 3090"} | begun
    warm_up = [step(seconds=2.0, stall_s=1.9) for _ in range(3)]
    readings = [Reading(time=NOW, **reading)] * 8 if reading else []
    for record in [started(**begun), *OFFERED, *others, *warm_up, *windows, *readings]:
        facts.absorb(record)
    return facts


def steady(count: int = 40, **changes: Any) -> list[StepRecord]:
    """Windows that nothing is amiss with, unless `changes` say so."""
    return [
        step(**{"seconds": 0.5, "wait_s": 0.0, "stall_s": 0.0, "precision": "bf16"} | changes) for _ in range(count)
    ]


def found(facts: Facts, rule: str) -> Advice | None:
    """What one rule gives."""
    result: Advice | None = getattr(advice_module, rule)(facts)
    return result


BF16 = Settings(amp="bf16")
COMPILED = Settings(compile=True)
FULL = {
    "card_total": 24 * GIB,
    "card_used": 23 * GIB,
    "reserved": 21 * GIB,
    "peak_allocated": 21 * GIB,
    "weights": 2 * GIB,
    "gradients": 2 * GIB,
    "optimizer_state": 4 * GIB,
    "retries": 0,
}
HALF = FULL | {"card_used": 11 * GIB, "reserved": 10 * GIB, "peak_allocated": 8 * GIB, "weights": GIB, "gradients": GIB}
HALF |= {"optimizer_state": 2 * GIB}


def test_a_run_with_nothing_amiss_gets_no_advice() -> None:
    busy = {"util": 0.99, "clock_mhz": 1950, "clock_max_mhz": 1965, "others": 0}
    full_enough = FULL | {"card_used": 18 * GIB, "reserved": 16 * GIB, "peak_allocated": 16 * GIB}
    facts = run(steady(), settings=BF16, reading=busy | full_enough)
    assert facts.steady
    assert advise(facts) == []
    assert advise(Facts()) == []


def test_at_most_three_the_weightiest_first() -> None:
    reading = FULL | {"util": 0.99, "clock_mhz": 1500, "clock_max_mhz": 1965, "held_back": "power", "others": 2 * GIB}
    facts = run(steady(seconds=1.0, stall_s=0.4, wait_s=0.4, precision="fp32", padding=16_000), reading=reading)
    assert [advice.key for advice in advise(facts)] == ["c", "", "w"]


class TestStarved:
    def test_workers_enough_to_load_as_fast_as_the_rest_of_a_step(self) -> None:
        facts = run(steady(seconds=1.0, stall_s=0.5, wait_s=0.5), settings=BF16)
        assert found(facts, "starved") == Advice(
            "w", "1 loader worker", "the loader starves it 50 % of the time, with 0 workers", "up to +100 %", 1.0
        )

    def test_no_more_is_promised_than_the_workers_can_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(advice_module, "CORES", 8)
        monkeypatch.setattr(
            advice_module, "BY_NAME", {**BY_NAME, "workers": replace(BY_NAME["workers"], values=(0, 1, 2, 4, 8))}
        )
        starved = steady(seconds=1.0, stall_s=0.9, wait_s=0.9)
        advice = found(run(starved), "starved")
        assert advice is not None
        assert (advice.what, advice.gain) == ("8 loader workers", "up to +789 %")  # 0.9 s of loading by 8 of them
        more = found(run(starved, settings=Settings(workers=1)), "starved")
        assert more is not None
        assert (more.what, more.gain) == ("2 loader workers", "up to +100 %")

    def test_a_small_stall_and_one_of_a_loaders_start_are_none(self) -> None:
        assert found(run(steady(seconds=1.0, stall_s=0.04, wait_s=0.9)), "starved") is None
        start = steady(1, seconds=60.0, stall_s=59.0, loader_start=True)
        assert found(run([*start, *steady()]), "starved") is None

    def test_with_all_cores_loading_prefetch_is_next_and_then_the_samples(self) -> None:
        stalled = steady(seconds=1.0, stall_s=0.5, wait_s=0.5)
        most = max(value for value in BY_NAME["workers"].values if isinstance(value, int))
        prefetch = found(run(stalled, settings=Settings(workers=most)), "starved")
        assert prefetch is not None
        assert prefetch.key == "p"
        samples = found(run(stalled, settings=Settings(workers=most, prefetch=2)), "starved")
        assert samples is not None
        assert (samples.key, samples.what) == ("", "cheaper samples: prepare or cache them")

    def test_not_what_the_machine_refuses(self) -> None:
        refused = Available(time=NOW, technique="workers", reason="no shared memory")
        advice = found(run(steady(seconds=1.0, stall_s=0.5, wait_s=0.5), refused, device="cpu"), "starved")
        assert advice is not None
        assert advice.key == ""


class TestLaunchBound:
    IDLE: ClassVar = {"util": 0.4}

    def test_a_card_that_idles_between_small_steps(self) -> None:
        advice = found(run(steady(200, seconds=0.02), settings=BF16, reading=self.IDLE), "launch_bound")
        assert advice is not None
        assert (advice.key, advice.what, advice.gain) == ("g", "CUDA graph replay", "up to × 2.5")
        assert advice.reason == "a kernel runs 40 % of the time, and no data is waited for: launching is the limit"

    def test_the_profiler_knows_better_than_nvml(self) -> None:
        seen = Profiled(
            **{
                "time": NOW,
                "step": 9,
                "kernels": 900,
                "kernel_s": 0.01,
                "tensor_core_share": 0.5,
                "unknown_share": 0.0,
            },
            busy_share=0.5,
            fp32_share=0.5,
            off_by_8="classifier [2 × 1024]",
        )
        fp32 = run(steady(precision="fp32"))
        fp32.absorb(seen)
        bound = found(fp32, "fp32_matmuls")
        assert bound is not None
        assert bound.gain == "at most × 1.3"  # half of the time, halved
        facts = run(steady(200, seconds=0.02), settings=BF16, reading={"util": 1.0})
        facts.absorb(seen)
        advice = found(facts, "launch_bound")
        assert advice is not None
        assert advice.gain == "up to × 2.0"
        facts.absorb(replace(seen, kernel_s=0.019))  # the profiler's own gaps are none of training's
        assert found(facts, "launch_bound") is None
        off = found(facts, "off_by_8")
        assert off is not None
        assert off.reason == "not divisible by 8: classifier [2 × 1024]"
        facts.absorb(Changed(time=NOW, step=9, technique="amp", old="bf16", new="off"))
        assert found(facts, "off_by_8") is None

    def test_where_replay_is_refused_compiling_makes_fewer_kernels(self) -> None:
        refused = [Available(time=NOW, technique=name, reason="no") for name in ("graph", "compile")]
        advice = found(run(steady(200, seconds=0.02), refused[0], settings=BF16, reading=self.IDLE), "launch_bound")
        assert advice is not None
        assert advice.key == "k"
        assert found(run(steady(200, seconds=0.02), *refused, settings=BF16, reading=self.IDLE), "launch_bound") is None

    def test_readings_of_a_pause_and_an_evaluation_do_not_count(self) -> None:
        facts = run(steady(200, seconds=0.02), settings=BF16)
        evaluating, training = (State(time=NOW + at, state=name) for at, name in ((0, "evaluating"), (9, "training")))
        idle = [Reading(time=NOW + at, util=0.0) for at in range(9)]
        back = [Reading(time=NOW + 10, util=0.0), *(Reading(time=NOW + at, util=0.9) for at in range(11, 19))]
        for record in [evaluating, *idle, training, *back]:
            facts.absorb(record)
        assert facts.median("util") == 0.9
        assert found(facts, "launch_bound") is None

    @pytest.mark.parametrize(
        "facts",
        [
            run(steady(200, seconds=0.02), reading={"util": 0.95}),
            run(steady(200, seconds=0.5), reading=IDLE),
            run(steady(200, seconds=0.02, stall_s=0.01), reading=IDLE),
            run(steady(200, seconds=0.02), reading=IDLE, device="cpu"),
            run(steady(200, seconds=0.02), reading=IDLE, settings=Settings(graph=True)),
            run(
                steady(200, seconds=0.02),
                Available(time=NOW, technique="graph", reason="no"),
                reading=IDLE,
                settings=COMPILED,
            ),
            run(steady(5, seconds=0.02), reading=IDLE),
        ],
        ids=["busy", "long steps", "waits for data", "cpu", "on already", "refused", "too early"],
    )
    def test_none(self, facts: Facts) -> None:
        assert found(facts, "launch_bound") is None


class TestPrecision:
    def test_fp32_matmuls(self) -> None:
        facts = run(steady(precision="fp32"))
        assert found(facts, "fp32_matmuls") == Advice(
            "a",
            "AMP bf16",
            "matmuls run in fp32, beside the Tensor Cores",
            "at most × 2.0",
            pytest.approx(0.497, abs=0.01),
        )

    def test_a_card_without_bf16_is_told_of_fp16(self) -> None:
        facts = run(steady(precision="fp32"), PRE_AMPERE, device_name="Tesla T4")
        advice = found(facts, "fp32_matmuls")
        assert advice is not None
        assert (advice.key, advice.what, advice.gain) == ("A", "AMP fp16 (this card has no bf16)", "at most × 8.0")
        assert found(facts, "tf32_off") is None

    def test_tf32(self) -> None:
        advice = found(run(steady(precision="fp32"), device_name="NVIDIA RTX A6000"), "tf32_off")
        assert advice is not None
        assert (advice.key, advice.gain) == ("t", "at most × 2.0")
        ours = found(run(steady(precision="fp32")), "tf32_off")
        assert ours is not None
        assert ours.gain == ""  # a 3090's peaks are equal: no promise

    @pytest.mark.parametrize("rule", ["fp32_matmuls", "tf32_off"])
    def test_none(self, rule: str) -> None:
        fp32 = steady(precision="fp32")
        assert found(run(steady(), settings=BF16), rule) is None
        assert found(run(fp32, device="cpu"), rule) is None
        assert found(run(fp32, *(Available(time=NOW, technique=t, reason="no") for t in ("amp", "tf32"))), rule) is None
        assert found(run(fp32, weights_dtype="bfloat16"), rule) is None
        idle = run(steady(200, seconds=0.02, precision="fp32"), reading={"util": 0.3})
        assert found(idle, rule) is None  # faster matmuls would only make the card wait longer

    def test_tf32_in_force_leaves_amp_to_try(self) -> None:
        facts = run(steady(precision="tf32"), settings=Settings(tf32=True))
        assert found(facts, "tf32_off") is None
        advice = found(facts, "fp32_matmuls")
        assert advice is not None
        assert advice.reason == "matmuls run in TF32"

    def test_what_this_run_measured_to_be_slower_is_not_advised_again(self) -> None:
        def measured(old: str, new: str, verdict: str) -> Gain:
            return gain(1, "amp", old, new, verdict=verdict)

        assert found(run(steady(precision="fp32"), measured("off", "bf16", "slower")), "fp32_matmuls") is None
        assert found(run(steady(precision="fp32"), measured("bf16", "off", "faster")), "fp32_matmuls") is None
        assert found(run(steady(precision="fp32"), measured("off", "bf16", "faster")), "fp32_matmuls") is not None


class TestMemory:
    def test_nearly_full(self) -> None:
        facts = run(steady(), settings=BF16, reading=FULL)
        assert found(facts, "memory_full") == Advice(
            "c", "activation checkpointing", "memory is nearly full: 23.0 of 24.0 GiB", "frees at most 13.0 GiB", 7
        )
        without = Available(time=NOW, technique="checkpointing", reason="no blocks")
        amp = found(run(steady(precision="fp32"), without, reading=FULL), "memory_full")
        assert amp is not None
        assert (amp.key, amp.what) == ("a", "AMP bf16")
        offload = found(run(steady(), without, settings=BF16, reading=FULL), "memory_full")
        assert offload is not None
        assert offload.key == "o"
        without_offload = Available(time=NOW, technique="offload", reason="no pinned memory")
        batch = found(run(steady(), without, without_offload, settings=BF16, reading=FULL), "memory_full")
        assert batch is not None
        assert (batch.key, batch.what) == ("", "half the batch, twice the accumulation: next start")

    def test_retries_of_the_allocator_since_the_change(self) -> None:
        some = FULL | {"card_used": 18 * GIB, "reserved": 16 * GIB, "peak_allocated": 16 * GIB, "retries": 3}
        advice = found(run(steady(), settings=BF16, reading=some), "memory_full")
        assert advice is not None
        assert advice.reason == "the allocator ran out 3 times and gave its cache back"
        facts = run(steady(), settings=BF16, reading=some)
        for record in [
            Changed(time=NOW, step=9, technique="tf32", old=False, new=True),
            *steady(),
            Reading(time=NOW, **some),
        ]:
            facts.absorb(record)
        assert found(facts, "memory_full") is None

    def test_the_batch_that_fits(self) -> None:
        # 16 samples take 4 GiB of activations; 22 of 24 GiB less 4 + 1 that are taken anyway hold 68 of them
        advice = found(run(steady(samples=16, micro_batches=1), settings=BF16, reading=HALF), "room")
        assert advice is not None
        assert (advice.key, advice.what, advice.gain) == ("", "batch 64 fits: next start", "21.0 of 24.0 GiB")
        assert advice.reason == "estimated: 15.0 GiB are free, a sample takes 0.2"

    def test_no_bigger_batch_than_there_are_samples(self) -> None:
        windows = steady(samples=16, micro_batches=1)
        advice = found(run(windows, settings=BF16, reading=HALF, rows=30), "room")
        assert advice is not None
        assert advice.what == "batch 30 fits: next start"
        assert found(run(windows, settings=BF16, reading=HALF, rows=20), "room") is None

    def test_with_accumulation_the_same_step_in_fewer_micro_batches(self) -> None:
        windows = steady(samples=64, micro_batches=4)
        advice = found(run(windows, settings=Settings(amp="bf16", accumulate=4), reading=HALF), "room")
        assert advice is not None
        assert advice.what == "batch 64, accumulate 1: next start"

    def test_a_cap_is_the_card(self) -> None:
        small = run(steady(samples=16, micro_batches=1), reading=HALF, memory=141 * GIB, memory_cap=10 * GIB)
        assert found(small, "room") is None
        full = found(run(steady(), reading=HALF, memory=141 * GIB, memory_cap=8 * GIB), "memory_full")
        assert full is not None
        assert full.reason == "memory is nearly full: 9.0 of 9.0 GiB"

    def test_what_only_the_start_needed_is_left_out(self) -> None:
        start = FULL | {"peak_allocated": 23 * GIB, "peak_steady": 8 * GIB, "card_used": 11 * GIB, "reserved": 10 * GIB}
        facts = run(steady(samples=16, micro_batches=1), settings=BF16, reading=start)
        assert found(facts, "memory_full") is None
        assert found(facts, "room") is None  # 8 GiB are weights, gradients and state

    def test_no_room_is_seen_where_it_can_not_be_computed(self) -> None:
        windows = steady(samples=16, micro_batches=1)
        assert found(run(windows, reading=HALF, settings=Settings(graph=True)), "room") is None
        assert found(run(windows, reading=HALF | {"weights": None}), "room") is None
        assert found(run(windows, reading=HALF, device="cpu"), "room") is None
        assert found(run(windows, reading=FULL), "room") is None
        assert found(run(windows), "room") is None

    def test_checkpointing_that_is_not_needed(self) -> None:
        every = Settings(checkpointing=1)
        measured = gain(1, "checkpointing", 0, 1, verdict="slower", peak_before=15 * GIB, peak_after=6 * GIB)
        windows = steady(flops=3e12, hardware_flops=4e12)
        advice = found(run(windows, measured, settings=every, reading=HALF), "without_checkpointing")
        assert advice is not None
        assert (advice.key, advice.gain) == ("c", "up to +33 %")
        assert advice.reason == "it fits without: 16.0 of 24.0 GiB"
        assert found(run(windows, settings=every, reading=HALF), "without_checkpointing") is None
        assert found(run(windows, measured, reading=HALF), "without_checkpointing") is None


class TestTraining:
    def test_a_scaler_that_keeps_skipping(self) -> None:
        windows = [w for n in range(80) for w in steady(1, skipped="overflow" if n % 8 == 0 else "")]
        fp16 = Settings(amp="fp16")
        advice = found(run(windows, settings=fp16), "overflowing")
        assert advice is not None
        assert (advice.key, advice.what) == ("A", "AMP bf16: fp32's range, no scaler")
        assert advice.reason == "the loss scaler skipped 12 % of the last 60 steps"
        old = found(run(windows, PRE_AMPERE, settings=fp16), "overflowing")
        assert old is not None
        assert old.key == "["
        lowest = found(run(windows, PRE_AMPERE, settings=Settings(amp="fp16", lr=0.5)), "overflowing")
        assert lowest is not None
        assert (lowest.key, lowest.what) == ("", "lower the learning rate: next start")

    def test_a_scaler_that_finds_its_scale(self) -> None:
        windows = [*steady(15, skipped="overflow"), *steady(65)]
        assert found(run(windows, settings=Settings(amp="fp16")), "overflowing") is None
        always = steady(80, skipped="overflow")
        assert found(run(always, settings=BF16), "overflowing") is None
        lost = found(run(always, settings=Settings(amp="fp16")), "overflowing")
        assert lost is not None
        assert lost.gain == ""

    def test_bf16_weights_that_do_not_move(self) -> None:
        said: list[tuple[str, str, str]] = []
        Watchdog(lambda source, text, level: said.append((source, text, level))).unmoved(0.95)
        ((source, text, level),) = said
        assert str(EVERY) in text
        facts = run(steady(), Event(time=NOW, level=level, source=source, text=text), weights_dtype="bfloat16")
        advice = found(facts, "unmoved")
        assert advice is not None
        assert "float32" in advice.what
        assert found(run(steady(), weights_dtype="bfloat16"), "unmoved") is None

    def test_throughput_below_the_runs_own_median(self) -> None:
        paces = [*steady(120, seconds=1.0), *steady(20, seconds=2.0)]
        advice = found(run(paces), "slower_than_before")
        assert advice is not None
        assert (advice.key, advice.gain) == ("6", "+100 %")
        assert advice.reason == "throughput is 50 % below this run's own median"
        on_cpu = found(run(paces, device="cpu", cards=0), "slower_than_before")
        assert on_cpu is not None
        assert (on_cpu.key, on_cpu.what) == ("2", "see what else runs on this machine")
        stalled = found(run([*steady(120, seconds=1.0), *steady(20, seconds=2.0, stall_s=1.0)]), "slower_than_before")
        assert stalled is not None
        assert stalled.key == "2"

    def test_a_single_slow_step_and_a_change_are_no_slump(self) -> None:
        assert (
            found(run([*steady(120, seconds=1.0), *steady(1, seconds=9.0), *steady(2)]), "slower_than_before") is None
        )
        facts = run(steady(120, seconds=1.0))
        change = Changed(time=NOW, step=9, technique="checkpointing", old=0, new=1)
        for record in [change, *steady(30, seconds=2.0)]:
            facts.absorb(record)
        assert found(facts, "slower_than_before") is None


class TestCard:
    SLOWED: ClassVar = {"clock_mhz": 1650, "clock_max_mhz": 1965, "temperature_c": 88.0, "util": 0.99}

    def test_held_back_by_power(self) -> None:
        advice = found(run(steady(), reading=self.SLOWED | {"held_back": "power"}), "held_back")
        assert advice is not None
        assert (advice.key, advice.reason, advice.gain) == ("", "power holds the clock back 16 %", "at most +19 %")

    def test_held_back_by_heat(self) -> None:
        advice = found(run(steady(), reading=self.SLOWED | {"held_back": "power, heat"}), "held_back")
        assert advice is not None
        assert (advice.what, advice.reason) == (
            "more air: fans, dust, case",
            "heat holds the clock back 16 %, at 88 °C",
        )

    def test_not_held_back(self) -> None:
        assert found(run(steady(), reading=self.SLOWED | {"held_back": ""}), "held_back") is None
        slightly = self.SLOWED | {"clock_mhz": 1900, "held_back": "power"}
        assert found(run(steady(), reading=slightly), "held_back") is None

    def test_others_on_the_card(self) -> None:
        advice = found(run(steady(), reading={"others": 8 * GIB, "holders": "user1 8.0 GiB"}), "others")
        assert advice is not None
        assert advice.reason == "others hold 8.0 GiB of this one (user1 8.0 GiB)"
        several = found(run(steady(), reading={"others": 8 * GIB, "holders": "user1 8.0 GiB"}, cards=2), "others")
        assert several is not None
        assert several.what == "another card: --device, next start"
        assert several.reason == f"{advice.reason}; tui3090 doctor lists the cards"
        assert advice.what == "ask who holds the card, or end it"  # there is no other to go to
        assert found(run(steady(), reading={"others": 200 << 20}), "others") is None
        assert found(run(steady(), reading={"others": None}), "others") is None


def test_padding() -> None:
    advice = found(run(steady(tokens=600, padding=400)), "padding")
    assert advice is not None
    assert (advice.reason, advice.gain) == ("40 % of the tokens are padding", "at most +67 %")
    assert found(run(steady(tokens=800, padding=200)), "padding") is None
    assert found(run(steady(tokens=0)), "padding") is None
