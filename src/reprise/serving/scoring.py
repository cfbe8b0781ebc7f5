"""Predictions for given texts or for a file of any size, one row after the other, for people and for machines.

No torch and no pyarrow: this runs from the base install beside one model.onnx.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reprise.serving.classifier import Classifier, Prediction

DEFAULT_COLUMN = "text"
DEFAULT_MODEL_PATHS = (Path("model.onnx"), Path("release/model.onnx"))
SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt")
# A quote that is never closed would read the rest of the file as one field; texts are far shorter than this.
MAX_FIELD_CHARACTERS = 16 * 2**20

Layout = Literal["table", "lines", "json"]


@dataclass(frozen=True, slots=True)
class Scored:
    """One text with its prediction."""

    text: str
    prediction: Prediction
    calibrated: bool


def find_model(path: Path | None) -> Path:
    """``path``, or the first of ./model.onnx and release/model.onnx that exists.

    Raises:
        ValueError: none was given and none is there.
    """
    if path is not None:
        return path
    for candidate in DEFAULT_MODEL_PATHS:
        if candidate.is_file():
            return candidate
    tried = " nor ".join(str(candidate) for candidate in DEFAULT_MODEL_PATHS)
    raise ValueError(
        f"no model: found neither {tried} in {Path.cwd()}; name one with --model FILE, or make one with `make rebuild`"
    )


def score_texts(classifier: Classifier, texts: Iterable[str], batch_size: int = 64) -> Iterator[Scored]:
    """One ``Scored`` per text, in order, in constant memory."""
    kept, read = itertools.tee(texts)  # the classifier reads one window ahead; tee holds no more than that
    for text, prediction in zip(kept, classifier.predict_stream(read, batch_size), strict=True):
        yield Scored(text, prediction, classifier.calibrated)


def score_file(classifier: Classifier, path: Path, column: str | None = None, batch_size: int = 64) -> Iterator[Scored]:
    """One ``Scored`` per text of ``path``, in order, in constant memory. Raises as ``read_texts`` does."""
    return score_texts(classifier, read_texts(path, column), batch_size)


# -------------------------------------------------------------------------------------------------------------- reading


def read_texts(path: Path, column: str | None = None) -> Iterator[str]:
    """The texts in ``path``, streamed: CSV and TSV with a header, JSON lines, or plain .txt with one text a line.

    ``column`` defaults to ``text``, else to the only column there is. Blank lines are skipped, except in .txt, where each line
    is a text. What is wrong with the path or its header is raised here, what is wrong with a row when it is reached.

    Raises:
        ValueError: naming the file, and the row and column where there are.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: cannot read {suffix or 'a file without a suffix'}; give one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ValueError(f"{path}: {'a folder' if path.is_dir() else 'no such file'}; name a {', '.join(SUFFIXES)} file")
    if suffix == ".txt":
        if column is not None:
            raise ValueError(f"{path}: a .txt file has no columns, but column {column!r} was asked for; leave it out")
        return _read_lines(path)
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: empty file; expected rows with a column of texts")
    if suffix == ".jsonl":
        return _read_jsonl(path, column)
    return _read_delimited(path, "\t" if suffix == ".tsv" else ",", column)


def _read_lines(path: Path) -> Iterator[str]:
    for line in _decoded_lines(path):
        yield line.rstrip("\r\n")


def _read_delimited(path: Path, delimiter: str, column: str | None) -> Iterator[str]:
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    rows = _csv_rows(path, delimiter)
    header = next(rows, [])
    position = header.index(_choose_column(path, header, column))

    def texts() -> Iterator[str]:
        for number, row in enumerate(rows, 1):
            if len(row) != len(header):
                raise ValueError(
                    f"{path}: row {number} has {len(row)} fields, the header has {len(header)} ({', '.join(header)}); "
                    f"put fields that hold a {'tab' if delimiter == chr(9) else 'comma'} into double quotes"
                )
            yield row[position]

    return texts()


def _csv_rows(path: Path, delimiter: str) -> Iterator[list[str]]:
    """The rows that are not blank lines; the header is row 0 in errors."""
    number = 0
    reader = csv.reader(_decoded_lines(path), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if row:
                yield row
                number += 1
    except csv.Error as error:
        raise ValueError(
            f"{path}: row {number}, which ends on line {reader.line_num}: {error}; close every double quote, "
            "and write a quote inside a quoted field twice"
        ) from None


def _read_jsonl(path: Path, column: str | None) -> Iterator[str]:
    name = column
    for number, line in enumerate(_decoded_lines(path), 1):
        if not line.strip():
            continue
        record = _parse_record(path, number, line)
        if name is None:
            name = _choose_column(path, list(record), None)
        if name not in record:
            raise ValueError(f"{path}: line {number} has no {name!r}; found {', '.join(map(str, record)) or 'no key at all'}")
        text = record[name]
        if not isinstance(text, str):
            raise ValueError(f"{path}: line {number}, {name!r} is {json.dumps(text)[:80]}, expected a text in double quotes")
        _check_encodable(path, number, name, text)
        yield text


def _parse_record(path: Path, number: int, line: str) -> dict[str, object]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {number} is not JSON: {error.msg} at character {error.pos}") from None
    if not isinstance(record, dict):
        raise ValueError(f'{path}: line {number} is a JSON {type(record).__name__}, expected an object such as {{"text": "..."}}')
    return record


def _check_encodable(path: Path, number: int, name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{path}: line {number}, {name!r} holds half a surrogate pair ({text[error.start]!r}), which is no character"
        ) from None


def _choose_column(path: Path, found: list[str], wanted: str | None) -> str:
    if not found:
        raise ValueError(f"{path}: no column at all; expected a header with a column {wanted or DEFAULT_COLUMN!r}")
    if wanted is None:
        wanted = found[0] if len(found) == 1 else DEFAULT_COLUMN
    if len(found) == 1 and (other := next((mark for mark in (";", "\t", ",") if mark in found[0]), None)):
        raise ValueError(
            f"{path}: the header is one column, {found[0]!r}, which looks separated by {other!r}; a .csv file is separated by "
            "commas, a .tsv file by tabs"
        )
    if found.count(wanted) != 1:
        fault = "no column" if wanted not in found else "more than one column"
        raise ValueError(f"{path}: {fault} {wanted!r}; found {', '.join(found)}. Name the column of texts with --text-column")
    return wanted


def _decoded_lines(path: Path) -> Iterator[str]:
    """Lines with their ends, as UTF-8 without a byte order mark; bytes that are not UTF-8 are named by line and offset."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}: line {number}, byte {offset + error.start} of the file (0x{line[error.start]:02x}) is not UTF-8; "
                    "save the file as UTF-8"
                ) from None
            yield text.removeprefix("\ufeff") if number == 1 else text
            offset += len(line)


# -------------------------------------------------------------------------------------------------------------- writing


def to_json(row: Scored) -> str:
    """One line of JSON; probabilities are rounded to 6 decimals, about what float32 logits carry."""
    return json.dumps(
        {
            "text": row.text,
            "label": row.prediction.label,
            "probability": round(row.prediction.probability, 6),
            "probabilities": {label: round(value, 6) for label, value in row.prediction.probabilities.items()},
            "calibrated": row.calibrated,
            "truncated": row.prediction.truncated,
        },
        ensure_ascii=False,
    )


def print_scored(rows: Iterable[Scored], out: TextIO, layout: Layout) -> int:
    """The number of rows written to ``out``: as JSON lines, plain lines, or a table (which holds all rows in memory)."""
    if layout == "table":
        return _print_table(list(rows), out)
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007  the last number is the result
        out.write((to_json(row) if layout == "json" else _plain_line(row)) + "\n")
    return count


def _plain_line(row: Scored) -> str:
    mark = "" if row.calibrated else " (uncalibrated)"
    return f"{row.prediction.label}\t{row.prediction.probability:.3f}{mark}\t{printable(row.text)}"


def _print_table(rows: list[Scored], out: TextIO) -> int:
    calibrated = all(row.calibrated for row in rows)
    table = Table(caption=None if calibrated else "Probabilities are uncalibrated: a softmax of raw logits, usually too sure.")
    for name, justify in (("text", "left"), ("label", "left"), ("probability", "right"), ("next", "left")):
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    for row in rows:
        # Text, not str: a text such as "[red]" is data here, not markup.
        table.add_row(
            Text(printable(row.text)),
            Text(printable(row.prediction.label)),
            Text(f"{row.prediction.probability:.3f}"),
            Text(_runners_up(row.prediction)),
        )
    Console(file=out).print(table)
    return len(rows)


def _runners_up(prediction: Prediction, count: int = 2) -> str:
    others = [item for item in prediction.probabilities.items() if item[0] != prediction.label]
    best = sorted(others, key=lambda item: -item[1])[:count]
    return ", ".join(f"{printable(label)} {value:.3f}" for label, value in best)


def printable(text: str) -> str:
    """``text`` on one line, without characters that could move the cursor or recolour the terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
