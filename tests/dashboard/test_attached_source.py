"""A run in another process as the dashboard sees it: attached with its keys, or the sentence why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.dashboard.test_folder_source import FINISHED, TRAINING, wait_for, write
from tests.dashboard.views import NOW, step
from tests.test_listener import Run, place
from tui3090.commands import Change, Evaluate, Stop
from tui3090.dashboard.source import AttachedSource, FolderSource, source_of
from tui3090.link import MAILBOX
from tui3090.records import Event, Record, State
from tui3090.runlog import RunFolder

__all__ = ["place"]  # a fixture


class Live(Run):
    """A run whose process lives: this one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files = RunFolder(folder)
        write(self.files, TRAINING, step(1))
        self.files.write_info(
            pid=os.getpid(),
            pid_started=psutil.Process().create_time(),
            socket=str(self.listener.path),
            exit_status=None,
        )


@pytest.fixture
def live(place: Path, tmp_path: Path) -> Iterator[Live]:
    made = Live(tmp_path)
    yield made
    made.listener.close()


def test_keys_reach_the_run_and_its_records_come(live: Live) -> None:
    source, problem = source_of(live.files)
    assert isinstance(source, AttachedSource)
    assert (problem, source.read_only) == ("", "")
    source.start()
    seen: list[Record] = []
    wait_for(lambda: bool(seen.extend(source.drain()) or len(seen) == 2))
    source.send(Change("amp", "bf16"))
    wait_for(live.commands.arrived.is_set)
    assert live.commands.take() == [Change("amp", "bf16")]
    write(live.files, step(2))
    wait_for(lambda: bool(seen.extend(source.drain()) or len(seen) == 3))
    source.close()
    wait_for(lambda: live.viewers[-1] == 0)


def test_what_the_run_refuses_is_told(live: Live) -> None:
    source, _ = source_of(live.files)
    for _ in range(MAILBOX):
        live.commands.send(Evaluate())
    source.send(Stop())
    seen: list[Record] = []
    wait_for(lambda: bool(seen.extend(source.drain()) or seen))
    [event] = seen
    assert isinstance(event, Event)
    assert (event.source, event.text) == ("key", "too many commands wait for the step to end")
    live.listener.close()
    wait_for(lambda: bool(source.send(Evaluate()) or seen.extend(source.drain()) or len(seen) > 1))
    assert "can't be reached any more" in getattr(seen[1], "text", "")
    source.close()
    live.listener = Run(live.folder).listener  # for the fixture to close


def test_a_run_that_is_over_is_looked_at(live: Live) -> None:
    live.files.write_info(exit_status=0)
    source, problem = source_of(live.files)
    assert isinstance(source, FolderSource)
    assert problem == ""


@pytest.mark.parametrize("named", [None, "", 7, "relative.sock", "/nowhere/1.sock", "/etc/passwd"])
def test_without_a_socket_that_answers_it_is_a_look_and_says_why(live: Live, named: object) -> None:
    live.files.write_info(socket=named)
    source, problem = source_of(live.files)
    assert isinstance(source, FolderSource)
    assert problem.endswith(("keys act in the terminal where it is.", "this is a look."))


def test_a_resumed_run_is_followed_although_it_was_over_before(live: Live) -> None:
    live.files.records.unlink()
    write(live.files, TRAINING, step(1), FINISHED)
    source, _ = source_of(live.files)
    source.start()
    seen: list[Record] = []
    wait_for(lambda: bool(seen.extend(source.drain()) or len(seen) == 3))
    write(live.files, State(time=NOW, state="training"), step(2))
    wait_for(lambda: bool(seen.extend(source.drain()) or len(seen) == 5))
    source.close()
