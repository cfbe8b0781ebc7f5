"""The report of one run: a single HTML page that needs no network, and its pictures beside it.

Everything on the page comes from ``ReportFacts``: plain values that any caller can fill in. Texts and class names are data of
strangers: the template escapes them, and a content security policy lets only this page's own script run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from numpy.typing import NDArray

from reprise.evaluation.baselines import BaselineRecord
from reprise.evaluation.metrics import ClassificationMetrics, confusion_matrix, softmax
from reprise.evaluation.pictures import (
    Curves,
    draw_confusion_matrix,
    draw_learning_curves,
    draw_per_class_f1,
)

MAX_CONFUSIONS = 15
MAX_ERRORS = 50
MAX_TEXT_LENGTH = 600  # characters of one text in the list of errors
MAX_EXAMPLE_LENGTH = 160  # and in the table of confusions
CHANCE = 0.05  # p-values below are called "more than chance explains"
BASELINE_NAMES = {"majority": "Most frequent class", "tfidf_logreg": "TF-IDF + logistic regression"}


@dataclass(frozen=True)
class ScoredRows:
    """The test rows in the order of the split: ``labels`` int [N] class positions, ``logits`` float [N, C]."""

    row_ids: Sequence[str]
    texts: Sequence[str]
    labels: NDArray[Any]
    logits: NDArray[Any]


@dataclass(frozen=True)
class TrainingFacts:
    """How the run went, as ``result.json`` has it. ``device`` in words, ``seconds`` of training alone."""

    model_kind: str
    num_parameters: int
    seconds: float
    epochs: int
    steps: int
    best_step: int | None
    examples_per_second: float
    device: str


@dataclass(frozen=True)
class DataFacts:
    """What was learned from, as ``manifest.json`` has it; mappings are by split. ``source`` in words."""

    source: str
    digest: str
    num_rows: Mapping[str, int]
    class_counts: Mapping[str, Mapping[str, int]]
    quarantined: int
    duplicates_across_splits: int
    tokenizer: str
    vocab_size: int
    max_length: int
    truncated: Mapping[str, int]
    token_counts: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class ExportFacts:
    """The proof that the file answers like the model: over ``num_rows`` test rows, and how far it may stray."""

    file_name: str
    num_bytes: int
    sha256: str
    opset: int
    num_rows: int
    max_logit_difference: float
    allowed_logit_difference: float
    label_agreement: float


@dataclass(frozen=True)
class GateRule:
    """One rule of the gate: ``name`` in words, ``found`` against ``required``."""

    name: str
    found: float
    required: float
    passed: bool


@dataclass(frozen=True)
class ReportFacts:
    """All that the page shows.

    ``metrics`` holds the splits ``test`` and ``validation``; ``curves`` maps metric keys to (step, value) points; ``export`` is
    None while there is no file; an empty ``gate`` means that nothing was asked. ``provenance`` (run key, MLflow run, git,
    versions, ...) and ``settings`` (dotted key: value) are shown line by line in their order.
    """

    model_name: str
    recipe: str
    class_names: Sequence[str]
    metrics: Mapping[str, ClassificationMetrics]
    baselines: Mapping[str, BaselineRecord]
    rows: ScoredRows
    curves: Curves
    training: TrainingFacts
    data: DataFacts
    export: ExportFacts | None
    gate: Sequence[GateRule]
    provenance: Mapping[str, str]
    settings: Mapping[str, object]


@dataclass(frozen=True)
class Confusion:
    """Rows of class ``label`` that were given class ``predicted``, the surest of them as ``example``."""

    label: str
    predicted: str
    count: int
    support: int
    reverse_count: int
    example: str


@dataclass(frozen=True)
class RowError:
    """One row that the model got wrong; probabilities are the softmax of the logits."""

    row_id: str
    text: str
    label: str
    predicted: str
    probability: float
    label_probability: float


def write_report(out_dir: Path, facts: ReportFacts) -> Path:
    """``report.html`` in ``out_dir``, with confusion_matrix.png, learning_curves.png and per_class_f1.png beside it.

    Each file appears whole or not at all. Raises ValueError where the rows do not fit together.
    """
    _check(facts)
    out_dir.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(facts)
    for name, png in pictures.items():
        _write_whole(out_dir / f"{name}.png", png)
    page = render_report(facts, pictures)
    _write_whole(out_dir / "report.html", page.encode("utf-8", errors="replace"))
    return out_dir / "report.html"


def draw_pictures(facts: ReportFacts) -> dict[str, bytes]:
    """PNG bytes of the three pictures by name, without the ending."""
    predicted = facts.rows.logits.argmax(axis=1)
    matrix = confusion_matrix(facts.rows.labels, predicted, len(facts.class_names))
    return {
        "confusion_matrix": draw_confusion_matrix(matrix, facts.class_names),
        "learning_curves": draw_learning_curves(facts.curves, facts.training.best_step),
        "per_class_f1": draw_per_class_f1(facts.metrics["test"]["per_class"]),
    }


def render_report(facts: ReportFacts, pictures: Mapping[str, bytes]) -> str:
    """The page as text, with the pictures inside."""
    environment = _environment()
    script = environment.get_template("report.js.j2").render()
    confusions = top_confusions(facts.rows, facts.class_names, MAX_CONFUSIONS)
    return environment.get_template("report.html.j2").render(
        facts=facts,
        test=facts.metrics["test"],
        validation=facts.metrics["validation"],
        verdict=verdict(facts),
        standings=standings(facts),
        gate_passed=all(rule.passed for rule in facts.gate),
        confusions=confusions,
        errors=surest_errors(facts.rows, facts.class_names, MAX_ERRORS),
        num_errors=int((facts.rows.logits.argmax(axis=1) != facts.rows.labels).sum()),
        classes=_class_rows(facts),
        pictures={name: _data_uri(png) for name, png in pictures.items()},
        picture_widths={name: _png_width(png) for name, png in pictures.items()},
        script=Markup(script),  # noqa: S704  # our own file, rendered without any value
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def verdict(facts: ReportFacts) -> list[str]:
    """The result in sentences: how often right, how far ahead of each baseline, and what to keep in mind."""
    test = facts.metrics["test"]
    right = round(test["accuracy"] * test["num_rows"])
    sentences = [
        f"On {test['num_rows']:,} test rows the model is right {right:,} times: accuracy {_percent(test['accuracy'])}, "
        f"macro F1 {test['macro_f1']:.3f} over {test['num_classes']} classes."
    ]
    ranked = sorted(facts.baselines.items(), key=lambda item: -item[1]["accuracy"])
    sentences += [_against(BASELINE_NAMES.get(name, name), record, test) for name, record in ranked]
    if absent := test["absent_classes"]:
        have, count = ("class has", "counts") if len(absent) == 1 else ("classes have", "count")
        sentences.append(
            f"{len(absent)} {have} no test row ({_listed(absent)}) and {count} as 0 in the macro average; over the classes "
            f"that do occur, macro F1 is {test['macro_f1_present']:.3f}."
        )
    return sentences


def standings(facts: ReportFacts) -> list[dict[str, Any]]:
    """The model and its baselines as rows of one table, the most accurate first."""
    test, validation = facts.metrics["test"], facts.metrics["validation"]
    rows: list[dict[str, Any]] = [
        {
            "name": "This model",
            "own": True,
            "test": test,
            "validation": validation,
            "seconds": facts.training.seconds,
            "note": "",
        }
    ]
    for name, record in facts.baselines.items():
        rows.append(
            {
                "name": BASELINE_NAMES.get(name, name),
                "own": False,
                "test": record,
                "validation": record["validation"],
                "seconds": record["seconds"],
                "note": record["note"],
            }
        )
    return sorted(rows, key=lambda row: (-row["test"]["accuracy"], not row["own"]))


def top_confusions(rows: ScoredRows, class_names: Sequence[str], limit: int) -> list[Confusion]:
    """The pairs of classes with the most errors, the larger first and among equals in the order of the classes."""
    predicted = rows.logits.argmax(axis=1)
    matrix = confusion_matrix(rows.labels, predicted, len(class_names))
    support = matrix.sum(axis=1)
    errors = matrix.copy()
    np.fill_diagonal(errors, 0)
    surest = softmax(rows.logits).max(axis=1)
    found = []
    for flat in np.argsort(-errors, axis=None, kind="stable")[: min(limit, int((errors > 0).sum()))]:
        label, other = (int(c) for c in np.unravel_index(flat, errors.shape))
        places = np.flatnonzero((rows.labels == label) & (predicted == other))
        example = rows.texts[int(places[np.argmax(surest[places])])]
        found.append(
            Confusion(
                label=class_names[label],
                predicted=class_names[other],
                count=int(errors[label, other]),
                support=int(support[label]),
                reverse_count=int(errors[other, label]),
                example=_cut(example, MAX_EXAMPLE_LENGTH),
            )
        )
    return found


def surest_errors(rows: ScoredRows, class_names: Sequence[str], limit: int) -> list[RowError]:
    """The rows that the model got wrong with the most probability, the surest first."""
    probabilities = softmax(rows.logits)
    predicted = rows.logits.argmax(axis=1)
    wrong = np.flatnonzero(predicted != rows.labels)
    ranked = wrong[np.argsort(-probabilities[wrong, predicted[wrong]], kind="stable")][:limit].tolist()
    return [
        RowError(
            row_id=rows.row_ids[i],
            text=_cut(rows.texts[i], MAX_TEXT_LENGTH),
            label=class_names[int(rows.labels[i])],
            predicted=class_names[int(predicted[i])],
            probability=float(probabilities[i, predicted[i]]),
            label_probability=float(probabilities[i, int(rows.labels[i])]),
        )
        for i in ranked
    ]


def _against(name: str, record: BaselineRecord, test: ClassificationMetrics) -> str:
    """How the model stands to one baseline, and whether chance explains the difference."""
    if name == BASELINE_NAMES["majority"] and test["accuracy"] > record["accuracy"] and record["p_value"] < CHANCE:
        return f"Always giving the train split's most frequent class would be right {_percent(record['accuracy'])} of the time."
    wins, losses = record["only_model_right"], record["only_baseline_right"]
    errors = round((1 - test["accuracy"]) * test["num_rows"])
    baseline_errors = round((1 - record["accuracy"]) * record["num_rows"])
    if wins == losses:
        return f"{name} reaches the same accuracy, {_percent(record['accuracy'])}."
    if record["p_value"] >= CHANCE:
        standing = f"the model is not shown to differ from it: {errors:,} errors to its {baseline_errors:,}"
        judgement = f"a difference that chance explains ({_p(record['p_value'])})"
    elif wins > losses:
        fewer = f", {_percent(1 - errors / baseline_errors, 0)} fewer" if baseline_errors else ""
        standing = f"the model beats it: {errors:,} errors instead of {baseline_errors:,}{fewer}"
        judgement = f"more than chance explains ({_p(record['p_value'])})"
    else:
        standing = f"the model is worse: {errors:,} errors instead of {baseline_errors:,}"
        judgement = f"more than chance explains ({_p(record['p_value'])}). Use the baseline, or find out why"
    return (
        f"{name} reaches {_percent(record['accuracy'])}; {standing}. "
        f"Only the model is right on {wins:,} rows, only the baseline on {losses:,}: {judgement}."
    )


def _class_rows(facts: ReportFacts) -> list[dict[str, Any]]:
    """The per-class table, the lowest F1 first, with the class that each is most often taken for."""
    predicted = facts.rows.logits.argmax(axis=1)
    errors = confusion_matrix(facts.rows.labels, predicted, len(facts.class_names))
    np.fill_diagonal(errors, 0)
    train_counts = facts.data.class_counts["train"]
    rows = []
    for c, row in enumerate(facts.metrics["test"]["per_class"]):
        taken_for = int(errors[c].argmax())
        count = int(errors[c, taken_for])
        mistaken = (facts.class_names[taken_for], count) if count else None
        rows.append({**row, "train": train_counts.get(row["label"], 0), "mistaken": mistaken})
    return sorted(rows, key=lambda row: (row["f1"], row["label"]))


def _check(facts: ReportFacts) -> None:
    rows, num_rows = facts.rows, facts.metrics["test"]["num_rows"]
    lengths = {len(rows.row_ids), len(rows.texts), len(rows.labels), len(rows.logits), num_rows}
    if len(lengths) > 1:
        raise ValueError(
            f"the test split has {num_rows} rows in its metrics, but {len(rows.row_ids)} row ids, {len(rows.texts)} texts, "
            f"{len(rows.labels)} labels and {len(rows.logits)} rows of logits; evaluate again"
        )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("reprise.evaluation"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "percent": _percent,
        "score": lambda value: f"{value:.3f}",
        "integer": lambda value: f"{value:,}",
        "seconds": _seconds,
        "size": _size,
        "scientific": lambda value: f"{value:.1e}",
        "breakable": _breakable,
    }
    environment.filters.update(filters)
    return environment


def _percent(fraction: float, digits: int = 1) -> str:
    return f"{100 * fraction:.{digits}f}\u00a0%"


def _p(value: float) -> str:
    return "p\u00a0<\u00a00.001" if value < 0.001 else f"p\u00a0=\u00a0{value:.2g}"


def _seconds(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.0f}\u00a0ms"
    if value < 120:
        return f"{value:.1f}\u00a0s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes:,}\u00a0min {seconds}\u00a0s"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}\u00a0MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f}\u00a0KiB"


def _listed(names: Sequence[str], limit: int = 8) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({len(text):,} characters)"


def _breakable(name: str) -> Markup:
    """The escaped name, which a line may leave after a joining character: identifiers hold no spaces."""
    return Markup("").join(escape(part) + (Markup("<wbr>") if part in "_/.-:" else "") for part in name)


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _png_width(png: bytes) -> int:
    return int.from_bytes(png[16:20], "big")


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
