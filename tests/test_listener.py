"""A run's socket: commands that reach the trainer, and all that must not hurt it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tui3090 import listener, remote
from tui3090.commands import Change, Command, Evaluate, Pause, Stop, Withdraw
from tui3090.link import MAILBOX, Commands
from tui3090.listener import A_SECOND, VIEWERS, Listener, Unreachable
from tui3090.remote import Remote, RemoteError, live_runs
from tui3090.wire import LONGEST, VERSION, Lines, WireError, from_command, line, to_command

COMMANDS: list[Command] = [
    Change("amp", "bf16"),
    Change("accumulate", 4),
    Change("lr", 0.5),
    Withdraw("tf32"),
    Pause(True),
    Evaluate(),
    Stop(now=True),
]


class Run:
    """A run folder with a listener; what the run was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands = Commands()
        self.viewers: list[int] = []
        self.moved: list[Path] = []
        self.listener = Listener(folder, self.commands, self.viewers.append, self.moved.append)

    def attach(self) -> Remote:
        return Remote(self.listener.path, self.folder)

    def call(self, greet: bool = True) -> socket.socket:
        """A bare connection, greeted or not."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(20)
        connection.connect(str(self.listener.path))
        if greet:
            connection.sendall(line({"tui3090": VERSION}))
        return connection

    def works(self) -> bool:
        """Whether a viewer can still send a command."""
        self.commands.take()
        viewer = self.attach()
        viewer.send(Evaluate())
        wait_for(self.commands.arrived.is_set)
        viewer.close()
        return self.commands.take() == [Evaluate()]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited 20 s for it"
        time.sleep(0.005)


def said(connection: socket.socket) -> list[dict[str, Any]]:
    """All that comes until the run ends the connection."""
    data = b""
    while True:
        try:
            more = connection.recv(1 << 16)
        except ConnectionResetError:
            more = b""
        if not more:
            return [json.loads(row) for row in data.splitlines()]
        data += more


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder for sockets, short enough for one."""
    short = Path(tempfile.mkdtemp())
    monkeypatch.setattr(listener, "places", lambda: [short / "tui3090"])
    monkeypatch.setattr(remote, "places", lambda: [short / "tui3090"])
    yield short / "tui3090"
    shutil.rmtree(short)


@pytest.fixture
def run(place: Path, tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.listener.close()


def test_commands_of_several_viewers_reach_the_trainer(run: Run) -> None:
    viewers = [run.attach(), run.attach()]
    wait_for(lambda: run.viewers and run.viewers[-1] == 2)
    for number, command in enumerate(COMMANDS):
        viewers[number % 2].send(command)
        wait_for(run.commands.arrived.is_set)
        assert run.commands.take() == ([command] if not isinstance(command, Withdraw) else [])
    assert run.commands.stop_now.is_set()
    for viewer in viewers:
        viewer.close()
    wait_for(lambda: run.viewers[-1] == 0)


def test_the_socket_is_its_users_alone(run: Run, place: Path) -> None:
    assert stat.S_IMODE(run.listener.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert run.listener.path.parent == place


def test_a_folder_that_others_can_enter_is_not_used(place: Path, tmp_path: Path) -> None:
    place.mkdir(mode=0o755)
    place.chmod(0o755)
    with pytest.raises(Unreachable, match="not this user's alone"):
        Run(tmp_path)
    place.rmdir()
    place.symlink_to(tmp_path)
    with pytest.raises(Unreachable):
        Run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_long_a_path_leaves_the_other_place(monkeypatch: pytest.MonkeyPatch) -> None:
    short = tempfile.mkdtemp()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp/" + "x" * 200)
    monkeypatch.setenv("TMPDIR", short)
    assert listener.places() == [Path("/tmp/" + "x" * 200 + "/tui3090"), Path(short) / f"tui3090-{os.getuid()}"]
    listening, path = listener.bind()
    listening.close()
    assert path.parent == listener.places()[1]
    shutil.rmtree(short)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    monkeypatch.delenv("TMPDIR")
    assert listener.places() == [Path(f"/tmp/tui3090-{os.getuid()}")]


def test_another_users_connection_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "peer_uid", lambda _: os.getuid() + 1)
    stranger = run.call(greet=False)
    assert said(stranger) == []
    monkeypatch.undo()


def test_another_users_run_is_not_attached_to(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "peer_uid", lambda _: os.getuid() + 1)
    with pytest.raises(RemoteError, match="another user's"):
        run.attach()
    assert live_runs() == []


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not JSON"),
        (b"[1]\n", "not a JSON object"),
        (b"[" * 4000 + b"\n", "not JSON"),
        (b"x" * (LONGEST + 2), "longer than"),
        (b'{"tui3090": 2}\n', "speaks version 1"),
        (b'{"tui3090": "1"}\n', "speaks version 1"),
        (b'{"id": 1, "command": "stop"}\n', "speaks version 1"),
    ],
)
def test_garbage_ends_the_connection_and_nothing_else(run: Run, sent: bytes, error: str) -> None:
    connection = run.call(greet=False)
    connection.sendall(sent)
    hello, last = said(connection)
    assert hello["run"] == str(run.folder)
    assert error in last["error"]
    assert run.commands.take() == []
    assert run.works()


@pytest.mark.parametrize(
    "message",
    [
        {"command": "nonsense"},
        {"command": ["stop"]},
        {},
        {"command": "change", "technique": "amp"},
        {"command": "change", "technique": "amp", "value": None},
        {"command": "change", "technique": "amp", "value": "int4"},
        {"command": "change", "technique": "no such", "value": 1},
        {"command": "change", "technique": "lr", "value": "high"},
        {"command": "change", "technique": "lr", "value": float("nan")},
        {"command": "change", "technique": "accumulate", "value": -1},
        {"command": "change", "technique": "accumulate", "value": 10**3000},
        {"command": "pause", "on": 1},
        {"command": "stop", "now": "yes"},
    ],
)
def test_a_command_that_is_none_is_answered_with_a_sentence(run: Run, message: dict[str, Any]) -> None:
    connection = run.call()
    connection.sendall(line({"id": 7, **message}) + line(from_command(Evaluate(), 8)))
    wait_for(run.commands.arrived.is_set)
    assert run.commands.take() == [Evaluate()]
    connection.shutdown(socket.SHUT_WR)
    _, refused, taken = said(connection)
    assert refused["id"] == 7
    assert len(refused["error"]) > 20
    assert taken == {"id": 8}


def test_a_flood_ends_its_connection(run: Run) -> None:
    connection = run.call()
    connection.sendall(line(from_command(Pause(True), 1)) * (A_SECOND + 5))
    assert f"more than {A_SECOND} messages" in said(connection)[-1]["error"]
    assert len(run.commands.take()) <= A_SECOND
    assert run.works()


def test_a_full_mailbox_takes_no_more_from_outside(run: Run) -> None:
    for _ in range(MAILBOX):
        run.commands.send(Evaluate())
    viewer = run.attach()
    viewer.send(Pause(True))
    errors: list[str] = []
    wait_for(lambda: errors.extend(viewer.errors()) or errors)
    assert errors == ["too many commands wait for the step to end"]
    assert run.commands.take() == [Evaluate()] * MAILBOX
    viewer.close()


def test_so_many_viewers_and_no_more(run: Run) -> None:
    connections = [run.call() for _ in range(VIEWERS)]
    wait_for(lambda: run.viewers and run.viewers[-1] == VIEWERS)
    with pytest.raises(RemoteError, match="which is the most"):
        run.attach()
    for connection in connections:
        connection.close()
    wait_for(lambda: run.viewers[-1] == 0)
    assert run.works()


def test_who_says_nothing_is_let_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "GREETING_S", 0.05)
    [hello] = said(run.call(greet=False))
    assert hello["tui3090"] == VERSION


def test_live_runs_are_found_and_dead_sockets_removed(run: Run, place: Path) -> None:
    dead = place / "1.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(dead))
    assert live_runs() == [run.folder]
    assert not dead.exists()


def test_what_a_run_folder_names_as_its_socket_is_left_alone(run: Run, tmp_path: Path) -> None:
    """A folder from elsewhere may name any file; a connection to one that is no socket is refused like a dead one's."""
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("dear")
    with pytest.raises(RemoteError, match="Nobody answers"):
        Remote(thesis, run.folder)
    assert thesis.read_text() == "dear"


def test_a_socket_of_another_run_is_not_taken_for_this_one(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(RemoteError, match="another run's"):
        Remote(run.listener.path, other)


def test_a_socket_whose_folder_was_cleared_away_is_made_again(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "CHECKED_S", 0.02)
    run = Run(tmp_path)
    shutil.rmtree(place)  # as when the user logs out
    wait_for(lambda: run.moved)
    assert run.works()
    run.listener.close()
    assert not run.listener.path.exists()


def test_a_run_that_is_gone_is_told_by_a_sentence(run: Run) -> None:
    viewer = run.attach()
    wait_for(lambda: run.viewers)
    run.listener.close()
    with pytest.raises(RemoteError, match="can't be reached any more"):
        viewer.send(Evaluate())
    assert viewer.errors() == []
    viewer.close()
    run.listener = Run(run.folder).listener  # for the fixture to close


_SENT = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            line({"tui3090": VERSION}),
            line({"tui3090": VERSION})[:9],
            *(line(from_command(command, 1)) for command in COMMANDS[:-1]),
            line({"id": 5, "command": "change", "technique": "lr", "value": 10**300}),
            line({"id": [], "command": {}}),
            b"{}\n",
            b"[]\n",
            b"\n",
            b'{"id": "' + b"x" * LONGEST + b'"}\n',
            b"[" * LONGEST,
            b'{"id": ' + b"9" * 4000 + b"}\n",
            b"\0" * 70_000,
        ]
    ),
)


@given(st.lists(_SENT, max_size=8), st.booleans())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_over_the_socket_is_answered_and_the_run_goes_on(
    run: Run, sent: list[bytes], greeted: bool
) -> None:
    connection = run.call(greet=greeted)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(b"".join(sent))
        connection.shutdown(socket.SHUT_WR)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
    answers = said(connection)  # until the run ends the connection, 20 s at the most
    connection.close()
    assert all(set(answer) <= {"id", "error"} and len(answer.get("error", "")) < 500 for answer in answers[1:])
    assert run.works()


@pytest.fixture
def false_run(place: Path, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Serves a socket by sending `sent`, `later` once it was greeted, and then a space now and then; gives the path."""
    ended = threading.Event()
    serving: list[threading.Thread] = []

    def serve(sent: bytes, later: bytes = b"") -> Path:
        listening, path = listener.bind()
        listening.settimeout(20)
        listening.listen()

        def send() -> None:
            with listening, contextlib.suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    connection.settimeout(20)
                    connection.sendall(sent)
                    if later and connection.recv(100):
                        connection.sendall(later)
                    while not ended.wait(0.05):
                        connection.sendall(b" ")

        serving.append(threading.Thread(target=send, daemon=True))
        serving[-1].start()
        return path

    yield serve
    ended.set()
    for thread in serving:
        thread.join(20)


def test_a_run_that_greets_without_end_is_not_waited_for(
    false_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "GREETED_S", 0.3)
    with pytest.raises(RemoteError, match="does not answer"):
        Remote(false_run(b'{"tui3090"'), tmp_path)


_HELLO = st.fixed_dictionaries({}, optional={"tui3090": st.sampled_from([VERSION, 2, "1", None]), "run": st.text()})


@given(
    st.one_of(st.binary(max_size=99), _HELLO.map(line), st.sampled_from([b"\0" * 9000, b"[" * 5000, b'{"error": 5}\n']))
)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_socket_answers_is_a_sentence_for_the_viewer(
    false_run: Callable[..., Path], tmp_path: Path, greeting: bytes
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "GREETED_S", 0.05)
        with pytest.raises(RemoteError):
            Remote(false_run(greeting), tmp_path)


def test_answers_of_a_run_that_turns_bad_are_passed_over(false_run: Callable[..., Path], tmp_path: Path) -> None:
    hello = line({"tui3090": VERSION, "run": str(tmp_path), "pid": 1, "started": 1.0})
    refused = line({"id": 1, "error": "x" * 4000})
    viewer = Remote(false_run(hello, refused + b'{"error": 5}\n[]\n{}\n' + refused), tmp_path)
    wait_for(lambda: select.select([viewer._socket], [], [], 0)[0])
    assert viewer.errors() == []  # what is not of the protocol spoils what came with it
    viewer.send(Evaluate())
    viewer.close()
    viewer = Remote(false_run(hello, refused * 2), tmp_path)
    errors: list[str] = []
    wait_for(lambda: errors.extend(viewer.errors()) or len(errors) == 2)
    assert errors == ["x" * 500] * 2
    viewer.close()


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_lines_are_cut_or_refused_whatever_comes(pieces: list[bytes]) -> None:
    lines = Lines()
    with contextlib.suppress(WireError):
        for piece in pieces:
            assert all(isinstance(message, dict) for message in lines.feed(piece))


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
_KEY = st.sampled_from(["command", "technique", "value", "on", "now", "id", "x"])
_NAMES = st.sampled_from(["change", "withdraw", "pause", "evaluate", "stop", "amp", "lr", "accumulate"])


@given(st.dictionaries(_KEY, st.one_of(_JSON, _NAMES), max_size=6))
def test_any_message_is_a_command_or_a_sentence(message: dict[str, Any]) -> None:
    with contextlib.suppress(WireError):
        command = to_command(message)
        assert to_command(from_command(command, 1)) == command


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_cross_unchanged(command: Command) -> None:
    [message] = Lines().feed(line(from_command(command, 3)))
    assert to_command(message) == command
