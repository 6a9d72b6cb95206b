"""Figures that are carried on equal those over all that is there."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tui3090.recent import Recent, Sampled, busy_share
from tui3090.records import Phases, Profiled, StepRecord
from tui3090.runlog import RecordReader

RECORDED = Path(__file__).parent / "data" / "h200.jsonl"
FIGURES = ("steps", "seconds", "tokens", "flops", "replayed", "loader_start", "uncounted", "unexecuted")

STEP = next(r for r in RecordReader(RECORDED).read(1 << 20) if isinstance(r, StepRecord))

windows = st.builds(
    lambda seconds, steps, tokens, flops, hardware_flops, replayed, loader_start: replace(
        STEP,
        seconds=seconds,
        steps=steps,
        tokens=tokens,
        flops=flops,
        hardware_flops=hardware_flops,
        replayed=replayed,
        loader_start=loader_start,
    ),
    st.floats(0, 1e6),
    st.integers(1, 1000),
    st.integers(0, 1 << 40),
    st.none() | st.floats(0, 1e18),
    st.none() | st.floats(0, 1e18),
    st.booleans(),
    st.booleans(),
)


def over_all(recent: Recent, name: str) -> float:
    """As one would write it down."""
    if name == "steps":
        return sum(record.steps for record in recent)
    return math.fsum((getattr(record, name) or 0) * record.steps for record in recent)


@given(st.lists(windows | st.none(), max_size=60))
def test_a_sum_is_that_of_the_windows_there_are(given: list[StepRecord | None]) -> None:
    """None: all of them go, as after a change."""
    recent, largest = Recent(7), 0.0
    for record in given:
        if record is None:
            recent.clear()
        else:
            recent.append(record)
        for name in FIGURES:
            expected = over_all(recent, name)
            largest = max(largest, expected)
            assert recent.total(name) == pytest.approx(expected, rel=1e-9, abs=1e-12 * largest)
    assert len(recent) <= 7


seconds_of_any_log = st.floats(0, 10) | st.floats()


@given(
    st.integers(0, 12),
    st.lists(st.none() | st.tuples(seconds_of_any_log, seconds_of_any_log, st.booleans()), max_size=60),
)
def test_median_and_worst_are_those_of_the_windows_there_are(
    asked_from: int, given: list[tuple[float, float, bool] | None]
) -> None:
    """Whenever they are first asked for, and whatever a log from elsewhere says of its windows."""
    recent = Recent(3)
    for number, figures in enumerate(given):
        if figures is None:
            recent.clear()
        else:
            seconds, stall_s, loader_start = figures
            recent.append(replace(STEP, seconds=seconds, stall_s=stall_s, loader_start=loader_start))
        if number < asked_from:
            continue
        known = [window.seconds for window in recent if math.isfinite(window.seconds)]
        assert recent.median_s == (statistics.median(known) if known else None)
        shares = [w.stall_s / w.seconds for w in recent if w.seconds > 0 and not w.loader_start]
        assert recent.worst_stall == max(filter(math.isfinite, shares), default=0.0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_goes_with_its_window(wrong: float) -> None:
    recent = Recent(3)
    recent.append(replace(STEP, seconds=wrong, steps=1))
    assert not math.isfinite(recent.total("seconds"))
    for _ in range(3):
        recent.append(replace(STEP, seconds=0.25, steps=2))
        recent.total("seconds")
    assert recent.total("seconds") == 1.5


@pytest.mark.parametrize(
    ("seconds", "stall_s", "kernel_s", "in_the_profile", "share"),
    [
        (0.1, 0.0, 0.09, 0.6, 0.9),  # the profiler made the gaps longer
        (0.1, 0.05, 0.04, 0.6, 0.8),  # what waits for data is no gap
        (0.1, 0.0, 0.03, 0.6, 0.6),  # a short batch among long ones
        (0.1, 0.0, 0.3, 0.6, 1.0),  # a long one among short ones
        (0.0, 0.0, 0.3, 0.6, 0.6),
        (0.1, 0.0, 0.0, None, None),
    ],
)
def test_the_share_of_a_step_in_which_a_kernel_runs(
    seconds: float, stall_s: float, kernel_s: float, in_the_profile: float | None, share: float | None
) -> None:
    recent = Recent(3)
    for steps in (1, 4):
        recent.append(replace(STEP, seconds=seconds, stall_s=stall_s, steps=steps))
    look = Profiled(
        time=0.0,
        step=1,
        tensor_core_share=in_the_profile,
        unknown_share=0.0,
        fp32_share=0.0,
        busy_share=in_the_profile,
        kernels=9,
        kernel_s=kernel_s,
    )
    assert busy_share(look, recent) == (None if share is None else pytest.approx(share))
    assert busy_share(look, Recent(3)) == in_the_profile


phases = st.builds(
    lambda seconds, forward_s: Phases(time=0.0, step=1, seconds=seconds, forward_s=forward_s),
    st.sampled_from([0.0, math.nan, math.inf]) | st.floats(1e-3, 1e3),
    st.floats(0, 1e3),
)


@given(st.lists(phases | st.none(), max_size=30))
def test_means_are_those_of_the_samples_there_are(given: list[Phases | None]) -> None:
    """None: all of them go. Samples that took no time, or none that can be told, are left out."""
    names = ("forward_s", "other_s")
    sampled = Sampled(5)
    for record in given:
        if record is None:
            sampled.clear()
        else:
            sampled.append(record)
        told = [sample for sample in sampled if 0 < sample.seconds < math.inf]
        expected = [statistics.fmean(getattr(sample, name) for sample in told) for name in names] if told else []
        assert sampled.means(names) == pytest.approx(expected)
