"""The log: events and output in one order, newest first, and nothing in it that a terminal would obey."""

from __future__ import annotations

import time

import pytest
from hypothesis import given

from tests.dashboard.views import HOSTILE, NOW, SIZES, any_view, assert_fits, role_of, texts, view
from tui3090.dashboard.panels import log
from tui3090.dashboard.text import row_width
from tui3090.dashboard.view import PRINTED, View
from tui3090.records import Event


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def event(ago: float, text: str, source: str = "train", level: str = "info") -> Event:
    return Event(time=NOW - ago, level=level, source=source, text=text)


def test_events_and_output_are_merged_newest_first() -> None:
    seen = view(event(30, "step 1 400"), event(10, "accumulation 1 → 2", "key"))
    seen.printed(["Map: 100 %"], NOW - 20)
    assert texts(log.rows(seen, 60, 5, NOW)) == [
        "01:46:30 key      accumulation 1 → 2",
        "01:46:20 output   Map: 100 %",
        "01:46:10 train    step 1 400",
    ]
    assert texts([log.line(seen, 60, NOW)]) == ["01:46 key accumulation 1 → 2"]
    assert texts(log.rows(seen, 60, 1, NOW)) == ["01:46:30 key      accumulation 1 → 2"]


def test_warnings_are_counted_and_marked() -> None:
    seen = view(event(2, "fine"), event(1, "watch out", level="warning"), event(0, "broken", level="error"))
    assert log.note(seen, NOW) == "l unfolds · 3 lines, 2 warnings"
    rows = log.rows(seen, 60, 5, NOW)
    assert (role_of(rows, "watch out"), role_of(rows, "broken"), role_of(rows, "fine")) == ("warn", "bad", "plain")
    assert log.note(view(event(0, "fine")), NOW) == "l unfolds · 1 line"


def test_a_line_printed_again_stands_once_with_its_count() -> None:
    seen = View()
    seen.printed(["UserWarning: x", "  warnings.warn(x)"] * 3 + ["", "done"], NOW)
    assert texts(log.rows(seen, 60, 5, NOW)) == [
        "01:46:40 output   done",
        "01:46:40 output     warnings.warn(x) (3 times)",
        "01:46:40 output   UserWarning: x (3 times)",
    ]
    assert texts(log.rows(seen, 40, 3, NOW))[1] == "01:46:40 output     warnings.… (3 times)"


def test_the_same_event_in_a_row_stands_once_and_apart_twice() -> None:
    seen = view(event(4, "overflow"), event(3, "other"), event(2, "overflow"), event(1, "overflow"))
    assert [text[18:] for text in texts(log.rows(seen, 60, 5, NOW))] == ["overflow (2 times)", "other", "overflow"]


def test_what_is_being_printed_comes_first_and_of_a_progress_bar_the_last_state() -> None:
    seen = view(event(0, "now"))
    seen.unfinished = "10 %\r20 %\r30 %"
    assert texts(log.rows(seen, 60, 5, NOW)) == ["now      output   30 %", "01:46:40 train    now"]


def test_output_of_unknown_time_comes_last() -> None:
    seen = view(event(3000, "old"))
    seen.printed(["from a file"], None)
    assert texts(log.rows(seen, 60, 5, NOW)) == ["00:56:40 train    old", "         output   from a file"]


def test_kept_output_is_bounded() -> None:
    seen = View()
    seen.printed([f"line {i}" for i in range(PRINTED + 5)], NOW)
    assert len(seen.output) == PRINTED
    assert next(iter(seen.output)) == "line 5"


def test_hostile_text_is_shown_and_not_obeyed() -> None:
    seen = view(event(0, HOSTILE, source="\x1b[2J漢字漢字漢字"))
    (row,) = log.rows(seen, 60, 5, NOW)
    assert row_width(row) == 60
    assert texts([row]) == ["01:46:40 ␛[2J漢…  [/data/train] [b]x ␛[31m red 漢字🙂�yyyyy…"]


def test_in_few_columns_time_and_source_go() -> None:
    seen = view(event(0, "a sentence that is long"))
    assert texts(log.rows(seen, 30, 1, NOW)) == ["01:46:40 a sentence that is l…"]
    assert texts(log.rows(seen, 20, 1, NOW)) == ["a sentence that is…"]


def test_with_nothing_to_tell() -> None:
    assert log.note(View(), NOW) == "l unfolds · 0 lines"
    assert texts(log.rows(View(), 60, 5, NOW)) == ["nothing yet"]


@given(any_view(), SIZES)
def test_it_fits(seen: View, size: tuple[int, int]) -> None:
    assert_fits(log, seen, *size, NOW)
