"""--notify: when the command runs, what it is told, and that nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.test_headless import step
from tui3090.notify import Notifier
from tui3090.records import Event, Record, State

WRITES = (
    'echo "$TUI3090_EVENT|$TUI3090_NAME|$TUI3090_STEP|$TUI3090_LOSS|$TUI3090_DETAIL" >> "$TUI3090_RUN/told"; echo said'
)


class Told:
    """A notifier over a folder, what its command wrote, and what it complained of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.complaints: list[Record] = []
        self.notifier: Notifier | None = None

    def by(self, command: str = WRITES, stalled_s: float = 1000.0) -> Callable[..., None]:
        """A function that takes records."""
        self.notifier = Notifier(command, self.folder, "bert [b]\x1b[31m", self.complaints.append, stalled_s)

        def look(*records: Record) -> None:
            assert self.notifier is not None
            for record in records:
                self.notifier.look(record)

        return look

    def lines(self, count: int) -> list[str]:
        """What the command wrote, once it is so many lines."""
        told = self.folder / "told"
        wait_for(lambda: told.exists() and told.read_text().count("\n") >= count)
        return told.read_text().splitlines()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited 20 s for it"
        time.sleep(0.01)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    if made.notifier is not None:
        made.notifier.close()


def state(name: str, detail: str = "") -> State:
    return State(time=1.0, state=name, detail=detail)


def test_the_facts_of_a_run_that_finished(told: Told) -> None:
    look = told.by()
    look(state("training"), step(5, loss=0.25), state("finished", "after 5 steps"))
    assert told.lines(1) == ["finished|bert [b]|5|0.25|after 5 steps"]
    wait_for(lambda: (told.folder / "output.log").read_text() == "said\n")
    assert told.complaints == []


def test_nan_is_told_once_and_a_pause_by_itself(told: Told) -> None:
    look = told.by()
    look(step(1), step(1, skipped="no labels", loss=float("nan")), step(1, skipped="overflow", loss=float("inf")))
    look(*[step(1, skipped="not finite", loss=float("nan"))] * 3, state("paused"), state("training"))
    look(state("paused", "Training is paused: nan"), state("failed", "boom"))
    assert told.lines(3) == [
        "nan|bert [b]|1|nan|the loss or its gradient is not finite",
        "paused|bert [b]|1|nan|Training is paused: nan",
        "failed|bert [b]|1|nan|boom",
    ]


def test_a_stall_is_told_once_until_training_goes_on(told: Told) -> None:
    look = told.by(stalled_s=0.2)
    look(state("training"))
    look(step(1, seconds=0.0))
    assert told.lines(1)[0].startswith("stall|bert [b]|1|2|no step for")
    look(step(2, seconds=0.0))
    assert told.lines(2)[1].startswith("stall|bert [b]|2|2|no step for")


def test_what_fails_is_said(told: Told) -> None:
    told.by("exit 3")(state("failed", "boom"))
    wait_for(lambda: told.complaints)
    [complaint] = told.complaints
    assert isinstance(complaint, Event)
    assert "ended with status 3" in complaint.text


def test_the_end_does_not_wait_for_the_command(told: Told) -> None:
    look = told.by(f"sleep 2; {WRITES}")
    look(state("finished"))
    began = time.monotonic()
    assert told.notifier is not None
    told.notifier.close()
    assert not (told.folder / "told").exists()
    assert time.monotonic() - began < 2.0
    assert told.lines(1) == ["finished|bert [b]|0||"]  # it outlives the notifier
