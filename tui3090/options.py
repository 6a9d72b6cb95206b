"""The parameters of a `recipe(...)` function as options of the command line."""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import re
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tui3090.recipe import RecipeError, harmless

OptionType = type[int] | type[float] | type[str] | type[bool] | type[Path]

TYPES: dict[str, OptionType] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "Path": Path,
    "pathlib.Path": Path,
}


@dataclass(frozen=True, slots=True)
class Option:
    """One parameter of `recipe()`, and thus one option of the command."""

    name: str
    """The parameter's name."""
    type: OptionType
    default: Any = None
    """The default where the source writes it as a literal, else None."""
    help: str = ""
    """The comment beside the parameter, or its line in the docstring."""
    required: bool = False
    """Whether there is no default at all."""
    code: str = ""
    """The default as the source writes it where that is no literal; the recipe fills it in itself."""
    choices: tuple[str, ...] = ()
    """The values of a Literal; empty: any."""

    @property
    def flag(self) -> str:
        """As the command line writes it."""
        return "--" + self.name.replace("_", "-")

    @property
    def sentence(self) -> str:
        """For the help: what it is, and its default."""
        default = self.code or ("" if self.default is None else str(self.default))
        note = "(required)" if self.required else f"(default: {default})" if default else ""
        return harmless(f"{self.help} {note}")


def options_of(function: ast.FunctionDef, source: str, path: Path, described: bool = True) -> list[Option]:
    """The options that the parameters of `function` in `source` are, in their order; with their help if `described`.

    A parameter of another type than int, float, str, bool, Path or a Literal of strings keeps its default and is no
    option. Raises RecipeError, naming `path` and the line, for one that can't be given at all.
    """
    arguments = function.args
    if arguments.posonlyargs:
        raise RecipeError(
            f"{path}, line {function.lineno}: recipe's parameters are given by name: remove the / after "
            f"{arguments.posonlyargs[-1].arg}."
        )
    # reading every token takes a while, and without a help to show the screen would wait for it
    comments, lines = (_comments(source), _docstring_lines(function)) if described else ({}, {})
    parameters = [*arguments.args, *arguments.kwonlyargs]
    missing = [None] * (len(arguments.args) - len(arguments.defaults))
    options = []
    for parameter, default in zip(parameters, [*missing, *arguments.defaults, *arguments.kw_defaults]):
        alone = sum(p.lineno == parameter.lineno for p in parameters) == 1
        beside = comments.get(parameter.lineno, "") if alone else ""
        option = _option(parameter, default, lines.get(parameter.arg) or beside)
        if option is not None:
            options.append(option)
        elif default is None:
            raise RecipeError(
                f"{path}, line {parameter.lineno}: recipe's parameter {parameter.arg} can't be given on the command "
                "line: annotate it as int, float, str, bool or Path, or give it a default."
            )
    return options


def _comments(source: str) -> dict[int, str]:
    """The comments at the end of lines with code, by line."""
    comments: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip():
            comments[token.start[0]] = token.string.lstrip("# ").strip()
    return comments


def _docstring_lines(function: ast.FunctionDef) -> dict[str, str]:
    """The lines `name: text` of the docstring, by name."""
    matches = re.finditer(r"^ *(\w+)(?: \(.*?\))?: +(\S.*)$", ast.get_docstring(function) or "", re.MULTILINE)
    return {match[1]: match[2].strip() for match in matches}


def _option(parameter: ast.arg, default: ast.expr | None, text: str) -> Option | None:
    """The option that a parameter is; None: it is of a type that the command line can't give."""
    value, code = None, ""
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except (ValueError, TypeError):
            code = ast.unparse(default)
    kind, choices = _annotated(parameter.annotation)
    if parameter.annotation is None:
        kind = str if value is None else TYPES.get(type(value).__name__)
    if kind is None:
        return None
    return Option(parameter.arg, kind, value, text, default is None, code, choices)


def _annotated(annotation: ast.expr | None) -> tuple[OptionType | None, tuple[str, ...]]:
    """The type and the choices that an annotation stands for: `int`, `int | None`, `Optional[int]`, `Literal["a"]`."""
    match annotation:
        case None:
            return None, ()
        case ast.Constant(value=str(text)):
            try:
                return _annotated(ast.parse(text, mode="eval").body)
            except SyntaxError:
                return None, ()
        case ast.BinOp(left=inner, op=ast.BitOr(), right=ast.Constant(value=None)):
            return _annotated(inner)
        case ast.Subscript(value=ast.Name(id="Optional") | ast.Attribute(attr="Optional"), slice=inner):
            return _annotated(inner)
        case ast.Subscript(value=ast.Name(id="Literal") | ast.Attribute(attr="Literal"), slice=inner):
            items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            choices = tuple(i.value for i in items if isinstance(i, ast.Constant) and isinstance(i.value, str))
            return (str, choices) if len(choices) == len(items) else (None, ())
    return TYPES.get(ast.unparse(annotation)), ()


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are exceptions, and sentences that name the train.py."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{self.prog}: {message.removeprefix('argument ')}.")


def parser_of(options: Sequence[Option], path: Path) -> argparse.ArgumentParser:
    """A parser for the options; an option that is not given is left out of what it returns."""
    parser = _Parser(
        prog=harmless(str(path)),
        usage="tui3090 run %(prog)s -- [OPTIONS]",
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
    )
    for option in options:
        given: dict[str, Any] = {"dest": option.name, "help": option.sentence.replace("%", "%%")}
        if option.type is bool:
            given["action"] = argparse.BooleanOptionalAction
        else:
            given["type"] = _converter(option.type)
            given["metavar"] = "|".join(option.choices) or option.type.__name__.upper()
            given["choices"] = option.choices or None
        try:
            parser.add_argument(option.flag, **given)
        except argparse.ArgumentError as error:
            raise RecipeError(f"{path}: recipe's parameter {option.name}: {error.message}: rename it.") from None
    return parser


def _converter(kind: OptionType) -> Callable[[str], Any]:
    wanted = "a whole number" if kind is int else "a number"  # a str or a Path can be made of any text

    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"takes {wanted}, not {text!r}") from None

    return convert


def parse(options: Sequence[Option], argv: Sequence[str], path: Path) -> dict[str, Any]:
    """The keyword arguments that `argv` stands for, literal defaults filled in.

    Raises RecipeError, naming the train.py at `path`, for an option or a value that is not one of these.
    """
    namespace, unknown = parser_of(options, path).parse_known_args(argv)
    if unknown:
        raise RecipeError(_unknown(options, unknown[0], path))
    given = vars(namespace)
    for option in options:
        if option.required and option.name not in given:
            raise RecipeError(f"{path} needs {option.flag}: add {option.flag} {option.type.__name__.upper()} after --.")
    return {o.name: o.default for o in options if not (o.required or o.code)} | given


def _unknown(options: Sequence[Option], given: str, path: Path) -> str:
    flag = given.split("=")[0]
    if not options:
        return f"{path} has no option {flag}: its recipe takes none."
    flags = [option.flag for option in options]
    switches = [f"--no-{option.flag[2:]}" for option in options if option.type is bool]
    near = difflib.get_close_matches(flag, [*flags, *switches], n=1)
    return f"{path} has no option {flag}: " + (f"did you mean {near[0]}?" if near else f"it has {', '.join(flags)}.")
