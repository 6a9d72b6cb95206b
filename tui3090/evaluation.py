"""Evaluation: the loss over the eval data, the recipe's own figures, and what the model writes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from tui3090.assemble import Job
from tui3090.oom import explained
from tui3090.recipe import weigh
from tui3090.records import Evaluated
from tui3090.sampling import host_states, restore_host
from tui3090.source import describe
from tui3090.techniques.amp import autocast
from tui3090.techniques.tf32 import matmuls

if TYPE_CHECKING:
    from tui3090.trainer import Trainer


def evaluate_in(trainer: Trainer, asked: bool = False, ends_epoch: bool = False) -> None:
    """Evaluate between two windows, and tell it; without eval data, say so if it was asked for."""
    trainer.interrupt()
    if trainer.job.recipe.eval_data is None:
        if asked:
            trainer.tell.say("eval", "the recipe has no eval_data: give it some to see the loss on unseen samples")
        return
    trainer.tell.state("evaluating")
    trainer.replay.make_room()
    evaluated, out_of_memory = None, False
    try:
        evaluated = evaluate(trainer.job, trainer.step, trainer.commands.stop.is_set)
    except Exception as error:  # what training has learned is not lost to a mistake in the metrics
        traceback.print_exc()
        trainer.tell.say(
            "eval", f"evaluation failed, training goes on: {describe(error, trainer.plan.recipe)}", "error"
        )
        if out_of_memory := isinstance(error, torch.OutOfMemoryError):
            trainer.tell.say("memory", explained(str(error)), "warning")
    if out_of_memory:
        trainer.switches.give_memory_back()
    if evaluated is not None:
        trainer.tell.emit(evaluated)
        if evaluated.loss is not None and not asked:  # looking at it changes nothing
            trainer.schedule.evaluated(evaluated.loss)
        trainer.evaluated = ends_epoch
        trainer.keeper.if_best(evaluated.loss)
    trainer.tell.state("training")


def evaluate(job: Job, step: int, stopped: Callable[[], bool]) -> Evaluated | None:
    """Evaluate the model as it is; None: stopped in the middle. Training's random streams and mode stay untouched."""
    began = time.perf_counter()
    model, device = job.step.model, job.step.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    weight = 0.0
    with _inference(job):
        for batch in _batches(job):
            if stopped():
                return None
            weighs = weigh(job.recipe, batch)
            if weighs:
                total += job.recipe.loss(model, job.feed.moved(batch)).double() * weighs
                weight += weighs
        figures: dict[str, float | str] = {}
        if job.recipe.metrics is not None:
            figures = job.recipe.metrics(model, map(job.feed.moved, _batches(job)))
    return Evaluated(
        time=time.time(),
        step=step,
        loss=total.item() / weight if weight else None,
        metrics="  ".join(f"{name} {value:.4g}" for name, value in figures.items() if not isinstance(value, str)),
        text="\n".join(value for value in figures.values() if isinstance(value, str)),
        seconds=time.perf_counter() - began,
    )


def _batches(job: Job) -> Iterator[Any]:
    """The eval data's batches on the CPU, always in the same order."""
    data: Any = job.recipe.eval_data
    if isinstance(data, DataLoader):
        return iter(data)
    options: dict[str, Any] = {
        "batch_size": job.feed.batch_size,
        "collate_fn": job.recipe.collate_fn or default_collate,
    }
    if not isinstance(data, IterableDataset):
        options["shuffle"] = False
    return iter(DataLoader(data, pin_memory=job.step.device.type == "cuda", **options))


@contextmanager
def _inference(job: Job) -> Iterator[None]:
    """Eval mode, no gradients, the precision in force; afterwards training goes on as if nothing had been."""
    model, device = job.step.model, job.step.device
    training = [module for module in model.modules() if module.training]
    host = host_states()
    card = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    model.eval()
    try:
        with torch.no_grad(), matmuls(job.step.settings), autocast(device, job.step.settings):
            yield
    finally:
        for module in training:
            module.training = True
        restore_host(host)
        if card is not None:
            torch.cuda.set_rng_state(card, device)
