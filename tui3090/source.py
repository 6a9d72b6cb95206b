"""A train.py as a file: its options, read without importing it, and its recipe, loaded by importing it.

Reading needs no torch, so that a mistyped option is told before the screen is taken.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import io
import re
import sys
import tokenize
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tui3090.options import Option, options_of, parse, parser_of
from tui3090.recipe import Recipe, RecipeError, harmless

__all__ = [
    "Option",
    "RecipeError",
    "bundled",
    "describe",
    "load_recipe",
    "new_file",
    "options_help",
    "parse_options",
    "read_options",
]

RECIPES = Path(__file__).parent / "recipes"
TEMPLATE = RECIPES / "_template.py"

_loaded: set[str] = set()
"""The names under which train.py files were imported: those may be imported anew."""


def read_options(path: Path, described: bool = True) -> list[Option]:
    """The options of the train.py at `path`, in the order of its parameters, without importing it.

    Their help stays empty where it is not wanted (`described`): it takes the longest to read.

    Raises RecipeError for a file that can't be read, has no `recipe` function, or one whose parameters can't be given.
    """
    source = _read(path)
    return options_of(_find_recipe(path, source), source, path, described)


def parse_options(path: Path, argv: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments for `recipe()` that `argv` stands for; literal defaults are filled in.

    Raises RecipeError for an option or value that the train.py does not take, and whatever `read_options` raises.
    """
    shown = Path(path.stem) if path.absolute().parent == RECIPES else path
    return parse(read_options(path, described=False), argv, shown)


def options_help(path: Path) -> str:
    """The help on the train.py's options; raises what `read_options` raises."""
    options = read_options(path)
    if not options:
        return f"The recipe of {harmless(str(path))} takes no options.\n"
    return parser_of(options, path).format_help()


def load_recipe(path: Path, options: dict[str, Any]) -> Recipe:
    """Import the train.py at `path` and call its `recipe(**options)`.

    It is imported by its stem with its folder on sys.path, so that worker processes can import it again. What it
    raises becomes a RecipeError that names the user's own line; the traceback goes to stderr. SystemExit passes.
    """
    function = _find_recipe(path, _read(path))
    try:
        made = _import(path).recipe(**options)
    except Exception as error:
        traceback.print_exc()
        raise RecipeError(describe(error, path)) from None
    if not isinstance(made, Recipe):
        kind = "nothing" if made is None else type(made).__name__
        raise RecipeError(f"{path}, line {function.lineno}: recipe returned {kind}: end it with return Recipe(...).")
    return made


def describe(error: BaseException, path: Path) -> str:
    """A harmless line on an exception of the train.py at `path`: the user's own file and line, and what it says.

    'train.py, line 12: KeyError: 'labels''. Where no line of the user's is in its traceback, the file alone is named.
    """
    if isinstance(error, RecipeError) and str(error).startswith(str(path)):
        return str(error)  # its place is in it already
    frames = list(traceback.extract_tb(error.__traceback__))
    text = str(error)
    if isinstance(error, RecipeError) and (text.startswith(str(path)) or path.absolute().parent == RECIPES):
        return harmless(text)  # it says its place itself, or is on an option of a bundled recipe
    if isinstance(error, SyntaxError):
        frames.append(traceback.FrameSummary(error.filename or "", error.lineno, ""))
        text = error.msg
    if text == "EOF when reading a line" or type(error).__name__ == "BdbQuit":
        text = "training can't read the terminal: take input() and breakpoint() out"
    said = text if isinstance(error, RecipeError) else f"{type(error).__name__}: {text}".removesuffix(": ")
    found = list(re.finditer(r'^ *File "(.+)", line (\d+), in .*$', text, re.MULTILINE))
    if found:  # of a loader's worker: the traceback came over as text, and what it says stands behind its last frame
        frames += [traceback.FrameSummary(match[1], int(match[2]), "") for match in found]
        behind = re.search(r"^\S.*", text[found[-1].end() :], re.MULTILINE | re.DOTALL)
        said = behind[0] if behind else said
    return harmless(f"{_own_place(frames, path) or path}: {said}")


def bundled(name: str) -> Path:
    """The file of a bundled recipe; raises RecipeError, with those there are, for a name that is not one."""
    names = sorted(p.stem for p in RECIPES.glob("*.py") if not p.stem.startswith("_"))
    if name not in names:
        raise RecipeError(f"tui3090 has no recipe {name!r}, only {', '.join(names)}; a file ends in .py.")
    return RECIPES / f"{name}.py"


def new_file(path: Path, source: Path = TEMPLATE) -> None:
    """Write a train.py to start from, like `source`; raises RecipeError where `path` exists or can't be written."""
    if path.suffix != ".py":
        raise RecipeError(f"{path} must end in .py: try {path}.py.")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(source.read_text("utf-8"))
    except FileExistsError:
        raise RecipeError(f"{path} exists already: name another file, or move it away.") from None
    except OSError as error:
        raise RecipeError(f"{path} can't be written: {error.strerror}.") from None


def _read(path: Path) -> str:
    """The text of a source file, by its own encoding."""
    if path.is_dir():
        raise RecipeError(f"{path} is a folder: name the train.py in it.")
    try:
        if not path.is_file():
            raise RecipeError(f"There is no file {path}: check the path, or write one with tui3090 new {path}.")
        data = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{path} can't be read: {error.strerror}.") from None
    if path.suffix != ".py":
        raise RecipeError(f"{path} does not end in .py: only a Python file can be imported.")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{path}, line {line}: not {error.encoding} text: save the file as UTF-8.") from None
    except SyntaxError as error:
        raise RecipeError(f"{path}: {error.msg}: save the file as UTF-8.") from None


def _find_recipe(path: Path, source: str) -> ast.FunctionDef:
    """The function `recipe` of a source text. Raises RecipeError where there is none, or a syntax error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come when the file is imported
            tree = ast.parse(source, str(path))
            compile(tree, str(path), "exec", dont_inherit=True)  # finds what ast lets pass, like a stray return
    except SyntaxError as error:
        raise RecipeError(f"{path}, line {error.lineno}: {type(error).__name__}: {error.msg}.") from None
    except ValueError as error:  # null bytes, in Python 3.11
        raise RecipeError(f"{path}: {error}.") from None
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "recipe"]
    if not found:
        raise RecipeError(f"{path} has no function recipe: it must define recipe(...) and return a Recipe from it.")
    return found[-1]


def _import(path: Path) -> ModuleType:
    """Import the file by a name by which worker processes find it too."""
    whole, stem = path.absolute(), path.stem
    if whole.parent == RECIPES:
        return importlib.import_module(f"tui3090.recipes.{stem}")
    _refuse_taken_name(path)
    folder = str(whole.parent)
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)
    sys.modules.pop(stem, None)  # of an earlier load
    importlib.invalidate_caches()
    _loaded.add(stem)
    module = importlib.import_module(stem)
    if module.__file__ is None or not Path(module.__file__).samefile(whole):
        raise RecipeError(f"the folder {stem} beside it takes its name: rename the file or the folder.")
    return module


def _refuse_taken_name(path: Path) -> None:
    """Raise RecipeError for a name under which Python would find another module, or others would find this one."""
    stem = path.stem
    if "." in stem:
        raise RecipeError(f"a file with a dot in its name can't be imported: rename it to {stem.replace('.', '_')}.py.")
    if stem in _loaded:
        return
    taken = stem in sys.modules or stem in sys.stdlib_module_names
    if not taken:
        installed = [p for p in sys.path if "site-packages" in p or "dist-packages" in p]
        spec = importlib.machinery.PathFinder.find_spec(stem, installed)
        taken = spec is not None and spec.origin is not None  # a mere folder gives way to a file
    if taken:
        raise RecipeError(f"its name would hide the module {stem}: rename it to my_{stem}.py.")


def _own_place(frames: Sequence[traceback.FrameSummary], path: Path) -> str:
    """'train.py, line 12': the innermost frame in the train.py or in a file under its folder; empty: there is none."""
    whole = path.absolute()
    for frame in reversed(frames):
        file = Path(frame.filename)
        if file == whole:
            return f"{path}, line {frame.lineno}"
        ours = Path(__file__).parent in file.parents
        if whole.parent in file.parents and not ours and "site-packages" not in file.parts:
            return f"{path.parent / file.relative_to(whole.parent)}, line {frame.lineno}"
    return ""
