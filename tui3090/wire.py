"""What the socket of a run carries: a line of JSON each way to greet, then commands, and an answer to each.

    run     {"tui3090": 1, "run": "/home/me/runs/x", "pid": 4711, "started": 1760000000.0}
    viewer  {"tui3090": 1}
    viewer  {"id": 1, "command": "change", "technique": "amp", "value": "bf16"}
    run     {"id": 1}      taken, or {"id": 1, "error": "a sentence"}; an error without an id is the last word

Records don't go over it: a viewer reads records.jsonl. This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields
from typing import Any, get_args

from tui3090.commands import Change, Command
from tui3090.lines import fits
from tui3090.settings import Settings

VERSION = 1
"""Of this protocol; both sides must have the same."""
LONGEST = 4096
"""Bytes of a line at the most."""
MOST = 1_000_000
"""No technique has a greater value."""

COMMANDS: dict[str, type[Command]] = {cls.__name__.lower(): cls for cls in get_args(Command)}


class WireError(Exception):
    """What came is not of this protocol; its text is a sentence."""


class Lines:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes. Raises WireError for what is none."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, [*lines, self._rest])) > LONGEST:
            raise WireError(f"a line is longer than {LONGEST} bytes")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                raise WireError("a line is not JSON") from None
            if not isinstance(message, dict):
                raise WireError("a line is not a JSON object")
            messages.append(message)
        return messages


def line(message: dict[str, Any]) -> bytes:
    """The message as it goes over the socket."""
    return json.dumps(message).encode() + b"\n"


def from_command(command: Command, number: int) -> dict[str, Any]:
    """The message that sends a command."""
    return {"id": number, "command": type(command).__name__.lower(), **asdict(command)}


def to_command(message: dict[str, Any]) -> Command:
    """The command that a message sends. Raises WireError, with the reason, for what is none or can't be."""
    name = message.get("command")
    cls = COMMANDS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise WireError(f"there is no such command: this tui3090 knows {', '.join(COMMANDS)}")
    given: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in message and fits(message[field.name], str(field.type)):
            given[field.name] = message[field.name]
        elif field.name in message or field.default is MISSING:
            raise WireError(f"{name} needs a {field.name} of another kind")
    command = cls(**given)
    if isinstance(command, Change):
        if isinstance(command.value, (int, float)) and not abs(command.value) <= MOST:
            raise WireError(f"{command.technique} takes no such number")
        try:
            Settings().having(command.technique, command.value)
        except (ValueError, TypeError) as error:
            raise WireError(str(error)) from None
    return command
