"""Commands one way, records the other."""

from __future__ import annotations

from tests.test_records import _step as step
from tui3090.commands import Change, Evaluate, Stop, Withdraw
from tui3090.link import MAILBOX, QUEUED, Commands, Outlet
from tui3090.records import Event


def test_the_last_change_of_a_technique_counts_and_can_be_withdrawn() -> None:
    commands = Commands()
    for command in (Change("amp", "bf16"), Change("tf32", True), Evaluate(), Change("amp", "fp16"), Withdraw("tf32")):
        commands.send(command)
    assert commands.arrived.is_set()
    assert commands.take() == [Evaluate(), Change("amp", "fp16")]
    assert commands.take() == []
    assert not commands.arrived.is_set()


def test_a_stop_is_seen_at_once() -> None:
    commands = Commands()
    commands.send(Stop())
    assert commands.stop.is_set()
    assert not commands.stop_now.is_set()
    commands.send(Stop(now=True))
    assert commands.stop_now.is_set()


def test_a_watcher_that_stalls_loses_step_records_but_no_event() -> None:
    outlet = Outlet()
    outlet.emit(Event(time=0.0, level="info", source="run", text="first"))
    for _ in range(3 * QUEUED):
        outlet.emit(step())
    outlet.emit(Event(time=1.0, level="info", source="run", text="last"))
    records = outlet.drain()
    assert len(records) == QUEUED + 2
    assert [r.text for r in (records[0], records[-1]) if isinstance(r, Event)] == ["first", "last"]
    assert outlet.drain() == []


def test_somebody_who_looks_from_another_terminal_can_press_a_key() -> None:
    commands = Commands()
    commands.attend(1)
    commands.leave_unattended()
    assert commands.arrived.is_set()
    assert not commands.unattended.is_set()  # an alarm pauses training: there is somebody
    commands.take()
    commands.attend(0)
    assert commands.unattended.is_set()
    assert not commands.arrived.is_set()  # a pause that the last one saw stays a pause
    commands.attend(2)
    assert not commands.unattended.is_set()


def test_a_pause_that_was_seen_outlives_the_screen() -> None:
    commands = Commands()
    commands.leave_unattended(seen=True)
    assert commands.unattended.is_set()
    assert not commands.arrived.is_set()


def test_a_screen_of_its_own_is_enough() -> None:
    commands = Commands()
    commands.attend(1)
    commands.attend(0)
    assert not commands.unattended.is_set()


def test_a_full_mailbox_refuses_what_comes_from_outside() -> None:
    commands = Commands()
    taken = [commands.offer(Evaluate()) for _ in range(MAILBOX + 3)]
    assert taken == [True] * MAILBOX + [False] * 3
    assert len(commands.take()) == MAILBOX
    assert commands.offer(Evaluate())
