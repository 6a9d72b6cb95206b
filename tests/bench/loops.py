"""The loops that are compared: written by hand, and our engine without a screen, both on a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tests.bench.turns import Loop
from tests.conftest import QuietPoller
from tui3090 import assemble
from tui3090.commands import Command, Stop
from tui3090.link import Commands
from tui3090.recipe import Recipe
from tui3090.records import Record
from tui3090.settings import RunPlan, Settings
from tui3090.techniques.amp import DTYPES
from tui3090.techniques.checkpointing import find_blocks
from tui3090.trainer import Trainer

OPTIMIZER: dict[str, Any] = {"lr": 6e-4, "betas": (0.9, 0.95)}
"""Of AdamW, the same for all."""


class Long(Dataset[Any]):
    """Samples again and again: a turn is never an epoch's end."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples) * (1 + 1_000_000 // len(self.samples))

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


def prepared(recipe: Recipe) -> Recipe:
    """The recipe as all contenders train it: no evaluation, a rate that stays, an end that does not come."""
    return replace(
        recipe,
        eval_data=None,
        metrics=None,
        train_data=Long(recipe.train_data),
        epochs=1_000,
        scheduler="constant",
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), **OPTIMIZER),
    )


def loader(recipe: Recipe, workers: int, device: torch.device) -> DataLoader[Any]:
    """Of the recipe's data, as one writes it by hand."""
    return DataLoader(
        recipe.train_data,  # type: ignore[arg-type]
        recipe.batch_size,
        shuffle=recipe.shuffle,
        drop_last=True,
        collate_fn=recipe.collate_fn,
        pin_memory=device.type == "cuda",
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def forever(batches: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from batches


class PlainLoop:
    """A loop as one writes it by hand: no more than the techniques of `settings` need."""

    def __init__(
        self, recipe: Recipe, device: torch.device, settings: Settings, compiled: bool = False, resident: bool = False
    ) -> None:
        """`compiled` compiles the model as a whole, `settings.compile` its blocks; `resident` trains on one batch that
        is on the device already."""
        self.model = recipe.model.to(device).train()
        self.loss, self.device, self.settings = recipe.loss, device, settings
        blocks = find_blocks(self.model)
        if settings.compile:
            for block in blocks:
                block.compile(dynamic=False)
        for block in blocks[:: settings.checkpointing] if settings.checkpointing else []:
            block.forward = _recomputed(block.forward)
        self.called: Any = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **OPTIMIZER)
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.amp == "fp16")
        self.batches = forever(loader(recipe, settings.workers, device))
        if resident:
            self.batches = forever([self._placed(next(self.batches))])

    def _placed(self, batch: Any) -> Any:
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def step(self) -> float | None:
        """One optimizer step; its loss, for which the host waits."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.trained(self._placed(next(self.batches)) for _ in range(self.settings.accumulate))
        return float(loss.item())

    def trained(self, batches: Iterable[Any]) -> Any:
        """Launch forward, backward and update; the loss on the device, []."""
        amp = self.settings.amp
        total: Any = 0.0
        for batch in batches:
            with torch.autocast(self.device.type, DTYPES.get(amp, torch.bfloat16), enabled=amp != "off"):
                loss: Tensor = self.loss(self.called, batch) / self.settings.accumulate
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total

    def run(self, boundary: Callable[[], bool]) -> None:
        """Train until there is no other step to take."""
        while boundary():
            self.step()


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


class AtBoundary(Commands):
    """The engine's commands: it asks for them between two windows."""

    def __init__(self, boundary: Callable[[], bool], script: Mapping[int, Sequence[Command]]) -> None:
        """`script`: commands by the number of the window that is about to begin, the first being 0."""
        super().__init__()
        self._boundary, self._script = boundary, script
        self._window = 0

    def take(self) -> list[Command]:
        """The end, when there is no other step to take."""
        due = list(self._script.get(self._window, ()))
        self._window += 1
        return due if self._boundary() else [Stop()]


def run_engine(
    recipe: Recipe, device: torch.device, settings: Settings, commands: Commands, emit: Callable[[Record], None]
) -> None:
    """Train by our own loop, without a screen, until its commands stop it. Raises RuntimeError with what went wrong."""
    last: list[Record] = []
    given = [recipe]  # emptied by the run: nothing of it outlives its trainer

    def keep_last(record: Record) -> None:
        last[:] = [record]
        emit(record)

    assemble.load_recipe = lambda path, options: given.pop()
    where = "cuda:0" if device.type == "cuda" else "cpu"
    plan = RunPlan(Path("train.py"), "train", settings=settings, device=where)
    if Trainer(plan, commands, keep_last, QuietPoller()).run():  # type: ignore[arg-type]
        raise RuntimeError(getattr(last[0], "detail", str(last[0])))


def engine(
    recipe: Recipe,
    device: torch.device,
    settings: Settings,
    emit: Callable[[Record], None] = lambda record: None,
    script: Mapping[int, Sequence[Command]] | None = None,
) -> Loop:
    """Our own loop as a contender."""
    return lambda boundary: run_engine(recipe, device, settings, AtBoundary(boundary, script or {}), emit)
