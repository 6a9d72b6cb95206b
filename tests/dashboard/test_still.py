"""Panels that stand still: while what they depend on is the same, so is all that they would show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dashboard.views import ANY_RECORD, GIB, NOW, gain, started, step, view
from tui3090.dashboard.frame import CONTENTS, STILL, unframed
from tui3090.dashboard.layout import Place
from tui3090.dashboard.view import Pending, View
from tui3090.records import Changed, Event, Phases, Reading, Record, State

PLACES = [Place(0, 0, 80, 1, "line"), Place(0, 0, 78, 6, "box"), Place(0, 0, 160, 24, "ruled")]
TRAINING = State(time=NOW, state="training")
CHANGED = Changed(time=NOW, step=3, technique="amp", old="off", new="bf16")


def _answer(view: View) -> None:
    view.answer, view.answer_time = "Keys locked.", NOW + 1


def _lock(view: View) -> None:
    view.locked = not view.locked


def _press(view: View) -> None:
    view.pending["accumulate"] = Pending(2, NOW)


def _send(view: View) -> None:
    view.pending = {name: replace(pending, sent=True) for name, pending in view.pending.items()}


def _cancel(view: View) -> None:
    view.pending.clear()


def _stop(view: View) -> None:
    view.stop_asked = True


def _print(view: View) -> None:
    view.printed(["Map: 100 %"], NOW)


def _progress(view: View) -> None:
    view.unfinished += "#"


def _leave_it(view: View) -> None:
    view.live = False


BY_HAND = [_answer, _lock, _press, _send, _cancel, _stop, _print, _progress, _leave_it]
HAPPENINGS: st.SearchStrategy[Any] = st.one_of(
    ANY_RECORD,
    st.builds(step, st.integers(1, 60), seconds=st.sampled_from([0.5, 2.0])),
    st.sampled_from([TRAINING, CHANGED, *BY_HAND]),
)


def happen(view: View, what: Any) -> None:
    if isinstance(what, Record):
        view.absorb([what])
    else:
        what(view)


def looks(view: View, now: float) -> dict[str, tuple[Any, list[Any]]]:
    """What each panel depends on, and what it shows at several places."""
    return {
        name: (still.depends(view, now), [unframed(CONTENTS[name], "1", place, view, now) for place in PLACES])
        for name, still in STILL.items()
    }


@given(st.lists(st.tuples(HAPPENINGS, st.sampled_from([0.0, 0.5, 7.0])), max_size=40))
def test_the_same_dependence_the_same_rows(happened: list[tuple[Any, float]]) -> None:
    seen, now = view(started(), TRAINING), NOW
    before = looks(seen, now)
    for what, seconds in happened:
        happen(seen, what)
        now += seconds
        after = looks(seen, now)
        for name, (depends, rows) in after.items():
            if depends is not None and depends == before[name][0]:
                assert rows == before[name][1], name
        before = after


def test_a_line_being_printed_is_no_longer_now_when_nothing_may_write_it() -> None:
    seen = view(started(), TRAINING)
    _progress(seen)
    before = looks(seen, NOW)["log"]
    _leave_it(seen)
    after = looks(seen, NOW)["log"]
    assert before[1] != after[1]
    assert before[0] != after[0]


def test_a_change_is_told_as_it_is_measured() -> None:
    """Every window after it moves its row, and the gain at the end."""
    seen = view(started(), TRAINING, *(step(n, seconds=0.5) for n in range(1, 60)), CHANGED)
    told = []
    for n in range(60, 120):
        before = looks(seen, NOW)["changes"]
        seen.absorb([step(n, seconds=0.25)])
        after = looks(seen, NOW)["changes"]
        assert (after[0] != before[0]) or after[1] == before[1]
        told.append(after[0] != before[0])
    assert seen.gains
    assert sum(told) >= 20
    assert not told[-1]


@pytest.mark.parametrize(
    "record", [step(61), Reading(time=NOW, allocated=GIB), Phases(time=NOW, step=61, seconds=0.5, forward_s=0.4)]
)
def test_the_steady_stream_leaves_them_alone(record: Record) -> None:
    """A frame in which nothing but that came makes none of them anew."""
    seen = view(
        started(),
        TRAINING,
        step(60),
        Event(time=NOW, level="info", source="run", text="x"),
        gain(3, "amp", "off", "bf16"),
    )
    before = {name: still.depends(seen, NOW) for name, still in STILL.items()}
    seen.absorb([record])
    assert {name: still.depends(seen, NOW + 0.5) for name, still in STILL.items()} == before
    assert None not in before.values()
