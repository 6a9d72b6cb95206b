"""A long run: what is kept of it does not grow, and its log is read once from start to end."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import fields, replace
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.dashboard.views import NOW, step
from tui3090 import runlog
from tui3090.dashboard.curve import POINTS
from tui3090.dashboard.frame import CONTENTS, paint
from tui3090.dashboard.layout import places
from tui3090.dashboard.view import View
from tui3090.files import open_regular
from tui3090.lines import to_line
from tui3090.records import Changed, Evaluated, Event, Reading, Record
from tui3090.runlog import LONGEST_LINE, RecordReader, RunFolder


def some(number: int) -> list[Record]:
    """What a run may emit around a step."""
    return [
        replace(step(1), step=number, time=NOW + number, loss=2.0 + number % 7, settings=f"workers={number % 3}"),
        Reading(time=NOW + number, util=0.5),
        Changed(time=NOW + number, step=number, technique="workers", old=0, new=1),
        Evaluated(time=NOW + number, step=number, loss=1.0),
        Event(time=NOW + number, level="warning", source="run", text=f"event {number}"),
    ]


def held(view: View) -> dict[str, int]:
    """How many things each part of a view holds."""
    parts = {field.name: getattr(view, field.name) for field in fields(view)} | {"points": view.loss.points}
    return {name: len(part) for name, part in parts.items() if isinstance(part, Sized)}


def test_what_is_kept_does_not_grow_with_the_run() -> None:
    view = View(name="x", folder="y")
    for number in range(1, 20_001):
        view.absorb(some(number))
        view.printed([f"line {number}"], NOW)
    grown = held(view)
    for number in range(20_001, 30_001):
        view.absorb(some(number))
        view.printed([f"line {number}"], NOW)
    assert {name: n for name, n in held(view).items() if name != "points"} == {
        name: n for name, n in grown.items() if name != "points"
    }
    assert max(grown.values()) <= POINTS
    assert held(view)["points"] <= POINTS
    for name, place in places(160, 50, "").items():
        assert len(paint(CONTENTS[name], "", place, view, NOW)) == place.height


def test_the_points_of_a_curve_are_halved_whenever_they_are_too_many() -> None:
    view = View()
    most = 0
    for number in range(1, 60_001):
        view.loss.add(number, float(number))
        most = max(most, len(view.loss.points))
    assert most < POINTS
    assert len(view.loss.points) >= POINTS // 4
    assert [point.step for point in view.loss.points] == sorted(point.step for point in view.loss.points)
    assert (view.loss.points[0].low, view.loss.points[-1].high) == (1.0, 60_000.0)


def test_a_log_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.records.write_text("".join(to_line(step(number)) for number in range(1, 5001)))
    asked: list[int] = []

    def opened(path: Path) -> BinaryIO:
        file = open_regular(path)
        read = file.read

        class Counting:
            """The file, with what is read of it counted."""

            def __enter__(self) -> Counting:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def seek(self, place: int) -> None:
                file.seek(place)

            def read(self, most: int) -> bytes:
                block = read(most)
                asked.append(len(block))
                return block

        return Counting()  # type: ignore[return-value]

    monkeypatch.setattr(runlog, "open_regular", opened)
    reader = RecordReader(folder.records)
    count = 0
    while not reader.at_end:
        count += len(reader.read(10_000))
        assert len(reader._rest) <= LONGEST_LINE
    assert count == 5000
    assert sum(asked) == folder.records.stat().st_size
