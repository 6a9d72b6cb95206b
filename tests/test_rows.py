"""Files of a user's: every format gives the same rows, and what can't be used is named by its line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tui3090 import rows
from tui3090.recipe import RecipeError

TABLE = [{"text": "a, b", "label": "x"}, {"text": 'say "no"', "label": "y"}, {"text": "two\nlines", "label": "x"}]


def pair(row: rows.Row) -> tuple[str, str]:
    return rows.text(row, "text", "text-column"), rows.column(row, "label", "label-column")


WANTED = [(row["text"], row["label"]) for row in TABLE]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def jsonl(table: list[rows.Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in table)


def csv_of(delimiter: str = ",") -> str:
    quoted = [f'"{text.replace(chr(34), chr(34) * 2)}"{delimiter}{label}' for text, label in WANTED]
    return "\r\n".join([f"text{delimiter}label", *quoted])


def refused(data: str, sentence: str, limit: int = 100) -> None:
    with pytest.raises(RecipeError, match=re.escape(sentence)):
        rows.read_items(data, pair, limit)


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(TABLE), tmp_path / "a.parquet")
    for data in (
        write(tmp_path / "a.jsonl", jsonl(TABLE)),
        write(tmp_path / "b.json", b"\xef\xbb\xbf" + jsonl(TABLE).encode() + b"\n\n"),
        write(tmp_path / "a.csv", "\ufeff" + csv_of()),
        write(tmp_path / "a.tsv", csv_of("\t")),
        str(tmp_path / "a.parquet"),
    ):
        assert rows.read_items(data, pair, 0) == (WANTED, []), data


def test_several_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    first = write(tmp_path / "a.jsonl", jsonl(TABLE[:1]))
    second = write(tmp_path / "sub" / "b.csv", "text,label\nc,z\n")
    write(tmp_path / "notes.pdf", "not data")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    write(tmp_path / ".ipynb_checkpoints" / "a-checkpoint.jsonl", jsonl(TABLE[:1]))
    both = [WANTED[0], ("c", "z")]
    assert rows.read_items(f"{first}, {second}", pair, 0)[0] == both
    assert rows.read_items(str(tmp_path), pair, 0)[0] == both
    comma = write(tmp_path / "sub" / "x,y.jsonl", jsonl(TABLE[1:]))
    assert rows.read_items(comma, pair, 0)[0] == WANTED[1:]


def test_a_text_file_is_one_text(tmp_path: Path) -> None:
    data = write(tmp_path / "a.txt", "\ufeffone\ntwo\n")
    assert rows.read_items(data, lambda row: rows.text(row, "text", "text-column"), 0) == (["one\ntwo\n"], [])


def test_bad_lines_of_json_are_named_counted_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        *(b'{"text": "a, b", "label": "x"}', b"{", b"", b"[1]", b'{"text": "\xff", "label": "x"}'),
        *(b'{"text": 3, "label": "x"}', b'{"text": " ", "label": "x"}', b'{"txt": "a"}', b'{"text": null}'),
    ]
    data = write(tmp_path / "a.jsonl", b"\n".join(lines))
    items, notes = rows.read_items(data, pair, 7)
    assert items == WANTED[:1]
    assert notes == [
        f"7 of 8 rows were skipped: {data}, line 2: not JSON; {data}, line 4: no JSON object but a list; "
        f"{data}, line 5: not UTF-8 text; …"
    ]
    assert capsys.readouterr().out.splitlines() == [
        f"skipped {data}, line {line}: {why}"
        for line, why in [
            (2, "not JSON"),
            (4, "no JSON object but a list"),
            (5, "not UTF-8 text"),
            (6, "its 'text' is no text but 3"),
            (7, "its 'text' is blank"),
            (8, "it has no 'text' but 'txt' (--text-column names the column)"),
            (9, "its 'text' is empty"),
        ]
    ]
    refused(data, f"{data}, line 2: not JSON ... more than 6 such rows", limit=6)


def test_bad_lines_of_csv_are_named_by_the_line_they_begin_at(tmp_path: Path) -> None:
    data = write(tmp_path / "a.csv", b'text,label\n"two\nlines",x\none\na,b,c\n\xff,x\nend,y\n')
    items, notes = rows.read_items(data, pair, 9)
    assert items == [("two\nlines", "x"), ("end", "y")]
    assert notes == [
        f"3 of 5 rows were skipped: {data}, line 4: 1 fields where the header has 2; "
        f"{data}, line 5: 3 fields where the header has 2; {data}, line 6: not UTF-8 text"
    ]


def test_wrong_columns_name_those_there_are(tmp_path: Path) -> None:
    data = write(tmp_path / "a.csv", "sentence,class\n" + "a,b\n" * 200)
    refused(data, "line 2: it has no 'text' but 'sentence', 'class' (--text-column names the column) ... more than 100")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b"", "a.jsonl holds no row that can be used: it is empty."),
        ("a.csv", b"text,label\n", "a.csv holds no row that can be used: it is empty."),
        ("a.csv", b"PAR1\x00\x00", "a.csv is Parquet: name it .parquet."),
        ("a.parquet", b"text,label\n", "a.parquet is no Parquet file: it lacks the mark PAR1."),
        ("a.parquet", b"PAR1 cut off", "a.parquet can't be read as Parquet after 0 rows"),
        ("a.jsonl", b"text,label\na,b\n", "a.jsonl holds no row that can be used: "),
        ("a.json", b'[{"text": "a"}]', "a.json is one JSON array: write an object a line"),
        ("a.xlsx", b"PK", "a.xlsx can't be read: its name must end in .jsonl"),
        ("a.txt", b"ok\n\xff", "a.txt, line 2: not UTF-8 text"),
        ("a.csv", b"text;label\na;b\n", "a.csv, line 1: its columns are 'text;label', separated by ';'"),
        ("a.tsv", b"text|label\na|b\n", "a.tsv, line 1: its columns are 'text|label', separated by '|'"),
        ("a.csv", b"text,text\na,b\n", "a.csv, line 1: two columns are named 'text'"),
        ("a.csv", "text,label\na,b\n".encode("utf-16"), "a.csv, line 1: the names of the columns are not UTF-8 text"),
        ("a.csv", b'text,label\na,b\n"c,d\ne,f\n', "a.csv, line 3: a quote is opened that is never closed"),
    ],
)
def test_a_file_that_is_empty_or_not_what_its_name_says_is_refused(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    refused(write(tmp_path / name, content), sentence)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    refused(str(tmp_path / "no.csv"), "no.csv: check the path.")
    refused(str(tmp_path), "holds no data: it must have files in .jsonl")
    refused(" , ", "names no file")


def test_rows_at_hand_are_named_by_their_number() -> None:
    assert rows.read_items(TABLE, pair, 0) == (WANTED, [])
    items, notes = rows.read_items([*TABLE, {"text": " ", "label": "x"}], pair, 1)
    assert (items, notes) == (WANTED, ["1 of 4 rows were skipped: row 4: its 'text' is blank"])
    with pytest.raises(RecipeError, match="The default data holds no row that can be used: row 1: it has no 'text'"):
        rows.read_items([{"txt": "a"}], pair, 1)


def test_a_few_long_texts_are_split_at_their_ends() -> None:
    assert rows.split_ends(["0123456789", "abcde", "x"], 0.2) == (["01234567", "abcd", "x"], ["89", "e"])
    for share in (0.0, 1.0, 0.01):
        with pytest.raises(RecipeError, match="16 characters can't be split"):
            rows.split_ends(["0123456789", "abcde", "x"], share)


def test_the_split_is_the_same_each_time_and_loses_nothing() -> None:
    train, held = rows.split(list(range(100)), 0.1)
    assert (train, held) == rows.split(list(range(100)), 0.1)
    assert len(held) == 10
    assert sorted(train + held) == list(range(100))
    for share in (0.0, 1.0, 0.001):
        with pytest.raises(RecipeError, match="can't be split"):
            rows.split(list(range(100)), share)
