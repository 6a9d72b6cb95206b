"""A pty under an interactive bash, and what its screen shows."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import tempfile
import termios
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pyte

import tui3090

INSTALLED = Path(sys.executable).with_name("tui3090")
COMMAND = str(INSTALLED) if INSTALLED.exists() else f"{sys.executable} -m tui3090"

TRAIN = """
import torch
from torch import nn
from tui3090 import Recipe


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        x = torch.full((4,), float(index % 7))
        return x, x.sum().unsqueeze(0)


def recipe() -> Recipe:
    model = nn.Linear(4, 1)
    return Recipe(
        model=model,
        train_data=Points(),
        batch_size=4,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    )
"""


class Shell:
    """An interactive bash on a pty. It is the session's leader, as in life: the program under test is a job of it."""

    def __init__(self, folder: Path, columns: int = 80, rows: int = 24) -> None:
        self.folder = folder
        self.runtime = tempfile.mkdtemp()  # short: the path of a socket is at most 107 bytes
        weakref.finalize(self, shutil.rmtree, self.runtime, ignore_errors=True)
        environment = {
            **os.environ,
            "PS1": "READY> ",
            "TERM": "xterm-256color",
            "XDG_RUNTIME_DIR": self.runtime,
            "TMPDIR": self.runtime,  # other live runs of this machine must not be found, let alone get keys
            "PYTHONPATH": os.pathsep.join([str(Path(tui3090.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        self.bash = pexpect.spawn(
            "/bin/bash", ["--norc", "-i"], dimensions=(rows, columns), env=environment, cwd=str(folder), timeout=30
        )
        self._began = 0
        self.bytes = b""
        """All that came to the terminal."""
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.wait(lambda: b"READY> " in self.bytes)
        self.attributes = termios.tcgetattr(self.bash.child_fd)

    @property
    def screen(self) -> str:
        """What a person sees."""
        return "\n".join(self._screen.display)

    def type(self, text: str) -> None:
        """Press keys."""
        self.bash.send(text.encode())

    def command(self, line: str) -> None:
        """Start a command line that ends by saying its exit status."""
        self._began = len(self.bytes)
        self.type(f"{line}; echo status $?.\n")

    def look(self, seconds: float = 0.1) -> None:
        """Read what came, waiting for it at the most so long."""
        try:
            data = self.bash.read_nonblocking(1 << 16, seconds)
        except (pexpect.TIMEOUT, pexpect.EOF):
            return
        self.bytes += data
        self._stream.feed(data)

    def wait(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Read until `condition` holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it did not come to that:\n{self.screen}\n{self.bytes[-500:]!r}"
            self.look()

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Wait until `condition` holds, without reading what comes to the terminal."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it did not come to that; last seen:\n{self.screen}"
            time.sleep(0.05)

    def leave(self) -> int:
        """Press q until the program is gone: keys are lost while one screen gives way to the next. The exit status."""
        due = 0.0

        def left() -> object:
            nonlocal due
            if time.monotonic() > due:
                self.type("q")
                due = time.monotonic() + 1.0
            return re.search(rb"status \d+\.", self.bytes[self._began :])

        self.wait(left)
        self.type("\x15")  # the last q may have come to the shell
        return self.status()

    def status(self, seconds: float = 60.0) -> int:
        """The exit status that the command line says, once it does."""
        said: list[bytes] = []

        def is_said() -> bool:
            said[:] = re.findall(rb"status (\d+)\.", self.bytes[self._began :])
            return bool(said)

        self.wait(is_said, seconds)
        return int(said[-1])

    @property
    def restored(self) -> bool:
        """Whether modes and line discipline of the terminal are the shell's again."""
        self.wait(lambda: b"READY> " in self.bytes[self.bytes.rfind(b"status ") :])
        modes_on = [b"\x1b[?1049h", b"\x1b[?25l", b"\x1b[?2004h", b"\x1b[?1004h", b"\x1b[?7l"]
        modes_off = [b"\x1b[?1049l", b"\x1b[?25h", b"\x1b[?2004l", b"\x1b[?1004l", b"\x1b[?7h"]
        drawn = self.bytes[self.bytes.find(b"\x1b[?1049h") : self.bytes.rfind(b"status ")]
        undone = all(drawn.rfind(off) > drawn.rfind(on) for on, off in zip(modes_on, modes_off, strict=True))
        return undone and termios.tcgetattr(self.bash.child_fd) == self.attributes

    def unread(self) -> int:
        """Bytes that the terminal has and nobody has read."""
        return int.from_bytes(fcntl.ioctl(self.bash.child_fd, termios.FIONREAD, bytes(4)), sys.byteorder)

    def close(self) -> None:
        """Close the terminal, as its window does."""
        self.bash.close(force=True)

    def steps(self, run: str = "run") -> int:
        """The optimizer steps that the run's log has so far."""
        records = self.folder / run / "records.jsonl"
        lines = records.read_bytes() if records.exists() else b""
        more = sum(int(steps) - 1 for steps in re.findall(rb'"type": "step".*"steps": (\d+)', lines))
        return lines.count(b'"type": "step"') + more  # in a long run a line stands for several

    def run_info(self, run: str = "run") -> dict[str, Any]:
        """The run's run.json."""
        info: dict[str, Any] = json.loads((self.folder / run / "run.json").read_text())
        return info

    def process(self, run: str = "run") -> psutil.Process:
        """The training process."""
        return psutil.Process(self.run_info(run)["pid"])
