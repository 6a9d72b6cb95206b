"""A record as a line of JSON, and the record that a line stands for.

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any

from tui3090.records import RECORD_TYPES, Record

_KEYS = {
    cls: [(field.name, f', "{field.name}": ', field.default) for field in fields(cls)] for cls in RECORD_TYPES.values()
}
"""A record's fields: name, as a key in its line, default."""

_string = json.JSONEncoder(ensure_ascii=False).encode

LONGEST_TEXT = 10_000
"""Characters of a string that is read; of a longer one the beginning is taken."""
MOST = 2**63 - 1
"""The greatest whole number that is read: greater ones are nobody's count, and no float holds some of them."""

_ACCEPTED: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "Value": (str, int, float, bool),
    "int | None": (int, NoneType),
    "float | None": (float, int, NoneType),
}
_READ = {cls: {field.name: _ACCEPTED[str(field.type)] for field in fields(cls)} for cls in RECORD_TYPES.values()}
"""A record's fields and the types of their JSON values."""
_LEFT_OUT: dict[type[Record], dict[str, Any]] = {
    cls: {f.name: f.default if f.default is not MISSING else "" if f.type == "str" else None for f in fields(cls)}
    for cls in RECORD_TYPES.values()
}
"""What a field is that was left out: its default, else empty or unknown."""
_NEEDED = {
    cls: [name for name, empty in left_out.items() if type(empty) not in _READ[cls][name]]
    for cls, left_out in _LEFT_OUT.items()
}
"""The fields that can be neither."""
_SETTERS = {cls: [(field.name, getattr(cls, field.name).__set__) for field in fields(cls)] for cls in _READ}
"""The functions that set a record's slots: a frozen dataclass's own way to fill them takes five times as long."""
_NOT_FINITE = ("nan", "inf", "-inf")


def to_line(record: Record) -> str:
    """The record as a JSON object on a line, its type first; unknown numbers and empty strings are left out.

    JSON has no NaN and no infinities: they are written as the strings 'nan', 'inf' and '-inf'. Put together by hand: a
    run may write hundreds a second, training waits while it does, and json.dumps takes twice as long.
    """
    parts = [f'{{"type": "{record.type}"']
    for name, key, default in _KEYS[type(record)]:
        value = getattr(record, name)
        if (value is None or value == "") and default in (MISSING, value):
            continue
        if value is None:
            text = "null"
        elif isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, str):
            text = _string(value)
        elif isinstance(value, int) or math.isfinite(value):
            text = repr(value)
        else:
            text = f'"{value}"'
        parts.append(key + text)
    parts.append("}\n")
    return "".join(parts)


def from_object(body: object) -> Record | None:
    """The record that a JSON object stands for. None: it is not one of ours, or misses something it must have.

    Fields that this version does not know, and values of a wrong type or out of all bounds (whole numbers are counts),
    are passed over. A log may come from anywhere: whatever stands in it, a record that was read has the types of its
    fields and bounded values. Written for speed, for there may be a hundred thousand lines.
    """
    kind = body.get("type") if isinstance(body, dict) else None
    cls = RECORD_TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None or not isinstance(body, dict):
        return None
    known = _READ[cls]
    values = _LEFT_OUT[cls].copy()
    for name, value in body.items():
        sort = type(value)
        if sort in known.get(name, ()):
            if sort is int and not 0 <= value <= MOST and not (float in known[name] and -MOST <= value <= MOST):
                continue
            values[name] = value[:LONGEST_TEXT] if sort is str else value
        elif sort is str and value in _NOT_FINITE and float in known.get(name, ()):
            values[name] = float(value)
    for name in _NEEDED[cls]:
        if values[name] is None:
            return None
    if values.get("steps") == 0:
        return None
    record = object.__new__(cls)
    for name, put in _SETTERS[cls]:
        put(record, values[name])
    return record


def fits(value: object, kind: str) -> bool:
    """Whether a JSON value can stand in a field of that type; a truth value is no number."""
    return isinstance(value, _ACCEPTED[kind]) and (not isinstance(value, bool) or kind in ("bool", "Value"))
