"""Reading what ``encode`` wrote: the manifest, checked against the params, and memory-mapped splits.

Letters: N examples of a split, L tokens of an example.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from reprise.config import ENCODER_FILES, SPLITS, Config, digest, flatten

CONTRACT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
_MAKE_AGAIN = "run `dvc repro encode`"

Scalar = str | int | float | bool | None


class StaleDatasetError(ValueError):
    """The encoded dataset was made with other params than those at hand; ``keys`` are the dotted paths that differ."""

    def __init__(self, message: str, keys: list[str]) -> None:
        self.keys = keys
        super().__init__(message)


class _ManifestPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TokenizerInfo(_ManifestPart):
    kind: str
    normaliser: str
    vocab_size: int
    sha256: str
    pad_id: int
    unk_id: int


class TokenCounts(_ManifestPart):
    """Tokens of a text before it is cut at the maximum length."""

    mean: float
    max: int
    p50: int
    p99: int


class Manifest(_ManifestPart):
    """What an encoded dataset is. ``digest`` covers its content, ``params_digest`` the settings that made it."""

    contract_version: Literal[1]
    digest: str
    params_digest: str
    params: dict[str, Scalar]
    labels: list[str]
    num_rows: dict[str, int]
    class_counts: dict[str, dict[str, int]]
    quarantined: int
    tokenizer: TokenizerInfo
    encoder_digest: str | None
    max_length: int
    truncated: dict[str, int]
    token_counts: dict[str, TokenCounts]
    versions: dict[str, str]
    num_bytes: dict[str, int]

    def to_json(self) -> str:
        """The bytes of manifest.json: the same dataset gives the same text."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


class Example(NamedTuple):
    """One row of a split: its position there, its token ids (int32 [L], a read-only view) and its label's position."""

    position: int
    input_ids: NDArray[np.int32]
    label: int


class Split(Protocol):
    """What training needs of the examples of one split: their number, lengths int32 [N], labels int64 [N], ids, and themselves."""

    def __len__(self) -> int: ...

    def __getitems__(self, positions: Sequence[int] | NDArray[np.integer[Any]]) -> Sequence[Any]: ...

    @property
    def lengths(self) -> NDArray[np.int32]: ...

    @property
    def labels(self) -> NDArray[np.int64]: ...

    @property
    def row_ids(self) -> list[str]: ...


class EncodedSplit:
    """The examples of one split, in their one order. Only pages that are read take memory; a pickle holds just the path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def _open(self) -> None:
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(self.path)))
            self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{self.path}: not a readable Arrow file ({error}); {_MAKE_AGAIN}") from None
        rows = [batch.num_rows for batch in self._batches]
        self._starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        self._offsets = [batch.column("input_ids").offsets.to_numpy() for batch in self._batches]
        self._values = [batch.column("input_ids").values.to_numpy() for batch in self._batches]

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.path = state["path"]
        self._open()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, position: int) -> Example:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int] | NDArray[np.integer[Any]]) -> list[Example]:
        """The examples at ``positions``, in that order (the name is the one PyTorch's loader looks for)."""
        wanted = np.asarray(positions, dtype=np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"position outside 0 .. {len(self) - 1} of {self.path.name}")
        batch_numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        within = wanted - self._starts[batch_numbers]
        labels = self.labels[wanted]
        return [
            Example(position, self._values[b][self._offsets[b][i] : self._offsets[b][i + 1]], label)
            for position, b, i, label in zip(wanted.tolist(), batch_numbers.tolist(), within.tolist(), labels.tolist(), strict=True)
        ]

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each example, int32 [N]."""
        return np.concatenate([np.empty(0, np.int32), *map(np.diff, self._offsets)]).astype(np.int32, copy=False)

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """Position of each example's label in the manifest's list, int64 [N]."""
        columns = [batch.column("label").to_numpy() for batch in self._batches]
        return np.concatenate([np.empty(0, np.int32), *columns]).astype(np.int64)

    @cached_property
    def row_ids(self) -> list[str]:
        """The row_id of each example, [N]."""
        return [row_id for batch in self._batches for row_id in batch.column("row_id").to_pylist()]

    @cached_property
    def num_tokens(self) -> NDArray[np.int32]:
        """Tokens of each text before it was cut, int32 [N]."""
        columns = [batch.column("num_tokens").to_numpy() for batch in self._batches]
        return np.concatenate([np.empty(0, np.int32), *columns])


@dataclass(frozen=True)
class EncodedDataset:
    """An opened dataset; ``splits`` holds train, validation and test."""

    folder: Path
    manifest: Manifest
    splits: Mapping[str, Split]

    @cached_property
    def tokenizer_json(self) -> str:
        """The text of tokenizer.json.

        Raises:
            ValueError: the file is not the one that the manifest names.
        """
        path = self.folder / TOKENIZER_NAME
        data = path.read_bytes()
        if (found := hashlib.sha256(data).hexdigest()) != self.manifest.tokenizer.sha256:
            raise ValueError(
                f"{path}: sha256 {found}, but the manifest says {self.manifest.tokenizer.sha256}; it was changed after "
                f"encode: {_MAKE_AGAIN}"
            )
        return data.decode("utf-8")

    @cached_property
    def encoder_dir(self) -> Path:
        """The folder of the pretrained encoder that the dataset was encoded for.

        Raises:
            ValueError: another encoder lies there, or none.
        """
        folder = self.folder.parent / "encoder"
        if (found := encoder_digest(folder)) != self.manifest.encoder_digest:
            raise ValueError(
                f"{folder}: the encoder's digest is {found}, but the manifest says {self.manifest.encoder_digest}; it was changed "
                f"after encode: {_MAKE_AGAIN}"
            )
        return folder


def encoder_digest(encoder_dir: Path) -> str:
    """64 hex digits over the files of an encoder; its tokenizer counts too.

    Raises:
        ValueError: a file is missing.
    """
    if missing := [name for name in ENCODER_FILES if not (encoder_dir / name).is_file()]:
        raise ValueError(f"{encoder_dir}: lacks {', '.join(missing)} of the encoder; run `dvc repro fetch`")
    sha = hashlib.sha256()
    for name in ENCODER_FILES:
        with (encoder_dir / name).open("rb") as file:
            sha.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return sha.hexdigest()


def open_dataset(encoded_dir: Path, config: Config) -> EncodedDataset:
    """The dataset in ``encoded_dir``, if it is whole and was made with the data and tokenizer sections of ``config``.

    Raises:
        StaleDatasetError: it was made with other params; the keys are named.
        ValueError: it is absent, incomplete, changed, or written by a newer Reprise.
    """
    manifest = read_manifest(encoded_dir)
    _check_params(manifest, config, encoded_dir)
    _check_sizes(manifest, encoded_dir)
    splits = {split: EncodedSplit(encoded_dir / f"{split}.arrow") for split in SPLITS}
    for split, examples in splits.items():
        if len(examples) != manifest.num_rows[split]:
            raise ValueError(
                f"{examples.path}: {len(examples)} rows, but the manifest says {manifest.num_rows[split]}; {_MAKE_AGAIN}"
            )
    return EncodedDataset(encoded_dir, manifest, splits)


def read_manifest(encoded_dir: Path) -> Manifest:
    """The manifest in ``encoded_dir``.

    Raises:
        ValueError: there is none, or it is not one that this version can read.
    """
    path = encoded_dir / MANIFEST_NAME
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{encoded_dir}: no encoded dataset here ({MANIFEST_NAME} is missing); {_MAKE_AGAIN}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not a manifest ({error}); {_MAKE_AGAIN}") from None
    version = tree.get("contract_version") if isinstance(tree, dict) else None
    if version != CONTRACT_VERSION:
        raise ValueError(f"{path}: contract_version {version!r}; this Reprise reads {CONTRACT_VERSION}: {_MAKE_AGAIN}")
    try:
        return Manifest.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {place}: {first['msg']} ({error.error_count()} problems); {_MAKE_AGAIN}") from None


def dataset_params(config: Config) -> dict[str, Scalar]:
    """The settings that decide an encoded dataset, by dotted path."""
    return {**flatten(config.data, "data"), **flatten(config.tokenizer, "tokenizer")}


def dataset_params_digest(config: Config) -> str:
    """64 hex digits that change with any setting that decides an encoded dataset."""
    return digest(config.data, config.tokenizer)


def name_differences(old: dict[str, Scalar], new: dict[str, Scalar], limit: int = 5) -> tuple[list[str], str]:
    """Dotted paths whose values differ, and the first of them with both values, for a message."""
    absent = object()
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key, absent) != new.get(key, absent))
    shown = [f"{key} (dataset: {_value(old, key)}, params: {_value(new, key)})" for key in keys[:limit]]
    if len(keys) > limit:
        shown.append(f"and {len(keys) - limit} more")
    return keys, ", ".join(shown)


def _value(params: dict[str, Scalar], key: str) -> str:
    return json.dumps(params[key], ensure_ascii=False) if key in params else "absent"


def _check_params(manifest: Manifest, config: Config, encoded_dir: Path) -> None:
    if manifest.params_digest == dataset_params_digest(config):
        return
    keys, shown = name_differences(manifest.params, dataset_params(config))
    raise StaleDatasetError(f"{encoded_dir}: made with other params: {shown}. {_MAKE_AGAIN[0].upper()}{_MAKE_AGAIN[1:]}", keys)


def _check_sizes(manifest: Manifest, encoded_dir: Path) -> None:
    for name, expected in manifest.num_bytes.items():
        path = encoded_dir / name
        if not path.is_file():
            raise ValueError(f"{path}: missing, though the manifest lists it; {_MAKE_AGAIN}")
        if (found := path.stat().st_size) != expected:
            raise ValueError(f"{path}: {found} bytes, but the manifest says {expected}; the file is damaged: {_MAKE_AGAIN}")
