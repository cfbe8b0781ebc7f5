"""export, gate, register, release: from a trained and evaluated run to what ships."""

from __future__ import annotations

import logging
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from reprise import __version__
from reprise.data.atomic import whole_folder
from reprise.data.sources import file_sha256
from reprise.export.onnx_export import export_onnx
from reprise.export.parity import check_shapes, check_split
from reprise.project import Project
from reprise.run_report import write_run_report
from reprise.serving.classifier import Classifier, ModelMetadata
from reprise.steps.runs import (
    best_model,
    dataset_of_run,
    read_json,
    read_result,
    read_split,
    tracked,
    tracking_dir,
    trained_run,
    write_json,
)
from reprise.tracking import mlflow_store
from reprise.tracking.provenance import git_state

logger = logging.getLogger(__name__)


def export(project: Project, key: str) -> dict[str, Any]:
    """The proof that model.onnx says what the trained model says; the file and the proof lie in runs/<key>/export.

    ``refusals`` in it lists why the file must not be released; empty if it may.

    Raises:
        ParityError: the file is broken: it fails at a shape, gives NaN or has another label order.
    """
    run_dir, config = trained_run(project, key), project.config
    data = dataset_of_run(project, key)
    predictions = _read_predictions(run_dir)
    path = run_dir / "export" / "model.onnx"
    with tracked(project, data, key) as (store, folder, run_id):
        model = best_model(project, data, run_dir, torch.device("cpu"))
        metadata = ModelMetadata(
            labels=tuple(data.manifest.labels),
            max_length=data.manifest.max_length,
            pad_id=data.manifest.tokenizer.pad_id,
            model_kind=config.model.kind,
            run_key=key,
            mlflow_run_id=run_id,
            dataset_digest=data.manifest.digest,
            versions={"reprise": __version__, **{name: version(name) for name in ("torch", "onnx", "onnxscript", "tokenizers")}},
        )
        export_onnx(model, path, opset=config.export.opset, metadata=metadata, tokenizer_json=data.tokenizer_json)
        tolerance = config.export.max_logit_difference
        shapes = check_shapes(
            model, path, vocab_size=data.manifest.tokenizer.vocab_size, max_length=data.manifest.max_length, tolerance=tolerance
        )
        parity = check_split(
            Classifier(path),
            read_split(project, "test")["text"].to_pylist(),
            np.asarray(predictions["logits"].to_pylist(), dtype=np.float32),
            predictions["label"].to_pylist(),
            data.manifest.labels,
            tolerance,
        )
        proof = {
            **parity.as_dict(),
            "shapes": shapes,
            "num_bytes": path.stat().st_size,
            "sha256": file_sha256(path),
            "refusals": parity.refusals(config.export.max_metric_drop),
        }
        write_json(path.with_name("export.json"), proof)
        exported = {name: proof[name] for name in ("max_logit_difference", "label_agreement", "num_bytes")}
        mlflow_store.log_evaluation(store, folder, read_result(project, key)["best_step"], {"export": exported})
        mlflow_store.log_artifacts(store, run_id, [path.parent])
    return proof


def gate(project: Project, key: str) -> list[str]:
    """Why this run must not be released, one line each; empty if it may. The verdict is a tag of the MLflow run."""
    run_dir = trained_run(project, key)
    metrics, proof = read_json(run_dir / "evaluation" / "metrics.json"), read_json(run_dir / "export" / "export.json")
    reasons = [f"export: {reason}" for reason in proof["refusals"]]
    for name, least in project.config.registry.gate.minimum.items():
        if metrics["test"][name] < least:
            reasons.append(f"test {name} is {metrics['test'][name]:.4f}, registry.gate.minimum asks for at least {least:g}")
    data = dataset_of_run(project, key)
    with tracked(project, data, key) as (store, _, run_id):
        write_run_report(project, data, key)
        mlflow_store.log_artifacts(store, run_id, [run_dir / "evaluation"])
        verdict = {"gate": "refused" if reasons else "passed", "reprise.gate_reasons": "; ".join(reasons) or "none"}
        mlflow_store.set_tags(store, run_id, verdict)
    return reasons


def register(project: Project, key: str) -> int:
    """The version of the registered model; the same run and the same bytes always give the same one."""
    run_dir = trained_run(project, key)
    data = dataset_of_run(project, key)
    with tracked(project, data, key) as (store, folder, run_id):
        registered = mlflow_store.register(store, folder, run_dir / "export" / "model.onnx", project.config.registry.model_name)
        mlflow_store.set_tags(store, run_id, {"reprise.model_version": f"{registered.name}/{registered.version}"})
    logger.info("registered as %s version %d, alias %s", registered.name, registered.version, mlflow_store.ALIAS)
    return registered.version


def release(project: Project, key: str, model_version: int) -> Path:
    """The folder ``release``, replaced as a whole by what this run made."""
    run_dir = trained_run(project, key)
    evaluation, exported = run_dir / "evaluation", run_dir / "export"
    proof = read_json(exported / "export.json")
    data = dataset_of_run(project, key)
    with whole_folder(project.release_dir) as folder:
        for path in (exported / "model.onnx", *evaluation.iterdir()):
            if path.name != "metrics.json":
                shutil.copyfile(path, folder / path.name)
        shutil.copyfile(project.params_path, folder / "params.yaml")
        exported_figures = {name: proof[name] for name in EXPORT_FIGURES}
        write_json(folder / "metrics.json", {**read_json(evaluation / "metrics.json"), "export": exported_figures})
        write_json(
            folder / "run.json",
            {
                "mlflow_run_id": mlflow_store.find_run(tracking_dir(project, key)),
                "run_key": key,
                "dataset_digest": data.manifest.digest,
                "git_commit": git_state(project.workdir).commit,
                "registered_model": project.config.registry.model_name,
                "model_version": model_version,
            },
        )
    return project.release_dir


EXPORT_FIGURES = ("max_logit_difference", "label_agreement", "num_flips", "num_rows", "num_bytes", "sha256")


def _read_predictions(run_dir: Path) -> pa.Table:
    try:
        return pq.read_table(run_dir / "evaluation" / "predictions.parquet")
    except FileNotFoundError:
        raise ValueError(f"run {run_dir.name} was not evaluated yet; run `reprise evaluate` first") from None
