"""`tui3090 run --resume`: which run, with which options, and what of it the screen shows."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.test_cli import folder, plans  # noqa: F401
from tests.test_headless import started, step
from tui3090 import cli
from tui3090.dashboard.view import View
from tui3090.records import Changed, Evaluated, Record, Resumed, Saved, State
from tui3090.runlog import RunFolder
from tui3090.savefolder import MODEL, TRAINING, Notes, saves, write_notes
from tui3090.settings import RunPlan, Settings

Plans = list[tuple[RunPlan, Path, bool, bool]]


def notes(**changes: Any) -> Notes:
    values: dict[str, Any] = {
        "number": 1, "step": 40, "time": 5.0, "reason": "key s", "healthy": True, "eval_loss": None, "best_eval": None,
        "epoch": 0, "taken": 160, "batch_size": 4, "whole_batch": 4, "rows": 999, "seed": 11, "planned": 60,
        "left": 20, "evaluated": False,
        "settings": "amp=bf16 accumulate=2", "model": "GPT", "optimizer": "AdamW", "tensors": {}, "ties": {},
        "trained": [], "torch": "2.13", "files": {},
    }  # fmt: skip
    return Notes(**(values | changes))


def run_folder(path: Path, recipe: Path | str, **info: Any) -> Path:
    """A run that was stopped at step 40."""
    save = path / "saves" / "step-00000040"
    save.mkdir(parents=True)
    (path / "records.jsonl").write_text("")
    write_notes(save, notes())
    known = {
        "name": Path(recipe).stem,
        "recipe": str(recipe),
        "options": {"size": "gpt2", "lr": 0.5},
        "steps_asked": 60,
    }
    RunFolder(path).write_info(**(known | {"device": "cpu", "vram_gib": None} | info))
    return path


def test_a_run_goes_on_as_it_was_but_for_what_the_command_says(plans: Plans, folder: Path) -> None:  # noqa: F811
    run = run_folder(folder / "runs" / "a", (folder / "train.py").resolve())
    assert cli.main(shlex.split("run train.py --resume --amp off --headless -- --batch-size 2")) == 7
    [(plan, where, _, _)] = plans
    assert where == Path("runs/a")
    assert run.exists()
    assert plan.resume
    assert plan.settings == Settings(accumulate=2)
    assert plan.options == {"size": "gpt2", "batch_size": 2, "lr": 0.5}
    assert (plan.seed, plan.steps, plan.device) == (11, 60, "cpu")
    assert plan.optimizer_state == "keep"


@pytest.mark.parametrize(
    ("was", "option", "goes_on"),
    [(True, "", True), (True, "--no-channels-last", False), (False, "", False), (None, "--channels-last", True)],
)
def test_the_order_in_memory_goes_on_unless_the_command_says_another(
    plans: Plans,  # noqa: F811
    folder: Path,  # noqa: F811
    was: bool | None,
    option: str,
    goes_on: bool,
) -> None:
    known = {} if was is None else {"channels_last": was}
    run_folder(folder / "runs" / "a", (folder / "train.py").resolve(), **known)
    assert cli.main(shlex.split(f"run train.py --resume {option}")) == 7
    assert plans[0][0].channels_last is goes_on


def test_the_newest_run_of_that_recipe_goes_on(plans: Plans, folder: Path) -> None:  # noqa: F811
    (folder / "other.py").write_text((folder / "train.py").read_text())
    for number, (name, recipe) in enumerate((("a", "train.py"), ("b", "train.py"), ("c", "other.py"))):
        run = run_folder(folder / "runs" / name, (folder / recipe).resolve())
        os.utime(run / "records.jsonl", (1000 + number, 1000 + number))
    assert cli.main(["run", "train.py", "--resume"]) == 7
    assert plans[0][1] == Path("runs/b")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("run --resume runs/a", "name the train.py to go on with: tui3090 run /elsewhere/evil.py --resume runs/a"),
        ("run train.py --resume", "there is no run of train.py with a save"),
        ("run train.py --resume nowhere", "nowhere is not a run folder"),
        ("run train.py --resume runs/empty", "can't go on: it has no saves"),
        ("run train.py --resume runs/a --run-dir x", "leave --run-dir out"),
        ("run train.py --resume runs/live", "is still being trained"),
        ("run train.py --resume runs/a -- --nonsense 1", "has no option --nonsense"),
        ("run train.py --optimizer-state some", "invalid choice"),
        ("run train.py --keep 0", "at least 1"),
        ("run train.py --save-minutes -1", "is not a number above 0"),
    ],
)
def test_what_can_not_go_on_is_one_sentence(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    command: str,
    sentence: str,
) -> None:
    run_folder(folder / "runs" / "a", "/elsewhere/evil.py")
    (folder / "runs" / "empty").mkdir()
    (folder / "runs" / "empty" / "records.jsonl").write_text("")
    me = psutil.Process()
    run_folder(folder / "runs" / "live", folder / "x.py", pid=me.pid, pid_started=me.create_time())
    assert cli.main(shlex.split(command)) == 2
    assert sentence in capsys.readouterr().err


def test_a_bundled_recipe_need_not_be_named_and_is_our_own_file(plans: Plans, folder: Path) -> None:  # noqa: F811
    run_folder(folder / "runs" / "a", "/evil/tui3090/recipes/gpt.py", options={"size": "small"})
    assert cli.main(["run", "--resume", "runs/a"]) == 7
    assert plans[0][0].recipe.resolve() == Path(cli.__file__).parent / "recipes" / "gpt.py"


def test_options_of_a_hostile_run_json_are_only_data(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = run_folder(folder / "runs" / "a", (folder / "train.py").resolve())
    for options in ({"lr": "x"}, {"--help": 1}, {"size": ["a"]}, {"\x1b[31m": 1}, [1], "x"):
        RunFolder(run).write_info(options=options)
        assert cli.main(["run", "train.py", "--resume", "runs/a", "--", "--nonsense"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "\x1b" not in said


def test_the_curve_goes_on_from_the_saved_step() -> None:
    records: list[Record] = [
        started(),
        *(step(n, loss=1.0 + (n == 3) - n / 100) for n in range(1, 21)),
        Evaluated(time=1.0, step=20, loss=0.1),
        Changed(time=1.0, step=15, technique="amp", old="off", new="bf16"),
        Saved(time=2.0, step=12, name="step-00000012", reason="key s", seconds=1.0, waited_s=0.1, bytes=9),
        State(time=3.0, state="stopped"),
    ]
    seen = View()
    seen.absorb(records)
    seen.absorb([Resumed(time=9.0, step=12, name="step-00000012"), step(13, loss=0.5)])
    steps = [point.step for point in seen.loss.points]
    assert steps == [*range(1, 14)]
    assert (seen.loss.best, seen.loss.best_step) == (0.5, 13)
    assert not seen.evaluated
    assert not seen.changes
    assert seen.loss.points[-2].smooth == pytest.approx(0.94 + 0.06, abs=0.2)
    assert [r.step for r in seen.recent] == [13]


TRAIN = """
import torch
from tui3090 import Recipe


def recipe(batch_size: int = 4):
    torch.manual_seed(0)
    rows = [{"x": torch.randn(8), "y": torch.randn(1)} for _ in range(4000)]
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    return Recipe(
        model=model,
        train_data=rows,
        loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),
        batch_size=batch_size,
        epochs=100,
    )
"""


def test_sigterm_saves_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    """As timeout(1) sends it: to the process and to its group, so that the loader worker gets it too."""
    (tmp_path / "train.py").write_text(TRAIN)

    def command(*options: str) -> list[str]:
        return [sys.executable, "-m", "tui3090", "run", "train.py", "--headless", "--device", "cpu", *options]

    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command("--run-dir", "r", "--workers", "1"),
        cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("step "):
            break
    run.send_signal(signal.SIGTERM)
    os.killpg(run.pid, signal.SIGTERM)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    [save] = saves(tmp_path / "r" / "saves")[0]
    assert not save.damage()
    assert {path.name for path in save.path.iterdir()} == {MODEL, TRAINING, "save.json"}
    assert f"step {save.notes.step:,}".replace(",", " ") in said
    assert json.loads((tmp_path / "r" / "run.json").read_text())["steps"] == save.notes.step
    again = subprocess.run(
        command("--resume", "r", "--steps", str(save.notes.step + 3)),
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert "goes on from saves/" in again.stdout
    lines = [json.loads(line) for line in (tmp_path / "r" / "records.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["type"] == "step"] == list(range(1, save.notes.step + 4))


def test_a_killed_run_leaves_no_worker_and_goes_on_and_nobody_else_trains_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)

    def command(*options: str) -> list[str]:
        return [sys.executable, "-m", "tui3090", "run", "train.py", "--headless", "--device", "cpu", *options]

    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    begun = command("--run-dir", "r", "--workers", "2", "--save-steps", "5")
    run = subprocess.Popen(begun, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("saved step "):
            break
    workers = psutil.Process(run.pid).children(recursive=True)
    assert sum("pt_data" in worker.name() for worker in workers) == 2, [worker.cmdline() for worker in workers]
    second = subprocess.run(command("--resume", "r"), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (second.returncode, second.stderr.count("\n")) == (2, 1)
    assert "r is still being trained" in second.stderr
    run.kill()
    run.wait(10)
    assert not psutil.wait_procs(workers, timeout=10)[1]
    newest = saves(tmp_path / "r" / "saves")[0][-1]
    assert not newest.damage()
    again = subprocess.run(
        command("--resume", "r", "--steps", str(newest.notes.step + 3)),
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr


def test_leaving_waits_for_a_save_and_a_second_signal_does_not() -> None:
    from tui3090.link import Commands
    from tui3090.session import Session

    session: Any = Session.__new__(Session)
    session._commands, session._force_at = Commands(), 0.0  # the time that training had is over
    session._interrupts = type("Interrupts", (), {"count": 1})()
    assert session._forced()
    session._commands.saving.set()
    assert not session._forced()
    session._interrupts.count = 2
    assert session._forced()
