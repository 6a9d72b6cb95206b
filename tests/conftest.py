"""What several tests need: a trainer that runs in the test's own thread, with commands at chosen windows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side: more threads would only wait for each other

import pytest
import torch

from tui3090 import assemble
from tui3090.commands import Command, Stop
from tui3090.link import Commands
from tui3090.recipe import Recipe
from tui3090.records import Record, StepRecord
from tui3090.settings import RunPlan, Settings
from tui3090.trainer import Trainer


class QuietPoller:
    """Stands in for the poller where no reading is wanted."""

    held: Any = None

    def watch(self, device_uuid: str, allocator: Any) -> None:
        """Nothing to look at."""

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing to silence."""
        yield


class ScriptedCommands(Commands):
    """Gives each command before the window of its number, the first being 0: exact, whatever is in flight."""

    def __init__(self, script: Mapping[int, Sequence[Command]]) -> None:
        super().__init__()
        self._script = script
        self.taken = 0
        """Boundaries that came."""

    def take(self) -> list[Command]:
        """The commands of the window that is about to begin."""
        due = list(self._script.get(self.taken, ()))
        self.taken += 1
        if any(isinstance(command, Stop) for command in due):
            self.stop.set()
        return due


class Ran:
    """What a run left behind."""

    def __init__(self, trainer: Trainer, records: list[Record], status: int) -> None:
        self.trainer = trainer
        self.records = records
        self.status = status

    def of(self, kind: type[Any]) -> list[Any]:
        """The records of one type."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def losses(self) -> list[float]:
        """Of the windows, in their order."""
        return [record.loss for record in self.of(StepRecord)]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The model's at the end."""
        return {name: value.detach().clone() for name, value in self.trainer.job.step.model.state_dict().items()}


Train = Callable[..., Ran]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains a recipe in this thread: `train(recipe, script={window: [commands]}, settings=..., device=...)`."""

    given: list[Recipe] = []  # emptied by the run: nothing of it outlives its trainer
    monkeypatch.setattr(assemble, "load_recipe", lambda path, options: given.pop())

    def run(
        recipe: Recipe | Callable[[], Recipe],
        script: Mapping[int, Sequence[Command]] | None = None,
        settings: Settings | None = None,
        device: str = "cpu",
        commands: Commands | None = None,
        **plan: Any,
    ) -> Ran:
        given.append(recipe if isinstance(recipe, Recipe) else recipe())
        records: list[Record] = []
        trainer = Trainer(
            RunPlan(Path("train.py"), "train", settings=settings or Settings(), device=device, **plan),
            commands or ScriptedCommands(script or {}),
            records.append,
            QuietPoller(),  # type: ignore[arg-type]
        )
        return Ran(trainer, records, trainer.run())

    return run


@pytest.fixture
def failure() -> Callable[[Ran], str]:
    """The sentence of a run that failed."""

    def sentence(ran: Ran) -> str:
        last = ran.records[-1]
        assert getattr(last, "state", "") == "failed", last
        return str(last.detail)  # type: ignore[attr-defined]

    return sentence
