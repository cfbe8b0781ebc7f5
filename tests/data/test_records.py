from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reprise.data.records import READERS, Records, read_records, row_ids

Make = Callable[..., Any]


def read(project: Any, **arguments: Any) -> Records:
    data = project.config.data
    return read_records(project.fetch(), project.workdir, data.columns, data.cleaning, **arguments)


def pairs(records: Records) -> list[tuple[str, str]]:
    return list(zip(records.table["text"].to_pylist(), records.table["label"].to_pylist(), strict=True))


def source(name: str) -> dict[str, Any]:
    return {"data.source": {"kind": "path", "path": f"data/source/{name}"}}


# ----------------------------------------------------------------------------------------------------------- exact text

HARD = [
    "001",
    "1.0",
    "1e5",
    "NA",
    "null",
    "None",
    "nan",
    "N/A",
    "true",
    "#N/A",
    "-",
    "2020-01-01",
    "0x1F",
    " spaced ",
    "日本",
    "é",
]


def as_csv(rows: list[tuple[str, str]], delimiter: str = ",") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerows([("text", "label"), *rows])
    return out.getvalue().encode()


def as_jsonl(rows: list[tuple[str, str]]) -> bytes:
    return "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows).encode()


def as_parquet(rows: list[tuple[str, str]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]}), sink)
    return sink.getvalue().to_pybytes()


WRITERS: dict[str, Callable[[list[tuple[str, str]]], bytes]] = {
    "rows.csv": as_csv,
    "rows.tsv": lambda rows: as_csv(rows, "\t"),
    "rows.jsonl": as_jsonl,
    "rows.parquet": as_parquet,
}


def test_every_reader_has_a_writer_here() -> None:
    assert {Path(name).suffix for name in WRITERS} == set(READERS)


@pytest.mark.parametrize("name", WRITERS)
def test_texts_and_labels_stay_what_they_are(project: Make, name: str) -> None:
    rows = [(f"text {value}", value) for value in HARD] + [(value, "x") for value in HARD]
    made = project(source(name))
    made.put(name, WRITERS[name](rows))
    assert pairs(read(made)) == rows


PRINTABLE = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20).filter(lambda text: text.strip() != "")


@pytest.mark.parametrize("name", WRITERS)
@given(rows=st.lists(st.tuples(PRINTABLE, PRINTABLE), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(tmp_path: Path, name: str, rows: list[tuple[str, str]]) -> None:
    path = tmp_path / name
    path.write_bytes(WRITERS[name](rows))
    table = READERS[path.suffix](path, ["text", "label"])
    assert list(zip(table["text"].to_pylist(), table["label"].to_pylist(), strict=True)) == rows


def table_or_refusal(path: Path, names: list[str]) -> pa.Table | None:
    """The table, or None where the reader says in its own words why there is none."""
    refusal = None
    try:
        return READERS[path.suffix](path, names)
    except ValueError as error:
        refusal = error
    assert str(path) in str(refusal)
    assert type(refusal) is ValueError
    return None


@given(content=st.one_of(st.binary(max_size=60), st.text(alphabet='abc",\t\r\n\x00é', max_size=60).map(str.encode)))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_as_the_standard_library_does_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"a,b\n" + content)
    table = table_or_refusal(path, ["a", "b"])
    if table is None:
        return
    records = [row for row in csv.reader(io.StringIO(content.decode(), newline="")) if row]
    assert [list(row.values()) for row in table.to_pylist()] == records


@given(content=st.one_of(st.binary(max_size=60), st.text(alphabet='{}[]":,ab1e.-\n ul\\dn', max_size=60).map(str.encode)))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_as_jsonl_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1, "b": 2}\n' + content)
    table = table_or_refusal(path, ["a", "b"])
    assert table is None or table.to_pylist()[0] == {"a": "1", "b": "2"}


def test_numbers_and_booleans_in_jsonl_keep_their_spelling(project: Make) -> None:
    made = project(source("rows.jsonl"))
    literals = ["1", "1.0", "1.10", "1e5", "-0", "12345678901234567890123", "true", "false", "NaN"]
    made.put("rows.jsonl", "\n".join(f'{{"label": {literal}, "text": "t"}}' for literal in literals))
    assert [label for _, label in pairs(read(made))] == literals


def test_jsonl_lines_end_at_line_feeds_only(project: Make) -> None:
    made = project(source("rows.jsonl"))
    made.put("rows.jsonl", '\ufeff{"text": "a\u2028b\x85c", "label": "x"}\r\n\r\n{"text": "d", "label": "y"}')
    assert pairs(read(made)) == [("a\u2028b\x85c", "x"), ("d", "y")]


def test_parquet_types_that_have_one_spelling_become_text(project: Make) -> None:
    made = project(source("rows.parquet"))
    labels = {
        "dictionary": (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        "int": (pa.array([1, 20, 2**60]), ["1", "20", str(2**60)]),
        "bool": (pa.array([True, False, True]), ["true", "false", "true"]),
        "decimal": (pa.array([Decimal("1.50"), Decimal("0.00"), Decimal("2.00")]), ["1.50", "0.00", "2.00"]),
        "large": (pa.array(["x", "y", "z"], pa.large_string()), ["x", "y", "z"]),
    }
    for column, expected in labels.values():
        pq.write_table(pa.table({"text": ["p", "q", "r"], "label": column}), made.put("rows.parquet", b""))
        assert [label for _, label in pairs(read(made))] == expected
    pq.write_table(pa.table({"text": ["p"], "label": [1.0]}), made.put("rows.parquet", b""))
    with pytest.raises(ValueError, match=r"column 'label' is of type double; .* Write it as text"):
        read(made)


def test_byte_order_mark_and_quoted_newlines(project: Make) -> None:
    made = project()
    made.put("rows.csv", '\ufefftext,label\r\n"two\nlines, and a ""quote""",x\r\n\r\nb,y\r\n')
    records = read(made)
    assert pairs(records) == [('two\nlines, and a "quote"', "x"), ("b", "y")]
    assert records.table["source_row"].to_pylist() == [1, 2]


def test_a_long_text_is_read(project: Make) -> None:
    made = project()
    long = "word " * 400_000
    made.put("rows.csv", f'text,label\n"{long}",x\nb,y\n')
    assert pairs(read(made)) == [(long, "x"), ("b", "y")]


# ------------------------------------------------------------------------------------------------------- broken files

BROKEN: dict[str, tuple[str, bytes, str]] = {
    "empty": ("rows.csv", b"", r"rows.csv: the file is empty \(0 bytes\)"),
    "blank lines": ("rows.csv", b"\n\n", r"rows.csv: the file holds blank lines only"),
    "header only": ("rows.csv", b"text,label\n", r"rows.csv: the file has columns but no rows"),
    "missing column": ("rows.csv", b"body,topic\na,b\n", r"no column 'text', 'label'; the file has 'body', 'topic'"),
    "spaced header": ("rows.csv", b"text, label\na,b\n", r"no column 'label'; the file has 'text', ' label'"),
    "column twice": ("rows.csv", b"text,label,text\na,b,c\n", r"column 'text' stands in the header 2 times"),
    "ragged": ("rows.csv", b"text,label\na,b\nc\n\nd,e,f\n",
               r"2 rows do not have the 2 fields of the header: row 2 \(line 3\) has 1, row 3 \(line 5\) has 3"),
    "ragged after quoted lines": ("rows.csv", b'text,label\n"a\nb",c\nd\n', r"row 2 \(line 4\) has 1"),
    "open quote": ("rows.csv", b'text,label\na,b\n"c,d\ne,f\n', r"row 2, which begins behind line 2: a field opens with the quote"),
    "open quote at the end": ("rows.csv", b'text,label\na,"b\n', r"row 1, which begins behind line 1: a field opens"),
    "text behind a quote": ("rows.tsv", b'text\tlabel\na\tb\n"c" d\te\n', r"row 2, .* a field opens with the quote"),
    "latin-1": ("rows.csv", b"text,label\na,b\ncaf\xe9,d\n", r"row 2: byte 18 \(0xe9\) is not UTF-8; .* iconv"),
    "latin-1 in jsonl": ("rows.jsonl", b'{"text": "a", "label": "b"}\n{"text": "\xe9"}\n', r"row 2: byte 38 \(0xe9\)"),
    "latin-1 in the header": ("rows.csv", b"t\xe9xt,label\na,b\n", r"in the header: byte 1 \(0xe9\)"),
    "utf-16": ("rows.csv", "text,label\na,b\n".encode("utf-16"), r"most likely UTF-16"),
    "cut character": ("rows.csv", b"text,label\na,\xc3", r"row 1: byte 13 \(0xc3\)"),
    "no json": ("rows.jsonl", b'{"text": "a", "label": "b"}\n\n{"text": \n', r"row 2 \(line 3\) is not JSON: .* one object"),
    "json array": ("rows.jsonl", b'["a", "b"]\n', r"row 1 \(line 1\) holds \[\"a\", \"b\"\]; each line must hold one object"),
    "key twice": ("rows.jsonl", b'{"text": "a", "label": "b", "text": "c"}\n', r"key 'text' stands there twice"),
    "nested": ("rows.jsonl", b'{"text": ["a"], "label": "b"}\n', r"row 1 \(line 1\): 'text' holds a list; allowed are text"),
    "lone surrogate": ("rows.jsonl", rb'{"text": "a\ud800", "label": "b"}', r"'text' holds the lone surrogate .* at character 1"),
    "json column": ("rows.jsonl", b'{"body": "a", "label": "b"}\n', r"no column 'text'; the file has 'body', 'label'"),
    "too deep": ("rows.jsonl", b"[" * 100_000, r"row 1 \(line 1\) is not JSON"),
    "no parquet": ("rows.parquet", b"PAR1 not really PAR1", r"not a readable Parquet file"),
    "cut parquet": ("rows.parquet", as_parquet([("a", "b")])[:-9], r"not a readable Parquet file"),
    "parquet column": ("rows.parquet", as_parquet([("a", "b")]).replace(b"label", b"lebal"), r"no column 'label'; the file has"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_says_what_and_where(project: Make, case: str) -> None:
    name, content, message = BROKEN[case]
    made = project(source(name))
    made.put(name, content)
    with pytest.raises(ValueError, match=message) as caught:
        read(made)
    assert str(made.data / "source" / name) in str(caught.value)


def test_a_byte_that_is_not_utf8_is_found_behind_many_rows(project: Make) -> None:
    made = project()
    rows = "".join(f'"row\n{i} é",label\n' for i in range(100_000))
    made.put("rows.csv", b"text,label\n" + rows.encode() + b"bad \xff,label\nmore,label\n")
    offset = len(b"text,label\n" + rows.encode() + b"bad ")
    with pytest.raises(ValueError, match=rf"row 100001: byte {offset} \(0xff\)"):
        read(made)


def test_a_file_changed_after_fetch_is_refused(project: Make) -> None:
    made = project()
    made.put("rows.csv", "text,label\na,b\n")
    listing = made.fetch()
    data = made.config.data
    path = made.put("rows.csv", "text,label\na,c\n")
    with pytest.raises(ValueError, match=r"rows.csv: changed since fetch .* run `dvc repro` again"):
        read_records(listing, made.workdir, data.columns, data.cleaning)
    path.unlink()
    with pytest.raises(ValueError, match=r"rows.csv: cannot be read \(No such file or directory\), though fetch listed it"):
        read_records(listing, made.workdir, data.columns, data.cleaning)


# ------------------------------------------------------------------------------------------------------------- columns


def test_rows_carry_their_place_group_time_and_metadata(project: Make) -> None:
    columns = {"text": "body", "label": "topic", "group": "user", "time": "sent", "metadata": ["channel", "spare"]}
    made = project({"data.columns": columns, "data.source": {"kind": "path", "path": "data/source"}})
    made.put("b.csv", "spare,user,body,topic,sent,channel\n,u1,hello,greet,2020-01-01,web\n,,bye,part,,\n")
    made.put("a.jsonl", '{"body": "x", "topic": 1, "user": 007e1, "sent": null, "channel": false}'.replace("007e1", "7"))
    made.put("a.jsonl", '{"body": "x", "topic": 1, "user": 7, "sent": null, "channel": false, "spare": ""}')
    table = read(made).table
    assert table.column_names == [
        "row_id", "text", "label", "source_file", "source_row", "group", "time", "channel", "spare",
    ]  # fmt: skip
    assert table["source_file"].to_pylist() == ["a.jsonl", "b.csv", "b.csv"]
    assert table["source_row"].to_pylist() == [1, 1, 2]
    assert table["group"].to_pylist() == ["7", "u1", None]
    assert table["time"].to_pylist() == [None, "2020-01-01", None]
    assert table["channel"].to_pylist() == ["false", "web", None]
    assert table["spare"].to_pylist() == [None, None, None]


def test_one_column_may_serve_two_roles(project: Make) -> None:
    made = project({"data.columns.group": "label", "data.columns.metadata": ["kept"]})
    made.put("rows.csv", "text,label,kept\na,b,c\n")
    assert read(made).table["group"].to_pylist() == ["b"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"data.columns.label": "text"}, "text and label both name column 'text'"),
        ({"data.columns.metadata": ["row_id"]}, "'row_id' is a name that Reprise uses itself"),
        ({"data.columns.metadata": ["a", "a"]}, "'a' stands there more than once"),
    ],
)
def test_columns_that_clash_are_refused(project: Make, columns: dict[str, Any], message: str) -> None:
    made = project(columns)
    made.put("rows.csv", "text,label\na,b\n")
    with pytest.raises(ValueError, match=message):
        read(made)


def test_files_are_chosen_by_name(project: Make) -> None:
    made = project({"data.source": {"kind": "path", "path": "data/source"}})
    made.put("b.csv", "text,label\nb,x\n")
    made.put("a.csv", "text,label\na,x\n")
    made.put("c.csv", "no,columns\nc,x\n")
    assert pairs(read(made, file_names=["b.csv", "a.csv"])) == [("a", "x"), ("b", "x")]
    with pytest.raises(ValueError, match=r"there is no file d.csv; the source has a.csv, b.csv, c.csv"):
        read(made, file_names=["a.csv", "d.csv"])


# ------------------------------------------------------------------------------------------------------------ bad rows

BAD = "text,label\na,x\n,x\n \u2003 ,x\nb,\nc,  \n,\nd,y\n"


def test_bad_rows_fail_with_their_places(project: Make) -> None:
    made = project()
    made.put("rows.csv", BAD)
    with pytest.raises(ValueError, match=r"^5 of 7 rows cannot be used: rows.csv, row 2: empty 'text'; ") as caught:
        read(made)
    assert "rows.csv, row 3: blank 'text'; rows.csv, row 4: empty 'label'; rows.csv, row 5: blank 'label'" in str(caught.value)
    made.put("rows.csv", "text,label\n" + ",x\n" * 8)
    with pytest.raises(ValueError, match=r"row 5: empty 'text'; and 3 more. Correct them, or set data.cleaning.on_bad_row"):
        read(made)


def test_bad_rows_are_set_aside_up_to_a_limit(project: Make) -> None:
    cleaning = {"on_bad_row": "quarantine", "max_quarantined_fraction": 0.8}
    made = project({"data.cleaning": cleaning, "data.columns.text": "text"})
    made.put("rows.csv", BAD)
    records = read(made)
    assert pairs(records) == [("a", "x"), ("d", "y")]
    assert records.table["source_row"].to_pylist() == [1, 7]
    assert [json.loads(row.to_json()) for row in records.quarantined][1] == {
        "file": "rows.csv", "row": 3, "column": "text", "reason": "blank", "value": " \u2003 ",
    }  # fmt: skip
    assert [(row.row, row.column) for row in records.quarantined] == [
        (2, "text"), (3, "text"), (4, "label"), (5, "label"), (6, "text"),
    ]  # fmt: skip
    cleaning["max_quarantined_fraction"] = 0.5
    made = project({"data.cleaning": cleaning})
    with pytest.raises(
        ValueError, match=r"5 of 7 rows \(71.4%\) cannot be used, more than .* 0.5 allows; the first is rows.csv, row 2"
    ):
        read(made)


def test_null_and_absent_keys_are_empty(project: Make) -> None:
    made = project(source("rows.jsonl"))
    made.put("rows.jsonl", '{"text": "a", "label": "x"}\n{"text": null, "label": "x"}\n{"label": "x"}\n')
    with pytest.raises(ValueError, match=r"2 of 3 rows cannot be used: rows.jsonl, row 2: empty 'text'; rows.jsonl, row 3: empty"):
        read(made)


# ------------------------------------------------------------------------------------------------------------- row ids


def test_row_ids_are_named_by_content_and_occurrence() -> None:
    ids = row_ids(["a", "b", "a", "a"], ["x", "x", "x", "y"])
    digest = hashlib.sha256(b"a\0x").hexdigest()[:16]
    assert [ids[0], ids[2]] == [f"{digest}-0", f"{digest}-1"]
    assert ids[3].endswith("-0")
    assert len(set(ids)) == 4


@given(rows=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy")), max_size=12), data=st.data())
@settings(max_examples=50, deadline=None)
def test_the_set_of_row_ids_does_not_depend_on_row_order(rows: list[tuple[str, str]], data: st.DataObject) -> None:
    def ids(some: list[tuple[str, str]]) -> list[str]:
        return row_ids([text for text, _ in some], [label for _, label in some])

    shuffled = data.draw(st.permutations(rows))
    assert sorted(ids(rows)) == sorted(ids(shuffled))
    assert ids([*rows, ("a", "x")])[: len(rows)] == ids(rows)
