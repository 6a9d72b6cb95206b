"""The run folder: written by a thread of its own while training goes on, read by `tui3090 show`.

    run.json        what this run is: format number, command, recipe, options, versions, card, seed, how it ended
    records.jsonl   one record a line (records.py)
    output.log      all that training printed

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import json
import os
import queue
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tui3090.records import Record, StepRecord, from_object, to_line

FORMAT = 1
"""Of run.json and records.jsonl; a reader refuses a higher one."""
EVERY_STEP = 10_000
"""Steps that have a line each; later lines stand for several."""
THINNED_S = 0.25
"""Later a line at most this often."""
GATHER_S = 1.0
"""Records of so long a time are written together."""
LONGEST_LINE = 1 << 20
"""Bytes; a longer line is not ours and is passed over."""


class RunFolderError(Exception):
    """A run folder that can't be made or read; its text is a sentence with the way out."""


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = path / "records.jsonl"
        self.output = path / "output.log"
        self.info_file = path / "run.json"

    @classmethod
    def create(cls, name: str, where: Path | None = None) -> RunFolder:
        """A new folder: `where`, which must be empty or new, or runs/<date>-<name>. Raises RunFolderError."""
        try:
            if where is not None:
                where.mkdir(parents=True, exist_ok=True)
                if any(where.iterdir()):
                    raise RunFolderError(f"{where} is not empty: name another --run-dir, or move it away.")
                return cls(where)
            plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
            for count in range(1, 1000):
                path = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{plain}{f'-{count}' if count > 1 else ''}"
                try:
                    path.mkdir(parents=True)
                    return cls(path)
                except FileExistsError:
                    continue
            raise RunFolderError("runs/ is full of runs of this second: name a --run-dir.")
        except OSError as error:
            raise RunFolderError(
                f"The run folder can't be made: {error.strerror} ({error.filename}): name another with --run-dir."
            ) from None

    @classmethod
    def find(cls, run: Path | None) -> RunFolder:
        """The folder `run`, or the newest under runs/. Raises RunFolderError."""
        if run is not None:
            path = run.parent if run.name in ("records.jsonl", "run.json") else run
            if not (path / "records.jsonl").is_file():
                raise RunFolderError(f"{run} is not a run folder: it has no records.jsonl.")
            return cls(path)
        candidates = [p for p in Path("runs").glob("*") if (p / "records.jsonl").is_file()]
        if not candidates:
            raise RunFolderError("There is no run under runs/ here: name a run folder, or start one with tui3090 run.")
        return cls(max(candidates, key=lambda p: (p / "records.jsonl").stat().st_mtime))

    def read_info(self) -> dict[str, Any]:
        """run.json; empty where it is missing or broken. Raises RunFolderError for a format newer than ours."""
        try:
            info = json.loads(self.info_file.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(info, dict):
            return {}
        number = info.get("format", FORMAT)
        if not isinstance(number, int) or number > FORMAT:
            raise RunFolderError(f"{self.path} was written by a newer tui3090 (format {number}): upgrade to read it.")
        return info

    def write_info(self, **changes: Any) -> None:
        """Set keys of run.json, whole or not at all."""
        info = {"format": FORMAT, **self.read_info(), **changes}
        aside = self.info_file.with_suffix(".json.tmp")
        aside.write_text(json.dumps(info, indent=2, ensure_ascii=False) + "\n", "utf-8")
        os.replace(aside, self.info_file)


class _Thinner:
    """Lets each of the first steps through, then makes one record of all those within `THINNED_S`."""

    def __init__(self) -> None:
        self._seen = 0
        self._group: list[StepRecord] = []

    def add(self, record: StepRecord) -> list[StepRecord]:
        """The records that are due for the file now."""
        self._seen += record.steps
        if self._seen <= EVERY_STEP:
            return [record]
        due: list[StepRecord] = []
        if self._group and (record.skipped, record.settings) != (self._group[0].skipped, self._group[0].settings):
            due = self.rest()
        self._group.append(record)
        if record.time - self._group[0].time >= THINNED_S:
            due += self.rest()
        return due

    def rest(self) -> list[StepRecord]:
        """What is being collected, as one record of means."""
        group, self._group = self._group, []
        return [_mean(group)] if group else []


def _mean(group: list[StepRecord]) -> StepRecord:
    """One record for several windows of the same settings: the last one's counters, the means of what was measured."""
    last, n = group[-1], len(group)
    if n == 1:
        return last
    norms = [r.grad_norm for r in group if r.grad_norm is not None]
    flops = [r.flops for r in group if r.flops is not None]
    hardware = [r.hardware_flops for r in group if r.hardware_flops is not None]
    return replace(
        last,
        steps=sum(r.steps for r in group),
        loss=sum(r.loss for r in group) / n,
        lr=sum(r.lr for r in group) / n,
        grad_norm=sum(norms) / len(norms) if norms else None,
        samples=round(sum(r.samples for r in group) / n),
        tokens=round(sum(r.tokens for r in group) / n),
        padding=round(sum(r.padding for r in group) / n),
        seconds=sum(r.seconds for r in group) / n,
        wait_s=sum(r.wait_s for r in group) / n,
        stall_s=sum(r.stall_s for r in group) / n,
        flops=sum(flops) / len(flops) if flops else None,
        hardware_flops=sum(hardware) / len(hardware) if hardware else None,
        replayed=all(r.replayed for r in group),
    )


class RunLog:
    """Writes records to a run folder from a thread of its own; `put` never waits for the disk."""

    def __init__(self, folder: RunFolder) -> None:
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._thinner = _Thinner()
        self._fd = os.open(folder.records, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._unwritten = b""
        self._closing = threading.Event()
        self.problem = ""
        """Why the last write failed, a sentence; empty: all is written."""
        self._thread = threading.Thread(target=self._run, name="runlog", daemon=True)
        self._thread.start()

    @property
    def native_id(self) -> int | None:
        """The thread, for measuring what it costs."""
        return self._thread.native_id

    def put(self, record: Record) -> None:
        """Take a record; any thread may call it."""
        self._queue.put(record)

    def close(self) -> None:
        """Write what is left and end the thread."""
        self._queue.put(None)
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        more = True
        while more:
            records = [self._queue.get()]
            self._closing.wait(GATHER_S)
            while not self._queue.empty():
                records.append(self._queue.get())
            more = None not in records
            for record in records:
                self._unwritten += "".join(map(to_line, self._due(record))).encode()
            self._write()
        os.close(self._fd)

    def _due(self, record: Record | None) -> Sequence[Record]:
        if record is None:
            return self._thinner.rest()
        return self._thinner.add(record) if isinstance(record, StepRecord) else (record,)

    def _write(self) -> None:
        """Write all there is; what the disk does not take is kept, and tried again with the next records."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]
            self.problem = ""
        except OSError as error:
            self.problem = f"records.jsonl can't be written: {error.strerror}."


class RecordReader:
    """Reads records.jsonl from the start and on as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self._skipping = False
        self.passed_over = 0
        """Lines that were not records of ours."""

    def read(self, most: int = 8 << 20) -> list[Record]:
        """The records of the next `most` bytes; empty at the end. A line still being written is left for later."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                block = file.read(most)
        except OSError:
            return []
        self._offset += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            self._rest, self._skipping = b"", True
        records: list[Record] = []
        for line in lines:
            if self._skipping:
                self._skipping = False
                self.passed_over += 1
                continue
            try:
                record = from_object(json.loads(line)) if len(line) <= LONGEST_LINE else None
            except (ValueError, RecursionError):
                record = None
            if record is not None:
                records.append(record)
            elif line.strip():
                self.passed_over += 1
        return records
