"""Vectors in place of token ids: written once, mapped into memory, the rest of the split unchanged."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reprise.data.dataset import EncodedDataset
from reprise.data.features import FeatureSplit, read_features, write_features


@pytest.fixture
def features(tiny_dataset: Callable[[str], EncodedDataset], tmp_path: Path) -> tuple[EncodedDataset, Path, dict[str, np.ndarray]]:
    data = tiny_dataset("bag")
    rng = np.random.default_rng(1)
    arrays = {name: rng.normal(size=(len(data.splits[name]), 6)).astype(np.float32) for name in ("train", "validation")}
    write_features(tmp_path / "deep" / "features.arrow", arrays)
    return data, tmp_path / "deep" / "features.arrow", arrays


def test_every_row_keeps_its_vector_its_label_and_its_id(features: tuple[EncodedDataset, Path, dict[str, np.ndarray]]) -> None:
    data, path, arrays = features
    for name, array in arrays.items():
        tokens, split = data.splits[name], FeatureSplit(data.splits[name], path, name)
        assert np.array_equal(read_features(path, name), array)
        assert len(split) == len(tokens)
        assert split.row_ids == tokens.row_ids
        assert np.array_equal(split.labels, tokens.labels)
        assert split.lengths.tolist() == [1] * len(tokens)
        for example in split.__getitems__([5, 0, len(split) - 1]):
            assert np.array_equal(example.features, array[example.position])
            assert example.label == tokens.labels[example.position]
    assert list(path.parent.iterdir()) == [path]


def test_vectors_are_a_view_of_the_file_and_cannot_be_changed(features: tuple[EncodedDataset, Path, dict[str, np.ndarray]]) -> None:
    view = read_features(features[1], "train")
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1


def test_it_reaches_a_loader_process_as_a_path(features: tuple[EncodedDataset, Path, dict[str, np.ndarray]]) -> None:
    data, path, arrays = features
    pickled = pickle.dumps(FeatureSplit(data.splits["train"], path, "train"))
    assert len(pickled) < 2000
    again = pickle.loads(pickled)
    assert np.array_equal(again.__getitems__([3])[0].features, arrays["train"][3])


def test_a_file_that_does_not_fit_is_refused(features: tuple[EncodedDataset, Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    data, path, arrays = features
    write_features(tmp_path / "other.arrow", {"train": arrays["validation"]})
    with pytest.raises(ValueError, match=rf"{len(arrays['validation'])} vectors for the {len(arrays['train'])} rows of train"):
        FeatureSplit(data.splits["train"], tmp_path / "other.arrow", "train")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"not a readable Arrow file .* delete it, and it is computed again"):
        FeatureSplit(data.splits["train"], path, "train")
