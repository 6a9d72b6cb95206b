"""Views for the panels' tests: records with round figures, and records of which anything may be missing or hostile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

from hypothesis import strategies as st

from tui3090.dashboard.text import Row, row_text, row_width
from tui3090.dashboard.view import View
from tui3090.records import (
    STATES,
    Activations,
    Changed,
    Evaluated,
    Event,
    Gain,
    Phases,
    Profiled,
    Reading,
    Record,
    Stage,
    Started,
    State,
    StepRecord,
)
from tui3090.settings import TECHNIQUES, Value

NOW = 1_000_000_000.0
GIB = 1 << 30
ROLES = {"plain", "dim", "bold", "good", "warn", "bad", "accent", "key", "raw", "smooth"}
HOSTILE = "[/data/train] [b]x \x1b[31m\tred\r\n漢字🙂‮" + "y" * 10_000


def started(**changes: Any) -> Started:
    given: dict[str, Any] = {
        "time": NOW - 900,
        "model": "GPT",
        "parameters": 124_439_808,
        "trainable": 124_439_808,
        "weights_dtype": "float32",
        "rows": 3668,
        "eval_rows": 408,
        "batch_size": 16,
        "epochs": 3,
        "device": "cuda:0",
        "device_name": "RTX 3090",
        "device_uuid": "GPU-1",
        "memory": 24 * GIB,
        "unit": "tokens",
        "torch": "2.13.0",
        "settings": "",
    }
    return Started(**given | changes)


def step(number: int = 1, **changes: Any) -> StepRecord:
    given: dict[str, Any] = {
        "time": NOW - 0.5,
        "step": number,
        "planned_steps": 6000,
        "epoch": 0.5,
        "micro_batches": 2,
        "loss": 0.5,
        "lr": 3.82e-5,
        "grad_norm": 1.31,
        "samples": 32,
        "tokens": 16_000,
        "seconds": 1.0,
        "wait_s": 0.3,
        "stall_s": 0.1,
    }
    return StepRecord(**given | changes)


def gain(at: int, technique: str, old: Value, new: Value, **changes: Any) -> Gain:
    """AMP's on a 3090, as the README draws it."""
    given_: dict[str, Any] = {
        "time": NOW,
        "step": at,
        "technique": technique,
        "old": old,
        "new": new,
        "verdict": "faster",
        "noise": 0.01,
        "windows_before": 20,
        "windows_after": 20,
        "unit": "tokens",
        "rate_before": 10_780.0,
        "rate_after": 15_450.0,
        "step_s_before": 0.76,
        "step_s_after": 0.53,
        "peak_before": round(16.5 * GIB),
        "peak_after": round(12.4 * GIB),
        "stall_before": 0.004,
        "stall_after": 0.006,
        "flops_s_before": 23.2e12,
        "flops_s_after": 33.3e12,
        "mfu_before": 0.652,
        "mfu_after": 0.469,
        "tensor_core_before": None,
        "tensor_core_after": None,
        "loss": "same",
    }
    return Gain(**given_ | changes)


def view(*records: Record, **changes: Any) -> View:
    seen = View(**changes)
    seen.absorb(records)
    return seen


def texts(rows: Sequence[Row]) -> list[str]:
    """Rows as they read, without roles and the padding at their ends."""
    return [row_text(row).rstrip() for row in rows]


def role_of(rows: Sequence[Row], words: str) -> str:
    """The role in which `words` are shown."""
    return next(role for row in rows for text, role in row if words in text)


def assert_fits(panel: ModuleType, seen: View, width: int, height: int, now: float) -> None:
    """The promise of every panel: whatever the view, it fits, and nothing in it can move the cursor."""
    rows = panel.rows(seen, width, height, now)
    one = panel.line(seen, width, now)
    assert len(rows) <= height
    for row in [*rows, one]:
        assert row_width(row) <= width, row
        assert {role for _, role in row} <= ROLES
        assert all(text.isprintable() for text, _ in row), row
    assert panel.note(seen, now).isprintable()


_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(0, 1 << 45),
    "float": st.one_of(
        st.floats(0, 1e4), st.sampled_from([0.0, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"), -1.0])
    ),
    "bool": st.booleans(),
    "str": st.sampled_from(["", "power", "漢字 [b]", HOSTILE]),
}
_VALUES |= {f"{kind} | None": st.one_of(st.none(), values) for kind, values in _VALUES.items()}


def _any(kind: type[Record], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{f.name: _VALUES[str(f.type)] for f in fields(kind) if f.name not in given} | given)


_TIME = st.one_of(st.floats(NOW - 200, NOW + 5), _VALUES["float"])
_CHANGED = st.sampled_from([(technique.name, value) for technique in TECHNIQUES for value in technique.values])
ANY_RECORD: st.SearchStrategy[Record] = st.one_of(
    _any(Started, device=st.sampled_from(["cpu", "cuda:0"]), unit=st.sampled_from(["tokens", "samples"])),
    _any(StepRecord, time=_TIME, step=st.integers(0, 3000), steps=st.integers(1, 50)),
    _any(Reading, time=_TIME),
    _any(Phases, time=_TIME),
    _any(Profiled, time=_TIME),
    _any(Activations, time=_TIME, layers=st.sampled_from(["", HOSTILE, "5 a\n-1 b\nnan c\n" + "9" * 5000])),
    _any(Evaluated, time=_TIME),
    _any(Event, time=_TIME),
    _any(Stage, time=_TIME),
    _any(State, time=_TIME, state=st.sampled_from(STATES)),
    st.builds(
        lambda gain, change, verdict: replace(
            gain,
            technique=change[0],
            old=change[1],
            new=change[1],
            verdict=verdict,
            rate_before=gain.rate_before or 1.0,
        ),
        _any(Gain, old=st.just(0), new=st.just(0), step=st.integers(0, 30)),
        _CHANGED,
        st.sampled_from(["faster", "slower", "same", "noisy", HOSTILE]),
    ),
    st.builds(
        lambda at, change: Changed(time=NOW, step=at, technique=change[0], old=change[1], new=change[1]),
        st.integers(0, 30),
        _CHANGED,
    ),
)


@st.composite
def any_view(draw: st.DrawFn) -> View:
    """A view of any records, in any order."""
    seen = View(live=draw(st.booleans()))
    seen.absorb(draw(st.lists(ANY_RECORD, max_size=25)))
    seen.printed(draw(st.lists(_VALUES["str"], max_size=3)), draw(st.one_of(st.none(), _TIME)))
    return seen


SIZES = st.tuples(st.integers(1, 250), st.integers(1, 250))
