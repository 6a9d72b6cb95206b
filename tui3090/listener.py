"""The socket by which a run is reached from another terminal: a thread that takes commands for the trainer.

It lies in a folder that only its user can enter, has mode 0600, and asks the kernel who calls. What is not of the
protocol ends the connection and nothing else. This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tui3090.link import Commands
from tui3090.wire import LONGEST, VERSION, Lines, WireError, line, to_command

VIEWERS = 16
"""Connections at the most."""
A_SECOND = 50
"""Messages that one viewer may send in a second."""
GREETING_S = 5.0
"""How long a connection may say nothing before its greeting."""
CHECKED_S = 10.0
"""Between two looks whether the socket's file is still there: XDG_RUNTIME_DIR goes when its user logs out."""
LONGEST_PATH = 100
"""Bytes: the kernel takes 107."""


class Unreachable(Exception):
    """There is no place for the socket; its text is a sentence."""


def places() -> list[Path]:
    """The folders in which this user's runs may have their sockets, the preferred one first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folders = [Path(runtime) / "tui3090"] if os.path.isabs(runtime) else []
    return [*folders, Path(f"/tmp/tui3090-{os.getuid()}")]


def is_private(folder: Path) -> bool:
    """Whether `folder` is a folder, no link, of this user, and closed to all others."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def peer_uid(connection: socket.socket) -> int:
    """Who is at the other end, by the kernel's word."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def bind() -> tuple[socket.socket, Path]:
    """A listening socket of this process in the first place that takes it. Raises Unreachable."""
    reason = "no folder is this user's alone"
    for folder in places():
        path = folder / f"{os.getpid()}.sock"
        if len(os.fsencode(path)) > LONGEST_PATH:
            continue
        listening = socket.socket(socket.AF_UNIX)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if not is_private(folder):
                raise PermissionError(0, "it is not this user's alone")
            path.unlink(missing_ok=True)  # of a process that had our number before
            listening.bind(str(path))
            path.chmod(0o600)
            listening.listen(VIEWERS)
        except OSError as error:
            listening.close()
            reason = f"{folder}: {error.strerror}"
            continue
        listening.setblocking(False)
        return listening, path
    raise Unreachable(f"tui3090 show can only look at this run, its keys are out of reach ({reason}).")


class _Viewer:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = Lines()
        self.greeted = False
        self.since = time.monotonic()
        """When it came; then the start of the second in which messages are counted."""
        self.messages = 0


class Listener:
    """Takes viewers and their commands while the run lasts. Raises Unreachable where no socket can be made.

    `attended` is told how many viewers there are, `moved` a new path of the socket; both in the listener's thread.
    """

    def __init__(
        self, run: Path, commands: Commands, attended: Callable[[int], None], moved: Callable[[Path], None]
    ) -> None:
        self._hello = {"tui3090": VERSION, "run": str(run.absolute()), "pid": os.getpid(), "started": time.time()}
        self._commands = commands
        self._attended = attended
        self._moved = moved
        self._viewers: dict[socket.socket, _Viewer] = {}
        self._told = 0
        self._listening, self.path = bind()
        self._checked = time.monotonic()
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for watched in (self._listening, self._woken):
            self._selector.register(watched, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, the connections and the socket."""
        self._wake.send(b"x")
        self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        closing = False
        while not closing:
            for key, _ in self._selector.select(GREETING_S if self._viewers else CHECKED_S):
                if key.fileobj is self._woken:
                    closing = True
                elif key.fileobj is self._listening:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(self._viewers[key.fileobj])
            self._look_after()
        for viewer in list(self._viewers.values()):
            self._drop(viewer)
        for watched in (self._listening, self._woken, self._selector):
            watched.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _look_after(self) -> None:
        """Let go who does not greet, say how many there are, and see that the socket can still be found."""
        now = time.monotonic()
        for viewer in [v for v in self._viewers.values() if not v.greeted and now - v.since >= GREETING_S]:
            self._drop(viewer)
        greeted = sum(viewer.greeted for viewer in self._viewers.values())
        if greeted != self._told:
            self._told = greeted
            self._attended(greeted)
        if now - self._checked >= CHECKED_S:
            self._checked = now
            if not self.path.exists():
                self._move()

    def _move(self) -> None:
        try:
            listening, self.path = bind()
        except Unreachable:
            return  # perhaps later
        self._selector.unregister(self._listening)
        self._listening.close()
        self._listening = listening
        self._selector.register(listening, selectors.EVENT_READ)
        self._moved(self.path)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return  # it went away again
        connection.setblocking(False)
        viewer = _Viewer(connection)
        if peer_uid(connection) != os.getuid():
            connection.close()
            return
        self._viewers[connection] = viewer
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._viewers) > VIEWERS:
            self._refuse(viewer, f"{VIEWERS} viewers are connected, which is the most")
        else:
            self._greet(viewer)

    def _greet(self, viewer: _Viewer) -> None:
        try:
            self._say(viewer, self._hello)
        except OSError:
            self._drop(viewer)

    def _read(self, viewer: _Viewer) -> None:
        try:
            data = viewer.connection.recv(4 * LONGEST)
            if not data:
                raise ConnectionError("it left")
            for message in viewer.lines.feed(data):
                self._take(viewer, message)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(viewer)
        except WireError as error:
            self._refuse(viewer, str(error))

    def _take(self, viewer: _Viewer, message: dict[str, object]) -> None:
        """Obey a message. Raises WireError where that is the end of the connection."""
        if not viewer.greeted:
            if message.get("tui3090") != VERSION:
                raise WireError(f"this run speaks version {VERSION}: use the tui3090 that started it")
            viewer.greeted = True
            return
        now = time.monotonic()
        if now - viewer.since >= 1.0:
            viewer.since, viewer.messages = now, 0
        viewer.messages += 1
        if viewer.messages > A_SECOND:
            raise WireError(f"more than {A_SECOND} messages in a second")
        answer: dict[str, object] = {"id": message.get("id") if isinstance(message.get("id"), int) else None}
        try:
            taken = self._commands.offer(to_command(message))
        except WireError as error:
            self._say(viewer, {**answer, "error": str(error)})
            return
        self._say(viewer, answer if taken else {**answer, "error": "too many commands wait for the step to end"})

    def _say(self, viewer: _Viewer, message: dict[str, object]) -> None:
        """Send a message; who lets them pile up until the kernel takes no more is let go."""
        try:
            sent = viewer.connection.send(words := line(message))
        except OSError:
            sent = -1
        if sent != len(words):
            raise ConnectionError("it takes no more")

    def _refuse(self, viewer: _Viewer, reason: str) -> None:
        with contextlib.suppress(OSError):
            self._say(viewer, {"error": reason})
        self._drop(viewer)

    def _drop(self, viewer: _Viewer) -> None:
        if self._viewers.pop(viewer.connection, None) is not None:
            self._selector.unregister(viewer.connection)
            viewer.connection.close()
