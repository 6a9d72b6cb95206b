"""A run folder from elsewhere: whatever stands in it, it is read to its end, painted harmlessly, and runs nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dashboard.views import HOSTILE, NOW, step
from tui3090.dashboard.app import Dashboard
from tui3090.dashboard.frame import CONTENTS, digit, paint
from tui3090.dashboard.layout import places
from tui3090.dashboard.source import FolderSource, writer_lives
from tui3090.dashboard.text import row_width
from tui3090.dashboard.view import Pending, View
from tui3090.headless import Reporter
from tui3090.lines import to_line
from tui3090.output import Tail
from tui3090.records import RECORD_TYPES, STATES, Available, Changed, Event, Stage, State, StepRecord
from tui3090.runlog import RecordReader, RunFolder, RunFolderError
from tui3090.settings import TECHNIQUES
from tui3090.show import name_of, view_of
from tui3090.summary import summary

NUMBERS = [
    "0", "1", "2", "-1", "5e-324", "1e-300", "1e308", "-1e308", "1e999", "-1e999", "NaN", "Infinity", '"nan"', '"inf"',
    "1e18", "9223372036854775807", "9223372036854775808", "-9223372036854775807", "1" + "0" * 400, "1" + "0" * 5000,
    "600", "3000", "0.5", str(NOW), str(NOW - 60), str(NOW + 1e9), "-62135596801",
]  # fmt: skip
STRINGS = [
    "", "x", HOSTILE, "\x00", "\ud800", "\x9b31m", "\x1b]0;owned\x07", "[/]", "[link=file:///]a[/link]", "\u2028",
    "\x1b[2J" * 4000, "漢" * 20_000, "a\r\nb", "\u202e\u200b", "e\u0301" * 300, "🏳️‍🌈" * 50, " " * 9000,
    *STATES, *(technique.name for technique in TECHNIQUES), "cuda:0", "cpu", "tokens", "overflow", "no labels",
    "warning", "amp=bf16 accumulate=2", "accumulate=" + "9" * 4000, "workers=-5 lr=×1e999 amp= = ==",
    "amp=fp16 " * 2000,
]  # fmt: skip
numbers = st.sampled_from(NUMBERS)
counts = st.sampled_from(["0", "1", "2", "600", "3000", "1000000000000000000", "9223372036854775807"])
strings = st.sampled_from(STRINGS).map(json.dumps)
anything = st.one_of(
    numbers, strings, st.sampled_from(["true", "false", "null", "[]", "{}", "[" * 3000 + "]" * 3000, '{"a":' * 3000])
)


@st.composite
def lines(draw: st.DrawFn) -> str:
    """A line that looks like a record: mostly the types are right and the values are not sensible."""
    kind = draw(st.sampled_from(sorted([*RECORD_TYPES, "step", "step", "reading"])))
    odd = draw(st.integers(0, 9))
    parts = [f'{{"type": "{kind}"']
    for field in fields(RECORD_TYPES[kind]):
        right = {"str": strings, "bool": st.sampled_from(["true", "false"]), "Value": anything, "int": counts}
        text = draw(anything if odd == 0 else right.get(str(field.type), numbers))
        if odd != 1 or draw(st.booleans()):
            parts.append(f'"{field.name}": {text}')
    return ", ".join(parts) + "}"


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A records.jsonl, cut, with foreign bytes in it and its lines in any order."""
    text = [line.encode("utf-8", "surrogatepass") for line in draw(st.lists(lines(), max_size=30))]
    text += draw(
        st.lists(st.sampled_from([b"\0" * 100, b"\xff\xfe", b"{}", b"null", b"[1", b"{" * 9000, b"\r"]), max_size=3)
    )
    draw(st.randoms(use_true_random=False)).shuffle(text)
    whole = b"\n".join(text) + draw(st.sampled_from([b"", b"\n"]))
    if draw(st.booleans()):
        whole = whole[: draw(st.integers(0, len(whole)))]
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(whole)))
        whole = (
            whole[:place] + draw(st.sampled_from([b"\0", b"\n", b'"', b"\x1b[31m", b"\xc3", b"9" * 30])) + whole[place:]
        )
    return whole


def read(folder: RunFolder) -> View:
    """The view of a folder, read to its end."""
    view = View(name=HOSTILE[:200], folder=HOSTILE[:200], again=HOSTILE[:200], live=False)
    reader = RecordReader(folder.records)
    while not reader.at_end:
        view.absorb(reader.read(1 << 16))
    return view


def assert_harmless(view: View, now: float) -> None:
    """Every panel in every form fits and shows nothing that a terminal could obey; so do summary and plain lines."""
    for width, height, zoomed in [(160, 50, ""), (80, 24, ""), (25, 8, ""), (100, 30, "loss"), (100, 30, "log")]:
        for name, place in places(width, height, zoomed).items():
            for row in paint(CONTENTS[name], digit(name), place, view, now):
                assert row_width(row) == place.width
                assert all(text.isprintable() for text, _ in row), row
    for line in summary(view):
        assert not [c for c in line if is_control(c)], line


def assert_bounded(view: View) -> None:
    """Nothing in a view grows with what is absorbed."""
    for name in ("stages", "available", "in_force", "pending", "skip_reasons"):
        assert len(getattr(view, name)) <= 64, name
    assert len(view.loss.points) <= 4096


@given(files(), st.sampled_from([NOW, NOW + 1e12, 0.0]), st.booleans())
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_any_records_are_read_and_painted(tmp_path: Path, content: bytes, now: float, live: bool) -> None:
    folder = RunFolder(tmp_path)
    folder.records.write_bytes(content)
    view = read(folder)
    view.live = live
    view.pending["amp"] = Pending("bf16", 0.0)
    assert_harmless(view, now)
    assert_bounded(view)
    said = list(Reporter(View(), every_s=0.0).lines(RecordReader(folder.records).read()))
    assert not [c for line in said for c in line if is_control(c)]


def is_control(char: str) -> bool:
    """Whether a terminal might obey it."""
    return ord(char) < 32 or 127 <= ord(char) < 160


def test_names_without_end_are_not_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.records.open("w") as file:
        for number in range(5000):
            file.write(to_line(Stage(time=NOW, name=f"stage {number}")))
            file.write(to_line(Available(time=NOW, technique=f"technique {number}", reason="x")))
            file.write(to_line(Changed(time=NOW, step=number, technique=f"technique {number}", old=0, new=1)))
            file.write(to_line(step(number, skipped=f"reason {number}", settings="x" * 100)))
    view = read(folder)
    assert_bounded(view)
    assert view.skipped == 5000
    assert_harmless(view, NOW)


def test_garbage_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.records.write_text(to_line(step(1)))
    with folder.records.open("ab") as file:
        file.truncate(1 << 40)  # a terabyte of zeros that takes no room
    reader = RecordReader(folder.records)
    records = []
    while not reader.at_end:
        records += reader.read()
    assert [type(record) for record in records] == [StepRecord]


INFO = st.one_of(
    st.binary(max_size=300),
    st.sampled_from(
        [
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b"\0" * 99,
            b'{"format": ' + b"9" * 5000 + b"}",
            b'{"format": "\\u001b[31m"}',
        ]
    ),
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("format", "name", "pid", "pid_started", "state", "recipe"), anything)
    ).map(lambda body: ("{" + ", ".join(f'"{k}": {v}' for k, v in body.items()) + "}").encode("utf-8", "replace")),
)


@given(INFO)
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_any_run_json_is_read_or_refused_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.records.write_text(to_line(step(1)))
    folder.info_file.write_bytes(content)
    assert writer_lives(folder) in (True, False)
    try:
        info, name = folder.read_info(), name_of(folder)
        again = shlex.split(view_of(folder).again)
        assert again[:2] + again[3:4] == ["tui3090", "run", "--resume"]
        assert len(again) == 5
    except RunFolderError as error:
        info, name = {}, str(error).replace(str(tmp_path), "")
        assert re.fullmatch(
            r" was written by a newer tui3090 \(format .{1,20}\): upgrade to read it\.", name, re.DOTALL
        )
    assert isinstance(info, dict)
    assert len(name) <= 200


def test_a_run_json_without_end_is_not_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.info_file.open("wb") as file:
        file.write(b'{"name": "x"}')
        file.truncate(1 << 40)
    assert folder.read_info() == {}


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.mkdir()


def _to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_suffix(".fifo"))
    path.symlink_to(path.with_suffix(".fifo"))


def _to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _to_itself(path: Path) -> None:
    path.symlink_to(path)


def _to_nothing(path: Path) -> None:
    path.symlink_to("/nowhere/at all")


IN_PLACE = [_fifo, _directory, _to_a_fifo, _to_zeros, _to_itself, _to_nothing]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put", IN_PLACE)
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, put: Callable[[Path], None]) -> None:
    folder = RunFolder(tmp_path)
    put(folder.records)
    with pytest.raises(RunFolderError, match="is not a run folder"):
        RunFolder.find(tmp_path)
    reader = RecordReader(folder.records)
    assert (reader.read(), reader.at_end) == ([], True)
    put(folder.output)
    assert Tail(folder.output).read() == []
    put(folder.info_file)
    assert folder.read_info() == {}
    assert not writer_lives(folder)


@pytest.mark.parametrize("put", IN_PLACE)
def test_show_without_a_terminal_says_what_there_is(tmp_path: Path, put: Callable[[Path], None]) -> None:
    folder = RunFolder(tmp_path)
    folder.records.write_text(to_line(step(7)) + to_line(State(time=NOW, state="failed", detail=HOSTILE)))
    put(folder.info_file)
    put(folder.output)
    done = subprocess.run(
        [sys.executable, "-m", "tui3090", "show", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "failed at step 7/6 000" in done.stdout
    assert "\x1b" not in done.stdout
    assert len(done.stdout.splitlines()) == 5


async def test_show_on_a_terminal_paints_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for path in (folder.info_file, folder.output):
        os.mkfifo(path)
    marked = Event(time=NOW, level="warning", source="[b]", text="[/data/train] [link=x]y[/] \x1b]0;owned\x07")
    folder.records.write_text(
        "".join(map(to_line, [marked, step(3), State(time=NOW, state="finished", detail=HOSTILE)]))
    )
    app = Dashboard(FolderSource(folder), View(name="\ud800" + HOSTILE[:200], folder=str(tmp_path), live=False))
    async with app.run_test(size=(120, 40)) as pilot:
        while not app._view.over:
            await pilot.pause(0.05)
        await pilot.pause(0.6)
        shown = app.export_screenshot()
        assert "owned" in shown
        assert not [c for c in shown if is_control(c) and c != "\n"]
        await pilot.press("x", "q")
    (picture,) = tmp_path.glob("*.svg")
    assert "owned" in picture.read_text("utf-8")


def test_only_the_names_of_folders_that_can_be_looked_at_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that belongs to somebody else, one that is a file, one with a FIFO, and ours."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    ours = runs / "ours\x1b[31m"
    for name in ("locked", "fifo", ours.name):
        (runs / name).mkdir(parents=True)
    (runs / "file").write_text("")
    os.mkfifo(runs / "fifo" / "records.jsonl")
    for name in ("locked", ours.name):
        (runs / name / "records.jsonl").write_text("")
    stat = Path.stat

    def refused(path: Path, **options: bool) -> os.stat_result:
        if path.parent.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    assert RunFolder.find(None).path == Path("runs") / ours.name
    with pytest.raises(RunFolderError, match="is not a run folder"):
        RunFolder.find(runs / "locked")


@given(
    st.lists(
        st.one_of(st.binary(max_size=200), st.sampled_from([b"\x1b[" + b"0" * 5000, b"\x1b]" * 3000, b"\r" * 9, b"\n"]))
    )
)
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_any_output_is_shown_harmlessly(tmp_path: Path, written: list[bytes]) -> None:
    log = tmp_path / "output.log"
    log.write_bytes(b"")
    tail = Tail(log)
    view = View()
    for piece in written:
        with log.open("ab") as file:
            file.write(piece)
        view.printed(tail.read(), NOW)
        view.unfinished = tail.unfinished
    assert_harmless(view, NOW)
