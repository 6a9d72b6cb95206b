"""Looking at a run folder: whole, growing, and left by a process that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.dashboard.views import NOW, step
from tui3090.commands import Change
from tui3090.dashboard import source
from tui3090.dashboard.source import WITHOUT_A_WORD, FolderSource, LiveSource, writer_lives
from tui3090.lines import to_line
from tui3090.link import Commands, Outlet
from tui3090.records import Record, State, StepRecord
from tui3090.runlog import RunFolder

FINISHED = State(time=NOW, state="finished")
TRAINING = State(time=NOW - 9, state="training")


def write(folder: RunFolder, *records: Record) -> None:
    with folder.records.open("a", encoding="utf-8") as file:
        file.writelines(map(to_line, records))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited 20 s for it"
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path)
    write(made)
    return made


@pytest.fixture
def look(folder: RunFolder) -> Iterator[tuple[FolderSource, list[Record], Callable[[], list[Record]]]]:
    """A source over the folder, what it gave so far, and a function that takes more."""
    looked = FolderSource(folder)
    seen: list[Record] = []

    def more() -> list[Record]:
        seen.extend(looked.drain())
        return seen

    yield looked, seen, more
    looked.close()


def alive(folder: RunFolder) -> None:
    folder.write_info(pid=os.getpid(), pid_started=psutil.Process().create_time())


Look = tuple[FolderSource, list[Record], Callable[[], list[Record]]]


def test_a_run_that_is_over_is_read_to_its_end(folder: RunFolder, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "CHUNK", 4096)  # several chunks, cut in the middle of lines
    looked, _, more = look
    records = [TRAINING, *(step(n) for n in range(1, 301)), FINISHED]
    write(folder, *records)
    looked.start()
    wait_for(lambda: len(more()) == len(records))
    assert more() == records


def test_a_growing_run_is_followed(folder: RunFolder, look: Look) -> None:
    looked, _, more = look
    alive(folder)
    write(folder, TRAINING, step(1))
    looked.start()
    wait_for(lambda: len(more()) == 2)
    write(folder, step(2))
    wait_for(lambda: len(more()) == 3)
    assert more()[-1] == step(2)


def test_a_run_whose_process_is_gone_ended_without_a_word(folder: RunFolder, look: Look) -> None:
    looked, _, more = look
    folder.write_info(pid=os.getpid(), pid_started=1.0)  # the number was given to another process
    write(folder, TRAINING, step(1, time=NOW))
    looked.start()
    wait_for(lambda: len(more()) == 3)
    assert more()[-1] == State(time=NOW, state="failed", detail=WITHOUT_A_WORD)


def test_a_run_that_writes_all_the_same_is_not_called_ended(folder: RunFolder, look: Look) -> None:
    looked, _, more = look
    write(folder, TRAINING, step(1))
    looked.start()
    wait_for(lambda: len(more()) == 3)
    write(folder, step(2))
    wait_for(lambda: len(more()) == 5)
    assert more()[-2:] == [TRAINING, step(2)]


def test_reading_ahead_is_bounded(folder: RunFolder, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "CHUNK", 512)
    looked, _, more = look
    write(folder, TRAINING, *(step(n) for n in range(1, 201)), FINISHED)
    looked.start()
    wait_for(lambda: looked._chunks.full())
    assert 0 < len(looked.drain()) < 100
    wait_for(lambda: any(isinstance(r, State) and r.state == "finished" for r in more()))


def test_whether_the_writer_lives(folder: RunFolder) -> None:
    assert not writer_lives(folder)
    alive(folder)
    assert writer_lives(folder)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder.write_info(pid=child.pid, pid_started=psutil.Process(child.pid).create_time())
    assert writer_lives(folder)
    child.communicate()
    assert not writer_lives(folder)
    folder.info_file.write_text('{"pid": "7", "pid_started": null}')
    assert not writer_lives(folder)
    folder.info_file.write_text('{"format": 99}')
    assert not writer_lives(folder)


def test_a_live_source_passes_records_and_commands_on() -> None:
    outlet, commands = Outlet(), Commands()
    started: list[int] = []
    live = LiveSource(outlet, commands, lambda: started.append(1))
    live.start()
    outlet.emit(step(1))
    live.send(Change("amp", "bf16"))
    assert started == [1]
    assert [r.step for r in live.drain() if isinstance(r, StepRecord)] == [1]
    assert live.drain() == []
    assert commands.take() == [Change("amp", "bf16")]
