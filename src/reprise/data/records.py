"""Rows of CSV, TSV, JSONL and Parquet files as one table of exact strings, each row with the place it came from.

Nothing is guessed: 001 stays 001, and NA, null, None and nan are text. Only an empty field is missing.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from reprise.config import CleaningConfig, ColumnsConfig
from reprise.data.sources import SourceFile, file_sha256, read_files_json

_CHUNK = 1 << 20
_MAX_CSV_RECORD = 1 << 26  # bytes: pyarrow reads a file in blocks, and one record must fit into a block
_SHOWN = 5
_RUN_AGAIN = "run `dvc repro` again (or `reprise fetch`)"
RESERVED = ("row_id", "text", "label", "source_file", "source_row", "group", "time", "split")


class Wanted(NamedTuple):
    """A column of the table and the name it has in the files."""

    role: str
    name: str


@dataclass(frozen=True)
class QuarantinedRow:
    """A row that was set aside: one line of data/quarantine.jsonl."""

    file: str
    row: int
    column: str
    reason: str
    value: str

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True)
class Records:
    """All good rows in the order of the files (by name) and of the rows in them.

    ``table``: row_id, text, label, source_file, source_row (1-based, header and blank lines not counted), group, time, split
    where a column gives it, then the metadata columns. All but source_row are strings; those behind it may be null.
    """

    table: pa.Table
    quarantined: list[QuarantinedRow]
    files: list[dict[str, Any]]


def read_records(
    files_json: Path,
    workdir: Path,
    columns: ColumnsConfig,
    cleaning: CleaningConfig,
    split_column: str | None = None,
    file_names: Sequence[str] | None = None,
) -> Records:
    """The rows of the fetched files (of those in ``file_names`` if given).

    Raises:
        ValueError: a file changed since fetch, cannot be read exactly, lacks a column, or has more bad rows than allowed.
    """
    wanted = _wanted_columns(columns, split_column)
    tables, facts = [], []
    for file in _chosen(read_files_json(files_json), file_names):
        path = file.locate(workdir)
        _check_unchanged(file, path)
        table = _read_file(path, file.name, wanted)
        facts.append({"name": file.name, "sha256": file.sha256, "num_rows": len(table)})
        tables.append(_with_place(table, file.name))
    table = pa.concat_tables(tables)
    good, quarantined = _set_bad_rows_aside(table, columns, cleaning)
    return Records(_with_row_ids(good), quarantined, facts)


def describe_counts(counts: dict[str, int], limit: int = 10) -> str:
    """``a: 3, b: 1``, cut after ``limit`` entries, for messages."""
    shown = ", ".join(f"{name}: {count}" for name, count in list(counts.items())[:limit])
    return shown + (f" and {len(counts) - limit} more" if len(counts) > limit else "")


# -------------------------------------------------------------------------------------------------------- what to read


def _wanted_columns(columns: ColumnsConfig, split_column: str | None) -> list[Wanted]:
    roles = {"text": columns.text, "label": columns.label, "group": columns.group, "time": columns.time, "split": split_column}
    wanted = [Wanted(role, name) for role, name in roles.items() if name is not None]
    if columns.text == columns.label:
        raise ValueError(f"data.columns: text and label both name column {columns.text!r}; they must be two columns")
    for name in columns.metadata:
        if name in RESERVED:
            raise ValueError(
                f"data.columns.metadata: {name!r} is a name that Reprise uses itself ({', '.join(RESERVED)}); rename the "
                "column in the file, or leave it out"
            )
    if repeated := [name for name, count in Counter(columns.metadata).items() if count > 1]:
        raise ValueError(f"data.columns.metadata: {repeated[0]!r} stands there more than once")
    return wanted + [Wanted(name, name) for name in columns.metadata]


def _chosen(files: list[SourceFile], names: Sequence[str] | None) -> list[SourceFile]:
    if names is None:
        return files
    by_name = {file.name: file for file in files}
    if missing := [name for name in names if name not in by_name]:
        raise ValueError(
            f"data.split.files: there is no file {', '.join(missing)}; the source has {', '.join(by_name) or 'no files'}"
        )
    return [by_name[name] for name in sorted(names)]


def _check_unchanged(file: SourceFile, path: Path) -> None:
    try:
        found = file_sha256(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}), though fetch listed it; {_RUN_AGAIN}") from None
    if found != file.sha256:
        raise ValueError(f"{path}: changed since fetch (sha256 {found[:12]}…, fetch saw {file.sha256[:12]}…); {_RUN_AGAIN}")


def _read_file(path: Path, name: str, wanted: list[Wanted]) -> pa.Table:
    """The wanted columns under their roles, as strings."""
    suffix = Path(name).suffix.lower()
    if suffix not in READERS:
        raise ValueError(f"{path}: cannot read {suffix or 'a file without an ending'}; allowed are {', '.join(READERS)}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty (0 bytes)")
    table = READERS[suffix](path, list(dict.fromkeys(column.name for column in wanted)))
    if len(table) == 0:
        raise ValueError(f"{path}: the file has columns but no rows")
    return pa.table({column.role: table[column.name] for column in wanted})


def _check_columns(path: Path, found: Sequence[str], names: Sequence[str]) -> None:
    if missing := [name for name in names if name not in found]:
        raise ValueError(
            f"{path}: no column {', '.join(map(repr, missing))}; the file has {', '.join(map(repr, found))}. Correct data.columns"
        )
    if repeated := [name for name in names if list(found).count(name) > 1]:
        raise ValueError(f"{path}: column {repeated[0]!r} stands in the header {list(found).count(repeated[0])} times; rename one")


def _with_place(table: pa.Table, name: str) -> pa.Table:
    """The table in its final column order, without row_id."""
    rows = len(table)
    missing = pa.nulls(rows, pa.string())
    columns = {
        "text": table["text"],
        "label": table["label"],
        "source_file": pa.repeat(pa.scalar(name), rows),
        "source_row": pa.array(range(1, rows + 1), pa.int64()),
    }
    for role in ("group", "time"):
        columns[role] = _blank_as_null(table[role]) if role in table.column_names else missing
    for role in table.column_names:
        if role not in columns:
            columns[role] = _blank_as_null(table[role])
    return pa.table(columns)


def _blank_as_null(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)


# ------------------------------------------------------------------------------------------------------------- readers


def _read_delimited(delimiter: str) -> Callable[[Path, list[str]], pa.Table]:
    def read(path: Path, names: list[str]) -> pa.Table:
        _check_utf8(path, delimiter)
        _check_columns(path, _header(path, delimiter), names)
        _check_quotes(path, delimiter)
        try:
            return pyarrow.csv.read_csv(
                path,
                read_options=pyarrow.csv.ReadOptions(block_size=min(path.stat().st_size + 1, _MAX_CSV_RECORD)),
                parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                convert_options=pyarrow.csv.ConvertOptions(
                    include_columns=names,
                    column_types=dict.fromkeys(names, pa.string()),
                    strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as error:
            _raise_for_ragged_rows(path, delimiter)
            if "straddl" in str(error):
                raise ValueError(f"{path}: a row is longer than {_MAX_CSV_RECORD >> 20} MiB; is a quote left open?") from None
            raise ValueError(f"{path}: cannot be read as {_kind(delimiter)}: {error}") from None

    return read


def _kind(delimiter: str) -> str:
    return "TSV" if delimiter == "\t" else "CSV"


def _records(path: Path, delimiter: str, *, strict: bool, errors: str = "strict") -> Iterator[tuple[int, list[str]]]:
    """(first line, fields) of each record that is not a blank line, header included, by the standard library's reader."""
    limit = csv.field_size_limit(sys.maxsize)  # a text may be long; the limit is one for the whole process
    try:
        with path.open(encoding="utf-8-sig", newline="", errors=errors) as lines:
            reader = csv.reader(lines, delimiter=delimiter, strict=strict)
            line = 1
            for fields in reader:
                if fields:
                    yield line, fields
                line = reader.line_num + 1
    finally:
        csv.field_size_limit(limit)


def _header(path: Path, delimiter: str) -> list[str]:
    for _, fields in _records(path, delimiter, strict=False):
        return fields
    raise ValueError(f"{path}: the file holds blank lines only")


def _check_quotes(path: Path, delimiter: str) -> None:
    """Raises for a quote that never closes or closes in mid-field: pyarrow would swallow the rows behind it without a word."""
    if not _contains(path, b'"'):
        return
    number, line = -1, 0
    records = _records(path, delimiter, strict=True)
    while True:
        try:
            line, _ = next(records)
            number += 1
        except StopIteration:
            return
        except csv.Error as error:
            row = "the header" if number < 0 else f"row {number + 1}"
            after = f", which begins behind line {line}" if number >= 0 else ""
            raise ValueError(
                f'{path}: {row}{after}: a field opens with the quote character " and is not closed as it must be ({error}). '
                'Close it, or, where it is part of the text, quote the whole field and double the inner quote: """so"" he said"'
            ) from None


def _contains(path: Path, needle: bytes) -> bool:
    with path.open("rb") as file:
        return any(needle in chunk for chunk in iter(lambda: file.read(_CHUNK), b""))


def _raise_for_ragged_rows(path: Path, delimiter: str) -> None:
    records = _records(path, delimiter, strict=False)
    _, header = next(records)
    ragged = [(row, line, len(fields)) for row, (line, fields) in enumerate(records, 1) if len(fields) != len(header)]
    if ragged:
        shown = ", ".join(f"row {row} (line {line}) has {count}" for row, line, count in ragged[:_SHOWN])
        raise ValueError(
            f"{path}: {len(ragged)} rows do not have the {len(header)} fields of the header: {shown}. A field that holds the "
            f"delimiter {delimiter!r} or a line break must stand in double quotes"
        )


def _check_utf8(path: Path, delimiter: str | None) -> None:
    """Raises for the first byte that is not UTF-8, with its file, row and offset."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with path.open("rb") as file:
        while True:
            chunk = file.read(_CHUNK)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                offset = done - pending + error.start
                raise ValueError(_not_utf8(path, offset, error.object[error.start], delimiter)) from None
            if not chunk:
                return
            done += len(chunk)


def _not_utf8(path: Path, offset: int, byte: int, delimiter: str | None) -> str:
    with path.open("rb") as file:
        before = file.read(offset)
    if before[:2] in (b"\xff\xfe", b"\xfe\xff") or (offset == 0 and byte in (0xFE, 0xFF)):
        return f"{path}: not UTF-8 but most likely UTF-16 (it starts with that mark); save it as UTF-8"
    row = _row_behind(before, delimiter)
    where = "in the header" if row == 0 else f"row {row}"
    return (
        f"{path}: {where}: byte {offset} (0x{byte:02x}) is not UTF-8; the file is probably in another encoding such as "
        f"Windows-1252. Save it as UTF-8, for example: iconv -f WINDOWS-1252 -t UTF-8 {path.name}"
    )


def _row_behind(before: bytes, delimiter: str | None) -> int:
    """The data row in which the byte behind ``before`` lies; 0 is the header of a delimited file."""
    text = before.decode("utf-8", errors="replace") + "?"
    if delimiter is None:
        return sum(1 for line in text.split("\n") if line.strip())
    limit = csv.field_size_limit(sys.maxsize)
    try:
        return sum(1 for fields in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if fields) - 1
    finally:
        csv.field_size_limit(limit)


def _read_jsonl(path: Path, names: list[str]) -> pa.Table:
    """Numbers and booleans as the characters that stand in the file; null and an absent key as empty."""
    _check_utf8(path, None)
    columns: dict[str, list[str]] = {name: [] for name in names}
    found: dict[str, None] = {}
    for row, line, record in _json_records(path):
        found.update(dict.fromkeys(record))
        for name, values in columns.items():
            values.append(_json_text(record.get(name), path, row, line, name))
    if found:
        _check_columns(path, list(found), names)
    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})


def _json_records(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(row, line, object) of each line that is not blank; numbers are left as text."""
    decoder = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str, object_pairs_hook=_pairs)
    row = 0
    with path.open("rb") as lines:
        for line, raw in enumerate(lines, 1):
            text = raw.decode("utf-8-sig" if line == 1 else "utf-8").strip()
            if not text:
                continue
            row += 1
            try:
                record = decoder.decode(text)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{path}: row {row} (line {line}) is not JSON: {error}. Each line must hold one object") from None
            except _RepeatedKeyError as error:
                raise ValueError(f"{path}: row {row} (line {line}): key {error.args[0]!r} stands there twice") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}: row {row} (line {line}) holds {_short(text)}; each line must hold one object, {{...}}")
            yield row, line, record


class _RepeatedKeyError(Exception):
    pass


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise _RepeatedKeyError(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return record


def _json_text(value: Any, path: Path, row: int, line: int, name: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        kind = "a list" if isinstance(value, list) else "an object"
        raise ValueError(f"{path}: row {row} (line {line}): {name!r} holds {kind}; allowed are text, number, true, false, null")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{path}: row {row} (line {line}): {name!r} holds the lone surrogate {value[error.start]!r} at character "
                f"{error.start}, which is no character of Unicode; correct the escape"
            ) from None
    return value


def _read_parquet(path: Path, names: list[str]) -> pa.Table:
    try:
        found = pq.read_schema(path)
        _check_columns(path, found.names, names)
        table = pq.read_table(path, columns=names)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file: {_first_line(error)}") from None
    return pa.table({name: _exact_strings(table[name], path, name) for name in names})


def _exact_strings(column: pa.ChunkedArray, path: Path, name: str) -> pa.ChunkedArray:
    """The column as strings, nulls as empty ones, where that loses nothing."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _exact_strings(column.cast(kind.value_type), path, name)
    exact = (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or pa.types.is_null(kind)
        or pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind) or pa.types.is_temporal(kind)
    )  # fmt: skip
    if not exact:
        raise ValueError(
            f"{path}: column {name!r} is of type {kind}; allowed are text, whole numbers, true/false, decimals and times. "
            "Write it as text (a floating number has more than one spelling: 1, 1.0, 1e0)"
        )
    try:
        return pc.fill_null(column.cast(pa.string()), "")
    except pa.ArrowException as error:
        raise ValueError(f"{path}: column {name!r} of type {kind} cannot be read as text: {_first_line(error)}") from None


READERS: dict[str, Callable[[Path, list[str]], pa.Table]] = {
    ".csv": _read_delimited(","),
    ".tsv": _read_delimited("\t"),
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


# ------------------------------------------------------------------------------------------------------------ bad rows


def _set_bad_rows_aside(table: pa.Table, columns: ColumnsConfig, cleaning: CleaningConfig) -> tuple[pa.Table, list[QuarantinedRow]]:
    """The rows with a text and a label, and the others.

    Raises:
        ValueError: there are others and they may not be, or are too many.
    """
    blank_text, blank_label = (_is_blank(table[role]) for role in ("text", "label"))
    bad = pc.or_(blank_text, blank_label)
    count = pc.sum(bad).as_py()
    if not count:
        return table, []
    rows = list(_bad_rows(table.append_column("no_text", blank_text).filter(bad), columns))
    if cleaning.on_bad_row == "fail":
        shown = "; ".join(f"{row.file}, row {row.row}: {row.reason} {row.column!r}" for row in rows[:_SHOWN])
        more = f"; and {count - _SHOWN} more" if count > _SHOWN else ""
        raise ValueError(
            f"{count} of {len(table)} rows cannot be used: {shown}{more}. Correct them, or set data.cleaning.on_bad_row: "
            "quarantine to leave them out and list them in data/quarantine.jsonl"
        )
    if count > cleaning.max_quarantined_fraction * len(table):
        first = rows[0]
        raise ValueError(
            f"{count} of {len(table)} rows ({count / len(table):.1%}) cannot be used, more than "
            f"data.cleaning.max_quarantined_fraction {cleaning.max_quarantined_fraction:g} allows; the first is {first.file}, "
            f"row {first.row}: {first.reason} {first.column!r}. Correct them or raise the limit"
        )
    return table.filter(pc.invert(bad)), rows


def _is_blank(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.equal(pc.utf8_trim_whitespace(column), "")


def _bad_rows(bad: pa.Table, columns: ColumnsConfig) -> Iterator[QuarantinedRow]:
    for row in bad.select(["text", "label", "source_file", "source_row", "no_text"]).to_pylist():
        role, name = ("text", columns.text) if row["no_text"] else ("label", columns.label)
        reason = "empty" if row[role] == "" else "blank"
        yield QuarantinedRow(row["source_file"], row["source_row"], name, reason, row[role][:80])


# ------------------------------------------------------------------------------------------------------------- row ids


def _with_row_ids(table: pa.Table) -> pa.Table:
    return table.add_column(0, "row_id", pa.array(row_ids(table["text"].to_pylist(), table["label"].to_pylist()), pa.string()))


def row_ids(texts: Iterable[str], labels: Iterable[str]) -> list[str]:
    """16 hex digits of sha256(text NUL label), ``-``, and which of the equal rows it is, from 0."""
    seen: Counter[str] = Counter()
    ids = []
    for text, label in zip(texts, labels, strict=True):
        key = hashlib.sha256(f"{text}\0{label}".encode()).hexdigest()[:16]
        ids.append(f"{key}-{seen[key]}")
        seen[key] += 1
    return ids


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"
