"""The step panel: rates, what a step waits for, what the host does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from tests.dashboard.views import GIB, NOW, SIZES, any_view, assert_fits, role_of, started, step, texts, view
from tui3090.dashboard.panels import step as panel
from tui3090.dashboard.view import View
from tui3090.records import Changed, Reading


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


def test_the_whole_panel() -> None:
    seen = view(started(), step(1), step(2, stall_s=0.3, wait_s=0.5), host())
    assert panel.note(seen, NOW) == "mean of 2 steps"
    assert texts(panel.rows(seen, 96, 4, NOW)) == [
        "16 000 tok/s   1.00 s/step, median 1.00   2 micro-batches          by phase: not in this version",
        "▒" * 19 + "░" * 19 + "█" * 58,
        "▒ data stall 20 %, worst 30 %   loader's wait 40 %   ░ hidden 20 %   █ rest 60 %",
        "workers 4, 37 % CPU each   process 98 % CPU   host RAM 16.00 of 64.00 GiB   dashboard 0.4 % CPU",
    ]


def test_in_fewer_columns_the_later_parts_go_whole() -> None:
    seen = view(started(), step(1, micro_batches=1), host())
    assert texts(panel.rows(seen, 42, 4, NOW)) == [
        "16 000 tok/s   1.00 s/step, median 1.00",
        "▒" * 4 + "░" * 9 + "█" * 29,
        "▒ data stall 10 %, worst 10 %",
        "workers 4, 37 % CPU each",
    ]


def test_padding_and_replay_hits_stand_beside_the_rates() -> None:
    seen = view(
        started(),
        Changed(time=NOW, step=1, technique="graph", old=False, new=True),
        step(1, tokens=900, padding=100, micro_batches=1),
        step(2, tokens=600, padding=400, micro_batches=1, replayed=True, steps=3),
    )
    assert "padding 32 %   replay hits 3 of 4" in texts(panel.rows(seen, 120, 4, NOW))[0]


def test_one_row() -> None:
    seen = view(started(), step(1), host())
    assert texts([panel.line(seen, 80, NOW)]) == [
        "▒▒░░░░░█████████████████  stall 10 %  wait 30 %  1.00 s/step  16 000 tok/s"
    ]


def test_the_stall_is_not_the_wait() -> None:
    """Waiting that the device did not notice is no stall; on a CPU the two are the same, and nothing is hidden."""
    hidden = view(started(), step(wait_s=0.31, stall_s=0.0))
    assert texts(panel.rows(hidden, 96, 4, NOW))[2] == (
        "▒ data stall 0.0 %, worst 0.0 %   loader's wait 31 %   ░ hidden 31 %   █ rest 69 %"
    )
    same = view(started(device="cpu"), step(wait_s=0.05, stall_s=0.05, seconds=0.25))
    assert texts(panel.rows(same, 96, 4, NOW))[2] == (
        "▒ data stall 20 %, worst 20 %   loader's wait 20 %   █ rest 80 %"
    )


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
    seen = view(started(), step(1), step(2), change, host())
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
        "rates n/a: no step so far      by phase: not in this version",
        "",
        "",
        "host n/a: no reading yet",
    ]


@given(any_view(), SIZES)
def test_it_fits(seen: View, size: tuple[int, int]) -> None:
    assert_fits(panel, seen, *size, NOW)
