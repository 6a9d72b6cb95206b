from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.terminal.pty_shell import TRAIN, Shell


@contextlib.contextmanager
def opened(folder: Path, columns: int, rows: int) -> Iterator[Shell]:
    """A shell in a folder with a train.py; what it started is ended with it."""
    (folder / "train.py").write_text(TRAIN)
    shell = Shell(folder, columns, rows)
    bash = psutil.Process(shell.bash.pid)
    try:
        yield shell
    finally:
        started = [bash, *bash.children(recursive=True)] if bash.is_running() else []
        for run in folder.glob("*/run.json"):
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                started.append(shell.process(run.parent.name))
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started, timeout=10)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """On a terminal of 80 x 24."""
    with opened(tmp_path, 80, 24) as shell:
        yield shell


@pytest.fixture(params=[(160, 50), (80, 24)], ids=["160x50", "80x24"])
def screen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    """On a terminal of either size."""
    with opened(tmp_path, *request.param) as shell:
        yield shell
