"""The run folder: written by a thread of its own while training goes on, read by `tui3090 show`.

    run.json        what this run is: format number, command, recipe, options, versions, card, seed, how it ended
    records.jsonl   one record a line (records.py)
    output.log      all that training printed

A long run's records.jsonl is thinned (thinning.py): ten hours at 30 steps a second are 42 MB. A log of
before, with four lines a second to its end, is read all the same.

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tui3090.files import is_regular, open_regular
from tui3090.lines import from_object, to_line
from tui3090.own import REST_S, Piece
from tui3090.records import Event, Reading, Record, StepRecord
from tui3090.thinning import Thinner

FORMAT = 1
"""Of run.json and records.jsonl; a reader refuses a higher one."""
GATHER_S = 1.0
"""Records of so long a time are written together."""
WATCHED_S = 0.1
"""Likewise while somebody looks at the run from another process."""
LONGEST_LINE = 1 << 20
"""Bytes; a longer line is not ours and is passed over."""
LONGEST_INFO = 1 << 20
"""Bytes; a longer run.json is not ours."""
NOTHING_OF_OURS = 32 << 20
"""Bytes in a row without one record, after which a file is read no further: one of zeros may say it has a terabyte."""
WAITING = 100_000
"""Records that wait for a disk that hangs at the most; then step records and readings are lost."""
UNWRITTEN = 8 << 20
"""Bytes kept for a disk that takes nothing at the most; then every second step record and reading is lost."""
DELETED = "records.jsonl was deleted: what is recorded from here on is lost."


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
            if not is_regular(path / "records.jsonl"):
                raise RunFolderError(f"{run} is not a run folder: it has no records.jsonl.")
            return cls(path)
        newest = cls.newest_first()
        if not newest:
            raise RunFolderError("There is no run under runs/ here: name a run folder, or start one with tui3090 run.")
        return newest[0]

    @classmethod
    def newest_first(cls) -> list[RunFolder]:
        """The run folders under runs/, the one that was written to last first."""
        found = [(_written(path / "records.jsonl"), path) for path in Path("runs").glob("*")]
        written = [(when, path) for when, path in found if when is not None]
        return [cls(path) for _, path in sorted(written, reverse=True)]

    def hold(self) -> None:
        """Keep other processes from training in this folder until this one ends. Raises RunFolderError if one does."""
        try:
            self._held = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(
                f"{self.path} is still being trained: tui3090 show {shlex.quote(str(self.path))} shows it."
            ) from None
        except OSError:  # a file system without locks
            return

    def read_info(self) -> dict[str, Any]:
        """run.json; empty where it is missing or broken. Raises RunFolderError for a format newer than ours."""
        try:
            with open_regular(self.info_file) as file:
                text = file.read(LONGEST_INFO + 1)
            info = json.loads(text) if len(text) <= LONGEST_INFO else None
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(info, dict):
            return {}
        number = info.get("format", FORMAT)
        if not isinstance(number, int) or number > FORMAT:
            newer = f"format {str(number)[:20] or 'unknown'}"
            raise RunFolderError(f"{self.path} was written by a newer tui3090 ({newer}): upgrade to read it.")
        return info

    def write_info(self, **changes: Any) -> None:
        """Set keys of run.json, whole or not at all."""
        info = {"format": FORMAT, **self.read_info(), **changes}
        aside = self.info_file.with_suffix(".json.tmp")
        aside.write_text(json.dumps(info, indent=2, ensure_ascii=False) + "\n", "utf-8", "backslashreplace")
        os.replace(aside, self.info_file)


def _written(path: Path) -> float | None:
    """When a file was written last; None where it is no regular file or can't be looked at."""
    try:
        return path.stat().st_mtime if is_regular(path) else None
    except OSError:
        return None


class RunLog:
    """Writes records to a run folder from a thread of its own; `put` never waits for the disk.

    What the disk does not take is kept, within bounds, and written once it does; the log and `tell` say both. Raises
    RunFolderError where the file can't be made.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.tell: Callable[[Event], None] = lambda event: None
        """Told, from the log's own thread, what a watcher should know of the log."""
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._thinner = Thinner()
        try:
            self._fd = os.open(folder.records, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise RunFolderError(f"{folder.records} can't be written: {error.strerror}.") from None
        self._unwritten = b""
        self._closing = threading.Event()
        self._why = ""
        self._lost = 0
        self._counting = threading.Lock()
        self.gather_s = GATHER_S
        """Records of so long a time are written together."""
        self._thread = threading.Thread(target=self._run, name="runlog", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why the last write failed and what was lost, sentences; empty: all is written that could be kept."""
        return f"{self._why} {self._losses}".strip() if self._why else ""

    @property
    def native_id(self) -> int | None:
        """The thread, for measuring what it costs."""
        return self._thread.native_id

    def put(self, record: Record) -> None:
        """Take a record; any thread may call it."""
        if self._queue.qsize() >= WAITING and isinstance(record, (StepRecord, Reading)):
            self._lose(1)
        else:
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
            self._closing.wait(self.gather_s)
            while not self._queue.empty():
                records.append(self._queue.get())
            more = None not in records
            lines: list[str] = []
            piece, until = Piece(), time.perf_counter() + self.gather_s
            for record in records:
                lines += map(to_line, self._due(record))
                if piece.over and time.perf_counter() < until:
                    self._closing.wait(REST_S)
                    piece.go_on()
            # at once: what a full disk left unwritten is long, and copied each time
            self._take(lines)
            self._write()
        self._lose(self._unwritten.count(b"\n"))
        os.close(self._fd)

    def _due(self, record: Record | None) -> Sequence[Record]:
        return self._thinner.rest() if record is None else self._thinner.add(record)

    def _take(self, lines: Iterable[str]) -> None:
        """Lines to be written. A lone surrogate, as in a file's name, has no UTF-8; escaped it is still JSON."""
        self._unwritten += "".join(lines).encode("utf-8", "backslashreplace")

    def _write(self) -> None:
        """Write all there is; what the disk does not take is kept, and tried again with the next records."""
        before = self._why
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]
            self._why = "" if os.fstat(self._fd).st_nlink else DELETED
        except OSError as error:
            self._bound()
            self._why = f"records.jsonl can't be written: {error.strerror}."
        if self._why and not before:
            self._say(f"{self._why} Training goes on.")
        elif before and not self._why:
            self._say(f"records.jsonl is written again. {self._losses}".rstrip())

    @property
    def _losses(self) -> str:
        return f"{self._lost:,} of its lines are lost." if self._lost else ""

    def _say(self, text: str) -> None:
        event = Event(time=time.time(), level="warning", source="log", text=text)
        self._take([to_line(event)])
        self.tell(event)

    def _bound(self) -> None:
        """Where too much is unwritten: give up every second step record and reading, and if need be what is oldest.

        Not the first line: its beginning may be on the disk.
        """
        if len(self._unwritten) <= UNWRITTEN:
            return
        first, *lines = self._unwritten.splitlines(keepends=True)
        kept: list[bytes] = []
        seen = 0
        for line in lines:
            repeating = line.startswith(_REPEATING)
            seen += repeating
            if not repeating or seen % 2:
                kept.append(line)
        size = sum(map(len, kept))
        start = 0
        while size > UNWRITTEN:
            size -= len(kept[start])
            start += 1
        self._lose(len(lines) - len(kept) + start)
        self._unwritten = b"".join([first, *kept[start:]])

    def _lose(self, count: int) -> None:
        with self._counting:
            self._lost += count


_REPEATING = tuple(f'{{"type": "{kind.type}"'.encode() for kind in (StepRecord, Reading))


_decode = json.JSONDecoder().raw_decode


class RecordReader:
    """Reads records.jsonl from the start and on as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self._skipping = False
        self._nothing = 0
        self.passed_over = 0
        """Lines that were not records of ours."""
        self.at_end = False
        """Whether the last `read` came to the end of what there is."""

    def read(self, most: int = 8 << 20) -> list[Record]:
        """The records of the next `most` bytes, which may be none. A line still being written is left for later."""
        block = b""
        if self._nothing <= NOTHING_OF_OURS:
            try:
                with open_regular(self._path) as file:
                    file.seek(self._offset)
                    block = file.read(most)
            except OSError:
                pass
        self.at_end = not block
        self._offset += len(block)
        whole, end, rest = block.rpartition(b"\n")
        lines = (self._rest + whole).split(b"\n") if end else []
        if lines and self._skipping:
            self._skipping = False
            self.passed_over += 1
            del lines[0]
        self._rest = rest if end else self._rest + rest
        if len(self._rest) > LONGEST_LINE:
            self._rest, self._skipping = b"", True
        records = [record for line in lines if (record := self._record(line)) is not None]
        self._nothing = 0 if records else self._nothing + len(block)
        return records

    def _record(self, line: bytes) -> Record | None:
        """The record that a line holds; bytes that are no UTF-8 become �."""
        record = None
        if line.startswith(b"{") and len(line) <= LONGEST_LINE:
            text = line.decode("utf-8", "replace")
            try:
                body, end = _decode(text)
            except (ValueError, RecursionError):
                pass
            else:
                record = from_object(body) if end == len(text) or text[end:].isspace() else None
        self.passed_over += record is None and bool(line.strip())
        return record
