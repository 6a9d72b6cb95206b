"""Loading a train.py: what comes out, what is said where it fails, and that worker processes find it too."""

import io
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch.utils.data import DataLoader

from tui3090.source import RecipeError, bundled, describe, load_recipe, new_file, parse_options, read_options

GOOD = """
import torch
from torch import nn
from torch.utils.data import Dataset
from tui3090 import Recipe

class Squares(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        if index == FAILS:
            raise KeyError(f"row {index}")
        return torch.tensor([float(index) ** 2])

FAILS = None

def recipe(batch_size: int = 2):
    return Recipe(model=nn.Linear(1, 1), train_data=Squares(), batch_size=batch_size)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a train.py and names it; what its import leaves on sys.path goes at the end."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(source: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source), "utf-8")
        return path

    return write


def fails(path: Path, sentence: str) -> None:
    """Loading says `sentence`, in which PATH and FOLDER stand for the path and its folder."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, {})
    assert str(caught.value) == sentence.replace("PATH", str(path)).replace("FOLDER", str(path.parent))


def test_a_recipe_is_loaded_with_its_options(write):
    path = write(GOOD)
    recipe = load_recipe(path, parse_options(path, ["--batch-size", "3"]))
    assert (recipe.batch_size, len(recipe.train_data)) == (3, 6)


def test_a_relative_path_is_found_and_named_as_it_was_given(write, monkeypatch):
    write("def recipe(): return 1 / 0", "sub/train.py")
    monkeypatch.chdir(write("", "x").parent)
    fails(Path("sub/train.py"), "sub/train.py, line 1: ZeroDivisionError: division by zero")


def test_two_files_of_one_name_do_not_get_mixed_up(write):
    assert load_recipe(write(GOOD, "a/train.py"), {}).batch_size == 2
    assert load_recipe(write(GOOD.replace("= 2", "= 5"), "b/train.py"), {}).batch_size == 5


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
@pytest.mark.parametrize("name", ["train.py", "my [b]train-2.py"])
def test_its_classes_reach_worker_processes(write, start, name):
    recipe = load_recipe(write(GOOD, name), {})
    loader = DataLoader(recipe.train_data, batch_size=3, num_workers=1, multiprocessing_context=start)
    assert torch.cat(list(loader)).flatten().tolist() == [0, 1, 4, 9, 16, 25]


def test_a_failure_in_a_worker_is_placed_in_the_users_file(write):
    path = write(GOOD.replace("FAILS = None", "FAILS = 4"))
    loader = DataLoader(load_recipe(path, {}).train_data, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(KeyError) as caught:
        list(loader)
    assert describe(caught.value, path) == f"{path}, line 12: KeyError: 'row 4'"


def test_what_fails_is_named_with_the_users_line(write, capsys):
    fails(write("x = {}\n\nprint(x['lr'])\ndef recipe(): ..."), "PATH, line 3: KeyError: 'lr'")
    assert "Traceback" in capsys.readouterr().err
    fails(
        write("def recipe():\n    import json\n    return json.loads('{')", "in_library.py"),
        "PATH, line 3: JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    )
    fails(write("def recipe():\n    assert 0", "silent.py"), "PATH, line 2: AssertionError")
    fails(
        write("import no_such_module\ndef recipe(): ...", "imports.py"),
        "PATH, line 1: ModuleNotFoundError: No module named 'no_such_module'",
    )
    fails(
        write("def recipe():\n    raise ValueError('[/b]\\x1b[2J\\nx')", "rude.py"),
        "PATH, line 2: ValueError: [/b]\\x1b[2J x",
    )


def test_a_file_beside_it_is_the_users_too(write):
    write("def load():\n    return 1 / 0\n", "beside.py")
    fails(
        write("from beside import load\ndef recipe():\n    return load()"),
        "FOLDER/beside.py, line 2: ZeroDivisionError: division by zero",
    )
    write("x = (\n", "broken_beside.py")
    fails(
        write("import broken_beside\ndef recipe(): ...", "imports_broken.py"),
        "FOLDER/broken_beside.py, line 1: SyntaxError: '(' was never closed",
    )


def test_a_recipes_own_refusal_has_its_line_and_no_class_name(write):
    fails(
        write(GOOD.replace("batch_size=batch_size", "batch_size=0")),
        "PATH, line 18: batch_size is 0: give 1 or more.",
    )


def test_something_else_returned(write):
    fails(
        write("\n\ndef recipe():\n    pass"),
        "PATH, line 3: recipe returned nothing: end it with return Recipe(...).",
    )
    fails(
        write("def recipe():\n    return {}", "other.py"),
        "PATH, line 1: recipe returned dict: end it with return Recipe(...).",
    )


def test_sys_exit_passes(write):
    with pytest.raises(SystemExit) as caught:
        load_recipe(write("import sys\ndef recipe():\n    sys.exit(7)"), {})
    assert caught.value.code == 7


@pytest.mark.parametrize("name", ["random", "torch", "tui3090", "pytest", "__main__"])
def test_a_name_that_would_hide_a_module_is_refused(write, name):
    before = sys.modules.get(name)
    fails(write(GOOD, f"{name}.py"), f"PATH: its name would hide the module {name}: rename it to my_{name}.py.")
    assert sys.modules.get(name) is before


def test_an_installed_module_counts_before_anyone_imports_it(write, tmp_path, monkeypatch):
    installed = write("", "site-packages/shiny_library.py").parent
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    fails(
        write(GOOD, "shiny_library.py"),
        "PATH: its name would hide the module shiny_library: rename it to my_shiny_library.py.",
    )


def test_names_that_cant_be_imported(write):
    fails(
        write(GOOD, "train.v2.py"),
        "PATH: a file with a dot in its name can't be imported: rename it to train_v2.py.",
    )
    write("", "model/__init__.py")
    fails(
        write(GOOD, "model.py"),
        "PATH: the folder model beside it takes its name: rename the file or the folder.",
    )


def test_an_error_without_a_line_of_the_users_names_the_file():
    assert describe(ValueError("boom"), Path("train.py")) == "train.py: ValueError: boom"


def test_what_says_its_place_is_not_told_it_again(write):
    path = write("def recipe(): return 1 / 0")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, {})
    assert describe(caught.value, path) == str(caught.value) == f"{path}, line 1: ZeroDivisionError: division by zero"


def test_a_sentence_of_a_bundled_recipe_stands_alone():
    assert describe(RecipeError("There is no data nope.csv."), bundled("bert")) == "There is no data nope.csv."


def test_bundled_recipes_are_files_that_load():
    assert "size" in [option.name for option in read_options(bundled("gpt"))]
    recipe = load_recipe(bundled("gpt"), {})
    assert type(recipe.model).__module__ == "tui3090.recipes.gpt"
    with pytest.raises(RecipeError, match=r"gpt\.py, line \d+: ValueError: context is 0: give 1 byte or more$"):
        load_recipe(bundled("gpt"), {"context": 0})
    with pytest.raises(RecipeError) as caught:
        bundled("gtp")
    assert str(caught.value) == "tui3090 has no recipe 'gtp', only bert, gpt, gpt2, lora; a file ends in .py."


def test_a_new_file_runs_as_it_stands(tmp_path):
    path = tmp_path / "mine.py"
    new_file(path)
    code = f"""
import torch
from pathlib import Path
from torch.utils.data import DataLoader
from tui3090.source import load_recipe, parse_options
path = Path({str(path)!r})
torch.manual_seed(0)
torch.set_num_threads(1)
recipe = load_recipe(path, parse_options(path, ["--width", "32"]))
optimizer = recipe.optimizer(recipe.model)
losses = []
for batch, _ in zip(DataLoader(recipe.train_data, 64, shuffle=True), range(60)):
    loss = recipe.loss(recipe.model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert sum(losses[-10:]) < 0.6 * sum(losses[:10]), losses
with torch.no_grad():
    assert recipe.metrics(recipe.model, iter(DataLoader(recipe.eval_data, 64)))["accuracy"] > 0.5
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_new_file_takes_no_others_place(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("precious")
    for where, sentence in (
        (path, f"{path} exists already: name another file, or move it away."),
        (tmp_path / "no/mine.py", f"{tmp_path}/no/mine.py can't be written: No such file or directory."),
        (tmp_path / "mine", f"{tmp_path}/mine must end in .py: try {tmp_path}/mine.py."),
    ):
        with pytest.raises(RecipeError) as caught:
            new_file(where)
        assert str(caught.value) == sentence
    assert path.read_text() == "precious"


@pytest.mark.parametrize("call", ["input()", "import bdb; raise bdb.BdbQuit  # as breakpoint() does"])
def test_what_asks_the_terminal_is_told_that_it_cannot(write, monkeypatch, call):
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # as training finds it
    path = write(f"def recipe():\n    {call}\n    return 1")
    with pytest.raises(RecipeError, match="training can't read the terminal: take input"):
        load_recipe(path, {})
    assert describe(EOFError("Ran out of input"), path) == f"{path}: EOFError: Ran out of input"


def test_a_place_that_is_told_is_not_told_again(write):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path := write("def recipe():\n    return 1 / 0"), {})
    assert describe(caught.value, path) == f"{path}, line 2: ZeroDivisionError: division by zero"
