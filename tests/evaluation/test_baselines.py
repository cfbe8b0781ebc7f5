"""Baselines: deterministic, fitted on the train split alone, the same figures as scikit-learn by hand."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from scipy.stats import binomtest

from reprise.evaluation import baselines
from reprise.evaluation.baselines import LabelledTexts, baseline_record, fit_baselines, sign_test

NAMES = ("majority", "tfidf_logreg")
CLASSES = ["card", "cash", "fee"]
WORDS = {0: ["card", "chip", "pin"], 1: ["cash", "note", "coin"], 2: ["fee", "charge", "cost"]}


def rows(num_rows: int, seed: int, classes: tuple[int, ...] = (0, 0, 1, 2)) -> LabelledTexts:
    """Short texts that carry one telling word and three that tell nothing."""
    generator = np.random.default_rng(seed)
    labels = generator.choice(classes, num_rows)
    fillers = ["my", "the", "why", "please", "today", "is", "was", "it"]
    texts = [" ".join([*generator.choice(fillers, 3), str(generator.choice(WORDS[label]))]) for label in labels.tolist()]
    return LabelledTexts(texts, labels.astype(np.int64))


TRAIN, SPLITS = rows(240, 1), {"validation": rows(60, 2), "test": rows(80, 3)}


def test_what_they_score() -> None:
    found = fit_baselines(NAMES, TRAIN, SPLITS, CLASSES)
    assert list(found) == list(NAMES)
    share = float((SPLITS["test"].labels == 0).mean())
    majority, logreg = found["majority"].metrics["test"], found["tfidf_logreg"].metrics["test"]
    assert majority["accuracy"] == share
    assert majority["macro_f1"] == pytest.approx(2 * share / (1 + share) / 3)
    assert logreg["accuracy"] == 1.0
    assert logreg["loss"] < 0.5 < majority["loss"]
    assert found["tfidf_logreg"].note == ""
    assert set(found["majority"].metrics) == {"validation", "test"}
    assert all(baseline.seconds > 0 for baseline in found.values())


def test_the_same_every_time() -> None:
    one, other = (fit_baselines(NAMES, TRAIN, SPLITS, CLASSES) for _ in range(2))
    for name in NAMES:
        np.testing.assert_array_equal(one[name].logits["test"], other[name].logits["test"])


def test_nothing_is_learned_from_the_rows_they_are_measured_on() -> None:
    alone = fit_baselines(NAMES, TRAIN, {"test": SPLITS["test"]}, CLASSES)
    beside = fit_baselines(NAMES, TRAIN, SPLITS, CLASSES)
    for name in NAMES:
        np.testing.assert_array_equal(alone[name].logits["test"], beside[name].logits["test"])


def test_a_class_without_train_rows_stays_possible() -> None:
    """Its column is there, finite and never the largest."""
    found = fit_baselines(NAMES, rows(120, 4, classes=(0, 1)), SPLITS, CLASSES)
    for baseline in found.values():
        assert baseline.logits["test"].shape == (80, 3)
        assert np.isfinite(baseline.logits["test"]).all()
        assert not (baseline.logits["test"].argmax(axis=1) == 2).any()
        assert baseline.metrics["test"]["per_class"][2]["recall"] == 0


def test_texts_of_single_characters() -> None:
    """scikit-learn's own token pattern finds nothing here and raises."""
    train = LabelledTexts(["?", "!", "? ?", "好", "!", "a"], np.array([0, 1, 0, 1, 1, 0]))
    found = fit_baselines(("tfidf_logreg",), train, {"test": train}, ["asks", "tells"])
    assert found["tfidf_logreg"].metrics["test"]["accuracy"] == 1.0


def test_a_fit_cut_short_is_noted_and_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "MAX_PASSES", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit_baselines(("tfidf_logreg",), TRAIN, SPLITS, CLASSES)
    assert found["tfidf_logreg"].note == "stopped after 1 passes, before it had converged"


def test_the_record_holds_the_paired_rows() -> None:
    baseline = fit_baselines(("majority",), TRAIN, SPLITS, CLASSES)["majority"]
    labels = SPLITS["test"].labels
    predicted = labels.copy()
    first_of_majority = int(np.flatnonzero(labels == 0)[0])
    predicted[first_of_majority] = 1
    record = baseline_record(baseline, labels, predicted)
    assert record["only_model_right"] == int((labels != 0).sum())
    assert record["only_baseline_right"] == 1
    assert record["p_value"] < 1e-6
    assert record["accuracy"] == baseline.metrics["test"]["accuracy"]
    assert record["validation"]["macro_f1"] == baseline.metrics["validation"]["macro_f1"]
    assert "per_class" not in {*record, *record["validation"]}
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    with pytest.raises(ValueError, match="the baseline answered 80 test rows, the model 79"):
        baseline_record(baseline, labels, predicted[:-1])


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (5, 5), (3, 11), (11, 3), (150, 60), (1200, 1100)])
def test_sign_test_equals_scipy(wins: int, losses: int) -> None:
    expected = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert sign_test(wins, losses) == pytest.approx(expected, rel=1e-9)


def test_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="no baseline is called svm; there are majority, tfidf_logreg"):
        fit_baselines(("majority", "svm"), TRAIN, SPLITS, CLASSES)
