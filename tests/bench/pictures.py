"""Makes screenshots/: real runs in a real terminal, the keys pressed, the picture taken by the program's own key `x`.

python -m tests.bench.pictures cpu|card|recorded [NAME ...]

`recorded` shows the run on an H200 of which tests/data holds the records.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.terminal.pty_shell import Shell

SCREENSHOTS = Path(__file__).parents[2] / "screenshots"
RECORDED = Path(__file__).parents[1] / "data" / "h200.jsonl"

CPU_RUN = "run gpt --device cpu --run-dir run"
CARD_RUN = "run gpt --device cuda:0 --run-dir run -- --size gpt2 --batch-size 8 --context 1024 --epochs 100"

# name, columns, rows, command, then steps to wait for and keys to press; the picture is taken at the end
PICTURES = {
    "cpu": [
        ("cpu-160x50", 160, 50, CPU_RUN, [(40, "c"), (70, "+"), (100, "c"), (130, "-"), (160, "")]),
        ("cpu-80x24", 80, 24, CPU_RUN, [(30, "+"), (60, "c"), (80, "")]),
        ("help", 160, 50, CPU_RUN, [(20, "?")]),
    ],
    "card": [
        (
            "card-160x50",
            160,
            50,
            CARD_RUN,
            [(50, "t"), (120, "a"), (250, "c"), (290, "c"), (330, "c"), (450, "g"), (650, "")],
        ),
        ("card-80x24", 80, 24, CARD_RUN, [(40, "a"), (140, "g"), (300, "")]),
    ],
    "recorded": [("card-160x50", 160, 50, "show run", []), ("card-80x24", 80, 24, "show run", [])],
}


def main(where: str, *names: str) -> None:
    """Take the pictures of one kind of machine, all or those named."""
    for name, columns, rows, command, script in PICTURES[where]:
        if names and name not in names:
            continue
        if where == "recorded":
            look(name, columns, rows, command)
        else:
            take(name, columns, rows, command, script)


def take(name: str, columns: int, rows: int, command: str, script: list[tuple[int, str]]) -> None:
    """One run and its picture."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shell = Shell(folder, columns, rows)
        shell.command(f"{sys.executable} -m tui3090 {command}")
        for steps, keys in script:
            shell.wait(lambda steps=steps: shell.steps() >= steps, 600)  # type: ignore[misc]
            shell.type(keys)
        seen = shell.steps()
        shell.wait(lambda: shell.steps() > seen + 3, 600)
        shell.type("x")
        shell.wait(lambda: list((folder / "run").glob("screen-*.svg")), 30)
        if name == "help":
            shell.type("?")
        shell.type("q")
        shell.wait(lambda: "stay" in shell.screen, 30)
        shell.type("s")
        shell.status(120)
        shell.close()
        shutil.copy(next((folder / "run").glob("screen-*.svg")), SCREENSHOTS / f"{name}.svg")
        shutil.copy(folder / "run" / "records.jsonl", Path(tempfile.gettempdir()) / f"{name}.jsonl")
        print(f"{name}: {len(script)} waits, {seen} steps")


def look(name: str, columns: int, rows: int, command: str) -> None:
    """The recorded run at its end."""
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        run.mkdir()
        # what could be used was another matter in the version that recorded it
        kept = [line for line in RECORDED.read_text().splitlines() if json.loads(line)["type"] != "available"]
        (run / "records.jsonl").write_text("\n".join(kept) + "\n")
        shell = Shell(run.parent, columns, rows)
        shell.command(f"{sys.executable} -m tui3090 {command}")
        shell.wait(lambda: "STOPPED" in shell.screen and "q leave" in shell.screen, 30)
        shell.type("x")
        shell.wait(lambda: list(run.glob("screen-*.svg")), 30)
        shell.type("q")
        shell.status(30)
        shell.close()
        shutil.copy(next(run.glob("screen-*.svg")), SCREENSHOTS / f"{name}.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])
