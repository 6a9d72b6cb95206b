"""The guardian's sentences; how it waits is tested in a real terminal."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tui3090.guardian import _tell
from tui3090.runlog import RunFolder


def told(folder: RunFolder, number: int, capfd: pytest.CaptureFixture[str], notify: str = "") -> str:
    """What it says of a run that a signal ended."""
    _tell(number, folder, "tui3090 run train.py --resume x", notify)
    return capfd.readouterr().err


def test_what_it_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    unsaved = "It had not saved anything yet.\n"
    killed = "tui3090: SIGKILL ended training (from outside: by somebody, or by the system for want of memory, "
    assert told(folder, signal.SIGKILL, capfd) == f"{killed}which dmesg then tells). {unsaved}"
    crashed = f"tui3090: SIGSEGV ended training: its last words are in {folder.output}. "
    assert told(folder, signal.SIGSEGV, capfd) == crashed + unsaved
    (tmp_path / "saves" / ".step-00000007").mkdir(parents=True)  # half written
    assert told(folder, signal.SIGSEGV, capfd) == crashed + unsaved
    (tmp_path / "saves" / "step-00000005").mkdir()
    assert told(folder, signal.SIGSEGV, capfd) == f"{crashed}Go on with: tui3090 run train.py --resume x\n"
    assert told(folder, 60, capfd).startswith("tui3090: signal 60 ended training")
    folder.write_info(exit_status=0)
    assert "ended the screen of a run that was over already" in told(folder, signal.SIGKILL, capfd)


def test_notify_hears_of_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told(RunFolder(tmp_path), signal.SIGKILL, capfd, 'echo "$TUI3090_EVENT|$TUI3090_STEP|$TUI3090_DETAIL"')
    deadline = time.monotonic() + 20
    while not (tmp_path / "output.log").read_text():
        assert time.monotonic() < deadline, "waited 20 s for it"
        time.sleep(0.01)
    assert (tmp_path / "output.log").read_text().startswith("failed||SIGKILL ended training")
