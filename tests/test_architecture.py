"""The rules that hold the house up: who imports whom."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).parent.parent


def test_imports_keep_the_contracts() -> None:
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        assert lint_imports(config_filename=str(ROOT / "pyproject.toml")) == 0
    finally:
        os.chdir(before)


def modules_after(statement: str) -> set[str]:
    """What is imported in a fresh interpreter after a statement."""
    return {name.split(".")[0] for name in names_after(statement)}


def names_after(statement: str) -> set[str]:
    """Their full names."""
    script = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(run.stdout.split())


def test_the_screen_and_the_command_come_without_torch() -> None:
    assert "torch" not in modules_after(
        "import tui3090.cli, tui3090.session, tui3090.show, tui3090.dashboard.app, tui3090.launch, tui3090.source"
    )


def test_the_command_comes_without_textual() -> None:
    assert not {"torch", "textual", "numpy"} & modules_after("import tui3090.cli")


def test_the_first_picture_waits_for_nothing_that_only_records_need() -> None:
    paint = """
import tui3090.cli
from tui3090.session import View, first_paint

class Terminal:
    taken, size = False, lambda self: (160, 50)
    write = lambda self, text: None
    flush = lambda self: None

tui3090.cli.parse_options(tui3090.cli.bundled("gpt"), ["--size", "small"])
first_paint(Terminal(), View(name="run"))
"""
    needless = {"tui3090.advice", "tui3090.facts", "tui3090.dashboard.app", "textual", "torch", "numpy"}
    assert not needless & names_after(paint)
