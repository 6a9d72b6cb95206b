"""Cutting, padding and figures, by terminal cells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tui3090.dashboard import text
from tui3090.dashboard.text import Row, row_text, row_width


@pytest.mark.parametrize(
    ("given_text", "shown"),
    [
        ("[/data/train] [b]x", "[/data/train] [b]x"),
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("a\tb\r\nc\x00", "a b  c "),
        ("abc\u202etxt\u200b", "abc�txt�"),
        ("日本 é", "日本 é"),
        ("\ud800", "�"),
    ],
)
def test_text_from_outside_is_shown_and_never_obeyed(given_text: str, shown: str) -> None:
    assert text.clean(given_text) == shown


@given(st.text())
def test_clean_text_can_not_move_the_cursor(anything: str) -> None:
    assert text.clean(anything).isprintable()


def test_cutting_counts_cells_and_says_that_something_is_left_off() -> None:
    assert text.fit("abcdef", 4) == "abc…"
    assert text.fit("日本語", 5) == "日本…"
    assert text.fit("日本語", 4) == "日… "
    assert text.fit("ab", 4) == "ab  "
    assert text.fit("ab", 4, right=True) == "  ab"
    assert text.fit("ab", 0) == ""


def test_a_row_that_is_too_long_is_cut_in_the_piece_that_does_not_fit() -> None:
    row: Row = [("abc", "good"), ("def", "bad")]
    assert text.fit_row(row, 8) == [("abc", "good"), ("def", "bad"), ("  ", "plain")]
    assert text.fit_row(row, 6) == row
    assert text.fit_row(row, 5) == [("abc", "good"), ("d…", "bad")]
    assert text.fit_row(row, 3) == [("ab…", "good")]
    assert text.fit_row(row, 0) == []


@given(st.lists(st.tuples(st.text(max_size=12).map(text.clean), st.just("plain")), max_size=5), st.integers(0, 40))
def test_a_fitted_row_is_exactly_as_wide_as_asked(row: Row, cells: int) -> None:
    assert row_width(text.fit_row(row, cells)) == cells


def test_two_ends_of_a_row_and_what_goes_when_there_is_no_room() -> None:
    assert row_text(text.spread([("left", "plain")], [("right", "dim")], 12)) == "left   right"
    assert row_text(text.spread([("left", "plain")], [("right", "dim")], 9)) == "left     "


@pytest.mark.parametrize(
    ("value", "shown"),
    [(12345, "12 345"), (999, "999"), (None, "n/a"), (float("nan"), "nan"), (float("inf"), "inf")],
)
def test_numbers_have_spaces_between_thousands(value: float | None, shown: str) -> None:
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.0634, "1.06"), (15480.0, "15 500"), (0.01234, "0.0123"), (3.82e-5, "3.82e-05"), (0.0, "0"), (None, "n/a")],
)
def test_significant_digits(value: float | None, shown: str) -> None:
    assert text.rounded(value) == shown


def test_units() -> None:
    assert text.gib(13.9 * text.GIB) == "13.90"
    assert text.gib(None) == "n/a"
    assert text.percent(0.469, 1) == "46.9 %"
    assert text.percent(None) == "n/a"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.42, "0.4 s"),
        (9.96, "10 s"),
        (59.7, "1 min"),
        (918, "15 min 18 s"),
        (12060, "3 h 21 min"),
        (187_200, "2 d 4 h"),
        (None, "n/a"),
        (float("nan"), "n/a"),
        (-1, "n/a"),
    ],
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert text.duration(seconds) == shown


def test_a_time_that_is_none_is_unknown() -> None:
    assert text.clock(float("inf")) == "n/a"
    assert text.clock(1e300) == "n/a"


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (80, "CUDA graph replay needs an NVIDIA card, and training runs on the CPU."),
        (26, "needs an NVIDIA card"),
        (10, "needs an…"),
    ],
)
def test_a_sentence_in_brief(cells: int, told: str) -> None:
    assert text.brief("CUDA graph replay needs an NVIDIA card, and training runs on the CPU.", cells) == told


def test_a_sentence_in_brief_leaves_out_what_for() -> None:
    assert (
        text.brief("Prefetch needs an NVIDIA card to copy to, and training runs on the CPU.", 26)
        == "needs an NVIDIA card"
    )
