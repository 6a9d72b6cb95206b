"""The step panel: rates, what a step waits for, what the host does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from tests.dashboard.views import GIB, NOW, SIZES, any_view, assert_fits, role_of, started, step, texts, view
from tui3090.dashboard.panels import step as panel
from tui3090.dashboard.view import View
from tui3090.records import Changed, Phases, Profiled, Reading


def host(**changes: Any) -> Reading:
    given_: dict[str, Any] = {
        "time": NOW - 0.5,
        "cpu": 0.98,
        "worker_count": 4,
        "worker_cpu": 0.37,
        "host_total": 64 * GIB,
        "host_available": 48 * GIB,
        "ui_share": 0.004,
    }
    return Reading(**given_ | changes)


def phases(**changes: Any) -> Phases:
    given_: dict[str, Any] = {
        "time": NOW - 0.5,
        "step": 2,
        "seconds": 1.0,
        "data_s": 0.1,
        "copy_s": 0.02,
        "forward_s": 0.25,
        "backward_s": 0.5,
        "optimizer_s": 0.08,
    }
    return Phases(**given_ | changes)


def test_the_whole_panel() -> None:
    seen = view(started(), step(1), step(2, stall_s=0.3, wait_s=0.5), phases(), host())
    assert panel.note(seen, NOW) == "CUDA events, mean of 1, 0.5 s ago"
    assert texts(panel.rows(seen, 100, 4, NOW)) == [
        "d data 100  c copy 20  ▒ forward 250  █ backward 500  o optimizer 80  · other 50  = 1 000 ms",
        "d" * 10 + "c" * 2 + "▒" * 25 + "█" * 50 + "o" * 8 + "·" * 5,
        "data stall 20 %, worst 30 %   loader's wait 40 %, 20 % hidden",
        "workers 4, 37 % CPU each   process 98 % CPU   host RAM 16.00 of 64.00 GiB   dashboard 0.4 % CPU",
    ]
    assert texts(panel.rows(seen, 100, 5, NOW))[3] == "16 000 tok/s   1.00 s/step, median 1.00   2 micro-batches"


def test_the_bar_adds_up_to_the_mean_of_the_samples() -> None:
    slow = phases(seconds=3.0, data_s=0.3, copy_s=0.02, forward_s=0.75, backward_s=1.5, optimizer_s=0.32)
    seen = view(started(), step(1), phases(), slow)
    assert texts(panel.rows(seen, 100, 4, NOW))[:2] == [
        "d data 200  c copy 20  ▒ forward 500  █ backward 1 000  o optimizer 200  · other 80  = 2 000 ms",
        "d" * 10 + "c" + "▒" * 25 + "█" * 50 + "o" * 10 + "·" * 4,
    ]
    assert panel.note(seen, NOW) == "CUDA events, mean of 2, 0.5 s ago"


def test_under_replay_forward_and_backward_are_one_graph() -> None:
    replayed = phases(seconds=0.005, data_s=0.0, copy_s=0.0001, forward_s=0, backward_s=0, graph_s=0.0044)
    seen = view(started(), step(1, replayed=True), replace(replayed, optimizer_s=0.0004))
    assert texts(panel.rows(seen, 100, 4, NOW))[:2] == [
        "d data 0.00  c copy 0.10  ▓ graph fwd+bwd 4.40  o optimizer 0.40  · other 0.10  = 5.00 ms",
        "c" * 2 + "▓" * 88 + "o" * 8 + "·" * 2,
    ]
    assert texts([panel.line(seen, 40, NOW)]) == ["graph 88 opt 8 %  stall 10 %  wait 30 %"]


def test_before_the_first_sample_the_rates_stand_there() -> None:
    seen = view(started(), step(1), host())
    assert panel.note(seen, NOW) == "mean of 1 step"
    assert texts(panel.rows(seen, 96, 4, NOW))[:2] == [
        "16 000 tok/s   1.00 s/step, median 1.00   2 micro-batches          by phase n/a: not sampled yet",
        "",
    ]


def test_the_clock_is_the_source_on_a_cpu_and_an_old_sample_is_stale() -> None:
    seen = view(started(device="cpu"), step(1), phases(time=NOW - 6, seconds=0.5))
    assert panel.note(seen, NOW) == "clock, mean of 1, stale: 6.0 s old"
    slow = view(started(device="cpu"), step(1), phases(time=NOW - 6, seconds=2.0))
    assert panel.note(slow, NOW) == "clock, mean of 1, 6.0 s ago"


def test_in_fewer_columns_names_are_short_and_the_least_go() -> None:
    seen = view(started(), step(1, micro_batches=1), phases(), host())
    assert texts(panel.rows(seen, 62, 4, NOW))[0] == ("d data 100  ▒ fwd 250  █ bwd 500  o opt 80  = 1 000 ms")
    assert texts(panel.rows(seen, 42, 4, NOW)) == [
        "▒ fwd 250  █ bwd 500  = 1 000 ms",
        "dddd" + "c" + "▒" * 11 + "█" * 21 + "ooo" + "··",
        "data stall 10 %, worst 10 %",
        "workers 4, 37 % CPU each",
    ]


def test_padding_and_replay_hits_stand_beside_the_stall() -> None:
    seen = view(
        started(),
        Changed(time=NOW, step=1, technique="graph", old=False, new=True),
        step(1, tokens=900, padding=100, micro_batches=1),
        step(2, tokens=600, padding=400, micro_batches=1, replayed=True, steps=3),
    )
    assert "padding 32 %   replay hits 3 of 4" in texts(panel.rows(seen, 120, 4, NOW))[2]


def test_one_row() -> None:
    seen = view(started(), step(1), phases(), host())
    assert texts([panel.line(seen, 80, NOW)]) == [
        "ddc▒▒▒▒▒▒████████████oo·  fwd 25 bwd 50 opt 8 %  stall 10 %  wait 30 %"
    ]


def test_workers_that_start_are_told_apart_from_the_stall() -> None:
    seen = view(started(), step(1, loader_start=True, seconds=4.0, wait_s=3.2, stall_s=3.2), step(2), host())
    assert texts(panel.rows(seen, 96, 4, NOW))[2] == (
        "data stall 10 %, worst 10 %   loader's wait 30 %, 20 % hidden   workers' start 3.2 s"
    )
    only = view(started(), step(1, loader_start=True, seconds=4.0, wait_s=3.2, stall_s=3.2))
    assert texts(panel.rows(only, 96, 4, NOW))[2] == (
        "data stall n/a, worst n/a   loader's wait n/a   workers' start 3.2 s"
    )


def test_gaps_between_kernels_are_told_by_a_profiled_step() -> None:
    profiled = Profiled(
        time=NOW, step=1, tensor_core_share=0.5, unknown_share=0, fp32_share=0, busy_share=0.6, kernels=9, kernel_s=0.1
    )
    rows = panel.rows(view(started(), step(1), profiled), 110, 4, NOW)
    assert texts(rows)[2].endswith("20 % hidden   launch gaps 40 % (profile)")
    assert role_of(rows, "launch gaps") == "warn"
    old = panel.rows(view(started(), step(1), replace(profiled, time=NOW - 200)), 110, 4, NOW)
    assert role_of(old, "launch gaps") == "dim"
    none = panel.rows(view(started(), step(1), replace(profiled, busy_share=0.99)), 110, 4, NOW)
    assert "gaps" not in texts(none)[2]
    longer = panel.rows(view(started(), step(1), replace(profiled, kernel_s=0.7)), 110, 4, NOW)
    assert texts(longer)[2].endswith("launch gaps 22 % (profile)")  # of 0.9 s that are no stall, kernels took 0.7


def test_a_slow_batch_now_and_then_shows_in_the_worst() -> None:
    slow = step(8, seconds=2.0, stall_s=1.0)
    seen = view(started(), *(step(number, stall_s=0.0) for number in range(1, 8)), slow)
    assert texts(panel.rows(seen, 96, 4, NOW))[2].startswith("data stall 11 %, worst 50 %")


def test_the_stall_is_not_the_wait() -> None:
    """Waiting that the device did not notice is no stall; on a CPU the two are the same, and nothing is hidden."""
    hidden = view(started(), step(wait_s=0.31, stall_s=0.0))
    assert texts(panel.rows(hidden, 96, 4, NOW))[2] == (
        "data stall 0.0 %, worst 0.0 %   loader's wait 31 %, 31 % hidden"
    )
    same = view(started(device="cpu"), step(wait_s=0.05, stall_s=0.05, seconds=0.25))
    assert texts(panel.rows(same, 96, 4, NOW))[2] == ("data stall 20 %, worst 20 %   loader's wait 20 %")


def test_a_line_for_several_steps_counts_as_several() -> None:
    seen = view(started(), step(1, seconds=1.0), step(10, seconds=2.0, steps=9))
    # 10 windows of 16 000 tokens in 1 + 9 x 2 seconds
    assert texts(panel.rows(seen, 96, 4, NOW))[0].startswith("8 420 tok/s   1.90 s/step")
    assert panel.note(seen, NOW) == "mean of 10 steps"


@pytest.mark.parametrize(("unit", "rate"), [("tokens", "16 000 tok/s"), ("samples", "32.0 samples/s")])
def test_the_unit_is_the_datas(unit: str, rate: str) -> None:
    assert texts(panel.rows(view(started(unit=unit), step()), 96, 4, NOW))[0].startswith(rate + " ")


def test_figures_do_not_outlive_a_change() -> None:
    change = Changed(time=NOW, step=3, technique="amp", old="off", new="bf16")
    seen = view(started(), step(1), step(2), phases(), change, host())
    assert panel.note(seen, NOW) == "no step since the change"
    rows = texts(panel.rows(seen, 96, 4, NOW))
    assert rows[0].startswith("rates n/a: no step since the change")
    assert rows[1:3] == ["", ""]
    assert texts([panel.line(seen, 69, NOW)]) == ["n/a: no step since the change"]


def test_rates_of_long_ago_are_not_shown_as_the_presents() -> None:
    seen = view(started(), step(time=NOW - 60), host())
    assert panel.note(seen, NOW) == "mean of 1 step, the last 1 min ago"
    rows = panel.rows(seen, 96, 4, NOW)
    assert {role for row in rows[:3] for _, role in row} == {"dim"}
    assert role_of(rows, "workers 4") == "plain"
    slow = view(started(), step(time=NOW - 60, seconds=30.0))
    assert panel.note(slow, NOW) == "mean of 1 step"


def test_stale_host_figures_are_dim() -> None:
    seen = view(started(), step(), host(time=NOW - 12))
    assert role_of(panel.rows(seen, 96, 4, NOW), "workers 4") == "dim"


def test_a_dashboard_that_costs_more_than_a_percent_is_a_warning() -> None:
    assert role_of(panel.rows(view(host(ui_share=0.02)), 96, 4, NOW), "dashboard 2.0 % CPU") == "warn"
    assert role_of(panel.rows(view(host(ui_share=None)), 96, 4, NOW), "dashboard n/a CPU") == "dim"


def test_before_the_first_step_and_reading() -> None:
    assert panel.note(View(), NOW) == "before the first step"
    assert texts(panel.rows(View(), 60, 4, NOW)) == [
        "rates n/a: no step so far",
        "",
        "",
        "host n/a: no reading yet",
    ]


@given(any_view(), SIZES)
def test_it_fits(seen: View, size: tuple[int, int]) -> None:
    assert_fits(panel, seen, *size, NOW)
