"""Proof that model.onnx says what the trained model says: at any shape, and over a whole split from raw text to label.

Two questions, two answers. Is the file *broken* (a length baked in, NaN, labels in another order)? Then ``ParityError``. How
far is it *off* (logits, labels, metrics)? That is measured into ``Parity``, and the release gate decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as runtime_errors
from torch import nn

from reprise.evaluation.metrics import classification_metrics
from reprise.export.onnx_export import inference_copy
from reprise.serving.classifier import INPUT_NAMES, OUTPUT_NAME, Classifier, open_session

COMPARED_METRICS: tuple[Literal["accuracy", "macro_f1"], ...] = ("accuracy", "macro_f1")

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]

_RUN_ERRORS = (
    runtime_errors.Fail,
    runtime_errors.InvalidArgument,
    runtime_errors.NotImplemented,
    runtime_errors.RuntimeException,
)


class ParityError(RuntimeError):
    """model.onnx is broken: it fails, gives NaN, or answers another question than the trained model."""


@dataclass(frozen=True)
class MetricPair:
    """One metric over the same rows, by the trained model and by the shipped file; ``drop`` is above 0 where that is worse."""

    reference: float
    shipped: float
    drop: float


@dataclass(frozen=True)
class Parity:
    """How far the shipped classifier is from the trained model over one split.

    ``flips`` counts the rows whose label changed: reference label -> shipped label -> rows. A flip is *clear* where the
    reference preferred its label by more than ``tolerance``; the others are ties that rounding may decide either way.
    """

    num_rows: int
    tolerance: float
    max_logit_difference: float
    worst_row: int
    label_agreement: float
    num_flips: int
    num_clear_flips: int
    flips: dict[str, dict[str, int]]
    metrics: dict[str, MetricPair]

    def refusals(self, max_metric_drop: float) -> list[str]:
        """Why this file must not be released, one line each; empty if it may."""
        reasons = []
        if not self.max_logit_difference <= self.tolerance:
            reasons.append(
                f"logits differ by up to {self.max_logit_difference:.3g} (row {self.worst_row}), allowed {self.tolerance:.3g}"
            )
        if self.num_clear_flips:
            reasons.append(f"{self.num_clear_flips} of {self.num_rows} rows get another label, allowed 0 beyond rounding")
        for name, pair in self.metrics.items():
            if pair.drop > max_metric_drop:
                reasons.append(f"{name} falls from {pair.reference:.4f} to {pair.shipped:.4f}, allowed drop {max_metric_drop:g}")
        return reasons

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values for JSON."""
        return asdict(self)


def check_shapes(model: nn.Module, path: Path, *, vocab_size: int, max_length: int, tolerance: float) -> dict[str, float]:
    """The largest logit difference between ``model`` and the file, for each of several shapes and paddings.

    None of them is the traced shape; among them are single tokens, the maximum length, rows that are all padding but for one
    token, and a row of padding only.

    Raises:
        ParityError: the file fails at a shape, either side gives NaN, they differ by more than ``tolerance``, or what stands
            beside a text in the batch changes its logits.
    """
    reference = inference_copy(model)
    session = open_session(path, num_threads=None)
    differences = {}
    for name, ids, mask in _shape_cases(vocab_size, max_length):
        expected = _run_reference(reference, ids, mask, name)
        found = _run_file(session, ids, mask, f"{path}: {name}")
        _check_finite(expected, found, f"{path}: {name}")
        # A row of padding only must be finite; its logits mean nothing, may be huge, and then differ by rounding alone.
        is_text = mask.any(axis=1)
        differences[name] = _difference(expected[is_text], found[is_text], f"{path}: {name}", tolerance)
        for row in np.flatnonzero(is_text & ~mask.all(axis=1)).tolist():
            place, tokens = f"{path}: {name}, row {row} alone and padded", slice(0, int(mask[row].sum()))
            alone = _run_file(session, ids[row : row + 1, tokens], mask[row : row + 1, tokens], place)
            _difference(alone, found[row : row + 1], place, tolerance)
    return differences


def _run_file(session: onnxruntime.InferenceSession, ids: Ids, mask: Ids, place: str) -> Logits:
    try:
        logits: Logits = session.run([OUTPUT_NAME], dict(zip(INPUT_NAMES, (ids, mask), strict=True)))[0]
    except _RUN_ERRORS as error:
        raise ParityError(f"{place}: onnxruntime fails, though the traced shape may run: {error}") from None
    return logits


def _run_reference(model: nn.Module, ids: Ids, mask: Ids, name: str) -> Logits:
    try:
        with torch.inference_mode():
            logits: Logits = model(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    except (RuntimeError, IndexError) as error:  # what torch raises for sizes that do not fit
        raise ParityError(f"the trained model itself fails at {name}: {error}") from error
    return logits


def _shape_cases(vocab_size: int, max_length: int) -> Iterator[tuple[str, Ids, Ids]]:
    """``(name, input_ids, attention_mask)``; ids are drawn from a generator of their own, padding is 0."""
    generator = np.random.default_rng(0)

    def case(name: str, lengths: list[int], width: int) -> tuple[str, Ids, Ids]:
        mask = (np.arange(width) < np.array(lengths)[:, None]).astype(np.int64)
        ids = generator.integers(1, vocab_size, size=mask.shape) * mask
        return f"{name} {list(mask.shape)}", ids, mask

    for batch, wanted in ((1, 1), (1, 7), (3, 33), (5, max_length)):
        length = min(wanted, max_length)
        yield case("full rows", [length] * batch, length)
    width = min(17, max_length)
    yield case("ragged rows", [width, max(1, width // 2), 1], width)
    yield case("all but one token padded", [1, 1, 1, 1], width)
    yield case("a row of padding only", [width, 0], width)


def _check_finite(expected: Logits, found: Logits, place: str) -> None:
    if expected.shape != found.shape:
        raise ParityError(f"{place}: logits have shape {list(found.shape)}, expected {list(expected.shape)}")
    for side, logits in (("trained model", expected), ("file", found)):
        if not np.isfinite(logits).all():
            raise ParityError(f"{place}: the {side} gives logits that are not finite in row {_first_bad_row(logits)}")


def _difference(expected: Logits, found: Logits, place: str, tolerance: float) -> float:
    difference = float(np.abs(expected - found).max())
    if not difference <= tolerance:  # also where it is NaN
        raise ParityError(f"{place}: logits differ by {difference:.3g}, allowed {tolerance:.3g}")
    return difference


def check_split(
    classifier: Classifier,
    texts: Sequence[str],
    reference_logits: Logits,
    labels: Sequence[str],
    class_names: Sequence[str],
    tolerance: float,
    batch_size: int = 64,
) -> Parity:
    """What the shipped file makes of a whole split, from raw text on, beside the trained model's logits for the same rows.

    Args:
        texts: raw texts of the split, in the order of ``reference_logits``.
        reference_logits: float32 [N, C] of the trained model; columns follow ``class_names``.
        labels: the true label of each row.
        class_names: the label list of the dataset's manifest.

    Raises:
        ParityError: the file's labels are not ``class_names`` in the same order, or either side gives NaN.
        ValueError: the arguments do not belong to the same rows.
    """
    if not len(texts) == len(reference_logits) == len(labels) or not len(texts):
        raise ValueError(
            f"{len(texts)} texts, {len(reference_logits)} rows of logits and {len(labels)} labels; expected as many of each"
        )
    _check_label_order(classifier, class_names)
    positions = _positions(labels, class_names)
    if not np.isfinite(reference_logits).all():
        raise ParityError(f"the trained model gives logits that are not finite in row {_first_bad_row(reference_logits)}")
    try:
        shipped_logits = classifier.logits(texts, batch_size)
    except FloatingPointError as error:
        raise ParityError(str(error)) from None
    if shipped_logits.shape != reference_logits.shape:
        raise ParityError(
            f"{classifier.path}: logits have shape {list(shipped_logits.shape)}, the trained model's {list(reference_logits.shape)}"
        )
    return _measure(reference_logits, shipped_logits, positions, class_names, tolerance)


def _measure(
    reference: Logits, shipped: Logits, positions: NDArray[np.int64], class_names: Sequence[str], tolerance: float
) -> Parity:
    row_differences = np.abs(reference - shipped).max(axis=1)
    before, after = reference.argmax(axis=1), shipped.argmax(axis=1)
    flipped = before != after
    # How much more the trained model liked its own label than the one that the file gives.
    rows = np.arange(len(reference))
    preference = reference[rows, before] - reference[rows, after]
    return Parity(
        num_rows=len(reference),
        tolerance=tolerance,
        max_logit_difference=float(row_differences.max()),
        worst_row=int(row_differences.argmax()),
        label_agreement=float(1 - flipped.mean()),
        num_flips=int(flipped.sum()),
        num_clear_flips=int((flipped & (preference > tolerance)).sum()),
        flips=_count_flips(before[flipped], after[flipped], class_names),
        metrics=_compare_metrics(reference, shipped, positions, class_names),
    )


def _count_flips(before: NDArray[np.int64], after: NDArray[np.int64], class_names: Sequence[str]) -> dict[str, dict[str, int]]:
    flips: dict[str, dict[str, int]] = {}
    for (old, new), count in sorted(Counter(zip(before.tolist(), after.tolist(), strict=True)).items()):
        flips.setdefault(class_names[old], {})[class_names[new]] = count
    return flips


def _compare_metrics(
    reference: Logits, shipped: Logits, positions: NDArray[np.int64], class_names: Sequence[str]
) -> dict[str, MetricPair]:
    before = classification_metrics(reference, positions, class_names)
    after = classification_metrics(shipped, positions, class_names)
    return {name: MetricPair(before[name], after[name], before[name] - after[name]) for name in COMPARED_METRICS}


def _check_label_order(classifier: Classifier, class_names: Sequence[str]) -> None:
    found = classifier.labels
    if len(found) != len(class_names):
        raise ParityError(f"{classifier.path}: {len(found)} labels, the dataset has {len(class_names)}")
    for position, (ours, theirs) in enumerate(zip(found, class_names, strict=True)):
        if ours != theirs:
            raise ParityError(
                f"{classifier.path}: label {position} is {ours!r}, in the dataset it is {theirs!r}: the label order differs"
            )


def _positions(labels: Sequence[str], class_names: Sequence[str]) -> NDArray[np.int64]:
    position_of = {name: position for position, name in enumerate(class_names)}
    if unknown := sorted(set(labels) - set(position_of)):
        raise ValueError(f"labels {unknown[:5]} are not among the {len(class_names)} labels of the dataset")
    return np.fromiter((position_of[label] for label in labels), np.int64, len(labels))


def _first_bad_row(logits: Logits) -> int:
    return int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
