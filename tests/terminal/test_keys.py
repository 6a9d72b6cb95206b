"""The command in a real terminal, the way a person uses it: the bundled recipe, its keys, and what the records say."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.terminal.pty_shell import COMMAND, Shell
from tui3090.records import Changed, Record, Stage, StepRecord
from tui3090.runlog import RecordReader

RECORDED = Path(__file__).parents[1] / "data"


def records(shell: Shell) -> list[Record]:
    """What the run has logged so far."""
    return RecordReader(shell.folder / "run" / "records.jsonl").read(1 << 28)


def test_a_person_watches_a_model_learn_and_presses_keys(screen: Shell) -> None:
    screen.command(f"{COMMAND} run --device cpu --run-dir run -- --batch-size 2")
    screen.wait(lambda: "LOADING" in screen.screen, 30)
    screen.wait(lambda: "TRAINING" in screen.screen and screen.steps() >= 3, 120)

    def changed(technique: str) -> list[object]:
        return [r.new for r in records(screen) if isinstance(r, Changed) and r.technique == technique]

    for keys, technique, value in (("c", "checkpointing", 2), ("+", "accumulate", 2), ("a", "amp", "bf16")):
        screen.type(keys)
        screen.wait(lambda technique=technique, value=value: changed(technique) == [value], 90)  # type: ignore[misc]
    screen.wait(lambda: "bf16" in screen.screen and "2nd" in screen.screen, 30)
    screen.type("a\x1ba")  # cancelled, and pressed again
    screen.wait(lambda: changed("amp") == ["bf16", "fp16"], 90)

    screen.type(" ")
    screen.wait(lambda: "PAUSED" in screen.screen, 90)
    paused = screen.steps()
    screen.type("?")
    screen.wait(lambda: "capital" in screen.screen.lower(), 30)
    screen.type("?")
    assert screen.steps() == paused
    screen.type(" ")
    screen.wait(lambda: screen.steps() > paused + 2, 90)

    screen.type("q")
    screen.wait(lambda: "stay" in screen.screen, 30)
    screen.type("\x1b")
    screen.wait(lambda: "stay" not in screen.screen, 30)
    screen.type("q")
    screen.wait(lambda: "stay" in screen.screen, 30)
    screen.type("s")
    assert screen.status(90) == 0
    assert screen.restored

    logged = records(screen)
    steps = [r for r in logged if isinstance(r, StepRecord)]
    assert {"torch", "train.py", "model", "data", "device", "first step"} <= {
        r.name for r in logged if isinstance(r, Stage)
    }
    assert steps[-1].settings == "amp=fp16 checkpointing=every2nd accumulate=2"
    assert steps[-1].micro_batches == 2
    assert steps[-1].loss < steps[0].loss
    said = screen.bytes[screen.bytes.rfind(b"\x1b[?1049l") :].decode(errors="replace")
    assert "stopped" in said
    assert str(Path("run")) in said


def test_the_first_picture_comes_before_torch(shell: Shell) -> None:
    shell.command(f"{COMMAND} run train.py --run-dir run --steps 3 --exit")
    shell.wait(lambda: "LOADING" in shell.screen and "first step" in shell.screen)
    done = [r for r in records(shell) if isinstance(r, Stage) and r.name == "torch" and r.seconds is not None]
    assert done == []
    assert shell.status() == 0


def test_a_run_that_was_recorded_on_a_card_is_shown(screen: Shell) -> None:
    run = screen.folder / "h200"
    run.mkdir()
    shutil.copy(RECORDED / "h200.jsonl", run / "records.jsonl")
    screen.command(f"{COMMAND} show h200")
    screen.wait(lambda: "H200" in screen.screen and "graph" in screen.screen)
    screen.type("3")
    screen.wait(lambda: "reserved" in screen.screen and "nvidia-smi" in screen.screen)
    screen.type("3a")
    screen.wait(lambda: "The run is over" in screen.screen)
    screen.type("q")
    assert screen.status() == 0
    assert screen.restored
