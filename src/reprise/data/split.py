"""Which rows train, validate and test: given by the data set, or drawn by a salted hash that no other row can change."""

from __future__ import annotations

import hashlib
import json
import logging
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from reprise.config import SPLITS, DataConfig, GivenSplit, HashSplit, flatten
from reprise.data.atomic import whole_folder, write_whole_file
from reprise.data.records import Records, describe_counts, read_records
from reprise.data.sources import check_source

log = logging.getLogger(__name__)

TRAIN, VALIDATION, TEST = range(3)
_DROPPED = -1
_ROW_GROUP = 65_536


@dataclass(frozen=True)
class Assignment:
    """The split of each row (int8 [rows]: 0 train, 1 validation, 2 test, -1 dropped), and what was done for rare classes."""

    splits: NDArray[np.int8]
    moved_classes: dict[str, int]
    dropped_classes: dict[str, int]


def make_splits(files_json: Path, workdir: Path, out_dir: Path, quarantine_path: Path, config: DataConfig) -> Path:
    """The path of split.json in ``out_dir``, which is replaced as a whole: {train,validation,test}.parquet beside it.

    ``quarantine_path`` is always written; it is empty where no row was set aside.

    Raises:
        ValueError: the fetched files are not those of ``config``, cannot be read, or cannot be split as asked.
    """
    check_source(files_json, config.source)
    split = config.split
    given = split if isinstance(split, GivenSplit) else None
    names = _given_names(given)
    records = read_records(files_json, workdir, config.columns, config.cleaning, given.column if given else None, names)
    assignment = assign_splits(records.table, split)
    facts = {**_facts(records, assignment), "params": flatten(config, "data")}
    with whole_folder(out_dir) as folder:
        for number, name in enumerate(SPLITS):
            table = records.table.filter(pa.array(assignment.splits == number))
            if "split" in table.column_names:
                table = table.drop_columns("split")
            pq.write_table(table, folder / f"{name}.parquet", compression="zstd", row_group_size=_ROW_GROUP)
        write_whole_file(folder / "split.json", json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
        write_whole_file(quarantine_path, "".join(row.to_json() + "\n" for row in records.quarantined))
    _report(facts)
    return out_dir / "split.json"


def assign_splits(table: pa.Table, config: GivenSplit | HashSplit) -> Assignment:
    """The split of every row of ``table`` (columns text, label, group, source_file, and split where a column gives it).

    Raises:
        ValueError: one class only, an empty split, a label that train never shows, or a given split that does not fit.
    """
    _check_classes(table)
    assignment = _hash_assignment(table, config) if isinstance(config, HashSplit) else _given_assignment(table, config)
    _check_not_empty(assignment.splits, table, config)
    _check_labels_seen(table, assignment.splits, config)
    return assignment


# -------------------------------------------------------------------------------------------------------------- hashing


def normalise_text(text: str) -> str:
    """The form in which two texts count as the same: NFKC, case folded, white space collapsed."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split())


def unit_fraction(unit: str, seed: int) -> float:
    """A number in [0, 1) that follows from ``unit`` and ``seed`` alone."""
    digest = hashlib.sha256(f"reprise split {seed}\0{unit}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53  # 53 bits: what a float holds without rounding up to 1


def _encoded(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[str]]:
    """The column as positions in the list of its distinct values, and that list."""
    coded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, coded.dictionary.to_pylist()


def normalised_codes(table: pa.Table) -> NDArray[np.int64]:
    """A number per row; rows whose normalised texts are equal share it."""
    codes, texts = _encoded(table["text"])
    numbers: dict[str, int] = {}
    by_text = np.fromiter((numbers.setdefault(normalise_text(t), len(numbers)) for t in texts), np.int64, len(texts))
    return by_text[codes]


def _unit_fractions(table: pa.Table, seed: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """A number per row for its unit, and that unit's fraction, both [rows]. A unit is a group, or else a normalised text."""
    groups, group_values = _encoded(table["group"])
    texts, text_values = _encoded(table["text"])
    units: dict[str, int] = {}
    # The letter in front keeps a group called "hello" apart from a text "hello".
    of_group = [units.setdefault(f"g{value}", len(units)) for value in group_values]
    of_text = [units.setdefault(f"t{normalise_text(value)}", len(units)) for value in text_values]
    fractions = np.fromiter((unit_fraction(unit, seed) for unit in units), np.float64, len(units))
    by_group = np.asarray([*of_group, -1])[groups]  # a row without a group has code -1: the entry at the end
    rows = np.where(groups >= 0, by_group, np.asarray(of_text, np.int64)[texts])
    return rows, fractions[rows]


def _hash_assignment(table: pa.Table, config: HashSplit) -> Assignment:
    units, fractions = _unit_fractions(table, config.seed)
    shares = config.fractions
    # Test lies at the low end, so that another share between train and validation leaves the test split as it is.
    splits = np.full(len(table), TRAIN, np.int8)
    splits[fractions < shares.test + shares.validation] = VALIDATION
    splits[fractions < shares.test] = TEST
    return _settle_rare_classes(table, splits, units, config)


def _settle_rare_classes(table: pa.Table, splits: NDArray[np.int8], units: NDArray[np.int64], config: HashSplit) -> Assignment:
    """The assignment after the policy for classes of which the hash put no row into train."""
    codes, labels = _encoded(table["label"])
    in_train = np.bincount(codes[splits == TRAIN], minlength=len(labels)) > 0
    rare = {labels[c]: int((codes == c).sum()) for c in np.flatnonzero(~in_train)}
    if not rare:
        return Assignment(splits, {}, {})
    rare = dict(sorted(rare.items()))
    if config.rare_class == "fail":
        raise ValueError(
            f"data.split: no row of these classes falls into train: {describe_counts(rare)}. Add rows of them, or set "
            "data.split.rare_class to keep_in_train or drop"
        )
    of_rare = ~in_train[codes]
    splits = splits.copy()
    if config.rare_class == "drop":
        splits[of_rare] = _DROPPED
        return Assignment(splits, {}, rare)
    splits[np.isin(units, units[of_rare])] = TRAIN  # whole units: another class's rows of the same group come along
    return Assignment(splits, rare, {})


# ---------------------------------------------------------------------------------------------------------------- given


def _given_names(config: GivenSplit | None) -> list[str] | None:
    """Names of the files that a given split reads; None for all."""
    if config is None or config.files is None:
        return None
    names = [name for name in (config.files.train, config.files.validation, config.files.test) if name is not None]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"data.split.files: {repeated[0]} is named for more than one split; each split needs a file of its own")
    return names


def _given_assignment(table: pa.Table, config: GivenSplit) -> Assignment:
    splits = _splits_by_file(table, config) if config.files is not None else _splits_by_column(table, config)
    if config.validation_fraction is None:
        return Assignment(splits, {}, {})
    if (splits == VALIDATION).any():
        raise ValueError(
            f"data.split.validation_fraction is {config.validation_fraction:g}, but column {config.column!r} already marks "
            f"{int((splits == VALIDATION).sum())} rows as validation; set validation_fraction to null"
        )
    units, fractions = _unit_fractions(table, config.seed)
    taken = (splits == TRAIN) & (fractions < config.validation_fraction)
    codes, labels = _encoded(table["label"])
    stays = np.bincount(codes[(splits == TRAIN) & ~taken], minlength=len(labels)) > 0
    emptied = taken & ~stays[codes]  # rows whose class the draw would take out of train as a whole: they stay
    moved = Counter(labels[code] for code in codes[emptied])
    splits[taken & ~np.isin(units, units[emptied])] = VALIDATION
    return Assignment(splits, dict(sorted(moved.items())), {})


def _splits_by_file(table: pa.Table, config: GivenSplit) -> NDArray[np.int8]:
    assert config.files is not None
    codes, names = _encoded(table["source_file"])
    number_of = {config.files.train: TRAIN, config.files.validation: VALIDATION, config.files.test: TEST}
    return np.asarray([number_of[name] for name in names], np.int8)[codes]


def _splits_by_column(table: pa.Table, config: GivenSplit) -> NDArray[np.int8]:
    codes, names = _encoded(table["split"])
    if wrong := sorted(set(names) - set(SPLITS)):
        row = int(np.flatnonzero(np.isin(codes, [names.index(name) for name in wrong]))[0])
        raise ValueError(
            f"{_place(table, row)}: column {config.column!r} holds {', '.join(map(repr, wrong[:5]))}; "
            f"allowed are {', '.join(SPLITS)}"
        )
    if (codes < 0).any():
        raise ValueError(
            f"{_place(table, int(np.flatnonzero(codes < 0)[0]))}: column {config.column!r} is empty "
            f"(so are {int((codes < 0).sum())} rows in all); each row needs one of {', '.join(SPLITS)}"
        )
    return np.asarray([SPLITS.index(name) for name in names], np.int8)[codes]


# --------------------------------------------------------------------------------------------------------------- checks


def _place(table: pa.Table, row: int) -> str:
    return f"{table['source_file'][row].as_py()}, row {table['source_row'][row].as_py()}"


def _check_classes(table: pa.Table) -> None:
    counts = _count(table["label"])
    if len(counts) < 2:
        found = describe_counts(counts) if counts else "no rows"
        raise ValueError(f"data.columns.label: a classifier needs at least 2 classes; found {found}")


def _check_not_empty(splits: NDArray[np.int8], table: pa.Table, config: GivenSplit | HashSplit) -> None:
    sizes = {name: int((splits == number).sum()) for number, name in enumerate(SPLITS)}
    if empty := [name for name, size in sizes.items() if size == 0]:
        advice = (
            "add rows, or give larger fractions in data.split.fractions (or another data.split.seed)"
            if isinstance(config, HashSplit)
            else "check data.split: each split needs rows (validation_fraction takes them out of train)"
        )
        raise ValueError(f"data.split: no rows for {' and '.join(empty)} out of {len(table)} ({describe_counts(sizes)}); {advice}")


def _check_labels_seen(table: pa.Table, splits: NDArray[np.int8], config: GivenSplit | HashSplit) -> None:
    codes, labels = _encoded(table["label"])
    in_train = np.bincount(codes[splits == TRAIN], minlength=len(labels)) > 0
    if in_train.sum() < 2:
        only = describe_counts(_count(table["label"].filter(pa.array(splits == TRAIN))))
        raise ValueError(f"data.split: train holds one class only: {only}; a classifier needs at least 2")
    unseen = np.flatnonzero(~in_train[codes] & (splits != _DROPPED))
    if not unseen.size:
        return
    counts = Counter((labels[codes[row]], table["source_file"][int(row)].as_py()) for row in unseen)
    shown = [f"{label!r} ({count} rows in {file})" for (label, file), count in sorted(counts.items())[:5]]
    more = f" and {len(counts) - 5} more" if len(counts) > 5 else ""
    raise ValueError(
        f"data.split: train has no row of these labels: {', '.join(shown)}{more}. Correct their spelling, add train rows, "
        "remove these rows, or let Reprise split by itself with data.split.method: hash"
    )


# ---------------------------------------------------------------------------------------------------------------- facts


def _count(column: pa.ChunkedArray) -> dict[str, int]:
    counts = {entry["values"]: entry["counts"] for entry in pc.value_counts(column).to_pylist()}
    return dict(sorted(counts.items()))


def _facts(records: Records, assignment: Assignment) -> dict[str, Any]:
    """What split.json says: counts, not times or places, so the same rows give the same bytes."""
    table, splits = records.table, assignment.splits
    labels = {name: table["label"].filter(pa.array(splits == number)) for number, name in enumerate(SPLITS)}
    class_counts = {name: _count(column) for name, column in labels.items()}
    known = class_counts["train"]
    return {
        "num_rows": {name: len(column) for name, column in labels.items()},
        "class_counts": {name: {label: counts.get(label, 0) for label in known} for name, counts in class_counts.items()},
        "absent_classes": {name: [label for label in known if label not in class_counts[name]] for name in SPLITS[1:]},
        "moved_classes": assignment.moved_classes,
        "dropped_classes": assignment.dropped_classes,
        **_duplicates(table, splits),
        "quarantined": len(records.quarantined),
        "files": records.files,
    }


def _duplicates(table: pa.Table, splits: NDArray[np.int8]) -> dict[str, Any]:
    """Normalised texts that stand in more than one split, and rows of validation and test whose text train also has."""
    codes = normalised_codes(table)
    has = np.zeros((int(codes.max()) + 1, len(SPLITS)), bool)
    kept = splits != _DROPPED
    has[codes[kept], splits[kept]] = True
    in_train = has[codes, TRAIN]
    return {
        "duplicates_across_splits": int((has.sum(axis=1) > 1).sum()),
        "rows_seen_in_train": {SPLITS[number]: int((in_train & (splits == number)).sum()) for number in (VALIDATION, TEST)},
    }


def _report(facts: dict[str, Any]) -> None:
    log.info("split: %s", describe_counts(facts["num_rows"]))
    for key, said in (("moved_classes", "kept in train"), ("dropped_classes", "dropped")):
        if facts[key]:
            log.warning("split: classes without a row in train, %s: %s", said, describe_counts(facts[key]))
    for name, absent in facts["absent_classes"].items():
        if absent:
            log.warning("split: %s has no row of %d classes: %s", name, len(absent), ", ".join(map(repr, absent[:5])))
    if facts["duplicates_across_splits"]:
        log.warning(
            "split: %d texts stand in more than one split; of validation %d rows and of test %d are also in train",
            facts["duplicates_across_splits"],
            *facts["rows_seen_in_train"].values(),
        )
