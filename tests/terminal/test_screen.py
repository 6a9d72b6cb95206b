"""What reaches a real terminal's screen: the dashboard, and nothing that training prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.terminal.pty_shell import COMMAND, TRAIN, Shell

SHOUTING = """
import logging
import multiprocessing
import os
import sys
import warnings

from shout import shout


def shout_all():
    print("SHOUT print")
    sys.stderr.write("SHOUT stderr\\n")
    os.write(2, b"SHOUT descriptor\\n")
    os.system("echo SHOUT system")
    warnings.warn("SHOUT warning")
    logging.warning("SHOUT logging")
    for number in range(3):
        sys.stderr.write(f"\\rSHOUT progress {number}")
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=shout, args=(method,))
        process.start()
        process.join()
        assert process.exitcode == 0, method

""" + TRAIN.replace("    model =", "    shout_all()\n    model =").strip()

WORKER = """
import os


def shout(method):
    print("SHOUT print in", method, flush=True)
    os.write(1, f"SHOUT descriptor in {method}\\n".encode())
"""


def test_nothing_that_training_prints_is_on_the_screen(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(SHOUTING)
    (shell.folder / "shout.py").write_text(WORKER)
    shell.command(f"{COMMAND} run train.py --run-dir run --steps 5 --exit")
    assert shell.status(120) == 0
    printed = (shell.folder / "run" / "output.log").read_text()
    ways = ["print", "stderr", "descriptor", "system", "warning", "logging", "progress 2"]
    ways += [f"{way} in {method}" for way in ("print", "descriptor") for method in ("fork", "spawn", "forkserver")]
    assert [way for way in ways if f"SHOUT {way}" not in printed] == []
    assert "fds_to_keep" not in printed
    # the log pane shows lines of it, each on one row of its own; none may stand where the shell was
    assert b"SHOUT" not in shell.bytes[: shell.bytes.find(b"\x1b[?1049h")]
    assert b"SHOUT" not in shell.bytes[shell.bytes.rfind(b"\x1b[?1049l") :]
    assert b"SHOUT print\r\n" not in shell.bytes
    assert b"SHOUT descriptor\r\n" not in shell.bytes


def test_the_last_words_of_an_abort_are_in_the_log(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(TRAIN.replace("    model =", "    import os; os.abort()\n    model ="))
    shell.command(f"{COMMAND} run train.py --run-dir run")
    assert shell.status() == 128 + 6
    assert shell.restored
    assert b"tui3090: SIGABRT ended training: its last words are in run/output.log." in shell.bytes
    assert "Fatal Python error: Aborted" in (shell.folder / "run" / "output.log").read_text()


@pytest.mark.parametrize("redirection", ["2>elsewhere", "</dev/null", "< <(yes)", "<&-"])
def test_the_dashboard_needs_only_the_terminal(shell: Shell, redirection: str) -> None:
    shell.command(f"{COMMAND} run train.py --run-dir run --steps 20 {redirection}")
    shell.wait(lambda: "finished" in shell.screen.lower())
    assert b"\x1b[?1049h" in shell.bytes
    assert shell.leave() == 0
    assert shell.restored
    elsewhere = shell.folder / "elsewhere"
    assert not elsewhere.exists() or elsewhere.read_bytes() == b""


@pytest.mark.parametrize("how", [">lines", "2>&1 | cat >lines", "--headless >lines"])
def test_without_a_terminal_to_draw_on_there_are_plain_lines(shell: Shell, how: str) -> None:
    shell.command(f"{COMMAND} run train.py --run-dir run --steps 20 {how}")
    assert shell.status() == 0
    assert b"\x1b[?1049h" not in shell.bytes
    lines = (shell.folder / "lines").read_bytes()
    assert b"\x1b" not in lines
    assert b"\r" not in lines
    assert b"tui3090: train finished at step 20/20\n" in lines


def test_a_dumb_terminal_gets_plain_lines(shell: Shell) -> None:
    shell.command(f"TERM=dumb {COMMAND} run train.py --run-dir run --steps 5")
    assert shell.status() == 0
    assert b"\x1b[?1049h" not in shell.bytes


def test_a_job_in_the_background_gets_plain_lines(shell: Shell) -> None:
    shell.type(f"{COMMAND} run train.py --run-dir run --steps 5 &\n")
    shell.wait(lambda: "tui3090: train finished at step 5/5" in shell.screen)
    assert b"\x1b[?1049h" not in shell.bytes


def test_show_opens_a_run_and_leaves(shell: Shell) -> None:
    shell.command(f"{COMMAND} run train.py --run-dir run --steps 20 --headless")
    assert shell.status() == 0
    shell.command(f"{COMMAND} show run")
    shell.wait(lambda: "finished" in shell.screen.lower() and b"\x1b[?1049h" in shell.bytes)
    shell.type("q")
    shell.wait(lambda: b"\x1b[?1049l" in shell.bytes)
    assert shell.status() == 0
    assert shell.restored


def test_a_recipe_in_another_folder_runs_from_here(shell: Shell) -> None:
    Path(shell.folder / "elsewhere").mkdir()
    (shell.folder / "train.py").rename(shell.folder / "elsewhere" / "train.py")
    shell.command(f"{COMMAND} run elsewhere/train.py --run-dir run --steps 5 --exit")
    assert shell.status() == 0
    assert shell.run_info()["recipe"] == str((shell.folder / "elsewhere" / "train.py").resolve())
