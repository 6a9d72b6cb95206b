"""How a run in a real terminal is left, and that the terminal is the shell's again afterwards."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.terminal.pty_shell import COMMAND, TRAIN, Shell
from tui3090.savefolder import saves
from tui3090.signals import SAME_S

HANGS = TRAIN.replace("x = torch", "open('hanging', 'w'); import time; time.sleep(1000)\n        x = torch")


def train(shell: Shell, options: str = "") -> None:
    """Start the dashboard, and wait until training is under way."""
    shell.command(f"{COMMAND} run train.py --run-dir run --workers 0 {options}")
    shell.wait(lambda: shell.steps() > 3)
    assert b"\x1b[?1049h" in shell.bytes


def advances(shell: Shell) -> None:
    """Wait until training has gone on from where it is now."""
    before = shell.steps()
    shell.wait(lambda: shell.steps() > before + 3)


def advances_unseen(shell: Shell) -> None:
    """Wait until training has gone on, without reading what comes to the terminal."""
    before = shell.steps()
    shell.until(lambda: shell.steps() > before + 300)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_training_and_leaves_the_terminal_whole(shell: Shell, number: signal.Signals) -> None:
    train(shell)
    shell.process().send_signal(number)
    assert shell.status() == 128 + number
    assert shell.restored
    assert shell.run_info()["state"] == "stopped"
    [save] = saves(shell.folder / "run" / "saves")[0]
    assert not save.damage()
    assert save.notes.step == shell.run_info()["steps"] == shell.steps()
    # the line may break anywhere, for the number of steps before it is as long as the machine is fast
    assert "tui3090runtrain.py--resumerungoesonfromit" in "".join(shell.screen.split())
    assert "tui3090: train stopped at step" in shell.screen


def test_a_second_signal_leaves_a_training_that_hangs(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(HANGS)
    shell.command(f"{COMMAND} run train.py --run-dir run")
    shell.wait(lambda: (shell.folder / "hanging").exists())
    shell.process().terminate()
    again = time.monotonic() + SAME_S
    shell.wait(lambda: "SIGTERM: stopping" in (shell.folder / "run" / "records.jsonl").read_text())
    shell.wait(lambda: time.monotonic() > again)
    shell.process().terminate()
    assert shell.status(8) == 143
    assert shell.restored


def test_training_goes_on_after_hang_up_signals(shell: Shell) -> None:
    train(shell)
    for _ in range(2):
        shell.process().send_signal(signal.SIGHUP)
        advances(shell)
    shell.process().terminate()
    assert shell.status() == 143
    assert shell.restored


def test_training_goes_on_without_a_screen_when_the_terminal_is_closed(shell: Shell) -> None:
    train(shell, "--steps 1000000")
    process = shell.process()
    shell.close()
    advances_unseen(shell)
    process.send_signal(signal.SIGHUP)
    advances_unseen(shell)
    process.terminate()
    process.wait(30)
    assert shell.run_info()["exit_status"] == 143
    assert shell.run_info()["state"] == "stopped"


def stall(shell: Shell) -> None:
    """Nobody reads the pty from here on; ctrl+l has the whole screen sent again, until the pty takes no more."""
    unread = -1
    while unread < shell.unread():
        unread = shell.unread()
        shell.type("\x0c" * 20)
        advances_unseen(shell)
    assert unread > 1000


def test_a_terminal_that_takes_nothing_does_not_hold_training_nor_leaving(shell: Shell) -> None:
    train(shell)
    stall(shell)
    shell.process().terminate()
    shell.until(lambda: shell.run_info().get("exit_status") == 143, seconds=20)
    assert shell.status() == 143
    assert shell.restored


COUNTS_WRITES = """
import pathlib
from tui3090.dashboard.driver import TerminalDriver

real, written = TerminalDriver.write, pathlib.Path("written").absolute()


def counted(driver, data):
    real(driver, data)
    with written.open("a") as file:
        file.write("w")


TerminalDriver.write = counted
"""


@pytest.mark.parametrize(
    "seconds", [0, pytest.param(60, marks=pytest.mark.slow)], ids=["of many frames", "of a minute"]
)
def test_a_stall_holds_nothing_and_afterwards_the_whole_screen_is_painted_again(shell: Shell, seconds: float) -> None:
    """What a stall can fill is counted in writes: there are more of them here than the 120 frames of a minute make."""
    (shell.folder / "train.py").write_text(TRAIN + COUNTS_WRITES)
    train(shell)
    stall(shell)
    full, end, written = shell.unread(), time.monotonic() + seconds, shell.folder / "written"
    last = written.stat().st_size + 250
    while time.monotonic() < end or written.stat().st_size < last:
        before = written.stat().st_size
        shell.type("\x0c")
        shell.until(lambda before=before: written.stat().st_size > before)  # type: ignore[misc]
    shell.type("+")  # keys act
    shell.until(lambda: '"technique": "accumulate"' in (shell.folder / "run" / "records.jsonl").read_text())
    advances_unseen(shell)
    assert shell.unread() == full
    shell.wait(lambda: all(words in shell.screen for words in ("TRAINING", "Loss", "Memory", "Techniques", "Log")))
    seen = shell.steps()
    shell.wait(lambda: step_on_screen(shell) > seen and "accum 2" in shell.screen)
    shell.process().terminate()
    assert shell.status() == 143
    assert shell.restored


def step_on_screen(shell: Shell) -> int:
    """The step that the header shows: `1 412/6 000`."""
    found = re.search(r"train +([\d ]+)/", shell.screen)
    return int(found[1].replace(" ", "")) if found else 0


def test_a_finished_run_stays_on_the_screen_until_q(shell: Shell) -> None:
    train(shell, "--steps 5")
    shell.wait(lambda: "finished" in shell.screen.lower())
    assert shell.leave() == 0
    assert shell.restored
    assert "tui3090: train finished at step 5/5" in shell.screen


def test_with_exit_a_finished_run_leaves_by_itself(shell: Shell) -> None:
    train(shell, "--steps 5 --exit")
    assert shell.status() == 0
    assert "loss" in shell.screen
    assert "run folder  run" in shell.screen


def test_a_start_that_fails_is_one_sentence_and_status_2(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(TRAIN.replace("model = nn.Linear(4, 1)", "raise ValueError('[b]boom[/b]')"))
    shell.command(f"{COMMAND} run train.py --run-dir run")
    assert shell.status() == 2
    assert shell.restored
    assert "ValueError: [b]boom[/b]" in shell.screen
    assert "run/output.log" in shell.screen
    assert "Traceback" not in shell.screen
    assert "Traceback" in (shell.folder / "run" / "output.log").read_text()


@pytest.mark.parametrize(
    ("failure", "status", "said"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("import sys; sys.exit(3)", 3, "called sys.exit(3)"),
        ("input()", 1, "training can't read the terminal"),
        ("breakpoint()", 1, "training can't read the terminal"),
    ],
    ids=["raise", "exit", "input", "breakpoint"],
)
def test_a_failure_in_training_stays_on_the_screen(shell: Shell, failure: str, status: int, said: str) -> None:
    code = TRAIN.replace("loss=lambda", "loss=fails_at_5 if True else lambda")
    code += f"""

calls = []


def fails_at_5(model, batch):
    calls.append(1)
    if len(calls) > 5:
        {failure}
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
    (shell.folder / "train.py").write_text(code)
    train(shell)
    shell.wait(lambda: "failed" in shell.screen.lower())
    process = shell.process()
    shell.wait(lambda: "show" in process.cmdline())  # nothing of torch is held any more
    assert shell.leave() == status
    assert shell.restored
    assert "tui3090: train failed at step" in shell.screen
    assert said.encode() in shell.bytes[shell.bytes.rfind(b"tui3090: train failed") :]
    assert "run/output.log" in shell.screen
    assert "Traceback" not in shell.screen


FORKS = """
import os
import signal


def fork():
    child = os.fork()
    if child == 0:
        names = ("SIGTERM", "SIGCONT", "SIGWINCH", "SIGTSTP", "SIGINT", "SIGHUP")
        print("HANDLERS", *(signal.getsignal(getattr(signal, name)).name for name in names), flush=True)
        os._exit(0)
    os.waitpid(child, 0)

""" + TRAIN.replace("    model =", "    fork()\n    model =").strip()


def test_a_child_that_training_forks_does_not_obey_for_its_parent(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(FORKS)
    train(shell)
    printed = (shell.folder / "run" / "output.log").read_text()
    assert "HANDLERS SIG_DFL SIG_DFL SIG_DFL SIG_DFL SIG_IGN SIG_IGN" in printed
    shell.process().terminate()
    assert shell.status() == 143


SAVES_SLOWLY = """
import pathlib, time
import tui3090.saves

real = tui3090.saves.safetensors.torch.save_file


def slow(tensors, path):
    real(tensors, path)
    pathlib.Path("saving").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)


tui3090.saves.safetensors.torch.save_file = slow
"""


def test_quitting_during_a_save_waits_for_it(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(TRAIN + SAVES_SLOWLY)
    train(shell)
    shell.type("s")
    shell.wait(lambda: (shell.folder / "saving").exists())
    shell.type("q")
    shell.wait(lambda: "save and stop" in shell.screen)
    shell.type("s")
    shell.wait(lambda: "STOPPING" in shell.screen)
    assert shell.process().is_running()
    (shell.folder / "go").touch()
    assert shell.status() == 0
    assert shell.restored
    found, passed_over = saves(shell.folder / "run" / "saves")
    assert not passed_over
    assert [save.damage() for save in found] == ["", ""]
    assert found[-1].notes.step == shell.run_info()["steps"]
    assert not list((shell.folder / "run" / "saves").glob(".*"))


COMPILES_FOR_EVER = """
import pathlib, time
import tui3090.techniques.compile


def endless(module, inputs):
    pathlib.Path("compiling").touch()
    time.sleep(1000)


tui3090.techniques.compile.BACKEND, tui3090.techniques.compile.OPTIONS = endless, {}
"""


def test_force_ends_a_compilation(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(TRAIN + COMPILES_FOR_EVER)
    train(shell)
    shell.type("k")
    shell.wait(lambda: (shell.folder / "compiling").exists() and "compiling" in shell.screen)
    shell.type("q")
    shell.wait(lambda: "save and stop" in shell.screen)
    shell.type("s")
    shell.wait(lambda: "STOPPING" in shell.screen)
    assert shell.process().is_running()
    shell.type("Q")
    assert shell.status(20) == 0
    assert shell.restored
