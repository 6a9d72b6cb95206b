"""Makes screenshots/: real runs in a real terminal, the keys pressed, the picture taken by the program's own key `x`.

python -m tests.bench.pictures cpu|card [NAME ...]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tests.terminal.pty_shell import Shell

SCREENSHOTS = Path(__file__).parents[2] / "screenshots"

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
}


def main(where: str, *names: str) -> None:
    """Take the pictures of one kind of machine, all or those named."""
    for name, columns, rows, command, script in PICTURES[where]:
        if not names or name in names:
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


if __name__ == "__main__":
    main(*sys.argv[1:])
