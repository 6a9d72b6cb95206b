"""The options of a train.py: read from its source without importing it, and parsed."""

from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tui3090.options import Option, parse
from tui3090.source import RecipeError, options_help, parse_options, read_options


@pytest.fixture
def write(tmp_path):
    """Writes a train.py and names it."""

    def write(source: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(dedent(source), "utf-8")
        return path

    return write


def fails(path: Path, sentence: str, argv: list[str] | None = None) -> None:
    """Parsing says `sentence`, in which PATH stands for the path."""
    with pytest.raises(RecipeError) as caught:
        parse_options(path, argv or [])
    assert str(caught.value) == sentence.replace("PATH", str(path))


def test_reading_does_not_import(write):
    path = write(
        """
        raise RuntimeError("imported")
        def recipe(lr: float = 1e-3): ...
        """
    )
    assert read_options(path) == [Option("lr", float, 1e-3)]


def test_types_come_from_the_annotation_or_the_default(write):
    path = write(
        """
        def recipe(
            a: int, b=0.5, c: "str" = "x", d: bool = False, e: Path = "data", f=None, *, g: int | None = None,
            h: Optional[float] = None, i: typing.Literal["p", "q"] = "p", j: pathlib.Path = Path("~"),
            k: float = 2 * LR, layers: list[int] = [1], **rest,
        ): ...
        """
    )
    assert read_options(path) == [
        Option("a", int, required=True),
        Option("b", float, 0.5),
        Option("c", str, "x"),
        Option("d", bool, False),
        Option("e", Path, "data"),
        Option("f", str),
        Option("g", int),
        Option("h", float),
        Option("i", str, "p", choices=("p", "q")),
        Option("j", Path, code="Path('~')"),
        Option("k", float, code="2 * LR"),
    ]


def test_help_comes_from_the_comment_beside_or_the_docstring(write):
    path = write(
        '''
        def recipe(
            lr: float = 1e-3,  # peak, 100 % of it
            a: int = 1, b: int = 2,  # of both
            size="small",
        ):
            """Train.

            size: how big
            b (int): the second
            """
        '''
    )
    assert {option.name: option.help for option in read_options(path)} == {
        "lr": "peak, 100 % of it",
        "a": "",
        "b": "the second",
        "size": "how big",
    }
    text = options_help(path)
    assert text.startswith(f"usage: tui3090 run {path} -- [OPTIONS]")
    assert "--lr FLOAT  peak, 100 % of it (default: 0.001)" in text


def test_help_of_a_recipe_without_options(write):
    path = write("def recipe(): ...")
    assert options_help(path) == f"The recipe of {path} takes no options.\n"


def test_help_shows_escape_codes_harmless(write):
    path = write("def recipe(\n    lr=1.0,  # \x1b[31mred\n): ...")
    assert "\x1b" not in options_help(path)
    assert "\\x1b[31mred" in options_help(path)


SOURCE = """
def recipe(model: str, batch_size: int = 8, lr: float = 5e-5, data: Path = Path("x"), fast: bool = True,
           size: Literal["small", "big"] = "small"): ...
"""


def test_what_is_given_and_the_literal_defaults_come_back(write):
    path = write(SOURCE)
    assert parse_options(path, ["--model", "bert"]) == {
        "model": "bert",
        "batch_size": 8,
        "lr": 5e-5,
        "fast": True,
        "size": "small",
    }
    argv = ["--model=-x [a]", "--batch-size", "16", "--lr=2e-5", "--data", "a b", "--no-fast", "--size", "big"]
    assert parse_options(path, argv) == {
        "model": "-x [a]",
        "batch_size": 16,
        "lr": 2e-5,
        "data": Path("a b"),
        "fast": False,
        "size": "big",
    }


def test_a_wrong_option_or_value_is_one_sentence(write):
    path = write(SOURCE)
    fails(path, "PATH needs --model: add --model STR after --.")
    fails(path, "PATH has no option --bacth-size: did you mean --batch-size?", ["--bacth-size", "16"])
    fails(path, "PATH has no option --modle: did you mean --model?", ["--modle=bert"])
    fails(path, "PATH has no option --no-fats: did you mean --no-fast?", ["--model", "x", "--no-fats"])
    fails(
        path,
        "PATH has no option --zzz: it has --model, --batch-size, --lr, --data, --fast, --size.",
        ["--zzz", "1"],
    )
    fails(path, "PATH has no option --batch: did you mean --batch-size?", ["--batch", "1"])  # no abbreviations
    fails(path, "PATH: --batch-size: takes a whole number, not '1.5'.", ["--batch-size", "1.5"])
    fails(path, "PATH: --lr: takes a number, not 'fast'.", ["--lr", "fast"])
    fails(path, "PATH: --lr: expected one argument.", ["--lr"])
    with pytest.raises(RecipeError, match=r"--size: invalid choice: 'tiny' \(choose from '?small'?, '?big'?\)\.$"):
        parse_options(path, ["--size", "tiny"])
    fails(write("def recipe(): ...", "none.py"), "PATH has no option --lr: its recipe takes none.", ["--lr", "1"])


def test_parameters_that_cant_be_options(write):
    fails(
        write("\n\ndef recipe(a, b, /): ..."),
        "PATH, line 3: recipe's parameters are given by name: remove the / after b.",
    )
    fails(
        write("def recipe(\n    layers: list[int],\n): ..."),
        "PATH, line 2: recipe's parameter layers can't be given on the command line: annotate it as int, float, str, "
        "bool or Path, or give it a default.",
    )
    fails(
        write("def recipe(fast: bool = True, no_fast: bool = False): ..."),
        "PATH: recipe's parameter no_fast: conflicting option string: --no-fast: rename it.",
    )


def test_a_file_that_cant_be_read(write, tmp_path):
    fails(tmp_path / "trian.py", "There is no file PATH: check the path, or write one with tui3090 new PATH.")
    fails(tmp_path, "PATH is a folder: name the train.py in it.")
    fails(write("def recipe(): ...", "train.txt"), "PATH does not end in .py: only a Python file can be imported.")
    fails(write("x = 1\n"), "PATH has no function recipe: it must define recipe(...) and return a Recipe from it.")
    fails(write(""), "PATH has no function recipe: it must define recipe(...) and return a Recipe from it.")
    fails(
        write("class A:\n    def recipe(self): ...\n"),
        "PATH has no function recipe: it must define recipe(...) and return a Recipe from it.",
    )


def test_syntax_errors_name_the_line(write):
    fails(write("x = 1\ndef recipe(:\n"), "PATH, line 2: SyntaxError: invalid syntax.")
    fails(
        write("def recipe():\n    pass\n  x\n"),
        "PATH, line 3: IndentationError: unindent does not match any outer indentation level.",
    )
    fails(write("def recipe(): ...\nreturn 1\n"), "PATH, line 2: SyntaxError: 'return' outside function.")


def test_a_file_in_another_encoding(tmp_path):
    path = tmp_path / "train.py"
    path.write_bytes("def recipe():\n    'Größe'\n".encode("latin-1"))
    fails(path, "PATH, line 2: not utf-8 text: save the file as UTF-8.")
    path.write_bytes("# coding: latin-1\ndef recipe(name='Größe'): ...\n".encode("latin-1"))
    assert read_options(path) == [Option("name", str, "Größe")]
    path.write_bytes(b"\xef\xbb\xbfdef recipe(a=1): ...\r\n")
    assert read_options(path) == [Option("a", int, 1)]
    path.write_bytes(b"# coding: klingon\ndef recipe(): ...\n")
    fails(path, "PATH: unknown encoding: klingon: save the file as UTF-8.")


def test_brackets_and_spaces_in_a_path(write, tmp_path):
    folder = tmp_path / "[b]my runs"
    folder.mkdir()
    path = write("def recipe(a=1): ...", "[b]my runs/train [x].py")
    assert parse_options(path, ["--a", "2"]) == {"a": 2}
    assert f"tui3090 run {path} -- [OPTIONS]" in options_help(path)


NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}[a-z]", fullmatch=True)


@given(NAMES, st.integers(), st.floats(allow_nan=False), st.text().filter(lambda text: "\0" not in text), st.booleans())
def test_every_value_comes_back_as_it_was_given(name, whole, number, text, on):
    path = Path("train.py")
    for kind, value in ((int, whole), (float, number), (str, text), (Path, Path(text))):
        option = Option(name, kind, required=True)
        assert parse([option], [f"{option.flag}={value}"], path) == {name: value}
    switch = Option(name, bool, default=not on)
    assert parse([switch], [switch.flag if on else f"--no-{switch.flag[2:]}"], path) == {name: on}
    assert parse([switch], [], path) == {name: not on}
