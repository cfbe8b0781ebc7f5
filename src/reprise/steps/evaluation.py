"""evaluate: the best checkpoint on the validation and test splits, baselines beside it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from reprise.config import SPLITS
from reprise.data.dataset import EncodedDataset
from reprise.device import choose_device
from reprise.evaluation.baselines import LabelledTexts, baseline_record, fit_baselines, split_figures
from reprise.evaluation.metrics import classification_metrics
from reprise.evaluation.predict import predict
from reprise.project import Project
from reprise.run_report import write_run_report
from reprise.steps.runs import best_model, dataset_of_run, read_result, read_split, tracked, trained_run, write_json
from reprise.tracking import mlflow_store

logger = logging.getLogger(__name__)


def evaluate(project: Project, key: str) -> dict[str, Any]:
    """The figures of the best checkpoint on validation and test, baselines beside it; written to runs/<key>/evaluation.

    The test split is read here and nowhere else, with the checkpoint that validation chose.
    """
    run_dir, config, device = trained_run(project, key), project.config, choose_device()
    data = dataset_of_run(project, key)
    result = read_result(project, key)
    folder = run_dir / "evaluation"
    folder.mkdir(exist_ok=True)
    with tracked(project, data, key) as (store, tracking_dir, run_id):
        model = best_model(project, data, run_dir, device)
        rows = {name: read_split(project, name) for name in SPLITS}
        logits = {
            name: predict(model, data.splits[name], config.evaluate.batch_size, device, data.manifest.tokenizer.pad_id)
            for name in ("validation", "test")
        }
        figures = {
            name: classification_metrics(values, data.splits[name].labels, data.manifest.labels) for name, values in logits.items()
        }
        metrics: dict[str, Any] = {
            "test": split_figures(figures["test"]),
            "validation": split_figures(figures["validation"]),
            "baselines": _baselines(project, data, rows, logits["test"]),
            "train": {name: result[name] for name in TRAIN_FIGURES},
        }
        _write_predictions(folder / "predictions.parquet", rows["test"], logits["test"], data.manifest.labels)
        write_json(folder / "metrics.json", metrics)
        counted = mlflow_store.count_test_evaluation(store, run_id, data.manifest.digest)
        logger.info("this test split was now evaluated %d times; every look at it makes its figures a little less honest", counted)
        write_run_report(project, data, key)
        mlflow_store.log_evaluation(store, tracking_dir, result["best_step"], _repeatable(metrics))
        mlflow_store.log_artifacts(store, run_id, [folder])
    return metrics


def _repeatable(metrics: dict[str, Any]) -> dict[str, Any]:
    """What MLflow gets to compare runs by: figures that the same checkpoint gives again to the bit, so no times."""
    baselines = {
        name: {figure: record[figure] for figure in ("accuracy", "macro_f1", "loss")}
        for name, record in metrics["baselines"].items()
    }
    return {"test": metrics["test"], "baselines": baselines}


TRAIN_FIGURES = ("seconds", "examples_per_second", "steps", "epochs", "best_step", "parameters")


def _baselines(project: Project, data: EncodedDataset, texts: dict[str, pa.Table], logits: NDArray[np.float32]) -> dict[str, Any]:
    rows = {name: LabelledTexts(texts[name]["text"].to_pylist(), data.splits[name].labels) for name in SPLITS}
    fitted = fit_baselines(
        project.config.evaluate.baselines,
        rows["train"],
        {name: rows[name] for name in ("validation", "test")},
        data.manifest.labels,
    )
    return {name: baseline_record(b, data.splits["test"].labels, logits.argmax(axis=1)) for name, b in fitted.items()}


def _write_predictions(path: Path, rows: pa.Table, logits: NDArray[np.float32], labels: list[str]) -> None:
    """One line per test row: row_id, label, predicted, logits (a list in the order of the manifest's labels)."""
    names = np.asarray(labels, dtype=object)
    table = pa.table(
        {
            "row_id": rows["row_id"],
            "label": rows["label"],
            "predicted": pa.array(names[logits.argmax(axis=1)], pa.string()),
            "logits": pa.array(list(logits), pa.list_(pa.float32())),
        }
    )
    pq.write_table(table, path, compression="zstd")
