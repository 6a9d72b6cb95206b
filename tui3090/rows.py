"""Files of a user's -> rows: JSON lines, CSV, Parquet and plain text; a bad row is named, counted and skipped.

A row is a dict of columns. What makes an item of it may raise `BadRow`; more bad rows than a limit, or no good one,
mean that the file is not what it was taken for, and a RecipeError says so.
"""

from __future__ import annotations

import csv
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tui3090.recipe import RecipeError, harmless

Item = TypeVar("Item")
Row = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")
PARQUET = b"PAR1"
"""What a Parquet file begins with."""
MOST_LABELS = 0.5
"""Different labels for each row: a column with more is none of labels."""


class BadRow(Exception):
    """A row that can't be used; its text says why."""


def read_items(data: str | Sequence[Row], make: Callable[[Row], Item], limit: int) -> tuple[list[Item], list[str]]:
    """What `make` makes of each row of `data`, and a sentence on those that were skipped, if any.

    `data` is a file, several with commas between them, or a folder; or rows that are at hand. Every skipped row is
    printed with its line. Raises RecipeError for a file that can't be read, for more than `limit` bad rows, and where
    no row is good.
    """
    items, bad = [], []
    named = data if isinstance(data, str) else "The default data"
    for place, row in _rows(data) if isinstance(data, str) else ((f"row {n}", row) for n, row in enumerate(data, 1)):
        try:
            if isinstance(row, BadRow):
                raise row
            items.append(make(row))
        except BadRow as error:
            bad.append(harmless(f"{place}: {error}"))
            print(f"skipped {bad[-1]}")
            if len(bad) > limit:
                raise RecipeError(
                    f"{bad[0]} ... more than {limit} such rows: mend the data, name its columns, or raise --bad-rows."
                ) from None
    if not items:
        raise RecipeError(f"{named} holds no row that can be used" + (f": {bad[0]}." if bad else ": it is empty."))
    if not bad:
        return items, []
    some = "; ".join(bad[:3]) + ("; …" if len(bad) > 3 else "")
    return items, [f"{len(bad)} of {len(bad) + len(items)} rows were skipped: {some}"]


def column(row: Row, name: str, option: str) -> Any:
    """The value of a column. Raises BadRow where there is none; `option` is what names the column."""
    value = row.get(name)
    if value is not None:
        return value
    if name in row:
        raise BadRow(f"its {name!r} is empty")
    columns = ", ".join(repr(key) for key in list(row)[:6])
    raise BadRow(f"it has no {name!r} but {columns or 'nothing'} (--{option} names the column)")


def text(row: Row, name: str, option: str) -> str:
    """The text of a column, not blank. Raises BadRow."""
    value = column(row, name, option)
    if not isinstance(value, str):
        raise BadRow(f"its {name!r} is no text but {json.dumps(value, default=repr)[:40]}")
    if not value.strip():
        raise BadRow(f"its {name!r} is blank")
    return value


def label(row: Row, name: str, option: str) -> str:
    """The class in a column, a name or a whole number. Raises BadRow."""
    value = column(row, name, option)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, (str, int)):
        raise BadRow(f"its {name!r} is {str(value)[:40]}: a label is a name or a whole number")
    return str(value)


def class_names(labels: list[str]) -> list[str]:
    """The classes, in the order of their numbers or of the alphabet. Raises RecipeError for what are no labels."""
    counts = Counter(labels)
    if len(counts) < 2:
        raise RecipeError(f"All {len(labels)} rows have the label {labels[0]!r}: there is nothing to tell apart.")
    if len(counts) > max(2, MOST_LABELS * len(labels)):
        raise RecipeError(
            f"{len(labels)} rows have {len(counts)} different labels, one of them {labels[0]!r}: "
            "is --label-column the right one?"
        )
    numbers = all(re.fullmatch(r"-?[0-9]+", name) for name in counts)
    return sorted(counts, key=lambda name: (int(name) if numbers else 0, name))


def split(items: list[Item], share: float) -> tuple[list[Item], list[Item]]:
    """Items to train on and to evaluate on, in their order, drawn always the same way. Raises RecipeError."""
    held = round(len(items) * share)
    if not 0 < held < len(items):
        raise _unsplit(f"{len(items)} rows", share)
    chosen = set(random.Random(0).sample(range(len(items)), held))
    return [x for i, x in enumerate(items) if i not in chosen], [x for i, x in enumerate(items) if i in chosen]


def split_ends(texts: list[str], share: float) -> tuple[list[str], list[str]]:
    """The beginnings of a few long texts to train on, and their ends to evaluate on. Raises RecipeError."""
    ends = [round(len(text) * share) for text in texts]
    if not 0 < share < 1 or not any(ends):
        raise _unsplit(f"{sum(map(len, texts))} characters", share)
    halves = [(text[: len(text) - end], text[len(text) - end :]) for text, end in zip(texts, ends)]
    return [first for first, _ in halves], [last for _, last in halves if last]


def _unsplit(what: str, share: float) -> RecipeError:
    return RecipeError(
        f"{what} can't be split with {share:g} of them held out: name a file with --eval-data, or another --held-out "
        "between 0 and 1."
    )


def files(data: str) -> list[Path]:
    """The files that `data` names: a file, several with commas between them, or a folder. Raises RecipeError."""
    names = [data] if Path(data).exists() else [name.strip() for name in data.split(",") if name.strip()]
    found: list[Path] = []
    for path in map(Path, names):
        if path.is_dir():
            inside = sorted(
                p
                for p in path.rglob("*")
                if p.suffix.lower() in SUFFIXES and p.is_file() and not _hidden(p.relative_to(path))
            )
            if not inside:
                raise RecipeError(f"The folder {path} holds no data: it must have files in {', '.join(SUFFIXES)}.")
            found += inside
        elif not path.exists():
            raise RecipeError(f"There is no data {path}: check the path.")
        elif path.suffix.lower() not in SUFFIXES:
            raise RecipeError(f"{path} can't be read: its name must end in {', '.join(SUFFIXES)}.")
        else:
            found.append(path)
    if not found:
        raise RecipeError(f"--data {data!r} names no file.")
    return found


def _hidden(path: Path) -> bool:
    """Whether it is a copy that some program keeps, like those in .ipynb_checkpoints."""
    return any(part.startswith(".") for part in path.parts)


def _rows(data: str) -> Iterator[tuple[str, Row | BadRow]]:
    """Every row with its place, 'train.csv, line 3'."""
    for path in files(data):
        kind = path.suffix.lower()
        try:
            with path.open("rb") as file:
                start = file.read(len(PARQUET))
            if (start == PARQUET) != (kind == ".parquet"):
                told = "Parquet: name it .parquet" if start == PARQUET else "no Parquet file: it lacks the mark PAR1"
                raise RecipeError(f"{path} is {told}.")
            if kind == ".parquet":
                yield from _parquet(path)
            elif kind in (".csv", ".tsv"):
                yield from _csv(path, "\t" if kind == ".tsv" else ",")
            elif kind in (".jsonl", ".json"):
                yield from _json_lines(path)
            else:
                yield from _plain(path)
        except OSError as error:
            raise RecipeError(f"{path} can't be read: {error.strerror or error}.") from None


def _json_lines(path: Path) -> Iterator[tuple[str, Row | BadRow]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not line:
                continue
            if number == 1 and line.startswith(b"["):
                raise RecipeError(f"{path} is one JSON array: write an object a line (jq -c '.[]' does).")
            yield f"{path}, line {number}", _json_row(line)


def _json_row(line: bytes) -> Row | BadRow:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        return BadRow("not UTF-8 text")
    except (json.JSONDecodeError, RecursionError):
        return BadRow("not JSON")
    return row if isinstance(row, dict) else BadRow(f"no JSON object but a {type(row).__name__}")


def _csv(path: Path, delimiter: str) -> Iterator[tuple[str, Row | BadRow]]:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header: list[str] = []
        while True:
            place = f"{path}, line {reader.line_num + 1}"
            try:
                fields = next(reader, None)
            except csv.Error as error:
                if str(error) == "unexpected end of data":  # every row behind it is gone, nobody knows how many
                    raise RecipeError(f"{place}: a quote is opened that is never closed: mend it.") from None
                yield place, BadRow(f"no CSV: {error}")
                continue
            if fields is None:
                return
            if not fields:
                continue
            undecoded = any("\udc80" <= c <= "\udcff" for field in fields for c in field)
            if not header:
                header = _header(fields, undecoded, place)
            elif len(fields) != len(header):
                yield place, BadRow(f"{len(fields)} fields where the header has {len(header)}")
            elif undecoded:
                yield place, BadRow("not UTF-8 text")
            else:
                yield place, dict(zip(header, fields))


def _header(fields: list[str], undecoded: bool, place: str) -> list[str]:
    """The names of a CSV's columns. Raises RecipeError for what are none."""
    if undecoded or any("\0" in field for field in fields):
        raise RecipeError(f"{place}: the names of the columns are not UTF-8 text: save the file as UTF-8.")
    if len(fields) == 1 and (other := next((c for c in ";\t|" if c in fields[0]), None)) is not None:
        raise RecipeError(
            f"{place}: its columns are {fields[0]!r}, separated by {other!r}: a .csv has commas, a .tsv has tabs."
        )
    if len(set(fields)) < len(fields):
        twice = next(name for name, count in Counter(fields).items() if count > 1)
        raise RecipeError(f"{place}: two columns are named {twice!r}: rename one.")
    return fields


def _parquet(path: Path) -> Iterator[tuple[str, Row | BadRow]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise RecipeError(f"{path} needs pyarrow: pip install pyarrow, or give the data as .jsonl or .csv.") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except ArrowException as error:
        raise RecipeError(f"{path} can't be read as Parquet after {number} rows: {error}.") from None


def _plain(path: Path) -> Iterable[tuple[str, Row | BadRow]]:
    """A text file is one row with one column, `text`."""
    data = path.read_bytes()
    try:
        return [(str(path), {"text": data.decode("utf-8-sig")})]
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return [(f"{path}, line {line}", BadRow("not UTF-8 text"))]
