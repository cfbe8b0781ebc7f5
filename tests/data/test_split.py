from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.config import SPLITS, GivenSplit, HashSplit
from reprise.data.records import row_ids
from reprise.data.split import assign_splits, make_splits, normalise_text, unit_fraction

Make = Callable[..., Any]
Row = tuple[str, str, str | None]  # text, label, group


def table_of(rows: list[Row], **more: list[Any]) -> pa.Table:
    texts, labels, groups = ([row[i] for row in rows] for i in range(3))
    return pa.table(
        {
            "row_id": row_ids(texts, labels),
            "text": pa.array(texts, pa.string()),
            "label": pa.array(labels, pa.string()),
            "group": pa.array(groups, pa.string()),
            "source_file": pa.array(["rows.csv"] * len(rows)),
            "source_row": list(range(1, len(rows) + 1)),
        }
        | more
    )


def hash_split(train: float = 0.6, validation: float = 0.2, seed: int = 3, rare_class: str = "keep_in_train") -> HashSplit:
    fractions = {"train": train, "validation": validation, "test": 1 - train - validation}
    return HashSplit.model_validate({"method": "hash", "seed": seed, "fractions": fractions, "rare_class": rare_class})


def given_split(**settings: Any) -> GivenSplit:
    empty = {"method": "given", "seed": 3, "files": None, "column": None, "validation_fraction": None}
    return GivenSplit.model_validate(empty | settings)


def many(count: int, groups: int | None = None) -> list[Row]:
    return [(f"text {i}", "abc"[i % 3], f"g{i % groups}" if groups else None) for i in range(count)]


def by_id(rows: list[Row], config: HashSplit) -> dict[str, int]:
    table = table_of(rows)
    return dict(zip(table["row_id"].to_pylist(), assign_splits(table, config).splits.tolist(), strict=True))


# -------------------------------------------------------------------------------------------------------------- hashing


def test_the_fractions_hold_in_expectation() -> None:
    for seed in (1, 2):
        counts = np.bincount(assign_splits(table_of(many(6000)), hash_split(0.7, 0.1, seed)).splits, minlength=3)
        # Five standard deviations of a draw of 6000.
        assert np.abs(counts / 6000 - [0.7, 0.1, 0.2]).max() < 5 * 0.5 / np.sqrt(6000)


def test_the_hash_is_pinned() -> None:
    """A change here moves every user's rows to other splits."""
    assert [round(unit_fraction(unit, 13), 12) for unit in ("thello", "ghello", "t")] == [
        0.486174917929,
        0.058143037088,
        0.246132758814,
    ]
    assert unit_fraction("thello", 13) != unit_fraction("thello", 14)


@given(texts=st.lists(st.text("abAB é", max_size=3), min_size=1, max_size=30), data=st.data(), grouped=st.booleans())
@settings(max_examples=60, deadline=None)
def test_hash_splits_follow_rows_whatever_their_order_and_company(texts: list[str], data: st.DataObject, grouped: bool) -> None:
    groups = st.sampled_from(["g", "h", None]) if grouped else st.none()
    drawn = [(text, data.draw(st.sampled_from("ab")), data.draw(groups)) for text in texts]
    rows = [*many(60), *drawn]  # the many keep every class and split filled, so that no policy has to step in
    config = hash_split()
    before = by_id(rows, config)
    # Equal rows of two groups share their ids, so with groups the order among them counts.
    if not grouped:
        assert by_id(data.draw(st.permutations(rows)), config) == before
    after = by_id([*rows, ("quite new", "a", None), ("another", "b", "k")], config)
    assert {row_id: after[row_id] for row_id in before} == before


def test_another_share_of_validation_leaves_test_as_it_is() -> None:
    table = table_of(many(300))
    one, other = (assign_splits(table, hash_split(train, 0.8 - train)).splits for train in (0.6, 0.7))
    assert ((one == 2) == (other == 2)).all()
    assert (one != other).any()


def test_texts_that_count_as_the_same_stay_together() -> None:
    variants = ["Straße 1", "STRASSE  1", " strasse\u00a01 ", "ｓｔｒａｓｓｅ １"]
    assert len({normalise_text(text) for text in variants}) == 1
    config = hash_split()
    for seed in range(20):
        rows = [*many(60), *((f"{text} {seed}", "a", None) for text in variants)]
        assert len(set(assign_splits(table_of(rows), config).splits[60:].tolist())) == 1


def test_groups_stay_together_and_a_group_is_not_a_text() -> None:
    splits = assign_splits(table_of(many(300, groups=40)), hash_split()).splits
    assert all(len({int(splits[i]) for i in range(g, 300, 40)}) == 1 for g in range(40))
    by_text, by_group = [(f"word{i}", "a", None) for i in range(60)], [(f"other {i}", "b", f"word{i}") for i in range(60)]
    splits = assign_splits(table_of([*by_text, *by_group]), hash_split()).splits
    assert (splits[:60] != splits[60:]).any()


def test_a_row_without_a_group_goes_by_its_text() -> None:
    grouped, bare = [*many(60, groups=20), ("alone", "a", None)], [*many(60), ("alone", "a", None)]
    config = hash_split()
    assert assign_splits(table_of(grouped), config).splits[-1] == assign_splits(table_of(bare), config).splits[-1]


# --------------------------------------------------------------------------------------------------------- rare classes


def rare_rows(config: HashSplit) -> list[Row]:
    """60 rows of common classes, and class rare with rows that the hash puts into test only."""
    in_test = [text for text in (f"rare {i}" for i in range(500)) if unit_fraction(f"t{text}", config.seed) < 0.1]
    return [*many(60), *((text, "rare", None) for text in in_test[:2])]


def test_a_class_without_a_train_row_is_kept_in_train_by_name() -> None:
    config = hash_split()
    rows = rare_rows(config)
    assignment = assign_splits(table_of(rows), config)
    assert assignment.moved_classes == {"rare": 2}
    assert assignment.dropped_classes == {}
    assert assignment.splits[-2:].tolist() == [0, 0]
    assert assignment.splits[:60].tolist() == assign_splits(table_of(rows[:60]), config).splits.tolist()


def test_a_class_without_a_train_row_is_dropped_by_name() -> None:
    config = hash_split(rare_class="drop")
    assignment = assign_splits(table_of(rare_rows(config)), config)
    assert (assignment.moved_classes, assignment.dropped_classes) == ({}, {"rare": 2})
    assert assignment.splits[-2:].tolist() == [-1, -1]


def test_a_class_without_a_train_row_fails_by_name() -> None:
    config = hash_split(rare_class="fail")
    with pytest.raises(ValueError, match=r"no row of these classes falls into train: rare: 2\. .* keep_in_train or drop"):
        assign_splits(table_of(rare_rows(config)), config)


def test_a_group_moves_as_a_whole() -> None:
    config = hash_split()
    group = next(g for g in (f"g{i}" for i in range(500)) if unit_fraction(f"g{g}", config.seed) < 0.1)
    rows = [*many(60), ("first", "rare", group), ("second", "a", group)]
    assert assign_splits(table_of(rows), config).splits[-2:].tolist() == [0, 0]


# ---------------------------------------------------------------------------------------------------------------- given


def test_files_say_the_split(project: Make) -> None:
    files = {"train": "t.csv", "validation": "d.csv", "test": "e.csv"}
    made = project({"data.source": {"kind": "path", "path": "data/source"}, "data.split": given_split(files=files).model_dump()})
    made.put("t.csv", "text,label\na,x\nb,y\na,x\n")
    made.put("d.csv", "text,label\nA ,x\n")
    made.put("e.csv", "text,label\nc,y\nb,y\n")
    made.put("unused.csv", "no such columns\n")
    facts = json.loads(made.split().read_text(encoding="utf-8"))
    assert facts["num_rows"] == {"train": 3, "validation": 1, "test": 2}
    assert facts["class_counts"] == {"train": {"x": 2, "y": 1}, "validation": {"x": 1, "y": 0}, "test": {"x": 0, "y": 2}}
    assert facts["absent_classes"] == {"validation": ["y"], "test": ["x"]}
    assert facts["duplicates_across_splits"] == 2
    assert facts["rows_seen_in_train"] == {"validation": 1, "test": 1}
    assert facts["quarantined"] == 0
    assert [file["name"] for file in facts["files"]] == ["d.csv", "e.csv", "t.csv"]
    train = pq.read_table(made.data / "split/train.parquet")
    assert train["text"].to_pylist() == ["a", "b", "a"]
    assert [row_id[-2:] for row_id in train["row_id"].to_pylist()] == ["-0", "-1", "-1"], (
        "b, y is the second: files are read by name"
    )
    assert sorted(path.name for path in (made.data / "split").iterdir()) == [
        "split.json", "test.parquet", "train.parquet", "validation.parquet",
    ]  # fmt: skip
    assert (made.data / "quarantine.jsonl").read_bytes() == b""


def given_table(files: list[str], labels: str = "ab") -> pa.Table:
    rows: list[Row] = [(f"text {i}", labels[i % len(labels)], None) for i in range(len(files))]
    return table_of(rows).set_column(4, "source_file", pa.array(files))


def test_validation_is_taken_from_train_by_hash() -> None:
    config = given_split(files={"train": "t", "validation": None, "test": "e"}, validation_fraction=0.25)
    table = given_table(["t"] * 400 + ["e"] * 100)
    splits = assign_splits(table, config).splits
    assert (splits[400:] == 2).all()
    assert 60 < (splits == 1).sum() < 140
    expected = [unit_fraction(f"ttext {i}", 3) < 0.25 for i in range(400)]
    assert (splits[:400] == 1).tolist() == expected


def test_taking_validation_never_takes_a_whole_class() -> None:
    config = given_split(files={"train": "t", "validation": None, "test": "e"}, validation_fraction=0.25)
    lone = next(text for text in (f"lone {i}" for i in range(100)) if unit_fraction(f"t{text}", 3) < 0.25)
    rows: list[Row] = [*((f"text {i}", "ab"[i % 2], None) for i in range(50)), (lone, "rare", None), ("test", "a", None)]
    table = table_of(rows).set_column(4, "source_file", pa.array(["t"] * 51 + ["e"]))
    assignment = assign_splits(table, config)
    assert assignment.splits[50] == 0
    assert assignment.moved_classes == {"rare": 1}


def test_a_column_says_the_split(project: Make) -> None:
    made = project({"data.split": given_split(column="part").model_dump()})
    made.put("rows.csv", "text,label,part\na,x,train\nb,y,train\nc,x,test\nd,y,validation\n")
    made.split()
    tables = {name: pq.read_table(made.data / f"split/{name}.parquet") for name in SPLITS}
    assert {name: table["text"].to_pylist() for name, table in tables.items()} == {
        "train": ["a", "b"], "validation": ["d"], "test": ["c"],
    }  # fmt: skip
    assert "split" not in tables["train"].column_names


@pytest.mark.parametrize(
    ("parts", "more", "message"),
    [
        ("train train test dev", {}, r"rows.csv, row 4: column 'part' holds 'dev'; allowed are train, validation, test"),
        ("train train test ''", {}, r"rows.csv, row 4: column 'part' is empty \(so are 1 rows in all\)"),
        ("train train test test", {}, r"no rows for validation out of 4 \(train: 2, validation: 0, test: 2\)"),
        ("train train validation test", {"validation_fraction": 0.5}, r"already marks 1 rows as validation; set .* to null"),
    ],
)
def test_a_column_that_does_not_say_it_is_refused(project: Make, parts: str, more: dict[str, Any], message: str) -> None:
    made = project({"data.split": given_split(column="part", **more).model_dump()})
    rows = [f"text {i},{'xy'[i % 2]},{part}" for i, part in enumerate(parts.replace("''", "").split(" "))]
    made.put("rows.csv", "\n".join(["text,label,part", *rows]))
    with pytest.raises(ValueError, match=message):
        made.split()
    assert not (made.data / "split").exists()
    assert not (made.data / "quarantine.jsonl").exists()


def test_a_file_for_two_splits_is_refused(project: Make) -> None:
    files = {"train": "rows.csv", "validation": "dev.csv", "test": "rows.csv"}
    made = project({"data.split": given_split(files=files).model_dump()})
    made.put("rows.csv", "text,label\na,b\n")
    with pytest.raises(ValueError, match=r"rows.csv is named for more than one split"):
        made.split()


# --------------------------------------------------------------------------------------------------------------- checks


def test_one_class_only_is_refused_with_its_count() -> None:
    for config in (hash_split(), given_split(files={"train": "rows.csv", "validation": "d", "test": "e"})):
        with pytest.raises(ValueError, match="needs at least 2 classes; found a: 30"):
            assign_splits(table_of([(f"{i}", "a", None) for i in range(30)]), config)


def test_one_class_in_train_is_refused() -> None:
    config = given_split(files={"train": "t", "validation": "d", "test": "e"})
    table = given_table(["t", "d", "t", "e", "t"], "ab")
    with pytest.raises(ValueError, match="train holds one class only: a: 3"):
        assign_splits(table, config)


def test_labels_that_train_never_shows_are_named() -> None:
    config = given_split(files={"train": "t", "validation": "d", "test": "e"})
    rows: list[Row] = [("1", "a", None), ("2", "b", None), ("3", "B", None), ("4", "a", None), ("5", "B", None), ("6", "c", None)]
    table = table_of(rows).set_column(4, "source_file", pa.array(["t", "t", "d", "e", "e", "e"]))
    with pytest.raises(
        ValueError, match=r"train has no row of these labels: 'B' \(1 rows in d\), 'B' \(1 rows in e\), 'c' \(1 rows in"
    ):
        assign_splits(table, config)


def test_a_split_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no rows for validation and test out of 4 .*fractions \(or another data.split.seed\)"):
        assign_splits(table_of([(f"{i}", "ab"[i % 2], None) for i in range(4)]), hash_split(0.98, 0.01))


def test_a_source_changed_without_fetch_is_refused(project: Make, rows: Callable[..., str]) -> None:
    made = project()
    made.put("rows.csv", rows(60))
    made.split()
    data = project({"data.source": {"kind": "path", "path": "data/source/other.csv"}}).config.data
    with pytest.raises(ValueError, match=r"data.source was changed after these files were fetched; run `dvc repro fetch`"):
        make_splits(made.data / "raw/files.json", made.workdir, made.data / "split", made.data / "quarantine.jsonl", data)


# ---------------------------------------------------------------------------------------------------------------- bytes


def test_the_same_rows_give_the_same_bytes(project: Make, rows: Callable[..., str], tmp_path: Path) -> None:
    made = project({"data.cleaning": {"on_bad_row": "quarantine", "max_quarantined_fraction": 0.1}})
    made.put("rows.csv", rows(80) + " ,yes\n")

    def bytes_of() -> dict[str, bytes]:
        made.split()
        folder = made.data / "split"
        return {path.name: path.read_bytes() for path in [*folder.iterdir(), made.data / "quarantine.jsonl"]}

    first = bytes_of()
    assert bytes_of() == first
    assert json.loads(first["quarantine.jsonl"]) == {
        "file": "rows.csv", "row": 81, "column": "text", "reason": "blank", "value": " ",
    }  # fmt: skip
    assert json.loads(first["split.json"])["quarantined"] == 1
    assert str(tmp_path).encode() not in b"".join(first.values())


def test_every_param_of_the_data_is_in_split_json(project: Make, rows: Callable[..., str]) -> None:
    """Else DVC would see the same bytes, leave encode out, and the manifest would stay stale for ever."""
    made = project()
    made.put("rows.csv", rows(60))
    before = made.split().read_bytes()
    other = project({"data.split.rare_class": "fail", "data.cleaning.max_quarantined_fraction": 0.06})
    assert other.split().read_bytes() != before


def test_all_rows_are_in_exactly_one_split(project: Make, rows: Callable[..., str]) -> None:
    made = project()
    made.put("rows.csv", rows(90))
    made.split()
    places = [row for name in SPLITS for row in pq.read_table(made.data / f"split/{name}.parquet")["source_row"].to_pylist()]
    assert Counter(places) == Counter(range(1, 91))
