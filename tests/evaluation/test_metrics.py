"""Metrics against scikit-learn, on random and on degenerate splits, and against numbers worked by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn import metrics as reference

from reprise.evaluation.metrics import classification_metrics, confusion_matrix, cross_entropy, softmax


def names_of(num_classes: int) -> list[str]:
    return [f"class {c}" for c in range(num_classes)]


def logits_for(predicted: NDArray[Any], num_classes: int, seed: int = 0) -> NDArray[np.float32]:
    """Logits whose largest entry is the wanted prediction."""
    logits = np.random.default_rng(seed).uniform(-1, 1, (len(predicted), num_classes)).astype(np.float32)
    logits[np.arange(len(predicted)), predicted] += 3
    return logits


@st.composite
def splits(draw: st.DrawFn) -> tuple[NDArray[np.float32], NDArray[np.int64], int]:
    """Splits of any shape: one class, one row, absent classes, classes never predicted, ties, huge logits."""
    num_classes = draw(st.integers(1, 9))
    num_rows = draw(st.integers(1, 60))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    usable = draw(st.integers(1, num_classes))
    labels = generator.integers(0, usable, num_rows)
    scale = draw(st.sampled_from([0.0, 1.0, 30.0, 3e4]))
    logits = (generator.normal(size=(num_rows, num_classes)) * scale).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    return logits, labels, num_classes


@pytest.mark.filterwarnings("ignore:A single label was found:UserWarning", "ignore:y_pred contains classes:UserWarning")
@settings(max_examples=80, deadline=None)
@given(splits())
def test_equal_to_scikit_learn(split: tuple[NDArray[np.float32], NDArray[np.int64], int]) -> None:
    logits, labels, num_classes = split
    found = classification_metrics(logits, labels, names_of(num_classes))
    predicted = logits.argmax(axis=1)
    classes = list(range(num_classes))
    present = sorted(set(labels.tolist()))

    matrix = reference.confusion_matrix(labels, predicted, labels=classes)
    np.testing.assert_array_equal(confusion_matrix(labels, predicted, num_classes), matrix)
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(labels, predicted), abs=1e-12)
    assert found["balanced_accuracy"] == pytest.approx(reference.balanced_accuracy_score(labels, predicted), abs=1e-12)
    over = {"macro": ("macro", classes, ""), "micro": ("micro", classes, ""), "weighted": ("weighted", classes, "")}
    over["present"] = ("macro", present, "_present")
    for average, pinned, ending in over.values():
        scores = reference.precision_recall_fscore_support(labels, predicted, labels=pinned, average=average, zero_division=0)
        for name, score in zip(("precision", "recall", "f1"), scores, strict=False):
            assert dict(found)[f"{average}_{name}{ending}"] == pytest.approx(score, abs=1e-12)
    table = reference.precision_recall_fscore_support(labels, predicted, labels=classes, average=None, zero_division=0)
    for c, row in enumerate(found["per_class"]):
        assert (row["precision"], row["recall"], row["f1"]) == pytest.approx([table[0][c], table[1][c], table[2][c]], abs=1e-12)
        assert (row["support"], row["predicted"]) == (table[3][c], int((predicted == c).sum()))
    assert found["absent_classes"] == [f"class {c}" for c in classes if c not in present]


@settings(max_examples=60, deadline=None)
@given(splits())
def test_loss_equals_scikit_learn(split: tuple[NDArray[np.float32], NDArray[np.int64], int]) -> None:
    logits, labels, num_classes = split
    probabilities = softmax(logits)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-12)
    loss = classification_metrics(logits, labels, names_of(num_classes))["loss"]
    assert 0 <= loss < np.inf
    own = probabilities[np.arange(len(labels)), labels]
    if num_classes > 1 and own.min() > 1e-12:  # scikit-learn clips below that
        assert loss == pytest.approx(reference.log_loss(labels, probabilities, labels=list(range(num_classes))), rel=1e-9)


def test_an_absent_class_lowers_macro_f1() -> None:
    """Two of three classes occur and all rows are right: 2/3 over the manifest's classes, 1 over those present."""
    labels = np.array([0, 0, 1, 1, 1])
    found = classification_metrics(logits_for(labels, 3), labels, ["yes", "no", "perhaps"])
    assert found["macro_f1"] == pytest.approx(2 / 3)
    assert found["macro_f1_present"] == found["accuracy"] == found["balanced_accuracy"] == found["weighted_f1"] == 1.0
    assert found["absent_classes"] == ["perhaps"]
    assert found["per_class"][2] == {"label": "perhaps", "precision": 0, "recall": 0, "f1": 0, "support": 0, "predicted": 0}


def test_worked_by_hand() -> None:
    labels, predicted = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(confusion_matrix(labels, predicted, 3), [[2, 1, 0], [0, 1, 1], [0, 0, 1]])
    found = classification_metrics(logits_for(predicted, 3), labels, names_of(3))
    assert found["accuracy"] == found["micro_f1"] == pytest.approx(4 / 6)
    assert [row["precision"] for row in found["per_class"]] == pytest.approx([1, 1 / 2, 1 / 2])
    assert [row["recall"] for row in found["per_class"]] == pytest.approx([2 / 3, 1 / 2, 1])
    assert [row["f1"] for row in found["per_class"]] == pytest.approx([4 / 5, 1 / 2, 2 / 3])
    assert found["macro_f1"] == pytest.approx((4 / 5 + 1 / 2 + 2 / 3) / 3)
    assert found["weighted_f1"] == pytest.approx((3 * 4 / 5 + 2 * 1 / 2 + 2 / 3) / 6)
    assert cross_entropy(np.array([[0.0, 0.0]]), np.array([1])) == pytest.approx([np.log(2)])


def test_independent_of_the_batch_size() -> None:
    """The figures of 600 rows are the same however the logits were made; a mean over batches is another number."""
    generator = np.random.default_rng(5)
    labels = generator.integers(0, 10, 600)
    logits = generator.normal(size=(600, 10)).astype(np.float32)
    logits[np.arange(600), labels] += 2
    whole = classification_metrics(logits, labels, names_of(10))
    batches = [slice(start, start + 32) for start in range(0, 600, 32)]
    joined = np.concatenate([logits[rows] for rows in batches])
    assert classification_metrics(joined, labels, names_of(10)) == whole
    per_batch = [classification_metrics(logits[rows], labels[rows], names_of(10))["macro_f1"] for rows in batches]
    assert abs(float(np.mean(per_batch)) - whole["macro_f1"]) > 0.01


def test_the_order_of_rows_does_not_matter() -> None:
    generator = np.random.default_rng(6)
    labels, logits = generator.integers(0, 4, 50), generator.normal(size=(50, 4))
    order = generator.permutation(50)
    one, other = (classification_metrics(x, y, names_of(4)) for x, y in ((logits, labels), (logits[order], labels[order])))
    assert one.pop("loss") == pytest.approx(other.pop("loss"), rel=1e-12)  # type: ignore[misc]  # popped to compare the rest exactly
    assert one == other


def test_ready_for_json() -> None:
    labels = np.array([0, 1, 1])
    found = classification_metrics(logits_for(labels, 2), labels, names_of(2))
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_huge_logits_do_not_overflow() -> None:
    logits = np.array([[3e38, -3e38], [-3e38, 3e38]], dtype=np.float32)
    found = classification_metrics(logits, np.array([0, 0]), names_of(2))
    assert np.isfinite(found["loss"])
    assert found["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (np.zeros((3, 2)), np.array([0, 1]), r"\(3, 2\) do not fit 2 labels and 2 classes"),
        (np.zeros((2, 3)), np.array([0, 1]), r"\(2, 3\) do not fit 2 labels and 2 classes"),
        (np.zeros((0, 2)), np.array([], dtype=np.int64), "no rows"),
        (np.array([[0.0, 1.0], [np.nan, 0.0]]), np.array([0, 1]), "1 of 2 rows .* first row 1, class 0: nan"),
        (np.zeros((2, 2)), np.array([0, 2]), r"label 2 of row 1 is outside the 2 classes 0\.\.1"),
        (np.zeros((2, 2)), np.array([-1, 0]), "label -1 of row 0 is outside"),
        (np.zeros((2, 2)), np.array([0.0, 1.0]), "labels are float64"),
    ],
)
def test_refuses_what_cannot_be_measured(logits: NDArray[Any], labels: NDArray[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classification_metrics(logits, labels, names_of(2))
