"""Leaving a run running and coming back to it; what the guardian does when the run is killed."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import psutil
import pytest

from tests.terminal.pty_shell import COMMAND, TRAIN, Shell
from tui3090.commands import Change
from tui3090.records import Changed
from tui3090.remote import Remote
from tui3090.runlog import RecordReader
from tui3090.signals import SAME_S

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
    second = Remote(socket, shell.folder / "run")  # another viewer, at the same time
    second.send(Change("accumulate", 8))
    shell.wait(lambda: changes(shell) == [2, 8] and "accum 8" in shell.screen)
    second.close()
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


def test_a_run_that_is_killed_leaves_a_whole_terminal_and_the_way_back(shell: Shell) -> None:
    train(shell, "--save-steps 20")
    shell.wait(lambda: list((shell.folder / "run").glob("saves/step-*")))
    shell.process().send_signal(signal.SIGKILL)
    assert shell.status() == 137
    assert shell.restored
    assert b"tui3090: SIGKILL ended training (from outside: by somebody, or by the system" in shell.bytes
    assert b"Go on with: tui3090 run train.py --resume run\r\n" in shell.bytes
    before = shell.steps()
    shell.command(f"{COMMAND} run train.py --resume run")
    shell.wait(lambda: shell.steps() > before + 20 and "TRAINING" in shell.screen)
    shell.process().terminate()
    assert shell.status() == 143
    assert shell.restored


def test_a_signal_to_the_whole_job_counts_once(shell: Shell) -> None:
    """`kill %1` reaches run and guardian: twice the same signal would end training without waiting for its step."""
    (shell.folder / "train.py").write_text(WAITS)
    shell.command(f"{COMMAND} run train.py --run-dir run")
    shell.wait(lambda: (shell.folder / "waiting").exists())
    os.killpg(guardian(shell).pid, signal.SIGTERM)
    log = shell.folder / "run" / "records.jsonl"
    shell.wait(lambda: "SIGTERM: stopping" in log.read_text())
    assert shell.process().is_running()
    time.sleep(SAME_S)  # within it a second one would be the same one
    guardian(shell).terminate()
    assert shell.status(8) == 143
    assert shell.restored


def test_a_storm_of_sizes_and_a_stop_change_nothing(shell: Shell) -> None:
    train(shell)
    for number in range(60):
        shell.bash.setwinsize(2 + number % 40, 3 + 5 * number % 170)
        shell.look(0.01)
    shell.bash.setwinsize(24, 80)
    shell.type("\x0c")
    shell.wait(lambda: "TRAINING" in shell.screen and "q leave" in shell.screen)
    os.killpg(guardian(shell).pid, signal.SIGSTOP)
    shell.wait(lambda: b"Stopped" in shell.bytes and shell.bytes.rstrip().endswith(b"READY>"))
    stopped = shell.steps()
    shell.command("fg")
    shell.wait(lambda: shell.steps() > stopped + 100 and "TRAINING" in shell.screen)
    shell.process().suspend()  # the run alone: its terminal stays its own
    shell.wait(lambda: shell.process().status() == psutil.STATUS_STOPPED)
    stopped = shell.steps()
    shell.process().resume()
    shell.wait(lambda: shell.steps() > stopped + 100)
    shell.type("?")
    shell.wait(lambda: "Capitals go backwards" in shell.screen)
    shell.process().terminate()
    assert shell.status() == 143
    assert shell.restored


SPAWNED = 'torch.utils.data.DataLoader(Points(), batch_size=4, num_workers=1, multiprocessing_context="spawn")'


@pytest.mark.parametrize(
    ("data", "started"),
    [("Points()", "forkserver"), ("unpicklable()", COMMAND), (SPAWNED, "spawn_main")],
    ids=["forkserver", "fork", "spawn"],
)
def test_workers_outlive_a_closed_terminal(shell: Shell, data: str, started: str) -> None:
    code = TRAIN.replace("train_data=Points()", f"train_data={data}")
    code += "\n\ndef unpicklable():\n    points = Points()\n    points.local = lambda: 0\n    return points\n"
    (shell.folder / "train.py").write_text(code)
    shell.command(f"{COMMAND} run train.py --run-dir run --workers 1")
    shell.wait(lambda: shell.steps() > 3)
    process = shell.process()
    workers = process.children(recursive=True)
    assert any(started in " ".join(worker.cmdline()) for worker in workers)
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


def test_a_headless_run_is_found_and_takes_keys(shell: Shell) -> None:
    shell.command(f"({COMMAND} run train.py --run-dir run --headless > lines &)")
    shell.wait(lambda: shell.steps() > 3)
    process = shell.process()
    shell.command(f"{COMMAND} show")
    shell.wait(lambda: "TRAINING" in shell.screen)
    shell.type("+")
    shell.wait(lambda: changes(shell) == [2] and "accum 2" in shell.screen)
    shell.type("q")
    shell.wait(lambda: "leave it running" in shell.screen)
    shell.type("s")
    shell.wait(lambda: b"stopped at step" in shell.bytes)
    shell.until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert shell.run_info()["state"] == "stopped"
    assert "accumulation 1 → 2 from step" in (shell.folder / "lines").read_text()


def test_a_closed_terminal_leaves_training_quiet(shell: Shell) -> None:
    """A descriptor of a terminal that is gone is ready to be read for ever: whoever asks it spins."""
    sleeps = TRAIN.replace("        x = torch", "        import time; time.sleep(0.02)\n        x = torch")
    (shell.folder / "train.py").write_text(sleeps)
    train(shell)
    process = shell.process()
    shell.close()
    before = shell.steps()
    shell.until(lambda: shell.steps() > before + 3)
    began, steps = sum(process.cpu_times()[:2]), shell.steps()
    shell.until(lambda: shell.steps() > steps + 30)
    spent = sum(process.cpu_times()[:2]) - began
    slept = (shell.steps() - steps) * 4 * 0.02  # batches of 4: at the least so much time has passed
    assert spent < 0.5 * slept
    assert not [f for f in Path(f"/proc/{process.pid}/fd").iterdir() if "pts" in os.readlink(f)]
    process.terminate()
    process.wait(30)


def test_a_finished_run_is_told_and_compared(shell: Shell) -> None:
    """The second run of a recipe sees the first; the end rings, sets the title, runs --notify, and drops torch."""
    shell.command(f"{COMMAND} run train.py --run-dir one --steps 20 --headless >/dev/null")
    assert shell.status() == 0
    assert shell.run_info("one")["socket"].startswith(shell.runtime)  # it could be attached to as well
    code = TRAIN.replace("    model = nn", "    import os; os.chdir('/')\n    model = nn")
    (shell.folder / "train.py").write_text(code)
    notify = """--notify 'echo "$TUI3090_EVENT $TUI3090_STEP $TUI3090_RUN" > "$TUI3090_RUN/told"'"""
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
    assert "run folder  two" in shell.screen
    shell.until(lambda: (shell.folder / "two" / "told").exists())
    assert (shell.folder / "two" / "told").read_text().split() == ["finished", "30", str(shell.folder / "two")]

    shell.command(f"{COMMAND} show one two | cat")
    assert shell.status() == 0
    assert "20/20" in shell.screen
    assert "30/30" in shell.screen
    shell.command(f"{COMMAND} show one two")
    shell.wait(lambda: "A one" in shell.screen and "B two" in shell.screen)
    assert shell.leave() == 0
    assert shell.restored


SLOW = """

def slow(model, batch):
    import time
    open("step", "w").close()
    time.sleep({seconds})
    return model(batch[0]).sum()
"""


def test_quitting_waits_for_a_long_step_and_force_ends_a_stall(shell: Shell) -> None:
    slow = TRAIN.replace("loss=lambda", "loss=slow if True else lambda") + SLOW.format(seconds=3)
    stalls = TRAIN.replace(
        "        x = torch", "        open('step', 'w'); import time; time.sleep(1000)\n        x = torch"
    )
    for run, code, force in (("slow", slow, ""), ("stalls", stalls, "Q")):
        (shell.folder / "train.py").write_text(code)
        shell.command(f"{COMMAND} run train.py --run-dir {run}")
        shell.wait(lambda: (shell.folder / "step").exists())
        shell.type("q")
        shell.wait(lambda: "leave it running" in shell.screen)
        shell.type("s")
        shell.wait(lambda: "STOPPING" in shell.screen)
        shell.type("?")  # the terminal can be used meanwhile
        shell.wait(lambda: "Capitals go backwards" in shell.screen)
        shell.type("?" + force)
        assert shell.status(30) == 0
        assert shell.restored
        assert shell.run_info(run)["steps"] == (0 if force else 1)
        (shell.folder / "step").unlink()
