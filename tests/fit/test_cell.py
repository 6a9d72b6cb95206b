"""One cell in its process, and the whole command without a card."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from tests.fit.fakes import LiveBytes
from tests.reference import Blocks, loss_of, samples
from tui3090.commands import Stop
from tui3090.feed import Feed
from tui3090.fit import cell, process
from tui3090.fit.cell import Windows, own_sampler, with_batch
from tui3090.fit.cells import Column, Look
from tui3090.fit.planning import Fit
from tui3090.fit.process import CellDied, Processes
from tui3090.link import Commands
from tui3090.recipe import Recipe
from tui3090.records import StepRecord
from tui3090.techniques import Machine

ROOT = Path(__file__).parents[2]
TRAIN = """
import os, signal, sys
import torch
from torch import nn
from tui3090 import Recipe

print("noise on stdout", flush=True)
os.write(2, b"noise below it")


def recipe(batch_size: int = 2, rows: int = 3, trouble: str = "") -> Recipe:
    if trouble == "exit":
        sys.exit(3)
    if trouble == "error":
        raise ValueError("no such data")
    if trouble == "hangs":
        signal.pause()
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return Recipe(
        model=nn.Sequential(*layers),
        train_data=[(torch.ones(8), torch.tensor(i % 3)) for i in range(rows)],
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=batch_size,
        max_steps=1,
    )
"""


@pytest.fixture
def train_py(tmp_path: Path) -> Path:
    path = tmp_path / "my_train.py"
    path.write_text(TRAIN)
    return path


def wanted(path: Path, *argv: str, **more: Any) -> dict[str, Any]:
    """What the command asks a process."""
    question = {"recipe": str(path), "argv": argv, "batch_option": True, "batch": 2, "device": "cpu", "vram_gib": None}
    of_a_cell = {"look": False, "samples": 2, "amp": "off", "technique": "checkpointing"}
    return {**question, **of_a_cell, **more}


def ask(question: dict[str, Any], patience_s: float = 120.0) -> dict[str, Any]:
    """The answer of a process."""
    with Processes(patience_s) as processes:
        return processes.ask(question, lambda: None)


def fit(*words: str, **options: Any) -> subprocess.Popen[str]:
    """The command, in the repository's root."""
    command = [sys.executable, "-m", "tui3090", "fit", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen(command, **{**pipes, **options})


def test_the_whole_command_without_a_card(train_py: Path) -> None:
    command = fit(str(train_py), "--device", "cpu", "--json", "--", "--rows", "3", "--batch-size", "2")
    out, err = command.communicate(timeout=120)
    assert command.returncode == 0, err
    told = json.loads(out)
    assert [(c["batch"], c["column"], c["status"]) for c in told["cells"]] == [
        (2, name, "ok") for name in ("fp32", "fp32+checkpointing", "bf16", "bf16+checkpointing")
    ]
    for measured in told["cells"]:
        assert measured["peak_allocated"] is None
        assert 50 << 20 < measured["peak_rss"] < told["room"]
        assert 0 < measured["step_s"] < 5
        assert measured["steps"] >= 3
        assert measured["samples_s"] == pytest.approx(2 / measured["step_s"])
    assert told["cells"][0]["speed"] == 1.0
    assert (told["device"], told["rows"], told["batch_size_by_option"]) == ("cpu", 3, True)
    assert set(told["left_out"]) == {"fp32+graph", "bf16+graph"}
    assert told["best"]["command"].startswith(f"tui3090 run {train_py}")
    assert "noise" not in out + err
    assert [line.split(":")[0] for line in err.splitlines()] == [
        "batch 2, FP32",
        "batch 2, FP32 + checkpointing",
        "batch 2, AMP bf16",
        "batch 2, AMP bf16 + checkpointing",
    ]


def test_an_interrupted_command_prints_what_is_known_and_leaves_nobody(tmp_path: Path) -> None:
    mark = str(tmp_path)
    command = fit("gpt", "--device", "cpu", "--json", "--", "--context", "16", env={**os.environ, "FIT_TEST": mark})
    assert command.stderr is not None
    try:
        assert command.stderr.readline().startswith("batch 1, FP32: ")  # the next cell has its process, or soon will
        command.send_signal(signal.SIGINT)
        out, _ = command.communicate(timeout=60)
    finally:
        command.kill()
        left = [process for process in psutil.process_iter() if _is_marked(process, mark)]
    assert command.returncode == 130
    told = json.loads(out)
    assert told["interrupted"]
    assert [(c["batch"], c["column"], c["status"]) for c in told["cells"]] == [(1, "fp32", "ok")]
    assert left == []


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("FIT_TEST") == mark
    except psutil.Error:
        return False


def test_a_cell_leaves_when_whoever_asked_is_gone(train_py: Path) -> None:
    script = (
        "import json, sys; from tui3090.fit.process import Processes; print('asked', flush=True); "
        "Processes().ask(json.loads(sys.argv[1]), lambda: None)"
    )
    question = json.dumps(wanted(train_py, "--trouble", "hangs"))
    asking = subprocess.Popen([sys.executable, "-c", script, question], cwd=ROOT, stdout=subprocess.PIPE)
    assert asking.stdout is not None
    asking.stdout.readline()
    parent = psutil.Process(asking.pid)
    until = time.monotonic() + 60
    while not (children := parent.children()) and time.monotonic() < until:
        time.sleep(0.05)
    asking.kill()
    asking.communicate()
    assert children
    assert psutil.wait_procs(children, timeout=60)[1] == []


@pytest.mark.parametrize(("trouble", "sentence"), [("exit", "called sys.exit(3)"), ("error", "ValueError: no such")])
def test_what_a_recipe_raises_is_the_answer(train_py: Path, trouble: str, sentence: str) -> None:
    assert sentence in ask(wanted(train_py, "--trouble", trouble))["error"]


@pytest.mark.parametrize(
    ("child", "sentence"),
    [
        ("os.kill(os.getpid(), 9)", "its process was ended by SIGKILL: mostly the machine's memory ran out"),
        ("os.kill(os.getpid(), 11)", "its process was ended by SIGSEGV"),
        (
            "os.write(2, b'libfoo: [x] failed\\n'); os._exit(6)",
            "its process ended with status 6: libfoo: [x] failed",
        ),
        ("os.write(1, b'{}\\n'); os.close(int(sys.argv[1]))", "its process ended with status 0: {}"),
        ("os.write(int(sys.argv[1]), b'{'); os._exit(0)", "its process ended with status 0"),
        ("os.fork() or time.sleep(60); os._exit(1)", "its process ended with status 1"),  # a worker holds the pipe
        ("time.sleep(60)", "no answer within 2 s"),
    ],
)
def test_how_a_process_died_is_a_sentence(child: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CHILD", f"import os, sys, time; {child}")
    with pytest.raises(CellDied) as died:
        ask({}, patience_s=2)
    assert str(died.value) == sentence


def test_whatever_a_recipe_prints_the_answer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "b'{\"a\": \"' + b'x' * 300_000 + b'\"}\\n'"  # more than a pipe holds
    monkeypatch.setattr(
        process, "CHILD", f"import os, sys; print('x' * 10**6); open(int(sys.argv[1]), 'wb').write({answer})"
    )
    assert ask({}) == {"a": "x" * 300_000}


def test_the_next_process_waits_and_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        process,
        "CHILD",
        "import os, sys, json; lines = sys.stdin.readline(), sys.stdin.readline(); "
        "os.write(int(sys.argv[1]), json.dumps([os.getpid(), *lines]).encode() + b'\\n'); sys.stdin.read()",
    )
    before = set(psutil.Process().children())
    with Processes() as processes:
        processes.ahead, processes.imports = True, ["transformers.models.gpt2"]
        answers: list[Any] = []
        for number in range(3):
            answers.append(processes.ask({"n": number}, lambda: None))
            assert len(set(psutil.Process().children()) - before) == 1
    assert [json.loads(line) for *_, line in answers] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert [json.loads(imports) for _, imports, _ in answers] == [["transformers.models.gpt2"]] * 3
    assert len({pid for pid, *_ in answers}) == 3
    assert set(psutil.Process().children()) == before


def test_libraries_are_imported_before_the_question_comes(tmp_path: Path) -> None:
    """A recipe finds them imported; one that can't be imported is left for the recipe to say."""
    path = tmp_path / "train.py"
    asks = "import sys\nprint('colorsys' in sys.modules, flush=True)\nsys.exit(3)"
    path.write_text(f"def recipe():\n    {asks.replace(chr(10), '; ')}\n")
    child = process.Child(["no_such_module", "colorsys"])
    try:
        child.ask(wanted(path, batch_option=False))
        assert "sys.exit(3)" in child.answer(lambda: None, 120.0)["error"]
        child._printed.seek(0)
        assert child._printed.read().split() == [b"True"]
    finally:
        child.end()


# what the first look finds, and what a cell measures


def test_the_look_at_a_card_measures_small_batches(train_py: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = LiveBytes()
    monkeypatch.setattr(Machine, "cuda", True)
    monkeypatch.setattr(cell, "card_peak", lambda device: counted.peak)
    with counted:
        told = cell.look(wanted(train_py, "--rows", "9", batch=6))
    looked = Look.from_json(json.loads(json.dumps(told)))
    assert (looked.rows, looked.batch_size, looked.fixed, looked.by_option) == (9, 6, False, True)
    assert looked.amp == "fp16"  # the card is of no generation
    assert looked.refused == {}
    assert looked.elements == 9
    assert {name: [point.elements for point in points] for name, points in looked.points.items()} == {
        name: [9, 18, 27, 54] for name in ("fp32", "fp32+checkpointing", "fp16", "fp16+checkpointing")
    }
    replay = Column("off", "graph")
    on_card = Fit(replace(looked, device="cuda:0"), 2)
    predicted = [on_card.predicted(8, column) for column in (Column(), replay)]
    assert None not in predicted
    assert predicted[0] < predicted[1]  # type: ignore[operator]


@pytest.mark.parametrize(("option", "size"), [(True, 4), (False, 4), (True, 5)])
def test_a_sampler_of_its_own_may_follow_the_option(
    option: bool, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = samples(12)
    loader = DataLoader(rows, batch_sampler=ByLength(SequentialSampler(rows), size, False))  # type: ignore[arg-type]
    monkeypatch.setattr(cell, "load_recipe", lambda path, options: recipe_of(loader))
    monkeypatch.setattr(cell, "parse_options", lambda path, argv: {})
    told = cell.look(wanted(tmp_path / "my_train.py", batch_option=option, batch=4))
    assert (told["by_option"], told["fixed"]) == (option and size == 4, not (option and size == 4))
    assert told["batch_size"] == size


def test_the_look_at_a_cpu_measures_nothing(train_py: Path) -> None:
    looked = Look.from_json(cell.look(wanted(train_py, batch_option=False)))
    assert (looked.device, looked.amp, looked.points, looked.by_option) == ("cpu", "bf16", {}, False)
    assert set(looked.refused) == {"fp32+graph", "bf16+graph"}
    assert looked.room > 100 << 20


def test_what_keeps_libraries_from_asking_the_hub_is_imported_before_them(
    train_py: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers.first", "tui3090.pretrained"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    imports = cell.look(wanted(train_py, batch_option=False))["imports"]
    assert imports[0] == "tui3090.pretrained"
    assert "transformers.first" in imports


def recipe_of(data: Any, **fields: Any) -> Recipe:
    return Recipe(model=Blocks(), train_data=data, loss=loss_of, **fields)


def batches_of(recipe: Recipe) -> list[int]:
    feed = Feed(recipe, torch.device("cpu"), seed=0)
    feed.start_epoch(0)
    window = feed.next_window(100)
    assert window is not None
    return [micro.samples for micro in window.micro_batches]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples(12))


@pytest.mark.parametrize(
    "data",
    [samples(12), DataLoader(samples(12), batch_size=3, shuffle=True), Stream(), DataLoader(Stream(), batch_size=3)],  # type: ignore[arg-type]
    ids=["dataset", "loader", "stream", "loader of a stream"],
)
def test_the_batch_size_is_varied(data: Any) -> None:
    recipe = recipe_of(data, batch_size=7, eval_data=samples(3), max_steps=5)
    assert not own_sampler(recipe)
    varied = with_batch(recipe, 6)
    assert batches_of(varied) == [6, 6]
    assert (varied.eval_data, varied.metrics, varied.max_steps) == (None, None, None)


def test_a_loader_keeps_its_order_and_its_collate_function() -> None:
    def collate(rows: list[Any]) -> Any:
        return torch.utils.data.default_collate(rows)

    for shuffle in (False, True):
        loader = DataLoader(samples(12), batch_size=3, shuffle=shuffle, collate_fn=collate)  # type: ignore[arg-type]
        varied = with_batch(recipe_of(loader), 6)
        assert (varied.shuffle, varied.collate_fn) == (shuffle, collate)


class ByLength(BatchSampler):
    """A sampler with a mind of its own."""


def test_a_sampler_of_the_recipes_own_is_left_alone() -> None:
    rows = samples(12)
    loader = DataLoader(rows, batch_sampler=ByLength(SequentialSampler(rows), 5, False))  # type: ignore[arg-type]
    recipe = recipe_of(loader, eval_data=samples(3))
    assert own_sampler(recipe)
    left = with_batch(recipe, 7)
    assert batches_of(left) == [5, 5, 2]
    assert left.eval_data is None


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a cell measures of a recipe, in this process: `measured(recipe, batch=...)`."""
    monkeypatch.setattr(cell, "parse_options", lambda path, argv: {})

    def measure(recipe: Recipe, batch: int) -> dict[str, Any]:
        monkeypatch.setattr(cell, "load_recipe", lambda path, options: recipe)
        return cell.measure(wanted(tmp_path / "my_train.py", batch=batch, samples=batch))

    return measure


def test_a_cell_measures_beyond_the_epochs_and_steps_of_the_recipe(measured: Any) -> None:
    told = measured(recipe_of(samples(12), epochs=1, max_steps=1), batch=6)
    assert (told["status"], told["steps"]) == ("ok", 10)
    assert 0 < told["step_s"] < 1
    assert told["peak_rss"] > 50 << 20


def test_out_of_memory_ends_a_cell_at_once(measured: Any) -> None:
    sizes: list[int] = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        sizes.append(len(batch["labels"]))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    assert measured(replace(recipe_of(samples(12)), loss=loss), batch=6) == {"status": "oom"}
    assert sizes == [6]


def test_out_of_memory_in_the_optimizers_step_does_too(measured: Any) -> None:
    class Full(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise torch.OutOfMemoryError("CUDA out of memory.")

    recipe = recipe_of(samples(12), optimizer=lambda model: Full(model.parameters(), lr=0.1))
    assert measured(recipe, batch=6) == {"status": "oom"}


def window(seconds: float, samples: int = 8, replayed: bool = False) -> StepRecord:
    return StepRecord(
        time=0.0, step=1, planned_steps=None, epoch=0.0, micro_batches=1, loss=1.0, lr=1.0, grad_norm=1.0,
        samples=samples, tokens=0, seconds=seconds, wait_s=0.0, stall_s=0.0, replayed=replayed,
    )  # fmt: skip


def test_slow_first_windows_short_batches_and_eager_windows_of_replay_do_not_count() -> None:
    windows = Windows(8, graph=True, commands=Commands())
    for record in (window(9.0), window(5.0, replayed=True), window(5.0, replayed=True), window(0.1, 3, replayed=True)):
        windows.emit(record)
    for seconds in (0.25, 0.5):
        windows.emit(window(seconds, replayed=True))
    assert windows.seconds == [0.25, 0.5]


@pytest.mark.parametrize(("seconds", "count"), [(0.01, 10), (0.2, 5), (4.0, 3)])
def test_fast_steps_are_measured_more_often(seconds: float, count: int) -> None:
    commands = Commands()
    windows = Windows(8, graph=False, commands=commands)
    while not (taken := commands.take()):
        windows.emit(window(seconds))
    assert taken == [Stop()]
    assert len(windows.seconds) == count


@pytest.mark.parametrize(("full", "windows"), [(0, 10), (1, 40)])
def test_a_cell_without_full_batches_ends(full: int, windows: int) -> None:
    commands = Commands()
    listening = Windows(8, graph=False, commands=commands)
    for number in range(windows):
        assert not commands.take()
        listening.emit(window(0.1, samples=8 if number < full else 7))
    assert commands.take() == [Stop()]
