"""The commands: `tui3090 run`, `show` and `new`. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tui3090.recipe import RecipeError, harmless
from tui3090.runlog import RunFolder, RunFolderError
from tui3090.settings import TECHNIQUES, RunPlan, Settings, Technique, Value
from tui3090.source import bundled, new_file, options_help, parse_options

DEFAULT_RECIPE = "gpt"

OPTIONS = tuple(technique for technique in TECHNIQUES if technique.name != "lr")
"""The techniques that a run can start with; the learning rate is the recipe's."""


class UsageError(Exception):
    """The command can't be carried out as it stands; its text is a sentence with the way out."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message} (see {self.prog} --help)")


class Version(argparse.Action):
    """Says the installed version; looking it up takes a while, so only when asked."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print it and exit."""
        from tui3090.runinfo import version

        print(f"tui3090 {version('tui3090')}")
        parser.exit()


class NotInThisVersion(argparse.Action):
    """An option that is known and does not exist yet."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{self.option_strings[0]} is not in this version: leave it out")


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the command line (sys.argv without the program's name when `argv` is None); the exit status."""
    _open_standard_descriptors()
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser()
    if not argv:
        parser.print_help()
        return 0
    try:
        # what follows -- belongs to the train.py
        ours, recipe_argv = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
        arguments, unknown = parser.parse_known_args(ours)
        if unknown:
            hint = ", and put options of the train.py after --" if arguments.command == run else ""
            raise UsageError(f"there is nothing called {unknown[0]} here: see tui3090 --help{hint}")
        if recipe_argv and arguments.command != run:
            raise UsageError("only tui3090 run takes options of a train.py after --")
        arguments.recipe_argv = recipe_argv
        status: int = arguments.command(arguments)
    except (UsageError, RecipeError, RunFolderError) as error:
        print(f"tui3090: {harmless(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"tui3090: {harmless(f'{error.filename}: {error.strerror}')}", file=sys.stderr)
        return 2
    return status


def make_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="tui3090",
        description="Fine-tune with a dashboard that switches techniques on and off while training goes on.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=Version, help="say which version this is")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands.add_parser("run", help="train, with the dashboard", allow_abbrev=False))
    show_parser = commands.add_parser("show", help="look at a run, while it goes on or afterwards", allow_abbrev=False)
    show_parser.add_argument("run", nargs="?", type=Path, help="its folder (default: the newest under runs/)")
    show_parser.set_defaults(command=show)
    new_parser = commands.add_parser("new", help="write a commented train.py to start from", allow_abbrev=False)
    new_parser.add_argument("file", type=Path, help="the file to write, e.g. train.py")
    new_parser.add_argument(
        "--from", dest="source", metavar="NAME", help="copy a bundled recipe: bert, gpt2, lora, gpt"
    )
    new_parser.set_defaults(command=new)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "tui3090 run [TRAIN.PY or NAME] [options] [-- RECIPE OPTIONS]"
    parser.description = "Train, with the dashboard. The train.py's own options follow --; see them with -- --help."
    parser.add_argument(
        "recipe", nargs="?", default=DEFAULT_RECIPE, help=f"a train.py, or a bundled recipe (default: {DEFAULT_RECIPE})"
    )
    techniques = parser.add_argument_group("techniques in force from the start; keys change them later")
    for technique in OPTIONS:
        _add_technique(techniques, technique)
    parser.add_argument("--device", type=_device, metavar="cpu|cuda:N", help="default: the freest card")
    parser.add_argument("--vram", type=_positive, metavar="GIB", help="cap torch's memory on the card, e.g. at 24")
    parser.add_argument("--steps", type=_at_least(1), metavar="N", help="end after N optimizer steps")
    parser.add_argument("--seed", type=_at_least(0), metavar="N", help="of order, data and dropout (default: recipe's)")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="the run's folder (default: runs/<date>-<name>)")
    parser.add_argument("--headless", action="store_true", help="plain lines instead of the dashboard")
    parser.add_argument("--exit", action="store_true", help="leave the dashboard when the run is over")
    parser.set_defaults(command=run)


def _add_technique(group: argparse._ArgumentGroup, technique: Technique) -> None:
    flag = f"--{technique.name}"
    if technique.later:
        group.add_argument(flag, action=NotInThisVersion, nargs=0, default=None, help="not in this version")
    elif isinstance(technique.values[0], bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=technique.sentence)
    else:
        group.add_argument(flag, type=_value_of(technique), metavar=technique.option, help=technique.sentence)


def _value_of(technique: Technique) -> Callable[[str], Value]:
    def value(text: str) -> Value:
        try:
            parsed = technique.parse(text)
            Settings().having(technique.name, parsed)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return parsed

    return value


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _device(text: str) -> str:
    if text == "cuda":
        return "cuda:0"
    if not re.fullmatch(r"cpu|cuda:[0-9]{1,3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor cuda:N")
    return text


def run(arguments: argparse.Namespace) -> int:
    """`tui3090 run`: train until the run is over or left."""
    path = _recipe_path(arguments.recipe)
    if {"-h", "--help"} & set(arguments.recipe_argv):
        print(options_help(path), end="")
        return 0
    plan = _plan(arguments, path)
    folder = RunFolder.create(plan.name, arguments.run_dir)
    from tui3090.session import Session

    return Session(plan, folder, headless=arguments.headless, leave_when_over=arguments.exit).run()


def show(arguments: argparse.Namespace) -> int:
    """`tui3090 show`: the dashboard on a run folder; its summary where there is no terminal."""
    from tui3090.show import show as show_folder

    return show_folder(RunFolder.find(arguments.run))


def new(arguments: argparse.Namespace) -> int:
    """`tui3090 new`: write a train.py."""
    new_file(arguments.file, *([bundled(arguments.source)] if arguments.source is not None else []))
    print(f"Wrote {harmless(str(arguments.file))}: start it with tui3090 run {shlex.quote(str(arguments.file))}")
    return 0


def _recipe_path(given: str) -> Path:
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


def _plan(arguments: argparse.Namespace, path: Path) -> RunPlan:
    asked = {t.name: getattr(arguments, t.name) for t in OPTIONS if getattr(arguments, t.name) is not None}
    return RunPlan(
        recipe=path,
        name=path.stem,
        options=parse_options(path, arguments.recipe_argv),
        settings=Settings(**asked),
        asked=frozenset(asked),
        device=arguments.device or "",
        vram_gib=arguments.vram,
        steps=arguments.steps,
        seed=arguments.seed,
    )


def _open_standard_descriptors() -> None:
    """Where the shell closed 0, 1 or 2, open nothing there, or the next file of ours would become stdout."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.__stdin__ is None:  # Textual's driver asks it for its descriptor
        sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
