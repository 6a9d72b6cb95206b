"""The commands: `tui3090 run`, `fit`, `show`, `new` and `doctor`. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tui3090.dashboard.terminal import open_terminal
from tui3090.guardian import fork
from tui3090.recipe import RecipeError, harmless
from tui3090.runlog import RunFolder, RunFolderError
from tui3090.runplan import DEFAULT_RECIPE, NEWEST, OPTIONS, UsageError, new_plan, recipe_path, resumed_plan
from tui3090.settings import Settings, Technique, Value
from tui3090.source import bundled, new_file, options_help


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
            hint = ", and put options of the train.py after --" if arguments.command in (run, fit) else ""
            raise UsageError(f"there is nothing called {unknown[0]} here: see tui3090 --help{hint}")
        if recipe_argv and arguments.command not in (run, fit):
            raise UsageError("only tui3090 run and fit take options of a train.py after --")
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
    _add_fit(commands.add_parser("fit", help="measure what fits the card, and how fast it is", allow_abbrev=False))
    show_parser = commands.add_parser("show", help="look at a run, while it goes on or afterwards", allow_abbrev=False)
    show_parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        type=Path,
        help="its folder (default: your newest live run, else the newest under runs/); several are compared",
    )
    # of a run that has turned into its own show: the exit status is the run's
    show_parser.add_argument("--status", type=_at_least(0), help=argparse.SUPPRESS)
    show_parser.set_defaults(command=show)
    new_parser = commands.add_parser("new", help="write a commented train.py to start from", allow_abbrev=False)
    new_parser.add_argument("file", type=Path, help="the file to write, e.g. train.py")
    new_parser.add_argument(
        "--from", dest="source", metavar="NAME", help="copy a bundled recipe: bert, gpt2, lora, gpt"
    )
    new_parser.set_defaults(command=new)
    doctor_parser = commands.add_parser(
        "doctor", help="say what this machine offers, and what each missing thing costs", allow_abbrev=False
    )
    doctor_parser.add_argument(
        "--counters",
        action="store_true",
        help="check CUPTI's counters against known matmuls on the card (some seconds; not yet verified on hardware)",
    )
    doctor_parser.set_defaults(command=doctor)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "tui3090 run [TRAIN.PY or NAME] [options] [-- RECIPE OPTIONS]"
    parser.description = "Train, with the dashboard. The train.py's own options follow --; see them with -- --help."
    parser.add_argument("recipe", nargs="?", help=f"a train.py, or a bundled recipe (default: {DEFAULT_RECIPE})")
    _add_saves(parser.add_argument_group("saves"))
    techniques = parser.add_argument_group("techniques in force from the start; keys change them later")
    for technique in OPTIONS:
        _add_technique(techniques, technique)
    parser.add_argument("--device", type=_device, metavar="cpu|cuda:N", help="default: the freest card")
    parser.add_argument("--vram", type=_positive, metavar="GIB", help="cap torch's memory on the card, e.g. at 24")
    parser.add_argument(
        "--channels-last",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="keep images and the weights of their convolutions as NHWC in memory, as Tensor Cores take them",
    )
    parser.add_argument("--steps", type=_at_least(1), metavar="N", help="end after N optimizer steps")
    parser.add_argument("--seed", type=_at_least(0), metavar="N", help="of order, data and dropout (default: recipe's)")
    parser.add_argument(
        "--counters",
        action="store_true",
        help="sample the Tensor Cores by CUPTI; may hold the card's clocks, and not yet verified on hardware",
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="the run's folder (default: runs/<date>-<name>)")
    parser.add_argument("--headless", action="store_true", help="plain lines instead of the dashboard")
    parser.add_argument("--exit", action="store_true", help="leave the dashboard when the run is over")
    parser.add_argument(
        "--notify",
        metavar="CMD",
        help="a shell command for the run's end, the first nan, a pause by itself, a stall: $TUI3090_EVENT and others",
    )
    parser.set_defaults(command=run)


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.usage = "tui3090 fit TRAIN.PY or NAME [options] [-- RECIPE OPTIONS]"
    parser.description = (
        "Measure memory and speed of batch sizes with and without AMP, checkpointing and graph replay: a table, and "
        "the command that starts the fastest combination that fits. The batch size doubles from 1, or from the "
        "train.py's --batch-size where it is given after --."
    )
    parser.add_argument("recipe", help="a train.py, or a bundled recipe")
    parser.add_argument("--device", type=_device, metavar="cpu|cuda:N", help="default: the freest card")
    parser.add_argument("--vram", type=_positive, metavar="GIB", help="cap torch's memory on the card, e.g. at 24")
    parser.add_argument("--json", action="store_true", help="the table as a JSON object")
    parser.set_defaults(command=fit)


def _add_saves(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--resume",
        nargs="?",
        type=Path,
        const=NEWEST,
        metavar="RUN",
        help="go on where a run stopped (default: the newest of this recipe under runs/)",
    )
    group.add_argument(
        "--optimizer-state",
        choices=("keep", "matching", "new"),
        default="keep",
        help="at a resume with other trainable parameters: keep what both have, or begin it anew",
    )
    group.add_argument(
        "--save-minutes",
        type=_not_negative,
        default=10.0,
        metavar="M",
        help="save every M minutes (default: 10; 0: not)",
    )
    group.add_argument("--save-steps", type=_at_least(1), default=0, metavar="N", help="save every N optimizer steps")
    group.add_argument(
        "--keep",
        type=_at_least(1),
        default=2,
        metavar="N",
        help="saves that are kept, besides the best by eval loss and the last good one (default: 2)",
    )


def _add_technique(group: argparse._ArgumentGroup, technique: Technique) -> None:
    flag = f"--{technique.name}"
    if isinstance(technique.values[0], bool):
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


def _not_negative(text: str) -> float:
    return 0.0 if text.strip() == "0" else _positive(text)


def _device(text: str) -> str:
    if text == "cuda":
        return "cuda:0"
    if not re.fullmatch(r"cpu|cuda:[0-9]{1,3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor cuda:N")
    return text


def run(arguments: argparse.Namespace) -> int:
    """`tui3090 run`: train until the run is over or left."""
    if arguments.resume is not None:
        plan, folder = resumed_plan(arguments)
    else:
        path = recipe_path(arguments.recipe or DEFAULT_RECIPE)
        if {"-h", "--help"} & set(arguments.recipe_argv):
            print(options_help(path), end="")
            return 0
        plan = new_plan(arguments, path)
        folder = RunFolder.create(plan.name, arguments.run_dir)
    guardian = 0
    if not arguments.headless and (terminal := open_terminal()) is not None:
        # before anything heavy is imported: it stays as small as the interpreter is now
        again = ["tui3090", "run", *([arguments.recipe] if arguments.recipe else []), "--resume", str(folder.path)]
        guardian, status = fork(terminal, folder, shlex.join(again), arguments.notify or "")
        terminal.close()
        if status is not None:
            return status
    folder.hold()
    from tui3090.session import Session

    return Session(plan, folder, arguments.headless, arguments.exit, guardian, arguments.notify or "").run()


def fit(arguments: argparse.Namespace) -> int:
    """`tui3090 fit`: measure what fits."""
    path = recipe_path(arguments.recipe)
    if {"-h", "--help"} & set(arguments.recipe_argv):
        print(options_help(path), end="")
        return 0
    from tui3090.fit.command import run_fit
    from tui3090.fit.table import Asked

    asked = Asked(arguments.recipe, tuple(arguments.recipe_argv), arguments.device or "", arguments.vram)
    return run_fit(asked, path, arguments.json)


def show(arguments: argparse.Namespace) -> int:
    """`tui3090 show`: the dashboard on a run; its summary where there is no terminal."""
    from tui3090.compare import LETTERS
    from tui3090.show import find
    from tui3090.show import show as show_folders

    if len(arguments.runs) > len(LETTERS):
        raise UsageError(f"{len(LETTERS)} runs can be compared at the most")
    return show_folders([find(run) for run in arguments.runs or [None]], arguments.status)


def new(arguments: argparse.Namespace) -> int:
    """`tui3090 new`: write a train.py."""
    new_file(arguments.file, *([bundled(arguments.source)] if arguments.source is not None else []))
    print(f"Wrote {harmless(str(arguments.file))}: start it with tui3090 run {shlex.quote(str(arguments.file))}")
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """`tui3090 doctor`: say what this machine offers."""
    from tui3090.doctor import doctor as examine

    return examine(arguments.counters)


def _open_standard_descriptors() -> None:
    """Where the shell closed 0, 1 or 2, open nothing there, or the next file of ours would become stdout."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.__stdin__ is None:  # Textual's driver asks it for its descriptor
        sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
