"""From a command line to the plan of a run: one that begins, or one that goes on where it stopped."""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from tui3090.recipe import RecipeError
from tui3090.runlog import RunFolder
from tui3090.settings import TECHNIQUES, RunPlan, Settings
from tui3090.source import bundled, parse_options

DEFAULT_RECIPE = "gpt"
NEWEST = Path("the newest")
"""Stands for a --resume without a run."""

OPTIONS = tuple(technique for technique in TECHNIQUES if technique.name != "lr")
"""The techniques that a run can start with; the learning rate is the recipe's."""


class UsageError(Exception):
    """The command can't be carried out as it stands; its text is a sentence with the way out."""


def recipe_path(given: str) -> Path:
    """The file that the command names: a path, or the name of a bundled recipe."""
    path = Path(given)
    if path.suffix == ".py" or os.sep in given:
        return path
    try:
        return bundled(given)  # before a folder of this name, which may well hold a model
    except RecipeError:
        if path.exists():
            return path
        raise


def new_plan(arguments: argparse.Namespace, path: Path) -> RunPlan:
    """The plan of a run that begins with the recipe at `path`. Raises RecipeError for options that it has not."""
    asked = {t.name: getattr(arguments, t.name) for t in OPTIONS if getattr(arguments, t.name) is not None}
    return RunPlan(
        recipe=path,
        name=path.stem,
        options=parse_options(path, arguments.recipe_argv),
        settings=Settings(**asked),
        asked=frozenset(asked),
        device=arguments.device or "",
        vram_gib=arguments.vram,
        channels_last=bool(arguments.channels_last),
        steps=arguments.steps,
        seed=arguments.seed,
        counters=arguments.counters,
        optimizer_state=arguments.optimizer_state,
        save_minutes=arguments.save_minutes,
        save_steps=arguments.save_steps,
        keep=arguments.keep,
    )


def resumed_plan(arguments: argparse.Namespace) -> tuple[RunPlan, RunFolder]:
    """The plan of a run that goes on, and its folder: as it was, but for what the command line says."""
    from tui3090.dashboard.source import writer_lives
    from tui3090.savefolder import saves

    if arguments.run_dir is not None:
        raise UsageError("--resume goes on in the run's own folder: leave --run-dir out")
    path = recipe_path(arguments.recipe) if arguments.recipe else None
    folder = _newest(path) if arguments.resume == NEWEST else RunFolder.find(arguments.resume)
    info = folder.read_info()
    if writer_lives(folder):
        raise UsageError(f"{folder.path} is still being trained: tui3090 show {shlex.quote(str(folder.path))} shows it")
    found, passed_over = saves(folder.path / "saves")
    if not found:
        why = " ".join(passed_over) or "it has no saves"
        raise UsageError(f"{folder.path} can't go on: {why}")
    notes = found[-1].notes
    if path is None:
        path = _recipe_of(info, folder)
    saved = info.get("options")
    argv = _as_argv(saved if isinstance(saved, dict) else {})
    arguments.recipe_argv = [*argv, *arguments.recipe_argv]
    plan = new_plan(arguments, path)
    settings = Settings.from_short(notes.settings)
    for name in plan.asked:
        settings = settings.having(name, getattr(plan.settings, name))
    steps, vram, device = (info.get(key) for key in ("steps_asked", "vram_gib", "device"))
    return replace(
        plan,
        resume=True,
        settings=settings,
        seed=notes.seed if plan.seed is None else plan.seed,
        steps=steps if plan.steps is None and type(steps) is int and steps > 0 else plan.steps,
        vram_gib=vram if plan.vram_gib is None and type(vram) is float and vram > 0 else plan.vram_gib,
        channels_last=plan.channels_last or (arguments.channels_last is None and info.get("channels_last") is True),
        device=device if not plan.device and isinstance(device, str) else plan.device,
    ), folder


def _newest(path: Path | None) -> RunFolder:
    """The newest run under runs/ that has a save, of the recipe at `path` if that is given."""
    for folder in RunFolder.newest_first():
        recipe = folder.read_info().get("recipe")
        if (folder.path / "saves").is_dir() and (path is None or recipe == str(path.resolve())):
            return folder
    of = f" of {path}" if path else ""
    raise UsageError(f"there is no run{of} with a save under runs/ here: name its folder after --resume")


def _recipe_of(info: dict[str, Any], folder: RunFolder) -> Path:
    """The recipe of a run, if it is a bundled one: a folder from elsewhere must not decide which file is run."""
    recipe, name = info.get("recipe"), info.get("name")
    if isinstance(recipe, str) and isinstance(name, str) and recipe.endswith(f"tui3090/recipes/{name}.py"):
        return bundled(name)
    shown = shlex.quote(recipe) if isinstance(recipe, str) else "TRAIN.PY"
    raise UsageError(f"name the train.py to go on with: tui3090 run {shown} --resume {shlex.quote(str(folder.path))}")


def _as_argv(options: dict[str, Any]) -> list[str]:
    """The recipe's options of an earlier run as its command line would give them."""
    argv = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            argv.append(f"--{flag}={value}")
    return argv
