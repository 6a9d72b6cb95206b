"""The command line: what is refused before the screen is taken, and what reaches the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tui3090 import cli
from tui3090.settings import TECHNIQUES, RunPlan, Settings

TRAIN = '''
def recipe(size: str = "small", batch_size: int = 8, lr: float = 1e-3):
    """A recipe that is only read here."""
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a train.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tui3090.remote.places", lambda: [])  # this machine's live runs are no part of the tests
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.fixture
def plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunPlan, Path, bool, bool]]:
    """What would have been run."""
    taken: list[tuple[RunPlan, Path, bool, bool]] = []

    class Session:
        def __init__(
            self, plan: RunPlan, folder: cli.RunFolder, headless: bool, leave_when_over: bool, *_: object
        ) -> None:
            taken.append((plan, folder.path, headless, leave_when_over))

        def run(self) -> int:
            return 7

    monkeypatch.setattr("tui3090.session.Session", Session)
    monkeypatch.setattr(cli, "open_terminal", lambda: None)  # with one it would fork
    return taken


def test_options_reach_the_run(plans: list[tuple[RunPlan, Path, bool, bool]]) -> None:
    line = (
        "run train.py --amp bf16 --checkpointing all --accumulate 4 --graph --no-tf32 --workers 2 --prefetch off "
        "--device cuda --vram 24 --steps 100 --seed 3 --counters --run-dir here --headless --exit "
        "--channels-last -- --batch-size 16 --size=gpt2"
    )
    assert cli.main(line.split()) == 7
    [(plan, folder, headless, leave)] = plans
    assert plan.settings == Settings(amp="bf16", checkpointing=1, accumulate=4, graph=True, workers=2)
    assert plan.asked == {"amp", "checkpointing", "accumulate", "graph", "tf32", "workers", "prefetch"}
    assert plan.options == {"size": "gpt2", "batch_size": 16, "lr": 1e-3}
    assert (plan.recipe, plan.name, plan.device) == (Path("train.py"), "train", "cuda:0")
    assert (plan.vram_gib, plan.steps, plan.seed, plan.counters, plan.channels_last) == (24.0, 100, 3, True, True)
    assert (folder, headless, leave) == (Path("here"), True, True)


def test_everything_is_off_unless_asked_for(plans: list[tuple[RunPlan, Path, bool, bool]]) -> None:
    cli.main(["run", "train.py"])
    [(plan, folder, headless, leave)] = plans
    assert (plan.settings, plan.asked, plan.device, plan.vram_gib) == (Settings(), frozenset(), "", None)
    assert (plan.steps, plan.seed, plan.channels_last, headless, leave) == (None, None, False, False, False)
    assert folder.parent == Path("runs")
    assert folder.name.endswith("-train")


def test_without_a_file_the_bundled_recipe_runs(plans: list[tuple[RunPlan, Path, bool, bool]]) -> None:
    cli.main(["run"])
    cli.main(["run", "gpt"])
    assert [plan.name for plan, *_ in plans] == ["gpt", "gpt"]
    assert plans[0][0].recipe.is_file()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("frobnicate", "invalid choice: 'frobnicate'"),
        ("run nope.py", "nope.py"),
        ("run nope", "has no recipe 'nope'"),
        ("run train.py --frob", "there is nothing called --frob here"),
        ("run train.py --batch-size 3", "options of the train.py after --"),
        ("run train.py --step 3", "there is nothing called --step here"),
        ("run train.py --lr 3", "there is nothing called --lr here"),
        ("run train.py --amp fp8", "amp is off|bf16|fp16, not 'fp8'"),
        ("run train.py --workers x", "workers is N, not 'x'"),
        ("run train.py --workers -1", "workers"),
        ("run train.py --accumulate 0", "accumulate is a whole number from 1 to 1000000"),
        ("run train.py --device gpu", "'gpu' is neither cpu nor cuda:N"),
        ("run train.py --steps 0", "'0' is not a whole number of at least 1"),
        ("run train.py --steps 1e3", "'1e3' is not a whole number"),
        ("run train.py --vram nan", "'nan' is not a number above 0"),
        ("run train.py --run-dir .", "is not empty"),
        ("run train.py -- --batch-size many", "batch-size"),
        ("run train.py -- --widht 3", "--widht"),
        ("show nowhere", "nowhere is not a run folder"),
        ("show", "There is no run under runs/ here"),
        ("show x -- --lr 3", "only tui3090 run and fit take options"),
        ("new train.py", "train.py exists already"),
        ("new", "the following arguments are required: file"),
    ],
)
def test_bad_usage_is_one_sentence_and_status_2(
    line: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tui3090: ")
    assert said.err.count("\n") == 1
    assert sentence in said.err
    assert not (folder / "runs").exists()


def test_escape_codes_on_the_command_line_are_harmless(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "\x1b[31m[b]x.py"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_without_arguments_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("run", "fit", "show", "new"))


def test_the_help_of_run_names_every_technique(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--help"])
    assert end.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for technique in TECHNIQUES:
        if technique.name != "lr":
            assert f"--{technique.name}" in said
            assert technique.sentence in said


def test_the_train_py_has_help_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "train.py", "--", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--batch-size" in said
    assert "0.001" in said
    assert not (folder / "runs").exists()


def test_new_writes_a_train_py_whose_options_can_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new", "mine.py"]) == 0
    assert "tui3090 run mine.py" in capsys.readouterr().out
    assert cli.main(["run", "mine.py", "--", "--help"]) == 0


def test_a_models_folder_does_not_hide_the_recipe_of_its_name(plans: list[tuple[RunPlan, Path, bool, bool]]) -> None:
    Path("gpt").mkdir()
    cli.main(["run", "gpt"])
    assert plans[0][0].recipe.is_file()


@pytest.mark.parametrize("name", ["bert", "gpt2", "lora", "gpt"])
def test_new_copies_a_bundled_recipe(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert cli.main(["new", "--from", name, "mine.py"]) == 0
    assert Path("mine.py").read_bytes() == (Path(cli.__file__).parent / "recipes" / f"{name}.py").read_bytes()
    assert cli.main(["run", "mine.py", "--", "--help"]) == 0
    assert "--batch-size INT" in capsys.readouterr().out
    assert cli.main(["new", "--from", "brt", "other.py"]) == 2
    assert "has no recipe 'brt', only bert" in capsys.readouterr().err
    assert not Path("other.py").exists()


def test_nothing_heavy_is_imported_before_the_command_is_known() -> None:
    code = (
        "import sys; from tui3090 import cli, session; "
        "print([m for m in ('torch', 'textual', 'numpy', 'psutil', 'pynvml', 'multiprocessing') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout == "[]\n", done.stderr


def test_python_m_works_without_a_standard_input(folder: Path) -> None:
    command = f"cd {Path(__file__).parents[1]} && {sys.executable} -m tui3090 --version <&- 2>&-"
    done = subprocess.run(["/bin/sh", "-c", command], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("tui3090 ")
