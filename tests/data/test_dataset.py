from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reprise.data.dataset import EncodedSplit, Example, StaleDatasetError, open_dataset, read_manifest


@pytest.fixture
def encoded(project: Callable[..., Any], rows: Callable[..., str]) -> Any:
    made = project()
    made.put("rows.csv", rows(120))
    made.encode()
    return made


def test_examples_and_arrays_agree(encoded: Any) -> None:
    dataset = encoded.open()
    assert list(dataset.splits) == ["train", "validation", "test"]
    train = dataset.splits["train"]
    assert len(train) == dataset.manifest.num_rows["train"]
    assert (train.lengths.dtype, train.labels.dtype, train.num_tokens.dtype) == (np.int32, np.int64, np.int32)
    for position in (0, 1, len(train) - 1):
        example = train[position]
        assert isinstance(example, Example)
        assert example.position == position
        assert example.input_ids.dtype == np.int32
        assert len(example.input_ids) == train.lengths[position]
        assert example.label == train.labels[position]
        assert isinstance(example.label, int)


def test_many_at_once_are_the_same_as_one_by_one(encoded: Any) -> None:
    train = encoded.open().splits["train"]
    positions = np.random.default_rng(0).permutation(len(train))
    for wanted in (positions, positions.tolist(), [3, 3, 0], []):
        examples = train.__getitems__(wanted)
        assert [example.position for example in examples] == list(wanted)
        for example in examples:
            one = train[example.position]
            assert one.input_ids.tolist() == example.input_ids.tolist()
            assert one.label == example.label


def test_ids_are_views_of_the_mapped_file(encoded: Any) -> None:
    train = encoded.open().splits["train"]
    example = train[2]
    assert not example.input_ids.flags.writeable
    assert not example.input_ids.flags.owndata
    assert np.shares_memory(example.input_ids, train[2].input_ids)


@pytest.mark.parametrize("position", [-1, 10_000])
def test_a_position_outside_is_refused(encoded: Any, position: int) -> None:
    train = encoded.open().splits["train"]
    with pytest.raises(IndexError, match=r"position outside 0 .. \d+ of train.arrow"):
        train[position]


def test_a_pickle_holds_the_path_only(encoded: Any) -> None:
    train = encoded.open().splits["train"]
    _ = train.labels, train.lengths, train.row_ids
    data = pickle.dumps(train)
    assert len(data) < 500
    again: EncodedSplit = pickle.loads(data)
    assert [example.input_ids.tolist() for example in again] == [example.input_ids.tolist() for example in train]
    assert again.row_ids == train.row_ids
    whole = pickle.loads(pickle.dumps(encoded.open()))
    assert whole.manifest == encoded.open().manifest


def test_no_dataset_says_what_to_run(encoded: Any, make_config: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"none: no encoded dataset here \(manifest.json is missing\); run `dvc repro encode`"):
        open_dataset(encoded.data / "none", make_config())


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"tokenizer.max_length": 9}, ["tokenizer.max_length"]),
        ({"data.split.seed": 14, "tokenizer.min_frequency": 3}, ["data.split.seed", "tokenizer.min_frequency"]),
        ({"data.columns.metadata": ["when"]}, ["data.columns.metadata"]),
        ({"data.source": {"kind": "path", "path": "data/source/other.csv"}}, ["data.source.path"]),
    ],
)
def test_other_params_are_named(encoded: Any, make_config: Callable[..., Any], changes: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(StaleDatasetError, match=r"made with other params: .* Run `dvc repro encode`") as caught:
        open_dataset(encoded.data / "encoded", make_config(changes))
    assert caught.value.keys == keys
    assert all(key in str(caught.value) for key in keys)
    assert isinstance(caught.value, ValueError)


def test_keys_of_another_kind_of_source_are_shown_as_absent(encoded: Any, make_config: Callable[..., Any]) -> None:
    url = {"kind": "url", "files": {"a.csv": {"url": "https://there/a.csv", "sha256": "0" * 64, "mirrors": []}}}
    with pytest.raises(StaleDatasetError, match=r'data.source.kind \(dataset: "path", params: "url"\)') as caught:
        open_dataset(encoded.data / "encoded", make_config({"data.source": url}))
    assert 'data.source.path (dataset: "data/source/rows.csv", params: absent)' in str(caught.value)


@pytest.mark.parametrize("name", ["train.arrow", "test.arrow", "tokenizer.json"])
def test_a_damaged_or_missing_file_is_named(encoded: Any, name: str) -> None:
    path = encoded.data / "encoded" / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=rf"{name}: {len(content) - 1} bytes, but the manifest says {len(content)}"):
        encoded.open()
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name}: missing, though the manifest lists it"):
        encoded.open()


def test_files_of_the_right_size_that_are_not_right_are_refused(encoded: Any) -> None:
    tokenizer = encoded.data / "encoded/tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"Lowercase", b"lowercase"))
    with pytest.raises(ValueError, match=r"tokenizer.json: sha256 .* it was changed after encode"):
        _ = encoded.open().tokenizer_json
    arrow = encoded.data / "encoded/train.arrow"
    arrow.write_bytes(bytes(arrow.stat().st_size))
    with pytest.raises(ValueError, match=r"train.arrow: not a readable Arrow file .* run `dvc repro encode`"):
        encoded.open()


def change_manifest(encoded: Any, **changes: Any) -> None:
    path = encoded.data / "encoded/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_a_manifest_that_cannot_be_right_is_refused(encoded: Any) -> None:
    folder = encoded.data / "encoded"
    rows = read_manifest(folder).num_rows
    change_manifest(encoded, num_rows=rows | {"train": rows["train"] + 1})
    with pytest.raises(ValueError, match=r"train.arrow: \d+ rows, but the manifest says \d+"):
        encoded.open()
    change_manifest(encoded, labels=3)
    with pytest.raises(ValueError, match=r"manifest.json: labels: Input should be a valid list"):
        encoded.open()
    change_manifest(encoded, contract_version=2)
    with pytest.raises(ValueError, match=r"manifest.json: contract_version 2; this Reprise reads 1: run `dvc repro encode`"):
        encoded.open()
    (folder / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"manifest.json: not a manifest"):
        encoded.open()


def test_a_manifest_survives_writing_and_reading(encoded: Any) -> None:
    path = encoded.data / "encoded/manifest.json"
    assert read_manifest(path.parent).to_json() == path.read_text(encoding="utf-8")
