"""Pictures: any number of classes, any class name, and an order that puts what is confused side by side."""

from __future__ import annotations

import io

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reprise.evaluation import pictures
from reprise.evaluation.metrics import ClassMetrics
from reprise.evaluation.pictures import (
    HIT,
    MISS,
    draw_confusion_matrix,
    draw_learning_curves,
    draw_per_class_f1,
    neighbours_first,
    shorten,
)

ODD_NAMES = [r"$\nocommand$", "línea\nnueva", "好的", "<b>&amp;", "x" * 90, r"\frac{1}{0}"]


def pixels(png: bytes) -> NDArray[np.float32]:
    assert png.startswith(b"\x89PNG")
    return np.asarray(matplotlib.image.imread(io.BytesIO(png)))[..., :3]


def holds(png: bytes, colour: str) -> bool:
    """Whether the picture has a spot near the colour."""
    wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return bool((np.abs(pixels(png) - wanted).max(axis=-1) < 0.02).any())


def per_class(names: list[str]) -> list[ClassMetrics]:
    return [ClassMetrics(label=name, precision=0.5, recall=1.0, f1=2 / 3, support=3, predicted=6) for name in names]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 4.0]))
def test_the_order_holds_each_class_once(num_classes: int, seed: int, rate: float) -> None:
    matrix = np.random.default_rng(seed).poisson(rate, (num_classes, num_classes)).astype(np.int64)
    before = matrix.copy()
    assert sorted(neighbours_first(matrix)) == list(range(num_classes))
    np.testing.assert_array_equal(matrix, before)


def test_what_is_confused_stands_side_by_side() -> None:
    matrix = np.diag([9, 9, 9, 9, 9, 9]).astype(np.int64)
    matrix[0, 5], matrix[5, 3], matrix[1, 4] = 5, 4, 3
    order = neighbours_first(matrix)
    assert order[:3] in ([0, 5, 3], [3, 5, 0])
    assert sorted(order[3:5]) == [1, 4]
    assert order[5] == 2


def test_hits_and_errors_have_their_colours() -> None:
    right = draw_confusion_matrix(np.diag([4, 4]).astype(np.int64), ["a", "b"])
    wrong = draw_confusion_matrix(np.array([[0, 4], [4, 0]]), ["a", "b"])
    assert holds(wrong, MISS)
    assert not holds(right, MISS)
    three_quarters = "#" + "".join(f"{round(255 + 0.75 * (int(HIT[i : i + 2], 16) - 255)):02x}" for i in (1, 3, 5))
    assert holds(right, three_quarters)
    assert not holds(wrong, three_quarters)


def test_any_class_name() -> None:
    """Formulas, line breaks, scripts that the font lacks: drawn as they are, without a warning."""
    matrix = np.ones((len(ODD_NAMES), len(ODD_NAMES)), dtype=np.int64)
    assert pixels(draw_confusion_matrix(matrix, ODD_NAMES)).size
    assert pixels(draw_per_class_f1(per_class(ODD_NAMES))).size


@pytest.mark.parametrize("matrix", [[[3]], [[0]], [[0, 0], [0, 0]]])
def test_degenerate_matrices(matrix: list[list[int]]) -> None:
    assert pixels(draw_confusion_matrix(np.array(matrix), ["a", "b"][: len(matrix)])).size


def test_cells_stay_readable_and_the_picture_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_CLASSES_DRAWN", 60)
    matrix = np.eye(75, dtype=np.int64)
    height = pixels(draw_confusion_matrix(matrix, [str(c) for c in range(75)])).shape[0]
    assert 20 * 60 < height < 24 * 60  # pixels a class, with the margins


@pytest.mark.parametrize(
    "curves",
    [
        {},
        {"train/loss": [], "validation/accuracy": [(3, 0.5)]},
        {
            "train/loss": [(s, 1 / (s + 1)) for s in range(200)],
            "validation/loss": [(100, 0.4), (199, 0.3)],
            "train/lr": [(1, 1.0)],
        },
    ],
)
def test_learning_curves_of_any_length(curves: dict[str, list[tuple[int, float]]]) -> None:
    assert pixels(draw_learning_curves(curves, 100)).size
    assert pixels(draw_learning_curves(curves, None)).size


def test_a_long_name_keeps_both_its_ends() -> None:
    assert shorten("short name") == "short name"
    assert shorten("balance_not_updated_after_bank_transfer", 21) == "balance_no…k_transfer"
    assert len(shorten("x" * 90, 21)) == 21
    assert shorten("two\n lines") == "two lines"
