"""The losses of other runs: of the last one of the same recipe, or of those that are compared."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from tui3090.dashboard.curve import Curve, Other
from tui3090.dashboard.source import writer_lives
from tui3090.lines import from_object
from tui3090.records import StepRecord
from tui3090.runlog import LONGEST_LINE, RunFolder, RunFolderError

LOOKED_AT = 200
"""Run folders of the same place that are looked through at the most, the newest first."""
CHUNK = 64 << 10
"""Bytes read at a time; between two of them training has the interpreter for itself."""
REST_S = 0.05
STEP = b'{"type": "step"'


def last_run(folder: Path, info: dict[str, Any]) -> RunFolder | None:
    """The newest run beside `folder` of the same recipe that was begun before it and is over.

    `info` is what run.json says of `folder` itself. Raises OSError.
    """
    recipe, started = info.get("recipe"), info.get("started")
    if not isinstance(recipe, str) or not isinstance(started, (int, float)):
        return None
    beside: list[tuple[float, Path]] = []
    for path in folder.absolute().parent.iterdir():
        try:
            beside.append(((path / "records.jsonl").stat().st_mtime, path))
        except OSError:
            continue
    for _, path in sorted(beside, reverse=True)[:LOOKED_AT]:
        other = RunFolder(path)
        try:
            known = other.read_info()
        except RunFolderError:
            continue
        began = known.get("started")
        earlier = isinstance(began, (int, float)) and began < started
        if path != folder.absolute() and earlier and known.get("recipe") == recipe and not writer_lives(other):
            return other
    return None


def read_curve(folder: RunFolder, curve: Curve, rest_s: float = 0.0) -> None:
    """Add the losses of the run to `curve`, resting for `rest_s` every now and then; as far as it can be read."""
    try:
        with folder.records.open("rb") as file:
            while lines := file.readlines(CHUNK):
                for line in lines:
                    if line.startswith(STEP) and len(line) <= LONGEST_LINE:
                        _add(line, curve)
                time.sleep(rest_s)
    except OSError:
        return


def _add(line: bytes, curve: Curve) -> None:
    try:
        record = from_object(json.loads(line))
    except (ValueError, RecursionError):
        return
    if isinstance(record, StepRecord) and record.skipped != "no labels":
        curve.add(record.step, record.loss, record.steps)


def read_last_run(folder: Path, info: dict[str, Any], others: list[Other], rest_s: float) -> None:
    """Look for the last run in a thread, and put it into `others` once its curve is read."""

    def look() -> None:
        try:
            found = last_run(folder, info)
        except OSError:
            return
        if found is not None:
            other = Other("", found.path.name)
            read_curve(found, other.curve, rest_s)
            if other.curve.points:
                others.append(other)

    threading.Thread(target=look, name="past", daemon=True).start()


def read_others(folders: list[tuple[Other, RunFolder]]) -> None:
    """Read the curves of runs that are compared, in a thread."""

    def read() -> None:
        for other, folder in folders:
            whole = Curve()
            read_curve(folder, whole)
            other.curve = whole

    threading.Thread(target=read, name="past", daemon=True).start()
