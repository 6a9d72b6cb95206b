"""Disks that fill, folders that go: training goes on, it is said, and what could be kept is written later."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.terminal.pty_shell import TRAIN
from tests.test_records import _step as step
from tui3090 import runlog
from tui3090.link import Outlet
from tui3090.records import Event, Reading, Record, StepRecord
from tui3090.runlog import DELETED, RecordReader, RunFolder, RunFolderError, RunLog


class Disk:
    """Takes the place of os.write; while `room` is 0 it takes nothing."""

    def __init__(self) -> None:
        self.room: float = float("inf")
        self.descriptor = -1
        self._write = os.write

    def write(self, descriptor: int, data: bytes) -> int:
        if descriptor != self.descriptor or self.room == float("inf"):
            return self._write(descriptor, data)
        if self.room < 1:
            raise OSError(28, "No space left on device")
        written = self._write(descriptor, data[: int(self.room)])
        self.room -= written
        return written


class Log:
    """A log on a disk of its own, with a watcher."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.folder = RunFolder(path)
        self.log = RunLog(self.folder)
        self.disk = disk
        disk.descriptor = self.log._fd
        self.outlet = Outlet(self.log)
        self.watched: list[Record] = []

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "waited 30 s for it"
            time.sleep(0.005)
            self.watched += self.outlet.drain()

    def told(self, words: str) -> bool:
        return any(isinstance(r, Event) and words in r.text for r in self.watched)

    @property
    def read(self) -> list[Record]:
        return RecordReader(self.folder.records).read(1 << 30)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    disk = Disk()
    monkeypatch.setattr(os, "write", disk.write)
    monkeypatch.setattr(runlog, "GATHER_S", 0.02)
    made = Log(tmp_path, disk)
    yield made
    if made.log._thread.is_alive():
        made.log.close()


def test_a_disk_that_is_full_loses_nothing_once_there_is_room(log: Log) -> None:
    log.disk.room = len(runlog.to_line(step())) + 9  # the second line is cut
    for number in (1, 2, 3):
        log.outlet.emit(replace(step(), step=number))
    log.until(lambda: log.told("records.jsonl can't be written: No space left on device. Training goes on."))
    assert log.log.problem == "records.jsonl can't be written: No space left on device."
    log.disk.room = float("inf")
    log.outlet.emit(replace(step(), step=4))
    log.until(lambda: log.told("records.jsonl is written again."))
    log.log.close()
    assert log.log.problem == ""
    assert [r.step for r in log.read if isinstance(r, StepRecord)] == [1, 2, 3, 4]
    events = [r.text.split(":")[0] for r in log.read if isinstance(r, Event)]
    assert events == ["records.jsonl can't be written", "records.jsonl is written again."]
    assert not lost_in(log)


def lost_in(log: Log) -> int:
    """How many lines the log's last event says are lost."""
    words = (
        [r.text for r in log.read if isinstance(r, Event)][-1].removeprefix("records.jsonl is written again.").split()
    )
    return int(words[0].replace(",", "")) if words else 0


def test_what_waits_for_a_full_disk_is_bounded_and_counted(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlog, "UNWRITTEN", 20_000)
    log.disk.room = 5  # a line has begun
    count, most = 0, 0
    for number in range(1, 40):
        for _ in range(20):
            count += 1
            log.outlet.emit(replace(step(), step=count))
        log.outlet.emit(Event(time=0.0, level="info", source="run", text=f"event {number}"))
        log.until(log.log._queue.empty)
        most = max(most, len(log.log._unwritten))
    log.until(lambda: log.told("can't be written"))
    log.until(lambda: len(log.log._unwritten) <= 20_500)  # with the sentence about it
    assert most < 60_000  # what was added since the last look comes on top
    assert "of its lines are lost" in log.log.problem
    log.disk.room = float("inf")
    log.outlet.emit(Reading(time=1.0))
    log.until(lambda: log.told("written again"))
    log.log.close()
    steps = [r.step for r in log.read if isinstance(r, StepRecord)]
    assert steps == sorted(set(steps))
    assert steps[0] == 1
    assert count - len(steps) == lost_in(log) > 0
    kept = [r.text for r in log.read if isinstance(r, Event) and r.source == "run"]
    assert kept == [f"event {number}" for number in range(1, 40)]


def test_a_flood_of_events_is_bounded_too(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlog, "UNWRITTEN", 5000)
    log.disk.room = 0
    for number in range(1, 2001):
        log.log.put(Event(time=0.0, level="info", source="run", text=f"event {number}"))
    log.until(lambda: "lost" in log.log.problem)
    log.until(lambda: len(log.log._unwritten) <= 5500)  # with the sentence about it
    log.disk.room = float("inf")
    log.log.close()
    texts = [r.text for r in log.read if isinstance(r, Event) and r.source == "run"]
    assert texts[-1] == "event 2000"
    assert 0 < len(texts) < 100


def test_what_a_full_disk_never_took_is_said_at_the_end(log: Log) -> None:
    log.disk.room = 0
    for number in (1, 2):
        log.outlet.emit(replace(step(), step=number))
    log.until(lambda: log.told("can't be written"))
    log.log.close()
    # the sentence about it is a line too
    assert log.log.problem == "records.jsonl can't be written: No space left on device. 3 of its lines are lost."


def test_a_disk_that_hangs_is_not_waited_for_by_training(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlog, "WAITING", 50)
    hangs, go_on = threading.Event(), threading.Event()

    def hang(descriptor: int, data: bytes) -> int:
        if descriptor == log.disk.descriptor and not go_on.is_set():
            hangs.set()
            assert go_on.wait(60)
        return log.disk.write(descriptor, data)

    monkeypatch.setattr(os, "write", hang)
    log.log.put(step())
    assert hangs.wait(60)
    for number in range(2, 102):
        log.log.put(replace(step(), step=number))
    log.log.put(Event(time=0.0, level="info", source="run", text="kept"))
    go_on.set()
    log.log.close()
    assert len([r for r in log.read if isinstance(r, StepRecord)]) == 51
    assert next(r.text for r in log.read if isinstance(r, Event)) == "kept"
    assert log.log._losses == "50 of its lines are lost."


def test_a_folder_that_is_deleted_is_told(log: Log) -> None:
    shutil.rmtree(log.folder.path)
    log.outlet.emit(step())
    log.until(lambda: log.told(DELETED))
    log.outlet.emit(step())
    log.log.close()
    assert log.log.problem == DELETED
    with pytest.raises(FileNotFoundError):
        log.folder.write_info(state="finished")


def test_a_log_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").mkdir()
    with pytest.raises(RunFolderError, match=r"records\.jsonl can't be written: Is a directory"):
        RunLog(RunFolder(tmp_path))


def test_text_without_utf_8_is_written_and_read(log: Log) -> None:
    log.log.put(Event(time=0.0, level="info", source="data", text="a file\udcff.txt"))
    log.log.close()
    assert [r.text for r in log.read if isinstance(r, Event)] == ["a file\udcff.txt"]


def test_printing_on_a_full_disk_fails_nothing(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from tui3090.output import OutputLog
with OutputLog(Path("/dev/full")) as output:
    for number in range(1000):
        print("x" * 99)
    print("to stderr", file=sys.stderr)
    assert "No space left on device" in output.problem, output.problem
    lost = output.lost
    os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 1)
    print("there is room")
    assert output.problem == ""
print(lost)
"""
    written = tmp_path / "written"
    done = subprocess.run([sys.executable, "-c", code, str(written)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("100010\n", "")
    assert written.read_text() == "there is room\n"


@pytest.mark.timeout(120)
def test_a_run_on_a_disk_that_fills_and_has_room_again_and_loses_its_folder(tmp_path: Path) -> None:
    """The limit on the size of files stands for the disk."""
    (tmp_path / "train.py").write_text(TRAIN.replace("mse_loss(model", "mse_loss(say() or model") + SAY)
    command = f"{sys.executable} -m tui3090 run train.py --headless --device cpu --run-dir run"
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = subprocess.Popen(
        ["/bin/bash", "-c", f"ulimit -S -f 100; exec {command}"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(runlog.__file__).parents[1])},
    )
    assert run.stdout is not None
    said: list[str] = []

    def until(*words: str) -> None:
        wanted = set(words)
        for line in run.stdout or ():
            said.append(line)
            wanted -= {word for word in wanted if word in line}
            if not wanted:
                return
        raise AssertionError("".join(said))

    try:
        until("warning: records.jsonl can't be written: File too large.", "warning: output.log can't be written")
        psutil.Process(run.pid).rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
        until("records.jsonl is written again", "output.log is written again")
        records = RecordReader(tmp_path / "run" / "records.jsonl").read(1 << 30)
        steps = [r for r in records if isinstance(r, StepRecord)]
        assert sum(r.steps for r in steps) == steps[-1].step
        shutil.rmtree(tmp_path / "run")
        until("records.jsonl was deleted")
        run.terminate()
        rest = run.communicate(timeout=60)[0]
    finally:
        run.kill()
    assert run.returncode == 143, rest
    assert "Traceback" not in rest
    assert DELETED in rest


SAY = """

def say():
    print("x" * 500)
"""
