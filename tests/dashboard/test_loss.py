"""The loss panel: the curve with its figures; before the first step the checklist."""

from __future__ import annotations

import math

import pytest
from hypothesis import given

from tests.dashboard.views import HOSTILE, NOW, SIZES, any_view, assert_fits, role_of, started, step, texts, view
from tui3090.dashboard.panels import loss
from tui3090.dashboard.text import row_width
from tui3090.dashboard.view import View
from tui3090.records import Changed, Evaluated, Stage, State, StepRecord


def falling(steps: int = 100) -> list[StepRecord]:
    return [step(n, loss=1 - n / 200) for n in range(1, steps + 1)]


def evaluated(text: str = "", **changes: object) -> Evaluated:
    given_ = {"time": NOW, "step": 50, "loss": 0.447, "metrics": "acc 0.862", "text": text}
    return Evaluated(**given_ | changes)  # type: ignore[arg-type]


def test_the_whole_panel() -> None:
    change = Changed(time=NOW, step=51, technique="amp", old="off", new="bf16")
    records = falling()
    seen = view(started(), *records[:50], change, *records[50:], evaluated())
    assert loss.note(seen, NOW) == "raw · smoothed α 0.02"
    rows = texts(loss.rows(seen, 96, 10, NOW))
    assert len(rows) == 10
    weights = [0.98 ** (100 - n) for n in range(1, 101)]
    smooth = sum(weight * record.loss for weight, record in zip(weights, records, strict=True)) / sum(weights)
    assert f"{smooth:.4f}" == "0.6686"
    assert rows[0] == "now 0.5000   smooth 0.6686 ↘   best 0.5000 (100)   eval 0.4470 acc 0.862 (50)"
    assert all("┤" in row for row in rows[1:7])
    assert rows[1][9 + 43] == "┊"
    assert rows[7].strip() == "a bf16"
    assert rows[8].split() == ["step", "1", "20", "40", "60", "80", "100"]
    assert rows[9] == "grad 1.31   lr 3.82e-05   skipped 0"


def test_one_row() -> None:
    seen = view(started(), *falling(), evaluated())
    assert texts([loss.line(seen, 69, NOW)]) == ["now 0.5000   smooth 0.6686 ↘   best 0.5000 (100)   eval 0.4470 (50)"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_shown_as_such_and_counted(bad: float) -> None:
    seen = view(started(), step(1, loss=0.5), step(1, loss=bad, skipped="not finite", grad_norm=bad))
    rows = loss.rows(seen, 96, 10, NOW)
    assert texts(rows)[0] == f"now {bad}   not finite: 1 step   smooth 0.5000 ·   best 0.5000 (1)"
    assert role_of(rows, str(bad)) == "bad"
    assert texts(rows)[-1] == f"grad {bad}   lr 3.82e-05   skipped 1: not finite 1"


def test_when_no_loss_was_finite_there_is_no_smoothed_one() -> None:
    rows = texts(loss.rows(view(started(), step(1, loss=math.nan, skipped="not finite")), 96, 6, NOW))
    assert rows[:2] == ["now nan   not finite: 1 step", "  no finite loss so far"]


def test_a_window_without_labels_has_no_loss_and_says_what_may_be_the_cause() -> None:
    seen = view(started(), step(1), step(1, loss=math.nan, skipped="no labels"))
    rows = texts(loss.rows(seen, 110, 6, NOW))
    assert rows[0] == "now n/a: no labels   smooth 0.5000 ·   best 0.5000 (1)"
    assert rows[-1] == (
        "grad 1.31   lr 3.82e-05   skipped 1: no labels 1   no labels: a maximum length may cut the answers off"
    )


def test_skipped_steps_are_told_apart_and_the_loss_scale_is_shown() -> None:
    seen = view(
        started(),
        step(1, loss=math.nan, skipped="overflow", loss_scale=32768.0),
        step(1, loss=math.nan, skipped="overflow", loss_scale=16384.0, grad_norm=None),
    )
    rows = loss.rows(seen, 96, 6, NOW)
    assert texts(rows)[-1] == "grad n/a   lr 3.82e-05   skipped 2: overflow 2   loss scale 16 384"
    assert role_of(rows, "skipped 2") == "warn"


@pytest.mark.parametrize(("slope", "arrow"), [(-0.005, "↘"), (0.005, "↗"), (0.0, "→")])
def test_the_arrow_shows_where_the_smoothed_loss_goes(slope: float, arrow: str) -> None:
    seen = view(started(), *(step(n, loss=1 + slope * n) for n in range(1, 101)))
    assert f" {arrow} " in texts([loss.line(seen, 96, NOW)])[0]


def test_in_fewer_columns_eval_goes_without_the_recipes_own_figures() -> None:
    seen = view(started(), *falling(), evaluated())
    assert texts(loss.rows(seen, 76, 6, NOW))[0].endswith("   eval 0.4470 (50)")


def test_eval_without_labels() -> None:
    seen = view(started(), step(), evaluated(loss=None, metrics=""))
    assert texts(loss.rows(seen, 96, 6, NOW))[0].endswith("eval n/a: no labels (50)")


def test_what_the_model_wrote_has_two_rows_and_all_it_needs_when_zoomed() -> None:
    seen = view(started(), *falling(), evaluated("Once upon a time\nthere was a model\nthat wrote three lines."))
    assert texts(loss.rows(seen, 60, 18, NOW))[-3:-1] == [
        "model wrote (50)  Once upon a time",
        "                  there was a model",
    ]
    assert texts(loss.rows(seen, 60, 40, NOW))[-4:-1] == [
        "model wrote (50)  Once upon a time",
        "                  there was a model",
        "                  that wrote three lines.",
    ]
    assert not any("wrote" in row for row in texts(loss.rows(seen, 60, 10, NOW)))


def test_what_the_model_wrote_is_harmless_and_wide_characters_count_twice() -> None:
    seen = view(started(), *falling(), evaluated(HOSTILE))
    rows = loss.rows(seen, 60, 18, NOW)
    assert texts(rows)[-3] == "model wrote (50)  [/data/train] [b]x ␛[31m red"
    assert all(row_width(row) <= 60 for row in rows)
    assert texts(rows)[-2].strip().startswith("漢字🙂�yyy")


def test_the_marks_read_as_keys_and_values() -> None:
    changes = [
        Changed(time=NOW, step=10, technique="checkpointing", old=0, new=1),
        Changed(time=NOW, step=30, technique="accumulate", old=1, new=2),
        Changed(time=NOW, step=50, technique="accumulate", old=2, new=1),
        Changed(time=NOW, step=70, technique="lr", old=1.0, new=0.7),
        Changed(time=NOW, step=90, technique="something new", old=1, new="x"),
    ]
    rows = texts(loss.rows(view(started(), *falling(), *changes), 140, 10, NOW))
    assert " ".join(rows[-3].split()) == "c all + 2 - 1 [ × 0.7 something new x"


def test_the_checklist_before_the_first_step() -> None:
    seen = view(
        Stage(time=NOW - 4, name="torch", seconds=1.8, detail="2.13.0"),
        Stage(time=NOW - 3, name="train.py", seconds=0.2),
        Stage(time=NOW - 2, name="model"),
    )
    assert loss.note(seen, NOW) == "before the first step"
    assert texts(loss.rows(seen, 60, 10, NOW)) == [
        " ✓  torch              1.8 s   2.13.0",
        " ✓  train.py           0.2 s",
        " ▸  model              2.0 s",
        " ·  data",
        " ·  device",
        " ·  first step",
    ]
    assert texts([loss.line(seen, 60, NOW)]) == ["model  2.0 s"]
    assert texts([loss.line(View(), 60, NOW)]) == ["waiting for the first step"]


def test_the_checklist_tells_parameters_and_rows() -> None:
    seen = view(
        Stage(time=NOW, name="model", seconds=3.0), Stage(time=NOW, name="data", seconds=0.4), started(time=NOW)
    )
    assert texts(loss.rows(seen, 60, 10, NOW))[2:4] == [
        " ✓  model              3.0 s   124 439 808 parameters",
        " ✓  data               0.4 s   3 668 rows",
    ]


def test_a_failure_before_the_first_step_is_a_sentence() -> None:
    seen = view(
        Stage(time=NOW - 60, name="train.py"),
        State(time=NOW, state="failed", detail="train.py line 12: NameError: name 'nett' is not defined. Mend it."),
    )
    rows = loss.rows(seen, 40, 12, NOW)
    assert texts(rows) == [
        " ·  torch",
        " ▸  train.py    not finished",
        " ·  model",
        " ·  data",
        " ·  device",
        " ·  first step",
        "",
        "train.py line 12: NameError: name 'nett'",
        "is not defined. Mend it.",
    ]
    assert role_of(rows, "is not defined") == "bad"
    assert texts([loss.line(seen, 60, NOW)]) == ["train.py line 12: NameError: name 'nett' is not defined. Me…"]


def test_in_one_or_two_rows_the_figures_stay() -> None:
    seen = view(started(), *falling())
    assert texts(loss.rows(seen, 60, 1, NOW)) == ["now 0.5000   smooth 0.6686 ↘   best 0.5000 (100)"]
    assert len(loss.rows(seen, 60, 2, NOW)) == 2


@pytest.mark.parametrize("width", [1, 5, 30])
def test_what_stands_in_the_chart_s_place_fits(width: int) -> None:
    assert_fits(loss, view(started(), step(1, loss=math.nan)), width, 3, NOW)


@given(any_view(), SIZES)
def test_it_fits(seen: View, size: tuple[int, int]) -> None:
    assert_fits(loss, seen, *size, NOW)
