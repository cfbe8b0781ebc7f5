"""Gathers from the files of a run what its report shows."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pydantic import BaseModel

from reprise.config import Config, flatten
from reprise.data.dataset import EncodedDataset
from reprise.evaluation.metrics import classification_metrics
from reprise.evaluation.report import (
    DataFacts,
    ExportFacts,
    GateRule,
    ReportFacts,
    ScoredRows,
    TrainingFacts,
    write_report,
)
from reprise.project import Project
from reprise.tracking.journal import read_points
from reprise.tracking.provenance import git_state


def write_run_report(project: Project, data: EncodedDataset, key: str) -> Path:
    """The path of report.html, written with its pictures to runs/<key>/evaluation from what the run's files hold so far."""
    run_dir, config = project.run_dir(key), project.config
    metrics, result = _read(run_dir / "evaluation" / "metrics.json"), _read(run_dir / "result.json")
    proof_path = run_dir / "export" / "export.json"
    proof = _read(proof_path) if proof_path.exists() else None
    rows = _scored_rows(project, run_dir, data)
    validation: Any = {**metrics["validation"], "per_class": []}  # the page shows classes of the test split only
    facts = ReportFacts(
        model_name=config.registry.model_name,
        recipe=project.recipe,
        class_names=data.manifest.labels,
        metrics={"test": classification_metrics(rows.logits, rows.labels, data.manifest.labels), "validation": validation},
        baselines=metrics["baselines"],
        rows=rows,
        curves=_curves(run_dir / "journal.jsonl"),
        training=TrainingFacts(
            model_kind=config.model.kind,
            num_parameters=result["parameters"],
            seconds=result["seconds"],
            epochs=result["epochs"],
            steps=result["steps"],
            best_step=result["best_step"],
            examples_per_second=result["examples_per_second"],
            device=result["device"],
        ),
        data=_data_facts(project, data),
        export=_export_facts(config, proof),
        gate=_gate_rules(config, metrics, proof),
        provenance=_provenance(project, data, key, result),
        settings={k: v for section in ("model", "train", "tokenizer", "data") for k, v in _flat(config, section).items()},
    )
    return write_report(run_dir / "evaluation", facts)


def _read(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return tree


def _flat(config: Config, section: str) -> dict[str, Any]:
    values: BaseModel = getattr(config, section)
    return flatten(values, section)


def _scored_rows(project: Project, run_dir: Path, data: EncodedDataset) -> ScoredRows:
    predictions = pq.read_table(run_dir / "evaluation" / "predictions.parquet")
    texts = pq.read_table(project.split_dir / "test.parquet", columns=["text"])
    return ScoredRows(
        row_ids=predictions["row_id"].to_pylist(),
        texts=texts["text"].to_pylist(),
        labels=data.splits["test"].labels,
        logits=np.asarray(predictions["logits"].to_pylist(), dtype=np.float32),
    )


def _curves(journal: Path) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for point in read_points(journal)[0]:
        if point.name.startswith(("train/", "validation/")):
            curves[point.name].append((point.step, point.value))
    return dict(curves)


def _data_facts(project: Project, data: EncodedDataset) -> DataFacts:
    manifest, split_facts = data.manifest, _read(project.split_dir / "split.json")
    source = project.config.data.source.model_dump(mode="json")
    origin = source.get("package") or source.get("repository") or source.get("path") or ", ".join(source.get("files", {}))
    return DataFacts(
        source=f"{source['kind']} {origin}",
        digest=manifest.digest,
        num_rows=manifest.num_rows,
        class_counts=manifest.class_counts,
        quarantined=manifest.quarantined,
        duplicates_across_splits=split_facts["duplicates_across_splits"],
        tokenizer=manifest.tokenizer.kind,
        vocab_size=manifest.tokenizer.vocab_size,
        max_length=manifest.max_length,
        truncated=manifest.truncated,
        token_counts={split: counts.model_dump() for split, counts in manifest.token_counts.items()},
    )


def _export_facts(config: Config, proof: dict[str, Any] | None) -> ExportFacts | None:
    if proof is None:
        return None
    return ExportFacts(
        file_name="model.onnx",
        num_bytes=proof["num_bytes"],
        sha256=proof["sha256"],
        opset=config.export.opset,
        num_rows=proof["num_rows"],
        max_logit_difference=proof["max_logit_difference"],
        allowed_logit_difference=proof["tolerance"],
        label_agreement=proof["label_agreement"],
    )


def _gate_rules(config: Config, metrics: dict[str, Any], proof: dict[str, Any] | None) -> list[GateRule]:
    rules = [
        GateRule(f"test {name}", metrics["test"][name], least, metrics["test"][name] >= least)
        for name, least in config.registry.gate.minimum.items()
    ]
    if proof is not None:
        agreement = proof["label_agreement"]
        rules.append(GateRule("labels equal in PyTorch and ONNX", agreement, 1.0, not proof["refusals"]))
    return rules


def _provenance(project: Project, data: EncodedDataset, key: str, result: dict[str, Any]) -> dict[str, str]:
    git = git_state(project.workdir)
    return {
        "run key": key,
        "MLflow run": result["mlflow_run_id"],
        "dataset digest": data.manifest.digest,
        "git commit": f"{git.commit or git.note}{' with changes' if git.dirty else ''}",
        "weights (best)": result["best_state_digest"],
        "weights (last)": result["state_digest"],
        **{f"version of {name}": value for name, value in result["versions"].items()},
    }
