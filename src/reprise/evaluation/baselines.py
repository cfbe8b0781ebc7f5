"""Two baselines that any model must beat, fitted on the train split and measured on the same rows as the model.

A baseline is deterministic and cheap: seconds, not minutes. Its settings were chosen on BANKING77's validation split and are no
params: a baseline that is tuned along with the model is no fixed point to compare with.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from reprise.evaluation.metrics import ClassificationMetrics, SplitFigures, classification_metrics

# Runs of letters and digits, and single other characters: a text that is not blank always has a token.
WORD_PATTERN = r"\w+|[^\w\s]"
# scikit-learn's SAGA reached the accuracy of a fully converged L-BFGS on 9,003 rows of 77 classes in 2 s instead of 30 s.
INVERSE_REGULARISATION = 30.0
TOLERANCE = 3e-3
MAX_PASSES = 100


@dataclass(frozen=True)
class LabelledTexts:
    """Rows of one split; ``labels`` int64 [N] are positions in the manifest's label list."""

    texts: Sequence[str]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Baseline:
    """A fitted baseline's answers: ``logits`` (log-probabilities, float64 [N, C]) and ``metrics`` by split.

    ``seconds`` is the wall time of fitting and predicting; ``note`` says what a reader must know, or is empty.
    """

    name: str
    logits: Mapping[str, NDArray[np.float64]]
    metrics: Mapping[str, ClassificationMetrics]
    seconds: float
    note: str


class BaselineRecord(SplitFigures):
    """A baseline's figures on the test split as ``metrics.json`` holds them, with those on validation inside.

    ``only_model_right`` and ``only_baseline_right`` count the test rows that one of the two gets right and the other wrong;
    ``p_value`` is the chance of a split at least that uneven if both were equally good.
    """

    validation: SplitFigures
    seconds: float
    note: str
    only_model_right: int
    only_baseline_right: int
    p_value: float


def fit_baselines(
    names: Sequence[str], train: LabelledTexts, splits: Mapping[str, LabelledTexts], class_names: Sequence[str]
) -> dict[str, Baseline]:
    """The named baselines (``majority``, ``tfidf_logreg``), fitted on ``train`` and measured on each of ``splits``.

    Raises ValueError for a name that does not exist.
    """
    if unknown := [name for name in names if name not in _PREDICTORS]:
        raise ValueError(f"no baseline is called {', '.join(unknown)}; there are {', '.join(_PREDICTORS)}")
    return {name: _fit(name, train, splits, class_names) for name in names}


def baseline_record(baseline: Baseline, labels: NDArray[Any], predicted: NDArray[Any]) -> BaselineRecord:
    """What ``metrics.json`` holds of a baseline, beside a model's ``predicted`` classes of the same test rows, int [N].

    Raises ValueError where the model was measured on another number of rows.
    """
    answers = baseline.logits["test"].argmax(axis=1)
    if not answers.shape == labels.shape == predicted.shape:
        raise ValueError(f"the baseline answered {len(answers)} test rows, the model {len(predicted)}, labels {len(labels)}")
    only_model = int(((predicted == labels) & (answers != labels)).sum())
    only_baseline = int(((predicted != labels) & (answers == labels)).sum())
    return {
        **split_figures(baseline.metrics["test"]),
        "validation": split_figures(baseline.metrics["validation"]),
        "seconds": baseline.seconds,
        "note": baseline.note,
        "only_model_right": only_model,
        "only_baseline_right": only_baseline,
        "p_value": sign_test(only_model, only_baseline),
    }


def split_figures(metrics: ClassificationMetrics) -> SplitFigures:
    """The figures without the table of classes."""
    return cast("SplitFigures", {key: value for key, value in metrics.items() if key != "per_class"})


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p-value of a split at least as uneven as ``wins`` to ``losses`` if either side were as likely.

    Source: McNemar's test in its exact form, a binomial test of the discordant pairs.
    """
    trials = wins + losses
    log_half = trials * math.log(0.5)
    log_choose = (math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * math.fsum(math.exp(term + log_half) for term in log_choose))


def _fit(name: str, train: LabelledTexts, splits: Mapping[str, LabelledTexts], class_names: Sequence[str]) -> Baseline:
    started = time.perf_counter()
    logits, note = _PREDICTORS[name](train, {split: rows.texts for split, rows in splits.items()}, len(class_names))
    seconds = time.perf_counter() - started
    metrics = {split: classification_metrics(logits[split], rows.labels, class_names) for split, rows in splits.items()}
    return Baseline(name=name, logits=logits, metrics=metrics, seconds=seconds, note=note)


def _majority(
    train: LabelledTexts, texts: Mapping[str, Sequence[str]], num_classes: int
) -> tuple[dict[str, NDArray[np.float64]], str]:
    """Always the most frequent class of the train split, with the classes' frequencies as probabilities."""
    counts = np.bincount(train.labels, minlength=num_classes)
    log_share = np.log((counts + 1) / (counts.sum() + num_classes))  # one more of each: an unseen class stays possible
    return {split: np.tile(log_share, (len(rows), 1)) for split, rows in texts.items()}, ""


def _tfidf_logreg(
    train: LabelledTexts, texts: Mapping[str, Sequence[str]], num_classes: int
) -> tuple[dict[str, NDArray[np.float64]], str]:
    """Logistic regression on TF-IDF of words and pairs of words."""
    model = make_pipeline(
        TfidfVectorizer(token_pattern=WORD_PATTERN, ngram_range=(1, 2), sublinear_tf=True),
        LogisticRegression(C=INVERSE_REGULARISATION, solver="saga", tol=TOLERANCE, max_iter=MAX_PASSES, random_state=0),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit(train.texts, train.labels)
    stopped_early = any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
    floor = -math.log(len(train.texts) + num_classes)
    logits = {}
    for split, rows in texts.items():
        logits[split] = np.full((len(rows), num_classes), floor)
        logits[split][:, model.classes_] = model.predict_log_proba(rows)
    return logits, f"stopped after {MAX_PASSES} passes, before it had converged" if stopped_early else ""


_PREDICTORS = {"majority": _majority, "tfidf_logreg": _tfidf_logreg}
