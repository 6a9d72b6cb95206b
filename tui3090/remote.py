"""The viewer's end of a run's socket: finds the live runs of this user and sends commands to one.

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from tui3090.commands import Command
from tui3090.listener import is_private, peer_uid, places
from tui3090.wire import VERSION, Lines, WireError, from_command, line

GREETED_S = 2.0
"""How long a run may take to greet: one that is stopped (SIGSTOP) does not."""

SILENT = "The run does not answer on its socket: this is a look."


class RemoteError(Exception):
    """A run can't be reached; its text is a sentence."""


class NobodyThere(RemoteError):
    """Nobody serves the socket."""


class Remote:
    """A connection to the run in folder `run`, by its socket at `path`. Raises RemoteError."""

    def __init__(self, path: Path, run: Path) -> None:
        self._socket, hello = _connect(path)
        try:
            if error := _error(hello):
                raise RemoteError(f"The run takes no keys from here: {error}.")
            if hello.get("tui3090") != VERSION:
                raise RemoteError("The run was started by another version of tui3090: this is a look.")
            if not isinstance(hello.get("run"), str) or not os.path.samefile(hello["run"], run):
                raise RemoteError("The socket is another run's: this is a look.")
            self._socket.sendall(line({"tui3090": VERSION}))
            self._socket.setblocking(False)  # from here on nothing may hold the screen up
        except RemoteError:
            self._socket.close()
            raise
        except OSError:
            self._socket.close()
            raise RemoteError(SILENT) from None
        self._lines = Lines()
        self._sent = 0

    def send(self, command: Command) -> None:
        """Send a command. Raises RemoteError when the run is gone or takes nothing."""
        self._sent += 1
        try:
            self._socket.sendall(line(from_command(command, self._sent)))
        except OSError:
            raise RemoteError("The run can't be reached any more: the key did nothing.") from None

    def errors(self) -> list[str]:
        """Why commands were refused since the last call; never waits."""
        found: list[str] = []
        with contextlib.suppress(OSError, WireError):
            data = self._socket.recv(1 << 16)  # the rest at the next call: whoever floods must not hold the screen up
            found += [error for message in self._lines.feed(data) if (error := _error(message))]
        return found

    def close(self) -> None:
        """End the connection; the run goes on."""
        self._socket.close()


def live_runs() -> list[Path]:
    """The folders of this user's live runs on this machine, the newest first; removes sockets that nobody serves."""
    found: dict[Path, float] = {}
    for folder in places():
        for path in folder.glob("*.sock") if is_private(folder) else ():
            try:
                connection, hello = _connect(path)
            except NobodyThere:
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            except RemoteError:
                continue
            connection.close()
            run, started = hello.get("run"), hello.get("started")
            if isinstance(run, str) and isinstance(started, (int, float)):
                found[Path(run)] = started
    return sorted(found, key=lambda run: found[run], reverse=True)


def _connect(path: Path) -> tuple[socket.socket, dict[str, Any]]:
    """A connection and the greeting of the run, of this user for certain. Raises RemoteError."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(GREETED_S)
    end = time.monotonic() + GREETED_S
    try:
        connection.connect(str(path))
        if peer_uid(connection) != os.getuid():
            raise RemoteError("The socket is another user's: this is a look.")
        lines = Lines()
        messages: list[dict[str, Any]] = []
        while not messages:
            if (left := end - time.monotonic()) <= 0:
                raise OSError("it does not come to an end")
            connection.settimeout(left)
            if not (data := connection.recv(1 << 16)):
                raise OSError("it left")
            messages = lines.feed(data)
    except ConnectionRefusedError:
        connection.close()
        raise NobodyThere("Nobody answers at the run's socket: this is a look.") from None
    except (OSError, WireError, ValueError):
        connection.close()
        raise RemoteError(SILENT) from None
    except RemoteError:
        connection.close()
        raise
    return connection, messages[0]


def _error(message: dict[str, Any]) -> str:
    """The sentence of a refusal; empty: it is none."""
    error = message.get("error")
    return error[:500] if isinstance(error, str) else ""
