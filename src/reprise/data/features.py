"""What a frozen encoder makes of the texts, one vector each: written once, then read in place of the token ids.

N examples of a split, D numbers of a vector.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reprise.data.atomic import whole_file
from reprise.data.dataset import Split


class FeatureExample(NamedTuple):
    """One row of a split: its position there, its vector (float32 [D], a read-only view) and its label's position."""

    position: int
    features: NDArray[np.float32]
    label: int


class FeatureSplit:
    """A split whose texts are vectors; labels and row ids are those of the split that they were computed from."""

    def __init__(self, tokens: Split, path: Path, name: str) -> None:
        self.tokens, self.path, self.name = tokens, path, name
        self._features = read_features(path, name)
        if len(self._features) != len(tokens):
            raise ValueError(f"{path}: {len(self._features)} vectors for the {len(tokens)} rows of {name}; delete the file")

    def __getstate__(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "path": self.path, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a pickle holds what it was made of

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitems__(self, positions: Sequence[int] | NDArray[np.integer[Any]]) -> list[FeatureExample]:
        wanted = np.asarray(positions, dtype=np.int64)
        labels = self.labels[wanted].tolist()
        return [
            FeatureExample(position, self._features[position], label)
            for position, label in zip(wanted.tolist(), labels, strict=True)
        ]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """1 for each example: no vector is longer than another, int32 [N]."""
        return np.ones(len(self), np.int32)

    @property
    def labels(self) -> NDArray[np.int64]:
        """Position of each example's label in the manifest's list, int64 [N]."""
        return self.tokens.labels

    @property
    def row_ids(self) -> list[str]:
        """The row_id of each example, [N]."""
        return self.tokens.row_ids


def write_features(path: Path, features: Mapping[str, NDArray[np.float32]]) -> None:
    """Write float32 [N, D] of each split to one Arrow file, of which ``FeatureSplit`` maps its part into memory."""
    width = next(iter(features.values())).shape[1]
    counts = {name: len(rows) for name, rows in features.items()}
    schema = pa.schema(
        [pa.field("features", pa.list_(pa.float32(), width), nullable=False)], metadata={"splits": json.dumps(counts)}
    )
    with (
        whole_file(path) as partial,
        pa.OSFile(str(partial), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        for rows in features.values():
            column = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(rows).reshape(-1)), width)
            writer.write_batch(pa.record_batch([column], schema=schema))


def read_features(path: Path, name: str) -> NDArray[np.float32]:
    """float32 [N, D], a read-only view of the file: the vectors of the split ``name``."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a readable Arrow file ({error}); delete it, and it is computed again") from None
    names = list(json.loads(reader.schema.metadata[b"splits"]))
    column = reader.get_batch(names.index(name)).column("features")
    features: NDArray[np.float32] = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    return features
