"""What every step needs of a run: its files, its MLflow run, and the lock of the work folder."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from filelock import FileLock, Timeout
from torch import nn

from reprise.checkpoint import load_checkpoint
from reprise.config import digest, flatten, load_config
from reprise.data.atomic import write_whole_file
from reprise.data.dataset import EncodedDataset, open_dataset
from reprise.device import choose_device
from reprise.models import build_model, make_servable, trained_part
from reprise.project import Project, run_key
from reprise.tracking import mlflow_store
from reprise.tracking.provenance import environment, git_state
from reprise.training.averaging import shipped_weights

logger = logging.getLogger(__name__)

BEST, LAST = "best.pt", "last.pt"


def current_run_key(project: Project) -> str:
    """The key of the run that the params, the dataset, the code and the libraries at hand would train."""
    return run_key(open_dataset(project.encoded_dir, project.config).manifest.digest, project.config)


def list_runs(project: Project) -> list[dict[str, Any]]:
    """One row per run of the work folder, the latest last: key, recipe, status, best validation metric, steps, MLflow run."""
    rows = []
    folders = [folder for folder in project.runs_dir.glob("*") if (folder / "result.json").exists()]
    for folder in sorted(folders, key=lambda f: (f / "result.json").stat().st_mtime):
        result = read_json(folder / "result.json")
        names = ("status", "recipe", "best_metric", "best_value", "steps", "seconds", "mlflow_run_id")
        row = {"key": folder.name, **{name: result.get(name) for name in names}}
        if row["status"] == "running" and not _is_busy(project):
            row["status"] = "interrupted"  # its process died without a word; training again continues it
        rows.append(row)
    return rows


def project_of_run(project: Project, key: str) -> Project:
    """The project as it was when the run was trained: the same folder, the params that the run kept."""
    read_result(project, key)  # a run that does not exist is named as such, with those that do
    path = project.run_dir(key) / "params.yaml"
    return replace(project, params_path=path, config=load_config(path))


def read_result(project: Project, key: str) -> dict[str, Any]:
    """result.json of a run.

    Raises:
        ValueError: there is no such run; those that exist are listed.
    """
    try:
        return read_json(project.run_dir(key) / "result.json")
    except FileNotFoundError:
        known = ", ".join(row["key"] for row in list_runs(project)) or "none"
        raise ValueError(f"no run {key} in {project.runs_dir}; runs there: {known}") from None


@contextmanager
def exclusive(project: Project) -> Iterator[None]:
    """Hold the work folder's lock: one trainer, evaluation or release at a time; who comes second waits and says so."""
    project.workdir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(project.lock_path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("another reprise process works in %s; waiting for it to finish", project.workdir)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_busy(project: Project) -> bool:
    """Whether some process holds the work folder's lock."""
    try:
        with FileLock(project.lock_path, timeout=0):
            return False
    except Timeout:
        return True


def checkpoint_paths(run_dir: Path, step: int, keep_last: int, *, is_best: bool) -> list[Path]:
    """Where the checkpoint of ``step`` belongs, in the order in which the names must appear: best before last."""
    best = [run_dir / BEST] if is_best else []
    own_name = [run_dir / f"step-{step:09d}.pt"] if keep_last > 1 else []
    return [*best, *own_name, run_dir / LAST]


def earlier_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints that ``execution.keep_last`` keeps beside last and best, oldest first."""
    return sorted(run_dir.glob("step-*.pt"))


def remove_old_checkpoints(run_dir: Path, keep_last: int) -> None:
    """Remove all but the newest ``keep_last``; best.pt and last.pt are no matter of this."""
    for path in earlier_checkpoints(run_dir)[:-keep_last]:
        path.unlink()


def has_finished(run_dir: Path) -> bool:
    path = run_dir / "result.json"
    return path.exists() and read_json(path)["status"] == "finished"


def read_json(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return tree


def write_json(path: Path, tree: dict[str, Any]) -> None:
    write_whole_file(path, json.dumps(tree, indent=2, ensure_ascii=False) + "\n")


def dataset_of_run(project: Project, key: str) -> EncodedDataset:
    """The dataset in the work folder, if it is the one that the run was trained on.

    Raises:
        ValueError: it is another one; its figures would be those of other rows.
    """
    data, trained_on = open_dataset(project.encoded_dir, project.config), read_result(project, key)["dataset_digest"]
    if data.manifest.digest != trained_on:
        raise ValueError(
            f"run {key} was trained on dataset {trained_on}, but {project.encoded_dir} holds {data.manifest.digest}. Restore the "
            "data that it was trained on, or train again: `dvc repro`"
        )
    return data


def trained_run(project: Project, key: str) -> Path:
    run_dir = project.run_dir(key)
    if not has_finished(run_dir):
        raise ValueError(f"run {key} in {project.runs_dir} is not trained to its end; run `reprise train` first")
    return run_dir


def best_model(project: Project, data: EncodedDataset, run_dir: Path, device: torch.device) -> nn.Module:
    torch.set_num_threads(project.config.train.num_threads)  # as in training: their number decides the last bits of every sum
    model = build_model(project.config.model, data)
    trained_part(model).load_state_dict(shipped_weights(load_checkpoint(run_dir / BEST, device)))
    return make_servable(model.to(device))


def read_split(project: Project, name: str) -> pa.Table:
    return pq.read_table(project.split_dir / f"{name}.parquet")


@contextmanager
def tracked(project: Project, data: EncodedDataset, key: str) -> Iterator[tuple[mlflow_store.Store, Path, str]]:
    """The store, the folder that remembers the MLflow run, and its id, with a true status after the block.

    It is the run that was trained, unless that one was already evaluated under other settings (evaluate, export, registry): then
    it is a run of its own that names the trained one, so that no recorded figure is ever overwritten.
    """
    config, folder = project.config, tracking_dir(project, key)
    store = mlflow_store.open_experiment(config.registry.experiment, project.workdir)
    run_id = mlflow_store.find_run(folder)
    if run_id is None:
        run_id = mlflow_store.start_run(store, folder, run_facts(project, data, key, choose_device()))
        mlflow_store.set_tags(store, run_id, {"reprise.trained_by": read_result(project, key)["mlflow_run_id"]})
    with mlflow_store.run_status(store, run_id):
        yield store, folder, run_id


def tracking_dir(project: Project, key: str) -> Path:
    """The folder whose tracking.json names the MLflow run of these evaluate, export and registry settings."""
    config, run_dir = project.config, project.run_dir(key)
    settings = digest(config.evaluate, config.export, config.registry)[:16]
    first = run_dir / "settings.json"
    if not first.exists():
        write_json(first, {"digest": settings})
    return run_dir if read_json(first)["digest"] == settings else run_dir / f"evaluated-{settings}"


def run_facts(project: Project, data: EncodedDataset, key: str, device: torch.device) -> mlflow_store.RunFacts:
    config = project.config
    sections = {"data": config.data, "tokenizer": config.tokenizer, "model": config.model, "train": config.train}
    workdir = project.workdir
    return mlflow_store.RunFacts(
        key=key,
        recipe=project.recipe,
        command=_command_line(),
        device=str(device),
        params={name: value for title, section in sections.items() for name, value in flatten(section, title).items()},
        manifest=data.manifest.model_dump(mode="json"),
        environment=environment(str(device)),
        git=git_state(workdir),
        files=[
            project.run_dir(key) / "params.yaml",
            project.encoded_dir / "manifest.json",
            workdir / "dvc.lock",
            workdir / "requirements.lock",
        ],
        source=config.data.source.model_dump(mode="json"),
    )


def _command_line() -> str:
    """The command that is running, as one would type it, without the path of this machine's Python."""
    words = sys.orig_argv[1:]
    return shlex.join(["python", *words] if words[:1] == ["-m"] else [Path(sys.argv[0]).name, *sys.argv[1:]])
