"""The report: complete, self-contained, safe to open whatever the texts hold, and right in what it says in words."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from reprise.evaluation.baselines import BaselineRecord, sign_test, split_figures
from reprise.evaluation.metrics import classification_metrics
from reprise.evaluation.report import (
    MAX_EXAMPLE_LENGTH,
    DataFacts,
    ExportFacts,
    GateRule,
    ReportFacts,
    ScoredRows,
    TrainingFacts,
    render_report,
    standings,
    surest_errors,
    top_confusions,
    verdict,
    write_report,
)

NAMES = ["card", "cash_<i>out", "fee", "never"]
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
PICTURES = ("confusion_matrix", "learning_curves", "per_class_f1")
VOID = {"meta", "img", "input", "br", "wbr", "link", "source"}


def rows() -> ScoredRows:
    """Nine rows of three of the four classes; rows 2, 5 and 8 are wrong, 5 with the most probability."""
    labels = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    predicted = np.array([0, 0, 1, 1, 1, 2, 2, 2, 1])
    logits = np.zeros((9, 4), dtype=np.float32)
    logits[np.arange(9), predicted] = [3, 3, 2, 3, 3, 5, 3, 3, 1]
    return ScoredRows([f"{i:016x}-0" for i in range(9)], [f"text {i} {EVIL}" for i in range(9)], labels, logits)


def record(accuracy: float, wins: int, losses: int, num_rows: int = 9) -> BaselineRecord:
    figures: Any = {**split_figures(classification_metrics(rows().logits, rows().labels, NAMES)), "accuracy": accuracy}
    figures["num_rows"] = num_rows
    paired: Any = {"only_model_right": wins, "only_baseline_right": losses, "p_value": sign_test(wins, losses)}
    return cast("BaselineRecord", {**figures, **paired, "validation": figures, "seconds": 1.5, "note": ""})


@pytest.fixture
def facts() -> ReportFacts:
    scored = rows()
    metrics = classification_metrics(scored.logits, scored.labels, NAMES)
    splits = ("train", "validation", "test")
    return ReportFacts(
        model_name="banking",
        recipe="bag",
        class_names=NAMES,
        metrics={"test": metrics, "validation": metrics},
        baselines={"majority": record(3 / 9, 3, 0), "tfidf_logreg": record(6 / 9, 1, 1)},
        rows=scored,
        curves={"train/loss": [(1, 2.0), (2, 1.0)], "validation/loss": [(2, 1.1)], "validation/macro_f1": [(2, 0.5)]},
        training=TrainingFacts("bag", 1_234_567, 5.25, 8, 1128, 987, 13000.0, "CPU, 2 threads"),
        data=DataFacts(
            source="package x 1.0",
            digest="d" * 64,
            num_rows=dict.fromkeys(splits, 9),
            class_counts={split: {"card": 3, "cash_<i>out": 3, "fee": 3} for split in splits},
            quarantined=2,
            duplicates_across_splits=1,
            tokenizer="bpe",
            vocab_size=4096,
            max_length=128,
            truncated=dict.fromkeys(splits, 4),
            token_counts={split: {"mean": 9.5, "max": 30, "p50": 9, "p99": 28} for split in splits},
        ),
        export=ExportFacts("model.onnx", 3 * 2**20, "e" * 64, 20, 9, 2.4e-6, 1e-3, 1.0),
        gate=[GateRule("accuracy", 0.667, 0.5, passed=True)],
        provenance={"Run key": "0123456789abcdef", "MLflow run": "f" * 32, "Git": "3f2c9a1, clean"},
        settings={"train.seed": 17, "data.columns.group": None},
    )


class Page(HTMLParser):
    """Reads a page and keeps its tags, attributes and text; fails where tags are not closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data


def page_of(facts: ReportFacts) -> tuple[str, Page]:
    """The page around three pictures of one byte more than a PNG header."""
    source = render_report(facts, dict.fromkeys(PICTURES, b"\x89PNG\r\n\x1a\n" + bytes(16)))
    return source, Page(source)


def test_what_is_written(facts: ReportFacts, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "evaluation"
    page = Page(write_report(folder, facts).read_text(encoding="utf-8"))
    assert {path.name for path in folder.iterdir()} == {"report.html", *(f"{name}.png" for name in PICTURES)}
    embedded = {value for tag, name, value in page.attributes if (tag, name) == ("img", "src")}
    files = {(folder / f"{name}.png").read_bytes() for name in PICTURES}
    assert {base64.b64decode(uri.removeprefix("data:image/png;base64,")) for uri in embedded} == files
    for expected in (
        "accuracy 66.7\u00a0%",
        "Gate passed",
        "1,234,567 parameters",
        "2.4e-06 (allowed 1.0e-03)",
        "Same answers",
        "0123456789abcdef",
        "3f2c9a1, clean",
        "train.seed",
        "d" * 64,
        "e" * 64,
        "text 5 " + EVIL,
        "cash_<i>out",
        "3.0\u00a0MiB",
    ):
        assert expected in page.text


def test_the_same_facts_give_the_same_bytes(facts: ReportFacts, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write_report(tmp_path / folder, facts)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_needs_no_network(facts: ReportFacts) -> None:
    source, page = page_of(facts)
    for tag, name, value in page.attributes:
        if name in ("src", "href", "srcset", "action", "data"):
            assert value.startswith(("data:image/png;base64,", "#")), (tag, name, value[:80])
    assert not re.search(r"https?:|@import|url\(", source)
    assert "default-src 'none'" in source


def test_only_its_own_script_runs(facts: ReportFacts) -> None:
    evil = replace(
        facts,
        model_name=EVIL,
        recipe=EVIL,
        class_names=[EVIL, *NAMES[1:]],
        metrics=dict.fromkeys(("test", "validation"), classification_metrics(rows().logits, rows().labels, [EVIL, *NAMES[1:]])),
        provenance={EVIL: EVIL},
        settings={EVIL: EVIL},
        gate=[GateRule(EVIL, 0.1, 0.2, passed=False)],
        data=replace(facts.data, source=EVIL, tokenizer=EVIL),
        training=replace(facts.training, device=EVIL, model_kind=EVIL),
    )
    source, page = page_of(evil)
    assert page.tags.count("script") == 1
    assert page.tags.count("img") == 3
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert page.text.count(EVIL) >= 15
    script = source.split("<script>")[1].split("</script>")[0]
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in source


def test_accessible_by_construction(facts: ReportFacts) -> None:
    source, page = page_of(facts)
    assert '<html lang="en">' in source
    assert "width=device-width" in source
    assert "prefers-color-scheme: dark" in source
    pictures = [value for tag, name, value in page.attributes if (tag, name) == ("img", "alt")]
    assert len(pictures) == 3
    assert all(pictures)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = {value.removeprefix("#") for _, name, value in page.attributes if name in ("href", "for", "aria-labelledby")}
    assert targets <= set(ids)
    assert page.tags.count("h1") == 1


def test_a_refusal_and_no_file(facts: ReportFacts) -> None:
    gate = [GateRule("accuracy", 0.667, 0.9, passed=False), GateRule("macro F1", 0.5, 0.1, passed=True)]
    _, page = page_of(replace(facts, gate=gate, export=None))
    assert "Gate refused" in page.text
    assert "accuracy 0.667 < 0.900" in page.text
    assert "macro F1 0.500 ≥ 0.100" in page.text
    assert "The model was not exported." in page.text


def test_an_export_that_strays_is_not_called_the_same(facts: ReportFacts) -> None:
    assert facts.export is not None
    _, page = page_of(replace(facts, export=replace(facts.export, label_agreement=0.9)))
    assert "Not the same answers" in page.text


def test_a_perfect_model(facts: ReportFacts) -> None:
    scored = replace(rows(), labels=rows().logits.argmax(axis=1))
    metrics = classification_metrics(scored.logits, scored.labels, NAMES)
    _, page = page_of(replace(facts, rows=scored, metrics={"test": metrics, "validation": metrics}, curves={}))
    assert page.text.count("No test row is wrong.") == 2


def test_rows_that_do_not_fit(facts: ReportFacts, tmp_path: Path) -> None:
    short = replace(facts, rows=replace(facts.rows, texts=facts.rows.texts[:-1]))
    with pytest.raises(ValueError, match="the test split has 9 rows in its metrics, but 9 row ids, 8 texts"):
        write_report(tmp_path / "out", short)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        (record(0.5, 60, 20, 900), "the model beats it: 300 errors instead of 450, 33\u00a0% fewer"),
        (record(0.5, 60, 20, 900), "only the baseline on 20: more than chance explains (p\u00a0<\u00a00.001)."),
        (record(0.66, 20, 14, 900), "the model is not shown to differ from it: 300 errors to its 306"),
        (record(0.66, 20, 14, 900), "a difference that chance explains (p\u00a0=\u00a00.39)."),
        (record(0.8, 20, 140, 900), "the model is worse: 300 errors instead of 180"),
        (record(6 / 9, 5, 5, 900), "TF-IDF + logistic regression reaches the same accuracy, 66.7\u00a0%."),
    ],
)
def test_the_verdict_on_a_baseline(facts: ReportFacts, baseline: BaselineRecord, expected: str) -> None:
    metrics: Any = {**facts.metrics["test"], "num_rows": 900}
    sentences = verdict(replace(facts, metrics={"test": metrics, "validation": metrics}, baselines={"tfidf_logreg": baseline}))
    assert sentences[0].startswith("On 900 test rows the model is right 600 times")
    assert expected in sentences[1]


def test_the_verdict_names_absent_classes(facts: ReportFacts) -> None:
    present = facts.metrics["test"]["macro_f1_present"]
    assert verdict(facts)[-1] == (
        "1 class has no test row (never) and counts as 0 in the macro average; "
        f"over the classes that do occur, macro F1 is {present:.3f}."
    )


def test_standings_are_ranked(facts: ReportFacts) -> None:
    worse = replace(facts, baselines={"majority": record(0.1, 5, 0), "tfidf_logreg": record(0.9, 0, 2)})
    assert [row["name"] for row in standings(worse)] == ["TF-IDF + logistic regression", "This model", "Most frequent class"]
    assert standings(facts)[0]["own"]


def test_confusions_and_errors_by_hand() -> None:
    scored = rows()
    scored.labels[8] = 0  # now two rows of class 0 are taken for class 1: row 2 surer than row 8
    first, second = top_confusions(scored, NAMES, 5)
    assert (first.label, first.predicted, first.count, first.support, first.reverse_count) == ("card", "cash_<i>out", 2, 4, 0)
    assert first.example.startswith("text 2")
    assert (second.label, second.predicted, second.count, second.reverse_count) == ("cash_<i>out", "fee", 1, 0)
    assert len(top_confusions(scored, NAMES, 1)) == 1

    errors = surest_errors(scored, NAMES, 2)
    assert [error.row_id for error in errors] == [f"{5:016x}-0", f"{2:016x}-0"]
    assert errors[0].probability == pytest.approx(np.exp(5) / (np.exp(5) + 3))
    assert errors[0].label_probability == pytest.approx(1 / (np.exp(5) + 3))
    assert (errors[0].label, errors[0].predicted) == ("cash_<i>out", "fee")


def test_a_long_text_is_cut() -> None:
    scored = replace(rows(), texts=["a" * 5000] * 9)
    example = top_confusions(scored, NAMES, 1)[0].example
    assert example == "a" * MAX_EXAMPLE_LENGTH + "… (5,000 characters)"
