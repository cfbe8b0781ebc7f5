"""A text classifier from one file: model.onnx holds the graph, the tokenizer, the labels and where it came from."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as runtime_errors

from reprise.data.tokenizer import encode_with_counts, load_tokenizer

CONTRACT_VERSION = 1
METADATA_KEY = "reprise"
TOKENIZER_KEY = "reprise.tokenizer"
INPUT_NAMES = ("input_ids", "attention_mask")
OUTPUT_NAME = "logits"

# Texts are sorted by length inside windows of this many batches: enough for little padding, little enough for memory.
WINDOW_BATCHES = 16

_LOAD_ERRORS = (
    runtime_errors.Fail,
    runtime_errors.InvalidArgument,
    runtime_errors.InvalidGraph,
    runtime_errors.InvalidProtobuf,
    runtime_errors.NoModel,
    runtime_errors.NotImplemented,
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The most probable label of one text, and the probability of every label in the order of ``Classifier.labels``.

    ``truncated``: the text is longer than the model reads, and its end was cut off.
    """

    label: str
    probability: float
    probabilities: dict[str, float]
    truncated: bool


@dataclass(frozen=True)
class ModelMetadata:
    """What model.onnx says about itself. ``temperature`` and ``threshold`` are null until they were fitted."""

    labels: tuple[str, ...]
    max_length: int
    pad_id: int
    model_kind: str
    run_key: str
    mlflow_run_id: str | None
    dataset_digest: str
    versions: dict[str, str]
    temperature: float | None = None
    threshold: float | None = None
    contract_version: int = CONTRACT_VERSION

    def __post_init__(self) -> None:
        if len(set(self.labels)) != len(self.labels) or not self.labels:
            raise ValueError(f"labels must be unique and at least one, found {len(self.labels)}: {list(self.labels[:10])}")
        if self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, found {self.max_length}")
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError(f"temperature must be null or above 0, found {self.temperature}")

    def to_json(self) -> str:
        """The JSON text stored in the file; the same metadata gives the same text."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The metadata in ``text``; keys of later minor additions are ignored.

        Raises:
            ValueError: a newer contract, or a key that is absent or of the wrong type.
        """
        tree = _json_object(text)
        version = tree.get("contract_version")
        if not isinstance(version, int) or version < 1:
            raise ValueError(f"contract_version is {version!r}, expected a whole number from 1 to {CONTRACT_VERSION}")
        if version > CONTRACT_VERSION:
            raise ValueError(
                f"the file was written for contract {version}, this Reprise reads up to {CONTRACT_VERSION}; upgrade reprise"
            )
        values = {name: _checked(tree, name) for name in _FIELD_TYPES}
        if odd := [label for label in values["labels"] if not isinstance(label, str)]:
            raise ValueError(f"metadata 'labels' holds {odd[0]!r}, expected texts only")
        return cls(**{**values, "labels": tuple(values["labels"]), "contract_version": version})


_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "labels": (list,),
    "max_length": (int,),
    "pad_id": (int,),
    "model_kind": (str,),
    "run_key": (str,),
    "mlflow_run_id": (str, type(None)),
    "dataset_digest": (str,),
    "versions": (dict,),
    "temperature": (float, int, type(None)),
    "threshold": (float, int, type(None)),
}


def _json_object(text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"metadata is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"metadata is a JSON {type(tree).__name__}, expected an object")
    return tree


def _checked(tree: dict[str, Any], name: str) -> Any:
    allowed = _FIELD_TYPES[name]
    if name not in tree:
        raise ValueError(f"metadata lacks {name!r}; it has {', '.join(sorted(tree))}")
    value = tree[name]
    if not isinstance(value, allowed) or isinstance(value, bool):
        raise ValueError(f"metadata {name!r} is {value!r}, expected {' or '.join(kind.__name__ for kind in allowed)}")
    return value


def open_session(path: Path, num_threads: int | None) -> onnxruntime.InferenceSession:
    """An onnxruntime session on the CPU; ``num_threads`` null leaves the choice to onnxruntime (one per core).

    Raises:
        ValueError: no such file, or not a model that this onnxruntime can run.
    """
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; give at least 1, or None for one thread per core")
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {found}; name the model.onnx that `reprise export` or a release wrote")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors arrive as exceptions, and need not be printed as well
    options.enable_mem_pattern = False  # a pattern is kept per input shape: with dynamic lengths memory would grow with each
    if num_threads is not None:
        options.intra_op_num_threads = num_threads
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except _LOAD_ERRORS as error:
        raise ValueError(
            f"{path}: not an ONNX file that onnxruntime {onnxruntime.__version__} can run "
            f"({path.stat().st_size} bytes): {error}. Copy the file again, or upgrade onnxruntime"
        ) from None


class Classifier:
    """Labels and probabilities for texts, from ``path`` alone; the same whatever the batch size, in the order given.

    Args:
        path: model.onnx as written by Reprise.
        num_threads: threads inside one forward; None is one per core.

    Raises:
        ValueError: no file, not an ONNX file, not written by Reprise, or written for a newer contract.
    """

    def __init__(self, path: str | Path, num_threads: int | None = None) -> None:
        self.path = Path(path)
        self._session = open_session(self.path, num_threads)
        stored = self._session.get_modelmeta().custom_metadata_map
        if missing := [key for key in (METADATA_KEY, TOKENIZER_KEY) if key not in stored]:
            raise ValueError(
                f"{self.path}: an ONNX file, but not one made by Reprise: its metadata lacks {' and '.join(map(repr, missing))}"
            )
        try:
            self.metadata = ModelMetadata.from_json(stored[METADATA_KEY])
            self._tokenizer = load_tokenizer(stored[TOKENIZER_KEY])
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        self._check_graph()

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in the order of the logits."""
        return self.metadata.labels

    @property
    def calibrated(self) -> bool:
        """Whether probabilities were calibrated; until then they are a softmax of raw logits, and usually too sure."""
        return self.metadata.temperature is not None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, cut at the maximum length: exactly those that training saw."""
        return encode_with_counts(self._tokenizer, texts, self.metadata.max_length).input_ids

    def logits(self, texts: Iterable[str], batch_size: int = 64) -> NDArray[np.float32]:
        """Logits float32 [N, C] in the order of ``texts``; columns follow ``labels``.

        Raises:
            ValueError: something in ``texts`` is not a text, named by its position from 0.
        """
        windows = [logits for logits, _ in self._windows(texts, batch_size)]
        return np.concatenate(windows) if windows else np.empty((0, len(self.labels)), np.float32)

    def predict(self, texts: Iterable[str], batch_size: int = 64) -> list[Prediction]:
        """One prediction per text, in order. Raises as ``logits`` does."""
        return list(self.predict_stream(texts, batch_size))

    def predict_stream(self, texts: Iterable[str], batch_size: int = 64) -> Iterator[Prediction]:
        """One prediction per text, in order, in constant memory; reads up to ``16 * batch_size`` texts ahead."""
        for logits, truncated in self._windows(texts, batch_size):
            probabilities = softmax(logits, self.metadata.temperature or 1.0)
            best = probabilities.argmax(axis=1).tolist()
            for top, row, cut in zip(best, probabilities.tolist(), truncated, strict=True):
                yield Prediction(self.labels[top], row[top], dict(zip(self.labels, row, strict=True)), cut)

    def _windows(self, texts: Iterable[str], batch_size: int) -> Iterator[tuple[NDArray[np.float32], list[bool]]]:
        """Logits of ``WINDOW_BATCHES`` batches of texts at a time, and for each text whether it was cut."""
        if isinstance(texts, str):
            raise ValueError("texts is one string; put it into a list: [text]")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; give at least 1")
        rest = iter(texts)
        start = 0
        while window := list(itertools.islice(rest, WINDOW_BATCHES * batch_size)):
            for position, text in enumerate(window, start):
                _check_text(text, position)
            ids, num_tokens = encode_with_counts(self._tokenizer, window, self.metadata.max_length)
            logits = self._run(ids, batch_size)
            if not np.isfinite(logits).all():
                row = int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
                raise FloatingPointError(f"{self.path}: the model gave logits that are not finite for text {start + row}")
            yield logits, [count > self.metadata.max_length for count in num_tokens]
            start += len(window)

    def _run(self, ids: list[list[int]], batch_size: int) -> NDArray[np.float32]:
        """Logits [N, C] of rows of token ids: alike lengths share a batch, and each batch is padded to its own longest row."""
        by_length = np.argsort([len(row) for row in ids], kind="stable")
        logits = np.empty((len(ids), len(self.labels)), np.float32)
        for first in range(0, len(ids), batch_size):
            rows = by_length[first : first + batch_size]
            arrays = pad([ids[row] for row in rows], self.metadata.pad_id)
            logits[rows] = self._session.run([OUTPUT_NAME], dict(zip(INPUT_NAMES, arrays, strict=True)))[0]
        return logits

    def _check_graph(self) -> None:
        inputs = tuple(node.name for node in self._session.get_inputs())
        outputs = {node.name: node.shape for node in self._session.get_outputs()}
        if set(inputs) != set(INPUT_NAMES) or OUTPUT_NAME not in outputs:
            raise ValueError(
                f"{self.path}: the graph maps {list(inputs)} to {list(outputs)}, expected {list(INPUT_NAMES)} to ['{OUTPUT_NAME}']"
            )
        if outputs[OUTPUT_NAME][-1] != len(self.labels):
            raise ValueError(
                f"{self.path}: {outputs[OUTPUT_NAME][-1]} logits for {len(self.labels)} labels; export the model again"
            )


def pad(ids: Sequence[Sequence[int]], pad_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``(input_ids, attention_mask)``, int64 [B, L] with L the longest row; the mask is 1 on tokens, 0 on padding."""
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    is_token = np.arange(lengths.max()) < lengths[:, None]
    input_ids = np.full(is_token.shape, pad_id, np.int64)
    input_ids[is_token] = np.fromiter(itertools.chain.from_iterable(ids), np.int64, int(lengths.sum()))
    return input_ids, is_token.astype(np.int64)


def softmax(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """Probabilities float64 [N, C] of ``logits / temperature``; each row adds up to 1."""
    scaled = logits.astype(np.float64) / temperature
    exponentials = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probabilities: NDArray[np.float64] = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probabilities


def _check_text(text: object, position: int) -> None:
    if not isinstance(text, str):
        raise ValueError(f"text {position} is {type(text).__name__} ({text!r:.60}), expected str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text {position} holds half a surrogate pair at character {error.start} ({text[error.start]!r}); "
            "decode the text again from its source"
        ) from None
