from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.terminal.pty_shell import TRAIN, Shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell in a folder with a train.py; what it started is ended with it."""
    (tmp_path / "train.py").write_text(TRAIN)
    shell = Shell(tmp_path)
    bash = psutil.Process(shell.bash.pid)
    yield shell
    started = [bash, *bash.children(recursive=True)] if bash.is_running() else []
    for run in tmp_path.glob("*/run.json"):
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            started.append(shell.process(run.parent.name))
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(started, timeout=10)
