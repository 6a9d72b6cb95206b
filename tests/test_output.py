"""Descriptors 1 and 2 in output.log, and the tail of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tui3090.output import OutputLog, Tail, plain


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a Python of its own, whose standard descriptors are pipes."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        input="typed\n",
        timeout=60,
        cwd=Path(__file__).parents[1],
    )


def test_everything_written_goes_to_the_log_and_the_descriptors_come_back(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
from pathlib import Path
from tui3090.output import OutputLog
print("before")
with OutputLog(Path(sys.argv[1])) as output:
    print("printed ⊕")
    print("to stderr", file=sys.stderr)
    os.write(1, b"descriptor 1\\n")
    os.write(2, b"descriptor 2\\n")
    subprocess.run(["echo", "a child"], stdout=sys.stdout, check=True)
    assert sys.stdin.read() == "" and not sys.stdout.isatty()
    os.write(output.stdout, b"to the shell\\n")
print("after", input())
print("after too", file=sys.stderr)
"""
    done = run_python(code, str(tmp_path / "output.log"))
    assert done.stdout == "before\nto the shell\nafter typed\n"
    assert done.stderr == "after too\n"
    logged = (tmp_path / "output.log").read_text("utf-8").splitlines()
    assert logged == ["printed ⊕", "to stderr", "descriptor 1", "descriptor 2", "a child"]


def test_the_log_is_appended_to(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_text("earlier\n")
    code = "import sys; from pathlib import Path; from tui3090.output import OutputLog\n"
    run_python(code + "with OutputLog(Path(sys.argv[1])): print('later')", str(tmp_path / "output.log"))
    assert (tmp_path / "output.log").read_text() == "earlier\nlater\n"


def test_streams_that_were_replaced_are_taken_again(tmp_path: Path) -> None:
    code = """
import io, sys
from pathlib import Path
from tui3090.output import OutputLog
with OutputLog(Path(sys.argv[1])) as output:
    sys.stdout = sys.stderr = io.StringIO()
    output.take_streams()
    print("printed")
    assert sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
"""
    assert run_python(code, str(tmp_path / "output.log")).returncode == 0
    assert (tmp_path / "output.log").read_text() == "printed\n"


def test_an_abort_leaves_its_last_words(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from tui3090.output import OutputLog
with OutputLog(Path(sys.argv[1])):
    sys.stdout.write("half a line")
    sys.stdout.flush()
    os.abort()
"""
    assert run_python(code, str(tmp_path / "output.log")).returncode < 0
    logged = (tmp_path / "output.log").read_text()
    assert logged.startswith("half a line")
    assert "Fatal Python error: Aborted" in logged


def test_a_log_that_cannot_be_opened_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), OutputLog(tmp_path / "nowhere" / "output.log"):
        pass
    os.fstat(1)  # still there


class TestTail:
    def test_lines_come_once_and_when_they_are_whole(self, tmp_path: Path) -> None:
        log = tmp_path / "output.log"
        tail = Tail(log)
        assert tail.read() == []
        log.write_bytes(b"one\ntw")
        assert tail.read() == ["one"]
        assert tail.unfinished == "tw"
        with log.open("ab") as file:
            file.write(b"o\nthree\n")
        assert tail.read() == ["two", "three"]
        assert tail.unfinished == ""
        assert tail.read() == []

    def test_of_a_progress_bar_only_the_newest_state_stays(self, tmp_path: Path) -> None:
        log = tmp_path / "output.log"
        tail = Tail(log)
        log.write_bytes(b"\r 10 %\r 20 %")
        assert tail.read() == []
        assert tail.unfinished == " 20 %"
        with log.open("ab") as file:
            file.write(b"\r 99 %\r")
        assert tail.read() == []
        assert tail.unfinished == " 99 %"
        with log.open("ab") as file:
            file.write(b"\r100 %\nwindows\r\n")
        assert tail.read() == ["100 %", "windows"]

    def test_a_progress_bar_that_never_ends_takes_bounded_memory(self, tmp_path: Path) -> None:
        log = tmp_path / "output.log"
        tail = Tail(log)
        with log.open("ab", buffering=0) as file:
            for count in range(200):
                file.write(f"\r{count} ".encode() + b"x" * 100)
                tail.read(1000)
        assert tail.unfinished == "199 " + "x" * 100
        assert len(tail._rest) < 1001

    def test_more_than_the_most_is_left_out_and_said(self, tmp_path: Path) -> None:
        log = tmp_path / "output.log"
        log.write_bytes(b"".join(b"%05d\n" % number for number in range(1000)))
        tail = Tail(log)
        first, *lines = tail.read(most=60)
        assert first == "… 5,940 bytes left out here: they are in output.log"
        assert lines == [f"{number:05}" for number in range(991, 1000)]
        assert tail.read() == []

    def test_what_is_not_text_is_harmless(self, tmp_path: Path) -> None:
        log = tmp_path / "output.log"
        log.write_bytes(b"\xff\xfe \x1b[31mred\x1b[0m \x1b]0;title\x07[b]not markup[/b]\n")
        assert Tail(log).read() == ["�� red [b]not markup[/b]"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[1;31mred\x1b[0m and \x1b[2J\x1b[Hhome", "red and home"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("two\r\nlines\tand a tab", "two lines and a tab"),
        ("bell \x07 back \x08 c1 \x9b31m", "bell · back · c1 ·31m"),
        ("cut off \x1b[", "cut off "),
        ("日本語 ⊕", "日本語 ⊕"),
    ],
)
def test_plain_text_obeys_nobody(text: str, expected: str) -> None:
    assert plain(text) == expected
