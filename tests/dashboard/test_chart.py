"""The chart: what is drawn where, and that no curve and no size breaks it."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dashboard.views import texts
from tui3090.dashboard.chart import Mark, draw
from tui3090.dashboard.curve import Curve
from tui3090.dashboard.text import row_text, row_width


def curve(*values: float, first: int = 1) -> Curve:
    made = Curve()
    for step, value in enumerate(values, first):
        made.add(step, value)
    return made


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    rows = texts(draw(curve(*(100 - i for i in range(100))), [], 49, 8))
    assert rows[-1] == "         step 1            50                 100"
    assert rows[0] == "    100 ┤⠉⠙⠒⠒⠲⠤⠤⣄⣀⣀"
    assert rows[6] == "        ┤                                  ⠈⠉⠓⠲⠤⣄"


def test_the_y_axis_has_round_values_in_their_rows() -> None:
    rows = texts(draw(curve(0.0, 1.0), [], 40, 9))
    assert [row[:9] for row in rows] == [
        "    1.0 ┤",
        "        ┤",
        "        ┤",
        "    0.5 ┤",
        "        ┤",
        "        ┤",
        "        ┤",
        "    0.0 ┤",
        "         ",
    ]


def test_one_spike_does_not_flatten_the_rest_and_is_shown_as_going_beyond() -> None:
    values = [1 + i % 10 / 10 for i in range(400)]
    values[200] = 1e6
    rows = draw(curve(*values), [], 60, 12)
    labels = [float(text[:7]) for text in texts(rows) if text[:7].strip() and "┤" in text]
    assert max(labels) <= 2
    assert "↑" in row_text(rows[0])


def test_nothing_is_cut_off_where_no_value_stands_out() -> None:
    rows = draw(curve(*(2 - i / 50 for i in range(100))), [], 60, 12)
    assert "↑" not in row_text(rows[0])
    assert [text[:7].strip() for text in texts(rows) if text[:7].strip()] == ["2", "1"]


def test_the_smoothed_line_clears_the_band_and_has_a_role_of_its_own() -> None:
    noisy = [1 + (i * 7919 % 100) / 100 for i in range(2000)]
    rows = draw(curve(*noisy), [], 60, 12)
    plot = [row[1:] for row in rows[:-1]]  # without the axis
    line_cells = "".join(text for row in plot for text, role in row if role == "smooth")
    # a line is one or two dots high in a cell, the band beside it is filled: the two differ without colour
    assert line_cells
    assert max(bin(ord(char) - 0x2800).count("1") for char in line_cells) <= 4
    assert sum(len(text) for row in plot for text, role in row if role == "raw") > 5 * len(line_cells) // 2


def test_marks_stand_at_their_steps_with_their_labels_below() -> None:
    rows = texts(draw(curve(*([1.0] * 101)), [Mark(26, "a bf16"), Mark(76, "+ 2")], 49, 8))
    assert rows[1] == "        ┤         ┊                   ┊"
    assert rows[-2] == "                  a bf16              + 2"


def test_with_one_row_below_the_marks_go_before_the_steps() -> None:
    made = curve(*([1.0] * 101))
    assert texts(draw(made, [Mark(26, "a bf16")], 49, 5))[-1].strip() == "a bf16"
    assert texts(draw(made, [], 49, 5))[-1].split() == ["step", "1", "50", "100"]


def test_a_label_without_room_is_cut_to_its_key_or_dropped_the_newest_first() -> None:
    def labels(*marks: Mark) -> str:
        return texts(draw(curve(*([1.0] * 101)), marks, 49, 8))[-2].strip()

    assert labels(Mark(50, "a bf16"), Mark(58, "c all")) == "a  c all"
    assert labels(Mark(50, "a bf16"), Mark(51, "c all")) == "c all"


def test_a_label_at_the_right_end_is_drawn_to_the_left_of_its_mark() -> None:
    rows = texts(draw(curve(*([1.0] * 101)), [Mark(101, "a bf16")], 49, 8))
    assert rows[0].endswith("┊")
    assert len(rows[0]) == len(rows[-2]) == 49
    assert rows[-2].endswith("a bf16")


def test_nan_is_in_no_point_and_the_rest_is_drawn() -> None:
    with_nan, without = curve(1.0, math.nan, math.inf, 2.0), Curve()
    without.add(1, 1.0)
    without.add(4, 2.0)
    assert draw(with_nan, [], 40, 8) == draw(without, [], 40, 8)


def test_without_a_value_the_rows_are_blank() -> None:
    assert draw(curve(math.nan), [Mark(1, "a")], 40, 3) == [[], [], []]


def test_it_is_drawn_anew_only_when_value_mark_or_size_changed() -> None:
    made = curve(1.0, 2.0)
    first = draw(made, [], 40, 8)
    assert draw(made, [], 40, 8) is first
    assert draw(made, [Mark(1, "a")], 40, 8) is not first
    again = draw(made, [], 40, 8)
    made.add(3, math.nan)
    assert draw(made, [], 40, 8) is again
    made.add(4, 1.0)
    assert draw(made, [], 40, 8) != again


def test_a_run_that_went_back_some_steps_is_drawn_by_step() -> None:
    made = curve(1.0, 2.0, 3.0)
    made.add(2, 2.5)
    rows = texts(draw(made, [], 40, 8))
    assert rows[-1] == "         step 1         2              3"


def test_it_is_smallest_without_axes() -> None:
    rows = draw(curve(*(float(i) for i in range(50))), [Mark(25, "a bf16")], 10, 3)
    assert [row_width(row) for row in rows] == [10, 10, 10]
    assert not any("┤" in row_text(row) or "step" in row_text(row) for row in rows)


@given(
    st.lists(st.floats(width=64), max_size=60),
    st.lists(st.builds(Mark, st.integers(-10, 100), st.sampled_from(["a bf16", "x", "c every 2nd"])), max_size=4),
    st.integers(1, 250),
    st.integers(1, 250),
)
def test_it_fits_any_size_whatever_the_values(values: list[float], marks: list[Mark], width: int, height: int) -> None:
    rows = draw(curve(*values), marks, width, height)
    assert len(rows) == height
    assert all(row_width(row) <= width for row in rows)


@pytest.mark.parametrize("constant", [0.0, 1e-320, -3.0, 1e300])
def test_a_constant_is_a_line_in_the_middle(constant: float) -> None:
    rows = draw(curve(*([constant] * 50)), [], 40, 7)
    drawn = [y for y, row in enumerate(rows[:-1]) if any(role == "smooth" for _, role in row)]
    assert drawn == [2]


def test_a_full_chart_costs_few_milliseconds() -> None:
    made = curve(*(2 + math.sin(i * 12.9898) for i in range(4095)))
    assert len(made.points) == 4095

    def cost() -> float:
        made.drawn = None
        begin = time.thread_time()
        draw(made, [Mark(1000, "a bf16")], 100, 20)
        return time.thread_time() - begin

    # 2.4 ms on a 2-core machine; the bound leaves room for a slower one
    assert min(cost() for _ in range(20)) < 0.010
