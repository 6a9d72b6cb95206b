"""The process that looks at a recipe or measures one cell, and tells it on a pipe.

Its standard input is a line of JSON, which modules will be needed, then another, what is wanted, and then stays open:
when it ends, whoever asked is gone, and so is this process. The answer is a line of JSON on the descriptor that the
command line names.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import statistics
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from tui3090.assemble import assemble
from tui3090.commands import Stop
from tui3090.feed import Window
from tui3090.fit.cells import Column, all_columns
from tui3090.fit.prediction import Point
from tui3090.fit.probe import card_peak, elements_in, probe, small_batches
from tui3090.link import Commands
from tui3090.meters.poller import Poller
from tui3090.recipe import Recipe, RecipeError
from tui3090.records import Event, Record, StepRecord
from tui3090.settings import RunPlan, Settings
from tui3090.source import describe, load_recipe, parse_options
from tui3090.techniques import refusal
from tui3090.trainer import Diverged, Stopped, Trainer

WARM_UP = 2
"""Windows before those that count; under replay counted from the first that was replayed."""
LEAST, MOST, LONG_ENOUGH_S = 3, 10, 1.0
"""Windows that count: at least `LEAST`, and as many more as there is time for, `MOST` at the most."""
WINDOWS, NONE_AT_ALL = 40, 10
"""Windows after which a cell that hasn't got `LEAST` is given up, and one in which none was full, or replayed."""
LARGE_LIBRARIES = ("tui3090.pretrained", "transformers", "peft")
"""They take seconds to import, more than many cells take to measure, and leave the card alone meanwhile. Ours comes
before theirs where a recipe has it: it keeps them from asking the hub."""


class NoRoom(Exception):
    """The card's memory is too small for this cell."""


class CellTrainer(Trainer):
    """The run's own loop, for a cell: what `run` survives ends it."""

    def measure(self, load: Callable[[Path, dict[str, Any]], Recipe]) -> None:
        """Train until a command stops it; raises what goes wrong."""
        self.job = assemble(self.plan, self.tell.emit, load)
        self._begin()
        self._train()

    def _made_smaller(self, window: Window) -> Window:
        raise NoRoom


class Windows:
    """Listens to a trainer and stops it when enough windows were measured."""

    def __init__(self, batch: int, graph: bool, commands: Commands) -> None:
        self._batch = batch
        self._graph = graph
        self._commands = commands
        self._seen = 0
        self._counting: list[float] = []
        self.note = ""
        """Why there is no replay."""

    def emit(self, record: Record) -> None:
        """Take a record of the trainer's."""
        if isinstance(record, Event) and record.source == "graph":
            self.note = record.text
        if not isinstance(record, StepRecord):
            return
        self._seen += 1
        # an epoch's last batch may be short
        if record.samples == self._batch and (record.replayed or not self._graph):
            self._counting.append(record.seconds)
        if self._seen >= (WINDOWS if self._counting else NONE_AT_ALL) or self._enough():
            self._commands.send(Stop())

    @property
    def seconds(self) -> list[float]:
        """Of the windows that count."""
        return self._counting[WARM_UP:]

    def _enough(self) -> bool:
        count = len(self.seconds)
        return count >= MOST or (count >= LEAST and sum(self.seconds) >= LONG_ENOUGH_S)


def with_batch(recipe: Recipe, batch: int) -> Recipe:
    """The recipe with so many samples in a micro-batch, and nothing but training to do.

    An ordinary DataLoader gives way to its dataset, collate function and order; one with a sampler of the recipe's own
    is left as it is.
    """
    bare: dict[str, Any] = {"eval_data": None, "metrics": None, "max_steps": None}
    data: Any = recipe.train_data
    if own_sampler(recipe):
        return replace(recipe, **bare)
    if isinstance(data, DataLoader):
        bare["collate_fn"] = recipe.collate_fn or data.collate_fn
        bare["train_data"] = data.dataset
        if not isinstance(data.dataset, IterableDataset):
            bare["shuffle"] = type(data.batch_sampler.sampler) is RandomSampler  # type: ignore[union-attr]
    return replace(recipe, batch_size=batch, **bare)


def own_sampler(recipe: Recipe) -> bool:
    """Whether batches are made by a sampler of the recipe's own: then only its option may set their size."""
    data: Any = recipe.train_data
    if not isinstance(data, DataLoader):
        return False
    if isinstance(data.dataset, IterableDataset):
        return data.batch_size is None
    sampler: Any = data.batch_sampler
    return type(sampler) is not BatchSampler or type(sampler.sampler) not in (RandomSampler, SequentialSampler)


def plan_of(wanted: dict[str, Any], settings: Settings) -> RunPlan:
    """What `tui3090 run` would be given. Raises RecipeError."""
    path = Path(wanted["recipe"])
    argv = list(wanted["argv"])
    if wanted["batch_option"]:
        argv += ["--batch-size", str(wanted["batch"])]
    return RunPlan(
        recipe=path,
        name=path.stem,
        options=parse_options(path, argv),
        settings=settings,
        device=wanted["device"],
        vram_gib=wanted["vram_gib"],
    )


def look(wanted: dict[str, Any]) -> dict[str, Any]:
    """A `Look`, as JSON has it."""
    given: list[Recipe] = []

    def load(path: Path, options: dict[str, Any]) -> Recipe:
        given.append(load_recipe(path, options))
        return with_batch(given[0], wanted["batch"])

    plan = plan_of(wanted, Settings())
    job = assemble(plan, lambda record: None, load)
    device, machine, rows = job.machine.device, job.machine, job.feed.rows
    amp = "bf16" if not machine.cuda or machine.capability >= (8, 0) else "fp16"
    columns = all_columns(amp)
    refused = {column.name: refusal(machine, column.settings) for column in columns}
    eager = [column for column in columns if column.eager is column and not refused[column.name]]
    first = job.feed.peek()
    assert first is not None  # assemble has looked at it
    own = own_sampler(given[0])
    by_option = wanted["batch_option"] and _follows(given[0], wanted["batch"], first.samples, rows)
    points: dict[str, list[Point]] = {}
    batches = [first]
    if machine.cuda:
        batches = small_batches(job.feed)
        points = probe(job, eager, batches, card_peak(device))
    return {
        "device": str(device),
        "device_name": job.device_name,
        "torch": torch.__version__,
        "room": _room(device, plan.vram_gib),
        "amp": amp,
        "rows": rows,
        "batch_size": first.samples,
        "fixed": own and not by_option,
        "by_option": by_option,
        "weights_dtype": job.weights_dtype,
        "tf32": job.settings.tf32,
        "refused": {name: reason for name, reason in refused.items() if reason},
        "points": {name: [asdict(point) for point in found] for name, found in points.items()},
        "elements": max(elements_in(micro.batch) / micro.samples for micro in batches),
        "imports": [name for large in LARGE_LIBRARIES for name in sys.modules if name.startswith(large)],
    }


def _follows(recipe: Recipe, asked: int, first: int, rows: int | None) -> bool:
    """Whether the recipe's batches have the size that its option asked for; `first`: the samples in the first one."""
    data: Any = recipe.train_data
    if own_sampler(recipe):
        return first in (asked, rows)
    return bool((data.batch_size if isinstance(data, DataLoader) else recipe.batch_size) == asked)


def _room(device: torch.device, vram_gib: float | None) -> int:
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)  # what this process holds, a cell's will have
    return min(free, int(vram_gib * 2**30)) if vram_gib is not None else free


def measure(wanted: dict[str, Any]) -> dict[str, Any]:
    """The measured fields of a `Cell`, as JSON has them."""
    column = Column(wanted["amp"], wanted["technique"])
    commands = Commands()
    commands.leave_unattended()
    windows = Windows(wanted["samples"], column.settings.graph, commands)
    # no end of its own: with a number of steps, epochs are gone through as often as it takes
    plan = replace(plan_of(wanted, column.settings), steps=10 * WINDOWS)
    trainer = CellTrainer(plan, commands, windows.emit, Poller(windows.emit))
    try:
        trainer.measure(lambda path, options: with_batch(load_recipe(path, options), wanted["batch"]))
    except Stopped:
        pass
    except (NoRoom, torch.OutOfMemoryError):
        return {"status": "oom"}
    except Diverged as error:
        return {"status": "failed", "sentence": str(error)}
    finally:
        if hasattr(trainer, "job"):
            trainer.job.feed.close()
    if column.settings.graph and "out of memory" in windows.note:
        return {"status": "oom", "sentence": windows.note}
    if len(windows.seconds) < LEAST:
        why = windows.note or f"of {WINDOWS} batches too few were replayed: their shapes differ"
        return {"status": "failed", "sentence": why if column.settings.graph else "too few full batches in the data"}
    memory = {"peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if trainer.allocator is not None:  # torch's own peaks begin anew once windows are steady
        figures = trainer.allocator.read()
        memory |= {name: figures[name] for name in ("peak_allocated", "peak_reserved")}
    return {
        "status": "ok",
        "step_s": statistics.median(windows.seconds),
        "steps": len(windows.seconds),
        **memory,
    }


def _leave_with(parent: Any) -> None:
    """Wait for the end of standard input: whoever asked is gone."""
    parent.read()
    os._exit(1)


def main(descriptor: int) -> None:
    """Answer what standard input asks."""
    for name in json.loads(sys.stdin.readline()):
        with contextlib.suppress(Exception):  # what is really missing, the recipe will say
            importlib.import_module(name)
    wanted = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave_with, args=(sys.stdin,), daemon=True).start()
    try:
        answer = look(wanted) if wanted["look"] else measure(wanted)
    except RecipeError as error:
        answer = {"error": str(error)}
    except torch.OutOfMemoryError:
        traceback.print_exc()
        answer = {"error": "The memory is too small for the model with its optimizer, whatever the batch."}
    except SystemExit as error:
        answer = {"error": f"{wanted['recipe']} called sys.exit({error.code!r})"}
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": describe(error, Path(wanted["recipe"]))}
    with os.fdopen(descriptor, "w") as pipe:
        pipe.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing that a library does at exit is worth waiting for
