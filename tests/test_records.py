"""Records as JSON lines: lossless, strict JSON, and readable when they come from elsewhere."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tui3090.lines import LONGEST_TEXT, MOST, from_object, to_line
from tui3090.records import RECORD_TYPES, Event, Record, StepRecord

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "str": st.text(),
    "int": st.integers(1, MOST),
    "float": st.floats(),
    "bool": st.booleans(),
    "Value": st.one_of(st.booleans(), st.integers(0, MOST), st.floats(allow_nan=False), st.text(min_size=1)),
}


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Any record."""
    cls = RECORD_TYPES[draw(st.sampled_from(sorted(RECORD_TYPES)))]
    given = {}
    for field in fields(cls):
        kind, _, optional = str(field.type).partition(" | ")
        given[field.name] = draw(st.one_of(VALUES[kind], st.none()) if optional else VALUES[kind])
    return cls(**given)


def _refused(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def equal(a: Any, b: Any) -> bool:
    """Equality in which nan equals nan."""
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


@given(records())
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    line = to_line(record)
    assert line.endswith("}\n")
    assert line.count("\n") == 1
    again = from_object(json.loads(line, parse_constant=_refused))
    assert type(again) is type(record)
    for field in fields(record):
        before, after = getattr(record, field.name), getattr(again, field.name)
        if field.name in ("new", "old", "value") and isinstance(before, float) and not math.isfinite(before):
            continue  # a technique has no such value
        assert equal(before, after), field.name


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=10,
)


@given(
    st.one_of(
        JSON,
        st.builds(
            lambda kind, body: {**body, "type": kind},
            st.sampled_from([*RECORD_TYPES, "newer"]),
            st.dictionaries(st.sampled_from(["time", "step", "loss", "level", "technique", "unheard", "type"]), JSON),
        ),
    )
)
def test_whatever_stands_in_a_line_is_a_record_or_none(body: Any) -> None:
    record = from_object(body)
    assert record is None or isinstance(record, Record)


def test_what_a_newer_version_added_is_passed_over_and_wrong_types_too() -> None:
    line = json.loads(to_line(_step()))
    assert from_object({**line, "added_later": 5}) == _step()
    assert from_object({**line, "grad_norm": "much"}) == from_object(
        {k: v for k, v in line.items() if k != "grad_norm"}
    )
    assert from_object({**line, "step": True}) is None
    assert from_object({k: v for k, v in line.items() if k != "step"}) is None
    assert from_object({**line, "type": "nothing"}) is None


def test_what_is_out_of_all_bounds_is_passed_over() -> None:
    line = json.loads(to_line(_step()))
    for number in (-1, MOST + 1, 10**400):
        assert from_object({**line, "samples": number}) is None
        assert from_object({**line, "planned_steps": number}) == replace(_step(), planned_steps=None)
    assert from_object({**line, "steps": 0}) is None
    assert from_object({**line, "loss": -5}) == replace(_step(), loss=-5)
    for number in (-(10**400), 10**400):
        assert from_object({**line, "loss": number}) is None
    read = from_object(json.loads(to_line(Event(time=1.0, level="info", source="x", text="y" * 20_000))))
    assert isinstance(read, Event)
    assert read.text == "y" * LONGEST_TEXT


def _step() -> StepRecord:
    return StepRecord(
        time=1.0,
        step=1,
        planned_steps=10,
        epoch=0.1,
        micro_batches=1,
        loss=2.5,
        lr=1e-3,
        grad_norm=1.0,
        samples=8,
        tokens=1024,
        seconds=0.5,
        wait_s=0.1,
        stall_s=0.05,
    )
