"""Classification metrics of a whole split, each from one confusion matrix. NumPy only.

Nothing here is averaged over batches: a mean of batch means depends on the batch size. The classes are those of the manifest,
never those that happen to occur in the rows at hand: a class without rows would otherwise flatter every macro average.

Letters in shapes: N rows, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray


class ClassMetrics(TypedDict):
    """The figures of one class: ``support`` rows have the label, ``predicted`` rows were given it."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int
    predicted: int


class SplitFigures(TypedDict):
    """The figures of one split as a whole, ready for JSON.

    ``macro_*`` is the mean over all C classes, where an absent class counts as 0; ``macro_*_present`` the mean over the classes
    that have at least one row; ``weighted_*`` is weighted by support. ``balanced_accuracy`` is ``macro_recall_present``, as in
    scikit-learn. ``micro_*`` equals accuracy, since each row has one label and gets one.
    """

    num_rows: int
    num_classes: int
    accuracy: float
    balanced_accuracy: float
    macro_precision: float
    macro_recall: float
    macro_f1: float
    macro_precision_present: float
    macro_recall_present: float
    macro_f1_present: float
    micro_precision: float
    micro_recall: float
    micro_f1: float
    weighted_precision: float
    weighted_recall: float
    weighted_f1: float
    loss: float
    absent_classes: list[str]


class ClassificationMetrics(SplitFigures):
    """The figures of one split and, in the order of the manifest, of each class."""

    per_class: list[ClassMetrics]


def classification_metrics(logits: NDArray[Any], labels: NDArray[Any], class_names: Sequence[str]) -> ClassificationMetrics:
    """All figures of one split. The prediction is the class with the largest logit, the first of equals.

    Shapes: ``logits`` [N, C] float, ``labels`` [N] integer.
    Raises ValueError where shapes disagree, the split is empty, a label is outside 0..C-1, or a logit is not finite.
    Source: macro F1 is the mean of the per-class F1 (Opitz and Burst 2019, arXiv:1911.03347, their preferred form); a ratio
    without a denominator is 0 (scikit-learn's ``zero_division=0``).
    """
    num_classes = len(class_names)
    _check_logits(logits, labels, num_classes)
    matrix = confusion_matrix(labels, logits.argmax(axis=1), num_classes)
    hits, support, predicted = np.diagonal(matrix), matrix.sum(axis=1), matrix.sum(axis=0)
    precision, recall, f1 = _ratio(hits, predicted), _ratio(hits, support), _ratio(2 * hits, support + predicted)
    present = support > 0
    num_rows = int(support.sum())
    accuracy = float(hits.sum() / num_rows)
    return {
        "num_rows": num_rows,
        "num_classes": num_classes,
        "accuracy": accuracy,
        "balanced_accuracy": _mean(recall[present]),
        "macro_precision": _mean(precision),
        "macro_recall": _mean(recall),
        "macro_f1": _mean(f1),
        "macro_precision_present": _mean(precision[present]),
        "macro_recall_present": _mean(recall[present]),
        "macro_f1_present": _mean(f1[present]),
        "micro_precision": accuracy,
        "micro_recall": accuracy,
        "micro_f1": accuracy,
        "weighted_precision": float((precision * support).sum() / num_rows),
        "weighted_recall": float((recall * support).sum() / num_rows),
        "weighted_f1": float((f1 * support).sum() / num_rows),
        "loss": _mean(cross_entropy(logits, labels)),
        "absent_classes": [name for name, there in zip(class_names, present, strict=True) if not there],
        "per_class": [
            {
                "label": name,
                "precision": float(precision[c]),
                "recall": float(recall[c]),
                "f1": float(f1[c]),
                "support": int(support[c]),
                "predicted": int(predicted[c]),
            }
            for c, name in enumerate(class_names)
        ],
    }


def confusion_matrix(labels: NDArray[Any], predicted: NDArray[Any], num_classes: int) -> NDArray[np.int64]:
    """Counts of (label, prediction) pairs, int64 [C, C]: a row per true class, a column per predicted class.

    Shapes: ``labels`` and ``predicted`` [N] integer.
    Raises ValueError where the lengths differ or a class is outside 0..C-1.
    """
    if labels.shape != predicted.shape or labels.ndim != 1:
        raise ValueError(f"labels {labels.shape} and predictions {predicted.shape} must be two vectors of one length")
    _check_classes("label", labels, num_classes)
    _check_classes("prediction", predicted, num_classes)
    pairs = labels.astype(np.int64) * num_classes + predicted.astype(np.int64)
    return np.bincount(pairs, minlength=num_classes * num_classes).astype(np.int64).reshape(num_classes, num_classes)


def cross_entropy(logits: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.float64]:
    """Cross entropy of each row in nats, float64 [N]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    own = np.take_along_axis(shifted, labels.astype(np.int64)[:, None], axis=1)[:, 0]
    losses: NDArray[np.float64] = np.log(np.exp(shifted).sum(axis=1)) - own
    return losses


def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Probabilities of each row, float64 [N, C]."""
    weights = logits.astype(np.float64)
    weights = np.exp(weights - weights.max(axis=1, keepdims=True))
    probabilities: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return probabilities


def _check_logits(logits: NDArray[Any], labels: NDArray[Any], num_classes: int) -> None:
    if logits.shape != (len(labels), num_classes):
        raise ValueError(
            f"logits {logits.shape} do not fit {len(labels)} labels and {num_classes} classes: expected [rows, classes]"
        )
    if not len(labels):
        raise ValueError("the split has no rows; there is nothing to measure")
    finite = np.isfinite(logits)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise ValueError(
            f"{int((~finite).any(axis=1).sum())} of {len(labels)} rows have a logit that is not finite, first row {row}, class "
            f"{column}: {logits[row, column]}; the weights or the input of that row are broken"
        )


def _check_classes(what: str, classes: NDArray[Any], num_classes: int) -> None:
    if not np.issubdtype(classes.dtype, np.integer):
        raise ValueError(f"{what}s are {classes.dtype}; expected integer class positions")
    outside = (classes < 0) | (classes >= num_classes)
    if outside.any():
        row = int(np.argmax(outside))
        raise ValueError(f"{what} {classes[row]} of row {row} is outside the {num_classes} classes 0..{num_classes - 1}")


def _ratio(numerator: NDArray[np.int64], denominator: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.divide(numerator, denominator, out=np.zeros(len(numerator)), where=denominator > 0)


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean())
