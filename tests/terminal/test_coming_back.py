"""Leaving a run running and coming back to it; what the guardian does when the run is killed."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import psutil
import pytest

from tests.terminal.pty_shell import COMMAND, TRAIN, Shell
from tui3090.records import Changed
from tui3090.runlog import RecordReader

WAITS = TRAIN.replace("    model = nn", "    open('waiting', 'w'); import time; time.sleep(1000)\n    model = nn")


def train(shell: Shell, options: str = "") -> None:
    """Start the dashboard, and wait until training is under way."""
    shell.command(f"{COMMAND} run train.py --run-dir run --workers 0 {options}")
    shell.wait(lambda: shell.steps() > 3)


def changes(shell: Shell) -> list[object]:
    """The techniques' values that came into force so far."""
    records = RecordReader(shell.folder / "run" / "records.jsonl").read(1 << 28)
    return [record.new for record in records if isinstance(record, Changed)]


def guardian(shell: Shell) -> psutil.Process:
    """The process that waits for the run."""
    parent = shell.process().parent()
    assert parent is not None
    assert parent.parent() == psutil.Process(shell.bash.pid)
    return parent


def test_a_run_is_left_running_and_found_again_with_its_keys(shell: Shell) -> None:
    train(shell)
    process = shell.process()
    waits = guardian(shell)
    socket = Path(shell.run_info()["socket"])
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    shell.type("q")
    shell.wait(lambda: "leave it running" in shell.screen)
    shell.type("d")
    assert shell.status() == 0
    assert shell.restored
    assert f"tui3090: train goes on.  Come back: tui3090 show   Stop it: kill {process.pid}" in shell.screen
    assert not waits.is_running()
    before = shell.steps()
    shell.until(lambda: shell.steps() > before + 100)
    assert os.getsid(process.pid) == process.pid  # nothing of the terminal is held any more
    assert not [f for f in Path(f"/proc/{process.pid}/fd").iterdir() if "pts" in os.readlink(f)]

    shell.command(f"cd / && {COMMAND} show")
    shell.wait(lambda: "TRAINING" in shell.screen)
    shell.type("+")
    shell.wait(lambda: changes(shell) == [2])
    shell.wait(lambda: "in force from step" in shell.screen)
    shell.type("q")
    shell.wait(lambda: "leave it running" in shell.screen)
    shell.type("d")
    assert shell.status() == 0
    assert shell.restored
    assert process.is_running()

    shell.command(f"{COMMAND} show {shell.folder}/run")
    shell.wait(lambda: "TRAINING" in shell.screen)
    shell.type("q")
    shell.wait(lambda: "leave it running" in shell.screen)
    shell.type("s")
    assert shell.status() == 0
    assert "tui3090: train stopped at step" in shell.screen
    shell.until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert shell.run_info()["exit_status"] == 0
    assert not socket.exists()


def test_a_run_that_is_killed_leaves_a_whole_terminal_and_a_sentence(shell: Shell) -> None:
    train(shell)
    shell.process().send_signal(signal.SIGKILL)
    assert shell.status() == 137
    assert shell.restored
    said = " ".join(shell.screen.split())
    assert "tui3090: SIGKILL ended training (from outside: by somebody, or by the system" in said
    assert "It had not saved anything yet." in said


def test_a_signal_to_the_whole_job_counts_once(shell: Shell) -> None:
    """`kill %1` reaches run and guardian: twice the same signal would end training without waiting for its step."""
    (shell.folder / "train.py").write_text(WAITS)
    shell.command(f"{COMMAND} run train.py --run-dir run")
    shell.wait(lambda: (shell.folder / "waiting").exists())
    os.killpg(guardian(shell).pid, signal.SIGTERM)
    log = shell.folder / "run" / "records.jsonl"
    shell.wait(lambda: "SIGTERM: stopping" in log.read_text())
    assert shell.process().is_running()
    guardian(shell).terminate()
    assert shell.status(8) == 143
    assert shell.restored


def test_a_stopped_job_goes_on_where_it_was(shell: Shell) -> None:
    train(shell)
    os.killpg(guardian(shell).pid, signal.SIGSTOP)
    shell.wait(lambda: b"Stopped" in shell.bytes and shell.bytes.rstrip().endswith(b"READY>"))
    stopped = shell.steps()
    shell.command("fg")
    shell.wait(lambda: shell.steps() > stopped + 100 and "TRAINING" in shell.screen)
    shell.process().terminate()
    assert shell.status() == 143
    assert shell.restored


@pytest.mark.parametrize("data", ["Points()", "unpicklable()"], ids=["forkserver", "fork"])
def test_workers_outlive_a_closed_terminal(shell: Shell, data: str) -> None:
    code = TRAIN.replace("train_data=Points()", f"train_data={data}")
    code += "\n\ndef unpicklable():\n    points = Points()\n    points.local = lambda: 0\n    return points\n"
    (shell.folder / "train.py").write_text(code)
    shell.command(f"{COMMAND} run train.py --run-dir run --workers 1")
    shell.wait(lambda: shell.steps() > 3)
    process = shell.process()
    workers = process.children(recursive=True)
    assert workers
    shell.close()
    for _ in range(2):
        before = shell.steps()
        shell.until(lambda before=before: shell.steps() > before + 20)  # type: ignore[misc]
        process.send_signal(signal.SIGHUP)
    process.terminate()
    process.wait(30)
    assert shell.run_info()["exit_status"] == 143
    psutil.wait_procs(workers, timeout=10)
    assert [worker for worker in workers if worker.is_running()] == []


def test_a_finished_run_is_told_and_compared(shell: Shell) -> None:
    """The second run of a recipe sees the first; the end rings, sets the title, runs --notify and frees the card."""
    shell.command(f"{COMMAND} run train.py --run-dir one --steps 20 --headless >/dev/null")
    assert shell.status() == 0
    notify = """--notify 'echo "$TUI3090_EVENT $TUI3090_STEP $TUI3090_RUN" > told'"""
    shell.command(f"{COMMAND} run train.py --run-dir two --steps 30 {notify}")
    shell.wait(lambda: b"\x1b]2;tui3090: train finished\x07" in shell.bytes, 60)
    assert b"\x07" in shell.bytes[: shell.bytes.find(b"\x1b]2;")]
    process = shell.process("two")
    shell.wait(lambda: "show" in process.cmdline())
    assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
    shell.wait(lambda: "last run ended at 20" in shell.screen)
    assert shell.leave() == 0
    assert shell.restored
    assert "tui3090: train finished at step 30/30" in shell.screen
    shell.until(lambda: (shell.folder / "told").exists())
    assert (shell.folder / "told").read_text().split() == ["finished", "30", str(shell.folder / "two")]

    shell.command(f"{COMMAND} show one two | cat")
    assert shell.status() == 0
    assert "20/20" in shell.screen
    assert "30/30" in shell.screen
    shell.command(f"{COMMAND} show one two")
    shell.wait(lambda: "A one" in shell.screen and "B two" in shell.screen)
    assert shell.leave() == 0
    assert shell.restored


def test_what_asks_the_terminal_fails_with_a_sentence(shell: Shell) -> None:
    """`input()` and `breakpoint()` in a train.py: the keys are the dashboard's."""
    for call, said in (("input()", "EOFError"), ("breakpoint()", "BdbQuit")):
        (shell.folder / "train.py").write_text(TRAIN.replace("    model = nn", f"    {call}\n    model = nn"))
        shell.command(f"{COMMAND} run train.py")
        assert shell.status() == 2
        assert shell.restored
        assert f"{said}: training can't read the terminal" in " ".join(shell.screen.split())


def test_resizes_in_a_storm(shell: Shell) -> None:
    train(shell)
    for number in range(60):
        shell.bash.setwinsize(2 + number % 40, 3 + 5 * number % 170)
        shell.look(0.01)
    shell.bash.setwinsize(24, 80)
    shell.type("\x0c")
    shell.wait(lambda: "TRAINING" in shell.screen and "q leave" in shell.screen)
    shell.process().terminate()
    assert shell.status() == 143
    assert shell.restored
