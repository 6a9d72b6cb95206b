"""The run folder: what is written is read again, whatever happened to it meanwhile."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.test_records import _step as step
from tui3090 import own
from tui3090.records import Event, StepRecord
from tui3090.runlog import LONGEST_LINE, RecordReader, RunFolder, RunFolderError, RunLog


def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create("train", tmp_path / "run")


def test_records_are_read_as_they_were_written_and_followed_as_they_come(tmp_path: Path) -> None:
    run = folder(tmp_path)
    log, reader = RunLog(run), RecordReader(run.records)
    event = Event(time=1.0, level="info", source="run", text="[/b] ünïcode \x1b[31m\n")
    log.put(event)
    log.put(step())
    log.close()
    assert reader.read() == [event, step()]
    assert reader.read() == []
    again = RunLog(run)
    again.put(replace(step(), step=2))
    again.close()
    assert [r.step for r in reader.read() if isinstance(r, StepRecord)] == [2]


def test_many_records_are_written_in_pieces_and_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between pieces it rests, but no longer than records are gathered for; closing waits for no rest."""
    monkeypatch.setattr(own, "HELD_S", 0.0)
    run = folder(tmp_path)
    log = RunLog(run)
    log.gather_s = 0.05
    rests: list[float] = []
    wait = log._closing.wait
    monkeypatch.setattr(log._closing, "wait", lambda seconds: rests.append(seconds) or wait(seconds))
    for number in range(100):
        log.put(replace(step(), step=number))
    until = time.monotonic() + 30
    while run.records.read_bytes().count(b"\n") < 100:
        assert time.monotonic() < until
        time.sleep(0.01)
    rested = rests.count(own.REST_S)
    assert 0 < rested < 100, "a rest after every record would take longer than they are gathered for"
    log.gather_s = 30.0
    for number in range(100, 200):
        log.put(replace(step(), step=number))
    began = time.monotonic()
    log.close()
    assert time.monotonic() - began < 10
    assert [r.step for r in RecordReader(run.records).read() if isinstance(r, StepRecord)] == list(range(200))


def test_a_line_being_written_is_left_for_later(tmp_path: Path) -> None:
    run = folder(tmp_path)
    reader = RecordReader(run.records)
    assert reader.read() == []
    whole = b'{"type": "event", "time": 1, "level": "info", "source": "run", "text": "x"}\n'
    run.records.write_bytes(whole + whole[:20])
    assert len(reader.read()) == 1
    with run.records.open("ab") as file:
        file.write(whole[20:])
    assert len(reader.read()) == 1
    assert reader.passed_over == 0


def test_what_is_no_record_is_passed_over_and_counted(tmp_path: Path) -> None:
    run = folder(tmp_path)
    good = b'{"type": "event", "time": 1, "level": "info", "source": "run", "text": "x"}\n'
    bad = [
        b"\xff\xfe\n",
        b"null\n",
        good[:-1] + b" {}\n",
        b"\0\0\n",
        b"[" * 5000 + b"\n",
        b'{"type": []}\n',
        b"x" * (LONGEST_LINE + 10) + b"\n",
    ]
    run.records.write_bytes(good + b"".join(bad) + b"\n" + good)
    reader = RecordReader(run.records)
    records = []
    while not reader.at_end:  # a long line gives several empty blocks
        records += reader.read(most=4096)
    assert len(records) == 2
    assert reader.passed_over == len(bad)


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = RunFolder.create("my train [/b]")
    assert first.path.parent == Path("runs")
    assert first.path.name.endswith("-my-train-b")
    with pytest.raises(RunFolderError, match="no run under runs/"):
        RunFolder.find(None)
    first.records.write_text("")
    second = RunFolder.create("other")
    second.records.write_text("")
    os.utime(first.records, (1, 1))
    assert RunFolder.find(None).path == second.path
    assert RunFolder.find(first.path).path == first.path
    assert RunFolder.find(first.path / "records.jsonl").path == first.path
    with pytest.raises(RunFolderError, match="is not empty"):
        RunFolder.create("x", first.path)
    with pytest.raises(RunFolderError, match="is not a run folder"):
        RunFolder.find(tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(RunFolderError, match="--run-dir"):
        RunFolder.create("x", blocked / "below")


def test_a_name_that_is_no_utf_8_is_written_and_read(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.write_info(name="tr\udcffain ünïcode")
    assert run.read_info()["name"] == "tr\udcffain ünïcode"


def test_run_json_is_whole_or_not_there_and_a_newer_format_is_refused(tmp_path: Path) -> None:
    run = folder(tmp_path)
    assert run.read_info() == {}
    run.write_info(command=["run"], pid=5)
    run.write_info(ended="finished")
    assert run.read_info() == {"format": 1, "command": ["run"], "pid": 5, "ended": "finished"}
    for broken in ("", "{", "[]", "null"):
        run.info_file.write_text(broken)
        assert run.read_info() == {}
    run.info_file.write_text(json.dumps({"format": 99}))
    with pytest.raises(RunFolderError, match="newer tui3090"):
        run.read_info()
