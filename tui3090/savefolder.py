"""The saves of a run on disk: `saves/step-00001200/`, whole or not there at all.

A save is written into a folder aside (its name begins with a dot), synced, and renamed; so what has a save's name was
complete once. It holds `model.safetensors`, `training.pt` (read with `weights_only=True`) and `save.json`, which knows
the size and the CRC-32 of the two: one that was damaged afterwards is recognised and passed over.

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

FORMAT = 1
MODEL, TRAINING, NOTES = "model.safetensors", "training.pt", "save.json"
LARGEST_NOTES = 64 << 20
"""Bytes of save.json that are read at the most."""
MOST = 10**15
"""The greatest count that is read."""
_NAME = re.compile(r"step-([0-9]{1,18})(?:\.([0-9]{1,9}))?")
_ASIDE = re.compile(rf"\.(?:[0-9]+-[0-9]+|{_NAME.pattern})")
"""What is being written or deleted. Nothing else in the folder is ours to delete: it may be a link to elsewhere."""

_ACCEPTED: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, NoneType),
    "float": (int, float),
    "float | None": (int, float, NoneType),
    "str": (str,),
    "bool": (bool,),
    "dict[str, Any]": (dict,),
    "list[list[str]]": (list,),
}


class SaveError(Exception):
    """A save can't be used; its text is a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """save.json: where training stood, and what must fit for it to go on. Plain numbers and strings."""

    number: int
    """Which one of the run's saves it is: after going back to an earlier step, steps don't tell which is newer."""
    step: int
    """Optimizer steps taken."""
    time: float
    """Seconds since the epoch."""
    reason: str
    """Why it was made: 'key s', 'every 10 min', 'best', 'the end' …"""
    healthy: bool
    """Whether training was not diverging then."""
    eval_loss: float | None
    """Of the evaluation at this step; None: there was none."""
    best_eval: float | None
    """The least eval loss of the run so far."""
    epoch: int
    taken: int
    """Samples of this epoch that steps were made of."""
    batch_size: int
    """Samples in a micro-batch: less than the recipe's after memory was short."""
    whole_batch: int
    """The recipe's."""
    rows: int | None
    """Training samples; None: unknown."""
    seed: int
    planned: int | None
    """Optimizer steps in the whole run, as planned then."""
    left: int | None
    """Optimizer steps that were left; fewer than planned where windows were skipped."""
    evaluated: bool
    """Whether the epoch is over and was evaluated."""
    settings: str
    """`Settings.short()`."""
    model: str
    """Its class."""
    optimizer: str
    """Its class."""
    tensors: dict[str, Any]
    """Of the model's state: name -> [shape, dtype]."""
    ties: dict[str, Any]
    """Names that are left out of the file, for their tensor is another one's as well -> that one's name."""
    trained: list[list[str]]
    """The optimizer's parameters by name, group by group."""
    torch: str
    """torch's version."""
    files: dict[str, Any]
    """File -> [bytes, CRC-32]."""


@dataclass(frozen=True, slots=True)
class Save:
    """A save on disk."""

    path: Path
    notes: Notes

    @property
    def name(self) -> str:
        """`step-00001200`."""
        return self.path.name

    def damage(self) -> str:
        """What is wrong with its files, a sentence; empty: they are as they were written. Reads all of them."""
        for name in (MODEL, TRAINING):
            wanted = self.notes.files.get(name)
            path = self.path / name
            try:
                if not path.is_file():
                    return f"{name} is missing"
                size = path.stat().st_size  # first: a file that grew without end is not read to its end
                if not isinstance(wanted, list) or wanted[:1] != [size] or wanted != [size, crc32(path)]:
                    return f"{name} is not as it was written"
            except OSError as error:
                return f"{name} can't be read: {error.strerror}"
        return ""


def crc32(path: Path) -> int:
    """Of a file's content."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            value = zlib.crc32(block, value)
    return value


def read_notes(path: Path) -> Notes:
    """The save.json in the folder `path`. Raises SaveError."""
    file = path / NOTES
    try:
        if not file.is_file():
            raise SaveError(f"{NOTES} is missing")
        with file.open("rb") as opened:
            body = json.loads(opened.read(LARGEST_NOTES))
    except OSError as error:
        raise SaveError(f"{NOTES} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise SaveError(f"{NOTES} is broken") from None
    number = body.get("format") if isinstance(body, dict) else None
    if isinstance(number, int) and number > FORMAT:
        raise SaveError(f"it was written by a newer tui3090 (format {number}): upgrade to read it")
    if not isinstance(body, dict) or number != FORMAT:
        raise SaveError(f"{NOTES} is broken")
    given: dict[str, Any] = {}
    for field in fields(Notes):
        value = body.get(field.name)
        kind = str(field.type)
        if not isinstance(value, _ACCEPTED[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise SaveError(f"{NOTES} is broken: {field.name}")
        given[field.name] = value
    if not all(isinstance(group, list) and all(isinstance(n, str) for n in group) for group in given["trained"]):
        raise SaveError(f"{NOTES} is broken: trained")
    counts = given["step"], given["epoch"], given["taken"], given["batch_size"] - 1, given["whole_batch"] - 1
    if min(counts) < 0 or max(counts) > MOST:
        raise SaveError(f"{NOTES} is broken: a count is negative or beyond all counting")
    return Notes(**given)


def write_notes(path: Path, notes: Notes) -> None:
    """Write save.json into the folder `path`."""
    body = {"format": FORMAT} | {field.name: getattr(notes, field.name) for field in fields(Notes)}
    (path / NOTES).write_text(json.dumps(body, indent=1) + "\n", "utf-8")


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
    except OSError:
        return []


def saves(folder: Path) -> tuple[list[Save], list[str]]:
    """The saves in a `saves` folder, oldest first, and a sentence for each that can't be used. No tensor is read."""
    found: list[Save] = []
    passed_over: list[str] = []
    for path in _entries(folder):
        try:
            found.append(Save(path, read_notes(path)))
        except SaveError as error:
            passed_over.append(f"The save {path.name} is passed over: {error}.")
    return sorted(found, key=lambda save: save.notes.number), passed_over


def new_path(folder: Path, step: int) -> Path:
    """A name that no save has yet: `step-00001200`, then `step-00001200.1` …"""
    names = (f"step-{step:08d}{f'.{number}' if number else ''}" for number in itertools.count())
    return next(path for name in names if not (path := folder / name).exists())


def clear_up(folder: Path) -> None:
    """Delete what a killed process left behind while it wrote."""
    for path in folder.glob(".*"):
        if _ASIDE.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the last `keep` saves (at least 1), the one with the least eval loss, and the last healthy one."""
    found, _ = saves(folder)
    kept = [*found[-keep:], *_best(found), *[save for save in found if save.notes.healthy][-1:]]
    for save in found:
        if save.path not in [k.path for k in kept]:
            aside = save.path.with_name("." + save.name)
            os.replace(save.path, aside)  # a kill in the middle leaves no half save under a save's name
            shutil.rmtree(aside, ignore_errors=True)


def _best(found: Iterable[Save]) -> list[Save]:
    evaluated = [(s.notes.eval_loss, i, s) for i, s in enumerate(found) if s.notes.eval_loss is not None]
    return [min(evaluated)[2]] if evaluated else []


def best(found: Iterable[Save]) -> Save | None:
    """The save with the least eval loss."""
    return next(iter(_best(found)), None)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
