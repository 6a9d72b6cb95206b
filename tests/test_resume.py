"""Going on from a save at awkward moments, and from saves that do not fit."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import IterableDataset

from tests.conftest import ScriptedCommands, Train
from tests.reference import Blocks, loss_of, samples
from tests.test_saves import LR, Stream, disturb, recipe, refused, same, stopped_at
from tui3090.commands import Change, Command, GoBack, MakeSave, Stop
from tui3090.recipe import Recipe
from tui3090.records import Evaluated, Event, Resumed, StepRecord
from tui3090.runlog import RunFolder, RunFolderError
from tui3090.savefolder import MODEL, NOTES, TRAINING, clear_up, crc32, saves
from tui3090.settings import Settings

KEYS = st.one_of(
    st.tuples(st.just("checkpointing"), st.sampled_from([0, 1, 2])),
    st.tuples(st.just("accumulate"), st.sampled_from([1, 2, 3])),
    st.tuples(st.just("lr"), st.sampled_from([0.5, 1.0, 2.0])),
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pressed=st.dictionaries(st.integers(0, 25), st.lists(KEYS, max_size=2), max_size=6),
    stops=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    saved=st.integers(0, 5),
    steps=st.sampled_from([None, 17]),
)
def test_keys_saves_and_resumes_at_random_windows_equal_the_uninterrupted_run(
    train: Train,
    tmp_path_factory: pytest.TempPathFactory,
    pressed: dict[int, list[tuple[str, Any]]],
    stops: list[int],
    saved: int,
    steps: int | None,
) -> None:
    """Each part of the run ends at the boundary that a stop names, counted from the part's first; an epoch's end is one
    too. A save in between changes nothing."""
    folder = tmp_path_factory.mktemp("run")
    script: dict[int, list[Command]] = defaultdict(list)
    for window, keys in pressed.items():
        script[window] = [Change(name, value) for name, value in keys]
    whole = train(recipe(), script, steps=steps)
    began, parts = 0, []
    now = Settings()
    for number, stop in enumerate([*stops, None]):
        part = {window - began: list(commands) for window, commands in script.items() if window >= began}
        if saved:
            part.setdefault(saved, []).append(MakeSave())
        if stop is not None:
            part[stop] = [Stop()]
        disturb()
        commands = ScriptedCommands(part)
        ran = train(recipe(), commands=commands, settings=now, folder=folder, resume=number > 0, steps=steps)
        assert ran.status == 0, ran.records[-1]
        parts.append(ran)
        began += commands.taken - 1
        now = ran.trainer.job.settings
    assert [loss for ran in parts for loss in ran.losses] == pytest.approx(whole.losses, abs=1e-6)
    rates = [r.lr for ran in parts for r in ran.of(StepRecord)]
    assert rates == pytest.approx([r.lr for r in whole.of(StepRecord)], rel=1e-9)
    same(parts[-1].weights, whole.weights)


# what the recipe brings


def test_a_skipped_step_does_not_move_the_plan(train: Train, tmp_path: Path) -> None:
    def made(fails: bool = True) -> Recipe:
        calls: list[int] = []

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            calls.append(1)
            return loss_of(model, batch) * (math.inf if fails and len(calls) == 3 else 1.0)

        return recipe(loss=loss, epochs=1)

    whole = train(made())
    stopped_at(train, tmp_path, 10, made)
    ran = train(made(False), folder=tmp_path, resume=True)
    assert [r.lr for r in ran.of(StepRecord)] == pytest.approx([r.lr for r in whole.of(StepRecord)[10:]], rel=1e-9)


def test_an_epochs_evaluation_is_not_repeated_after_the_save_it_led_to(train: Train, tmp_path: Path) -> None:
    def made() -> Recipe:
        return recipe(
            scheduler=lambda optimizer, _: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
            eval_data=samples(8, seed=2),
            epochs=3,
        )

    whole = train(made())
    stopped_at(train, tmp_path, 21, made)
    for save in saves(tmp_path / "saves")[0]:
        if save.notes.reason != "best eval loss":
            shutil.rmtree(save.path)
    ran = train(made(), folder=tmp_path, resume=True)
    assert [r.step for r in ran.of(Resumed)] == [20]
    assert [r.step for r in ran.of(Evaluated)] == [40, 60]
    assert [r.lr for r in ran.of(StepRecord)] == [r.lr for r in whole.of(StepRecord)[20:]]


def test_a_run_that_was_over_goes_on_with_more_steps(train: Train, tmp_path: Path) -> None:
    def made() -> Recipe:
        return recipe(scheduler="constant", eval_data=samples(8, seed=2))

    whole = train(made(), steps=25)
    tmp_path.mkdir(exist_ok=True)
    first = train(made(), steps=20, folder=tmp_path)  # an epoch's last window is the run's last
    ran = train(made(), steps=25, folder=tmp_path, resume=True)
    assert first.losses + ran.losses == pytest.approx(whole.losses, abs=1e-6)
    same(ran.weights, whole.weights)


def test_a_stream_that_tells_where_it_is_loses_no_sample_of_a_window_that_was_broken_off(
    train: Train, tmp_path: Path
) -> None:
    def made(fails: bool) -> Recipe:
        calls: list[int] = []

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            calls.append(1)
            if fails and len(calls) == 10:
                raise ValueError("boom")
            return loss_of(model, batch)

        return recipe(train_data=Stream(True), max_steps=10, loss=loss)

    whole = train(made(False), settings=Settings(accumulate=2))
    assert train(made(True), settings=Settings(accumulate=2), folder=tmp_path).status == 1
    ran = train(made(False), settings=Settings(accumulate=2), folder=tmp_path, resume=True)
    assert ran.of(Resumed)[0].step == 4
    assert ran.losses == pytest.approx(whole.losses[4:], abs=1e-6)


class LongerThanItSays(IterableDataset[Any]):
    """80 samples, and a length of 20."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[Any]:
        return iter(samples(80))


def test_a_stream_with_a_wrong_length_goes_on_and_back(train: Train, tmp_path: Path) -> None:
    def made() -> Recipe:
        return recipe(train_data=LongerThanItSays(), max_steps=18)

    stopped_at(train, tmp_path, 12, made)
    ran = train(made(), folder=tmp_path, resume=True)
    assert (ran.status, len(ran.losses)) == (0, 6), ran.records[-1]
    ran = train(made(), {2: [MakeSave()], 9: [GoBack()]}, folder=tmp_path / "b")
    assert (ran.status, len(ran.losses)) == (0, 9 + 16), ran.records[-1]


def test_what_a_state_dict_leaves_out_goes_on_too(train: Train, tmp_path: Path) -> None:
    """A buffer that is not persistent, and a parameter that only the loss and the optimizer know."""

    class Centred(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return super().forward(x - self.mean)

    def made() -> Recipe:
        torch.manual_seed(0)
        temperature = nn.Parameter(torch.zeros(()))
        return recipe(
            model=Centred(),
            loss=lambda model, batch: loss_of(model, batch) * temperature.exp() + temperature**2,
            optimizer=lambda model: torch.optim.SGD([*model.parameters(), temperature], lr=LR),
            epochs=1,
        )

    whole = train(made())
    stopped_at(train, tmp_path, 9, made)
    ran = train(made(), folder=tmp_path, resume=True)
    assert ran.losses == pytest.approx(whole.losses[9:], abs=1e-6)
    assert not any(name == "mean" for save in saves(tmp_path / "saves")[0] for name in save.notes.tensors)


class Homemade:
    """A schedule that is none of torch's and has no state dict."""

    def __init__(self, optimizer: torch.optim.Optimizer, fails_at: int = 0) -> None:
        self.optimizer, self.count, self.fails_at = optimizer, 0, fails_at

    def step(self) -> None:
        self.count += 1
        if self.count == self.fails_at:
            raise ValueError("boom")
        self.optimizer.param_groups[0]["lr"] = LR / (1 + self.count)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer, _: Homemade(optimizer),
        lambda optimizer, _: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        lambda optimizer, _: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16),
            ],
            [4],
        ),
    ],
)
def test_more_schedules_go_on(train: Train, tmp_path: Path, scheduler: Any) -> None:
    whole = train(recipe(scheduler=scheduler, epochs=1))
    stopped_at(train, tmp_path, 9, lambda: recipe(scheduler=scheduler, epochs=1))
    ran = train(recipe(scheduler=scheduler, epochs=1), folder=tmp_path, resume=True)
    assert [r.lr for r in ran.of(StepRecord)] == pytest.approx([r.lr for r in whole.of(StepRecord)[9:]], rel=1e-9)
    assert ran.losses == pytest.approx(whole.losses[9:], abs=1e-6)


def test_what_fails_after_the_update_does_not_train_its_samples_again(train: Train, tmp_path: Path) -> None:
    def made(fails_at: int = 0) -> Recipe:
        return recipe(scheduler=lambda optimizer, _: Homemade(optimizer, fails_at), epochs=1)

    whole = train(made())
    assert train(made(fails_at=5), folder=tmp_path).status == 1
    ran = train(made(), folder=tmp_path, resume=True)
    assert ran.of(Resumed)[0].step == 5
    assert ran.losses == pytest.approx(whole.losses[5:], abs=1e-6)
    same(ran.weights, whole.weights)


def test_another_schedule_or_rate_is_told_and_what_comes_of_it(train: Train, tmp_path: Path) -> None:
    def resumed(**changes: Any) -> tuple[list[float], str]:
        state = changes.pop("optimizer_state", "keep")
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(tmp_path / "0", folder)
        ran = train(recipe(epochs=1, **changes), {3: [Stop()]}, folder=folder, resume=True, optimizer_state=state)
        assert ran.status == 0, ran.records[-1]
        return [r.lr for r in ran.of(StepRecord)], " ".join(e.text for e in ran.of(Event) if e.source == "save")

    def slower(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=LR / 10, weight_decay=0.5)

    first = stopped_at(train, tmp_path / "0", 9, lambda: recipe(epochs=1))
    planned = [r.lr for r in train(recipe(epochs=1)).of(StepRecord)]
    assert len(first.losses) == 9
    assert resumed() == (pytest.approx(planned[9:12]), "")
    rates, told = resumed(scheduler="constant")
    assert rates == [LR] * 3
    assert "schedule was the default and is now constant" in told
    rates, told = resumed(scheduler=lambda optimizer, _: torch.optim.lr_scheduler.StepLR(optimizer, 5))
    assert rates == pytest.approx([LR / 10, LR / 100, LR / 100])
    assert "is now StepLR" in told
    rates, told = resumed(optimizer=slower)
    assert rates == pytest.approx(planned[9:12])
    assert "learning rate was 0.01 and is now 0.001" in told
    assert "weight_decay was 0.01 and is now 0.5" in told
    assert resumed(optimizer=slower, optimizer_state="new") == (pytest.approx([p / 10 for p in planned[9:12]]), "")


# a save from elsewhere, or somebody else in the folder


def rewritten(folder: Path, **changes: Any) -> None:
    """Change what the one save in `folder` holds, and make its checksums fit."""
    [save] = saves(folder / "saves")[0]
    if "model" in changes:
        safetensors.torch.save_file(changes.pop("model"), save.path / MODEL)
    training = torch.load(save.path / TRAINING, weights_only=True)
    torch.save({**training, **changes}, save.path / TRAINING)
    body = json.loads((save.path / NOTES).read_text())
    for name in (MODEL, TRAINING):
        body["files"][name] = [(save.path / name).stat().st_size, crc32(save.path / name)]
    (save.path / NOTES).write_text(json.dumps(body))


def test_a_save_whose_parts_make_no_sense_is_a_sentence(train: Train, tmp_path: Path) -> None:
    first = stopped_at(train, tmp_path / "0", 2)
    halves = {name: value.half() if value.is_floating_point() else value for name, value in first.weights.items()}
    for number, changes in enumerate(
        (
            {"model": halves}, {"model": {}}, {"schedule": 5}, {"schedule": {}}, {"random": {}}, {"random": None},
            {"scaler": 3}, {"optimizer": {"state": {0: 5}, "param_groups": []}},
        )
    ):  # fmt: skip
        folder = tmp_path / f"a{number}"
        shutil.copytree(tmp_path / "0", folder)
        rewritten(folder, **changes)
        ran = train(recipe(), folder=folder, resume=True)
        assert "step-00000002 can't be read" in refused(ran), changes


def test_state_that_a_fused_kernel_would_read_beyond_is_refused(train: Train, tmp_path: Path) -> None:
    stopped_at(train, tmp_path / "0", 2)
    [save] = saves(tmp_path / "0" / "saves")[0]
    whole = torch.load(save.path / TRAINING, weights_only=True)
    first, moments = next(iter(whole["optimizer"]["state"].items()))
    long, short = moments["exp_avg"], moments["exp_avg"][:1].clone()
    for number, (name, value) in enumerate(
        (("exp_avg", short), ("exp_avg_sq", torch.zeros(0)), ("exp_avg", torch.zeros(())), ("step", long))
    ):
        folder = tmp_path / f"a{number}"
        shutil.copytree(tmp_path / "0", folder)
        state = {**whole["optimizer"]["state"], first: {**moments, name: value}}
        rewritten(folder, optimizer={**whole["optimizer"], "state": state})
        assert f"the optimizer's {name} has another shape than its parameter" in refused(
            train(recipe(), folder=folder, resume=True)
        )
    shutil.copytree(tmp_path / "0", tmp_path / "numpy")
    host = whole["random"]["host"]
    numpy = (*host["numpy"][:2], 10**6, *host["numpy"][3:])
    rewritten(tmp_path / "numpy", random={**whole["random"], "host": {**host, "numpy": numpy}})
    assert "numpy's random state" in refused(train(recipe(), folder=tmp_path / "numpy", resume=True))


def test_the_optimizers_state_goes_on_in_its_parameters_order_of_memory(train: Train, tmp_path: Path) -> None:
    """A fused kernel pairs weights and moments by their place in memory: channels_last weights need moments like it."""

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.conv = nn.Conv2d(4, 8, 3, padding=1)
            self.head = nn.Linear(8 * 16, 4)
            self.to(memory_format=torch.channels_last)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(x).flatten(1))  # type: ignore[no-any-return]

    def made() -> Recipe:
        torch.manual_seed(5)
        rows = [{"x": torch.randn(4, 4, 4), "y": torch.randint(4, ())} for _ in range(48)]
        return recipe(
            model=Seen(),
            train_data=rows,
            loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
            epochs=1,
        )

    whole = train(made())
    stopped_at(train, tmp_path, 5, made)
    ran = train(made(), folder=tmp_path, resume=True)
    assert ran.losses == pytest.approx(whole.losses[5:], abs=1e-6)
    same(ran.weights, whole.weights)


def test_only_our_own_left_overs_are_deleted(tmp_path: Path) -> None:
    elsewhere = tmp_path / "home"
    for name in (".ssh", ".config", ".123-4", ".step-00000003", ".step-00000003.1"):
        (elsewhere / name).mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "saves").symlink_to(elsewhere)
    clear_up(tmp_path / "run" / "saves")
    assert sorted(path.name for path in elsewhere.iterdir()) == [".config", ".ssh"]


def test_a_linked_saves_folder_is_saved_into(train: Train, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "saves").symlink_to(tmp_path / "disk")
    stopped_at(train, tmp_path / "run", 3)
    assert [save.notes.step for save in saves(tmp_path / "disk")[0]] == [3]
    assert [r.step for r in train(recipe(), {1: [Stop()]}, folder=tmp_path / "run", resume=True).of(Resumed)] == [3]


def test_a_folder_is_trained_in_by_one_process(tmp_path: Path) -> None:
    held = "import sys; from tui3090.runlog import *; f = RunFolder(Path(sys.argv[1])); f.hold(); print('held')"
    command = [sys.executable, "-c", f"{held}; sys.stdout.flush(); sys.stdin.read()", str(tmp_path)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match="is still being trained"):
            RunFolder(tmp_path).hold()
        first.kill()
        first.wait(10)
    RunFolder(tmp_path).hold()


def test_a_save_made_while_diverging_is_told_at_the_resume(train: Train, tmp_path: Path) -> None:
    stopped_at(train, tmp_path, 3)
    [save] = saves(tmp_path / "saves")[0]
    body = json.loads((save.path / NOTES).read_text())
    (save.path / NOTES).write_text(json.dumps(body | {"healthy": False}))
    ran = train(recipe(), {1: [Stop()]}, folder=tmp_path, resume=True)
    assert any("looked as if it diverged" in e.text for e in ran.of(Event) if e.level == "warning")
