"""Save and resume: what comes after is what would have come without."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from tests.conftest import Ran, Train
from tests.reference import Blocks, loss_of, samples
from tui3090.commands import Change, GoBack, MakeSave, Stop
from tui3090.dashboard.view import View
from tui3090.host_copies import HostCopies
from tui3090.recipe import Recipe
from tui3090.records import Changed, Evaluated, Event, Resumed, Saved, StepRecord
from tui3090.savefolder import MODEL, NOTES, TRAINING, prune, read_notes, saves
from tui3090.settings import Settings

LR = 1e-2


def recipe(**fields: Any) -> Recipe:
    """The reference's small model: dropout, BatchNorm, shuffling, 20 windows an epoch."""
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Blocks(batch_norm=True),
        "train_data": samples(80),
        "loss": loss_of,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=LR),
        "batch_size": 4,
        "epochs": 2,
    }
    return Recipe(**{**options, **fields})


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def stopped_at(train: Train, folder: Path, window: int, made: Callable[[], Recipe] = recipe, **plan: Any) -> Ran:
    """A run that is stopped before the window of that number."""
    folder.mkdir(exist_ok=True)
    ran = train(made(), {window: [Stop()]}, folder=folder, **plan)
    assert ran.status == 0, ran.records[-1]
    return ran


def disturb() -> None:
    """What a resume must not depend on: the generators of a new process."""
    torch.manual_seed(random.randrange(1000))
    random.seed()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_is_the_uninterrupted_one_also_the_second_time(
    train: Train, tmp_path: Path, workers: int
) -> None:
    whole = train(recipe(), settings=Settings(workers=workers))
    first = stopped_at(train, tmp_path, 25, settings=Settings(workers=workers))
    disturb()
    second = train(recipe(), {4: [Stop()]}, settings=Settings(workers=workers), folder=tmp_path, resume=True)
    disturb()
    third = train(recipe(), settings=Settings(workers=workers), folder=tmp_path, resume=True)
    assert third.status == 0, third.records[-1]
    assert [r.step for ran in (first, second, third) for r in ran.of(StepRecord)] == list(range(1, 41))
    assert first.losses + second.losses + third.losses == pytest.approx(whole.losses, abs=1e-6)
    assert [r.lr for ran in (first, second, third) for r in ran.of(StepRecord)] == pytest.approx(
        [r.lr for r in whole.of(StepRecord)], rel=1e-9
    )
    same(third.weights, whole.weights)
    assert [r.step for r in third.of(Resumed)] == [len(first.losses + second.losses)]


def test_memory_is_made_ready_once_and_for_all_that_a_save_copies(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: list[Any] = []
    saved: list[Any] = []
    of = HostCopies.of
    monkeypatch.setattr(HostCopies, "make_ready", lambda self, tree: ready.append(shapes(tree)))
    monkeypatch.setattr(HostCopies, "of", lambda self, tree: saved.append(shapes(tree)) or of(self, tree))
    stopped_at(train, tmp_path, 7)
    assert len(ready) == len(saved) == 1
    assert any("exp_avg" in name for name in ready[0])
    small = {name for name in saved[0] if name.startswith(("/training/random", "/training/data", "/training/schedule"))}
    assert ready[0] == {name: shape for name, shape in saved[0].items() if name not in small}


def shapes(tree: Any, path: str = "") -> dict[str, torch.Size]:
    """Of the tensors of nested dicts and lists, by path."""
    if isinstance(tree, torch.Tensor):
        return {path: tree.shape}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {name: shape for key, value in items for name, shape in shapes(value, f"{path}/{key}").items()}


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_of_the_epoch_is_trained_on_once(train: Train, tmp_path: Path, workers: int) -> None:
    trained: list[int] = []

    def made() -> Recipe:
        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            trained.extend(batch["index"].tolist())
            return loss_of(model, batch)

        data = [{**sample, "labels": torch.tensor(1), "index": i} for i, sample in enumerate(samples(80))]
        return recipe(train_data=data, loss=loss, epochs=1)

    stopped_at(train, tmp_path, 7, made, settings=Settings(workers=workers))
    train(made(), {5: [Stop()]}, folder=tmp_path, resume=True)
    train(made(), folder=tmp_path, resume=True, settings=Settings(workers=workers))
    assert sorted(trained) == list(range(80))


OTHERWISE = [
    (Settings(), Settings(checkpointing=1)),
    (Settings(checkpointing=2, accumulate=2), Settings(accumulate=2)),
    (Settings(amp="fp16"), Settings(amp="fp16", checkpointing=1)),
    (Settings(amp="bf16"), Settings(amp="bf16", workers=1)),
]


@pytest.mark.parametrize(("before", "after"), OTHERWISE)
def test_techniques_may_change_between_save_and_resume(
    train: Train, tmp_path: Path, before: Settings, after: Settings
) -> None:
    whole = train(recipe(), settings=before, steps=20)
    stopped_at(train, tmp_path, 10, settings=before, steps=20)
    ran = train(recipe(), settings=after, folder=tmp_path, resume=True, steps=20)
    assert ran.losses == pytest.approx(whole.losses[10:], abs=1e-6)
    same(ran.weights, whole.weights)


def test_the_scalers_state_survives_fp16_and_back(train: Train, tmp_path: Path) -> None:
    script = {3: [Change("amp", "off")], 12: [Change("amp", "fp16")]}
    whole = train(recipe(), script, settings=Settings(amp="fp16"), steps=20)
    tmp_path.mkdir(exist_ok=True)
    train(recipe(), {**script, 6: [Stop()]}, settings=Settings(amp="fp16"), folder=tmp_path, steps=20)
    ran = train(recipe(), {6: [Change("amp", "fp16")]}, folder=tmp_path, resume=True, steps=20)
    assert [r.loss_scale for r in ran.of(StepRecord)] == [r.loss_scale for r in whole.of(StepRecord)][6:]
    assert ran.losses == pytest.approx(whole.losses[6:], abs=1e-6)


SCHEDULES = [
    "constant",
    lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=max(1, steps)),
    lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps)),
    lambda optimizer, steps: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    lambda optimizer, steps: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
]
OPTIMIZERS: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
    lambda model: torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
    lambda model: torch.optim.AdamW(model.parameters(), lr=LR, foreach=True),
    lambda model: torch.optim.Adam(
        [{"params": model.head.parameters(), "lr": 1e-3}, {"params": model.blocks.parameters()}],
        lr=LR,  # type: ignore[union-attr]
    ),
    lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    lambda model: torch.optim.AdamW(model.parameters(), lr=LR),
]


@pytest.mark.parametrize(("scheduler", "optimizer"), list(zip(SCHEDULES, OPTIMIZERS)))
def test_schedules_and_optimizers_go_on(train: Train, tmp_path: Path, scheduler: Any, optimizer: Any) -> None:
    def made() -> Recipe:
        return recipe(scheduler=scheduler, optimizer=optimizer, eval_data=samples(8, seed=2))

    whole = train(made())
    stopped_at(train, tmp_path, 23, made)
    ran = train(made(), folder=tmp_path, resume=True)
    done = ran.of(Resumed)[0].step
    assert ran.losses == pytest.approx(whole.losses[done:], abs=1e-6)
    assert [r.lr for r in ran.of(StepRecord)] == pytest.approx([r.lr for r in whole.of(StepRecord)][done:], rel=1e-9)
    same(ran.weights, whole.weights)


class Stream(IterableDataset[Any]):
    """Samples one after the other, with random draws of its own; `tells` where it is or does not."""

    def __init__(self, tells: bool) -> None:
        self.start = self.at = 0
        if tells:
            self.state_dict = lambda: {"at": self.at}
            self.load_state_dict = lambda state: setattr(self, "start", state["at"])

    def __iter__(self) -> Iterator[Any]:
        rows = samples(80)
        self.at, self.start = self.start, 0
        while self.at < len(rows):
            self.at += 1
            yield {**rows[self.at - 1], "x": rows[self.at - 1]["x"] + torch.randn(16) * random.random()}


@pytest.mark.parametrize("tells", [True, False])
def test_an_iterable_dataset_goes_on(train: Train, tmp_path: Path, tells: bool) -> None:
    def made() -> Recipe:
        return recipe(train_data=Stream(tells), max_steps=25)

    whole = train(made())
    stopped_at(train, tmp_path, 12, made)
    disturb()
    ran = train(made(), folder=tmp_path, resume=True)
    assert ran.status == 0, ran.records[-1]
    assert ran.losses == pytest.approx(whole.losses[12:], abs=1e-6)
    assert any("gone through" in e.text for e in ran.of(Event)) != tells


def test_saves_come_by_key_by_steps_by_time_and_when_evaluation_is_the_best(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = train(
        recipe(eval_data=samples(8, seed=2), epochs=1),
        {3: [MakeSave()], 4: [MakeSave()]},
        folder=tmp_path,
        save_steps=6,
        keep=9,
    )
    told = {r.step: r.reason for r in ran.of(Saved)}
    assert told == {3: "key s", 4: "key s", 10: "every 6 steps", 16: "every 6 steps", 20: "best eval loss"}
    found, passed_over = saves(tmp_path / "saves")
    assert [s.notes.step for s in found] == [3, 4, 10, 16, 20]
    assert not passed_over
    assert not any(save.damage() for save in found)
    assert found[-1].notes.eval_loss == ran.of(Evaluated)[-1].loss
    assert not list((tmp_path / "saves").glob(".*"))
    again = train(recipe(epochs=1), folder=tmp_path / "b", save_minutes=1e-9, keep=100)
    assert [r.reason for r in again.of(Saved)][:2] == ["every 1e-09 min"] * 2


def test_the_last_ones_the_best_and_the_last_good_one_are_kept(train: Train, tmp_path: Path) -> None:
    script: dict[int, Any] = {window: [MakeSave()] for window in range(1, 8)}
    train(recipe(), {**script, 8: [Stop()]}, folder=tmp_path, keep=100)
    folder = tmp_path / "saves"
    for save in saves(folder)[0]:
        body = json.loads((save.path / NOTES).read_text())
        step = save.notes.step
        body |= {"healthy": step <= 5, "eval_loss": {2: 0.5, 4: 0.7}.get(step)}
        (save.path / NOTES).write_text(json.dumps(body))
    prune(folder, 2)
    assert [save.notes.step for save in saves(folder)[0]] == [2, 5, 7, 8]


def test_tied_weights_are_written_once_and_resumed(train: Train, tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
            self.out.weight = self.inside.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.inside(x))[:, :4]

    def made() -> Recipe:
        torch.manual_seed(0)
        return recipe(model=Tied(), epochs=1)

    whole = train(made())
    stopped_at(train, tmp_path, 9, made)
    (save,) = saves(tmp_path / "saves")[0]
    assert (save.path / MODEL).stat().st_size < 2 * 16 * 16 * 4
    ran = train(made(), folder=tmp_path, resume=True)
    assert ran.losses == pytest.approx(whole.losses[9:], abs=1e-6)


# a damaged, foreign or hostile save


def refused(ran: Ran) -> str:
    assert ran.status == 2, ran.records[-1]
    assert not ran.of(StepRecord)
    return str(ran.records[-1].detail)  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [0, 0.5])
@pytest.mark.parametrize("name", [MODEL, TRAINING, NOTES])
def test_a_damaged_save_is_passed_over_with_a_sentence(
    train: Train, tmp_path: Path, name: str, size: float, failure: Callable[[Ran], str]
) -> None:
    train(recipe(), {4: [MakeSave()], 8: [Stop()]}, folder=tmp_path)
    file = tmp_path / "saves" / "step-00000008" / name
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * size)])
    ran = train(recipe(), folder=tmp_path, resume=True)
    assert ran.status == 0, ran.records[-1]
    assert [r.step for r in ran.of(Resumed)] == [4]
    assert any("step-00000008 is passed over" in e.text for e in ran.of(Event))


@pytest.mark.parametrize("name", [MODEL, TRAINING])
def test_a_file_without_end_is_not_read(train: Train, tmp_path: Path, name: str) -> None:
    train(recipe(), {4: [MakeSave()], 8: [Stop()]}, folder=tmp_path)
    with (tmp_path / "saves" / "step-00000008" / name).open("ab") as file:
        file.truncate(1 << 40)  # a terabyte of zeros that takes no room
    ran = train(recipe(), {0: [Stop()]}, folder=tmp_path, resume=True)
    assert [r.step for r in ran.of(Resumed)] == [4]
    assert any(f"step-00000008 is passed over: {name} is not as it was written" in e.text for e in ran.of(Event))


def test_without_a_whole_save_the_sentence_says_so(train: Train, tmp_path: Path) -> None:
    assert "no whole save" in refused(train(recipe(), folder=tmp_path, resume=True))


def test_another_model_is_explained_and_nothing_is_loaded(train: Train, tmp_path: Path) -> None:
    stopped_at(train, tmp_path, 4)
    deeper = refused(train(recipe(model=Blocks(depth=5, batch_norm=True)), folder=tmp_path, resume=True))
    assert "blocks.4.0.bias" in deeper
    assert "not in the save" in deeper
    wider = refused(train(recipe(model=Blocks(width=16, depth=4)), folder=tmp_path, resume=True))
    assert "running_mean" in wider
    narrow = Blocks(batch_norm=True)
    narrow.head = nn.Linear(16, 5)
    assert "head.weight is 5 x 16 in float32 and was 4 x 16" in refused(
        train(recipe(model=narrow), folder=tmp_path, resume=True)
    )
    assert "samples and had 80" in refused(train(recipe(train_data=samples(84)), folder=tmp_path, resume=True))


def test_a_frozen_layer_is_explained_and_the_choice_is_kept(train: Train, tmp_path: Path) -> None:
    def frozen() -> Recipe:
        made = recipe(optimizer=lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=LR))
        model = made.model
        for parameter in model.head.parameters():  # type: ignore[union-attr]
            parameter.requires_grad = False
        return made

    stopped_at(train, tmp_path, 6)
    sentence = refused(train(frozen(), folder=tmp_path, resume=True))
    assert "head.bias, head.weight are no longer trained" in sentence
    assert "--optimizer-state matching" in sentence
    states = {}
    for choice in ("matching", "new"):
        ran = train(frozen(), {0: [Stop()]}, folder=tmp_path, resume=True, optimizer_state=choice)
        assert ran.status == 0, ran.records[-1]
        states[choice] = ran.trainer.job.step.optimizer.state_dict()["state"]
    assert not states["new"]
    assert {float(s["step"]) for s in states["matching"].values()} == {6.0}
    sgd = refused(
        train(recipe(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=LR)), folder=tmp_path, resume=True)
    )
    assert "was AdamW and is now SGD" in sgd


def test_a_save_that_would_run_code_is_refused(train: Train, tmp_path: Path) -> None:
    stopped_at(train, tmp_path, 4)
    path = tmp_path / "saves" / "step-00000004"
    mark = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {mark}",)

    torch.save({"optimizer": Evil()}, path / TRAINING)
    from tui3090.savefolder import crc32

    body = json.loads((path / NOTES).read_text())
    body["files"][TRAINING] = [(path / TRAINING).stat().st_size, crc32(path / TRAINING)]
    (path / NOTES).write_text(json.dumps(body))
    assert "can't be read" in refused(train(recipe(), folder=tmp_path, resume=True))
    assert not mark.exists()


# bad days


def test_a_failing_step_loses_only_itself(train: Train, tmp_path: Path) -> None:
    def made(fails: bool) -> Recipe:
        calls = []

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            calls.append(1)
            value = loss_of(model, batch)
            if fails and len(calls) == 12:
                raise ValueError("boom")
            return value

        return recipe(loss=loss, epochs=1)

    whole = train(made(False))
    failed = train(made(True), folder=tmp_path)
    assert failed.status == 1
    assert [r.reason for r in failed.of(Saved)] == ["failed"]
    ran = train(made(False), folder=tmp_path, resume=True)
    assert ran.of(Resumed)[0].step == 11
    assert ran.losses == pytest.approx(whole.losses[11:], abs=1e-6)


def test_going_back_to_the_last_good_save(train: Train, tmp_path: Path) -> None:
    whole = train(recipe(), steps=20)
    ran = train(recipe(), {6: [MakeSave()], 10: [GoBack()]}, folder=tmp_path, steps=20)
    assert [r.step for r in ran.of(StepRecord)] == [*range(1, 11), *range(7, 21)]
    assert ran.losses[10:] == pytest.approx(whole.losses[6:], abs=1e-6)
    same(ran.weights, whole.weights)


def test_going_back_holds_no_state_twice(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card that is nearly full there would be no room for it."""
    held: list[tuple[int, bool]] = []
    real = torch.optim.AdamW.load_state_dict

    def load(optimizer: torch.optim.AdamW, state: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        held.append((len(optimizer.state), any(p.grad is not None for p in parameters)))
        real(optimizer, state)

    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", load)
    ran = train(recipe(), {6: [MakeSave()], 8: [GoBack()], 9: [Stop()]}, folder=tmp_path)
    assert ran.status == 0
    assert held == [(0, False)]


def test_techniques_stay_as_they_are_on_going_back_and_are_told(train: Train, tmp_path: Path) -> None:
    """What was changed since the save may be the remedy (a smaller rate, another precision): a key undoes it."""
    script: dict[int, list[Any]] = {
        2: [Change("accumulate", 2)],
        6: [MakeSave()],
        7: [Change("lr", 2.0)],
        8: [Change("accumulate", 1), Change("lr", 0.5)],
        9: [GoBack()],
    }
    ran = train(recipe(epochs=1), script, folder=tmp_path)
    at = next(number for number, record in enumerate(ran.records) if isinstance(record, Resumed))
    stays = [r for r in ran.records[at:] if isinstance(r, Changed)]
    assert [(r.step, r.technique, r.old, r.new, r.origin) for r in stays] == [
        (7, "accumulate", 2, 1, "going back"),
        (7, "lr", 1.0, 0.5, "going back"),
    ]
    assert any("(lr=×0.5); the save was made with accumulate=2" in e.text for e in ran.of(Event))
    after = [r for r in ran.records[at:] if isinstance(r, StepRecord)]
    assert {r.settings for r in after} == {"lr=×0.5"}
    assert [r.step for r in after] == list(range(7, 7 + len(after)))
    assert after[-1].planned_steps == after[-1].step, "the plan is made again for the accumulation that stays"
    seen = View()
    seen.absorb(ran.records)
    assert [(c.step, c.technique, c.new) for c in seen.changes] == [
        (3, "accumulate", 2), (7, "accumulate", 1), (7, "lr", 0.5),
    ]  # fmt: skip
    assert seen.value("accumulate") == 1
    assert seen.value("lr") == 0.5


@pytest.mark.parametrize(
    "problem", [OSError(28, "No space left on device"), OSError(30, "Read-only file system"), MemoryError("too little")]
)
def test_a_save_that_fails_costs_the_save_and_not_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    from tui3090 import saves as module

    real, calls = module.safetensors.torch.save_file, []

    def failing(tensors: Any, path: Path) -> None:
        calls.append(path)
        Path(path).write_bytes(b"half")
        if len(calls) == 1:
            raise problem
        real(tensors, path)

    monkeypatch.setattr(module.safetensors.torch, "save_file", failing)
    ran = train(recipe(), {4: [MakeSave()], 9: [MakeSave()], 12: [Stop()]}, folder=tmp_path)
    assert ran.status == 0
    [told] = [e.text for e in ran.of(Event) if e.source == "save" and e.level == "error"]
    assert told.startswith(f"step 4 can't be saved: {getattr(problem, 'strerror', None) or 'MemoryError'}")
    assert [save.notes.step for save in saves(tmp_path / "saves")[0]] == [9, 12]
    assert not list((tmp_path / "saves").glob(".*"))


def test_training_waits_for_the_copy_alone(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tui3090 import saves as module

    written = []
    real = module.safetensors.torch.save_file

    def slow(*args: Any) -> None:
        while len(trained) < 12:  # the loop goes on meanwhile, or this never ends
            time.sleep(0.001)
        real(*args)
        written.append(len(trained))

    trained: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        trained.append(1)
        return loss_of(model, batch)

    monkeypatch.setattr(module.safetensors.torch, "save_file", slow)
    train(recipe(loss=loss), {4: [MakeSave()], 20: [Stop()]}, folder=tmp_path)
    assert written[0] >= 12


def test_a_kill_at_any_moment_leaves_a_whole_save(train: Train, tmp_path: Path) -> None:
    draw = random.Random(5)
    last = 0
    for _ in range(20):
        child = os.fork()
        if not child:  # pragma: no cover
            try:
                torch.set_num_threads(1)
                train(recipe(epochs=1000), folder=tmp_path, resume=last > 0, save_steps=1, keep=2)
            finally:
                os._exit(0)
        deadline = time.monotonic() + 30
        while not saves(tmp_path / "saves")[0] and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(draw.uniform(0.02, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found, _ = saves(tmp_path / "saves")
        newest = found[-1]
        assert not newest.damage()
        assert newest.notes.step >= last
        last = newest.notes.step
    ran = train(recipe(epochs=1000), {0: [Stop()]}, folder=tmp_path, resume=True)
    assert ran.status == 0
    assert not list((tmp_path / "saves").glob(".*")), "what was half written is cleared up"


def test_reading_a_hostile_save_json_is_a_sentence(train: Train, tmp_path: Path) -> None:
    stopped_at(train, tmp_path, 4)
    path = tmp_path / "saves" / "step-00000004" / NOTES
    good = json.loads(path.read_text())
    assert read_notes(path.parent).step == 4
    for changes in (
        {"step": "4"}, {"step": True}, {"taken": -1}, {"trained": [1]}, {"tensors": []}, {"format": 99},
        {"format": "1"}, {"batch_size": 0}, {"seed": None},
    ):  # fmt: skip
        path.write_text(json.dumps({**good, **changes}))
        found, passed_over = saves(path.parent.parent)
        assert not found
        assert len(passed_over) == 1
    for text in ("", "[]", "{" * 100000, "nul", "\0\xff"):
        path.write_text(text)
        assert saves(path.parent.parent)[0] == []
