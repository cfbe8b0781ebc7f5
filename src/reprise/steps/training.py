"""train: the model, from its beginning or from where an earlier call stopped."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from reprise.batches import steps_per_epoch
from reprise.checkpoint import (
    CheckpointError,
    State,
    load_checkpoint,
    require_same_environment,
    require_space,
    save_checkpoint,
    tensor_digest,
    training_environment,
)
from reprise.data.dataset import EncodedDataset, open_dataset
from reprise.device import choose_device
from reprise.models import build_model, trained_part
from reprise.progress import training_progress
from reprise.project import Project, run_key
from reprise.steps.lessons import learner_and_lessons
from reprise.steps.runs import (
    BEST,
    LAST,
    checkpoint_paths,
    earlier_checkpoints,
    has_finished,
    remove_old_checkpoints,
    run_facts,
    write_json,
)
from reprise.stopping import Stopped, catch_signals
from reprise.tracking import mlflow_store
from reprise.tracking.journal import Journal
from reprise.training.averaging import moving_average, shipped_weights
from reprise.training.loop import FitState, count_bytes, count_parameters, fit, restore
from reprise.training.memory import keep_freed_memory, recompute_activations
from reprise.training.optim import build_optimizers, optimizer_state_bytes
from reprise.training.precision import allow_tf32, loss_scaler
from reprise.training.randomness import make_deterministic

logger = logging.getLogger(__name__)


def train(project: Project, *, restart: bool = False) -> str:
    """The key of the run, trained to its end: begun, or continued from its last checkpoint; a finished one is left alone.

    Raises:
        Stopped: a signal asked for it; the state is saved and the same call continues.
        StaleDatasetError: the params changed since the dataset was made.
        CheckpointError: there are checkpoints, but none can be read or they were made under another environment.
    """
    config, device = project.config, choose_device()
    data = open_dataset(project.encoded_dir, config)
    key = run_key(data.manifest.digest, config)
    run_dir = project.run_dir(key)
    if restart:
        _set_aside(run_dir)
    if has_finished(run_dir):
        logger.info("run %s is finished already; nothing to train (--restart begins anew)", key)
        return key
    run_dir.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(project.params_path, run_dir / "params.yaml")

    torch.set_num_threads(config.train.num_threads)
    make_deterministic(config.train.seed)
    allow_tf32(config.train.tf32)
    keep_freed_memory()
    whole_model = build_model(config.model, data).to(device)
    model, lessons = learner_and_lessons(project, whole_model, data, device)
    if config.train.activation_checkpointing:
        recompute_activations(model)
    optimizers = build_optimizers(model, config.train.optimizer)
    scaler, average = loss_scaler(device, config.train.precision), moving_average(model, config.train.ema_decay)
    num_bytes = count_bytes(model) + optimizer_state_bytes(optimizers) + (count_bytes(model) if average is not None else 0)
    require_space(run_dir, num_bytes, num_files=config.execution.keep_last + 2)  # best, and the one that is being written
    state = FitState()
    if saved := _last_checkpoint(run_dir, device):
        state = restore(model, optimizers, scaler, average, saved)
        logger.info("run %s continues from step %d", key, state.step)
    total_steps = steps_per_epoch(len(data.splits["train"]), config.train.batch_size) * config.train.max_epochs
    logger.info(
        "run %s: %s, %s parameters (%s of them trained), %d steps on %s",
        key,
        project.recipe,
        f"{count_parameters(whole_model):,}",
        f"{sum(p.numel() for p in model.parameters() if p.requires_grad):,}",
        total_steps,
        device,
    )

    store = mlflow_store.open_experiment(config.registry.experiment, project.workdir)
    run_id = mlflow_store.start_run(store, run_dir, run_facts(project, data, key, device))
    with mlflow_store.run_status(store, run_id):
        with (
            _recorded_status(run_dir, {"status": "running", "recipe": project.recipe, "mlflow_run_id": run_id}),
            Journal(run_dir / "journal.jsonl") as journal,
            mlflow_store.JournalSender(store, run_dir) as sender,
            catch_signals() as stop,
            training_progress(config.train, total_steps, state) as show,
        ):

            def log(step: int, values: dict[str, float]) -> None:
                journal.log(step, values)
                if "validation/loss" in values:
                    _log_epoch(values, step, total_steps)
                sender.flush()

            def save(new: State, is_best: bool) -> None:
                journal.sync()
                paths = checkpoint_paths(run_dir, new["fit"]["step"], config.execution.keep_last, is_best=is_best)
                save_checkpoint({**new, "environment": training_environment(device)}, *paths)
                remove_old_checkpoints(run_dir, config.execution.keep_last)

            state = fit(
                model,
                optimizers,
                scaler,
                average,
                lessons,
                config.train,
                config.execution,
                device,
                state,
                evaluation_batch_size=config.evaluate.batch_size,
                log=log,
                save=save,
                show=show,
                stop_requested=lambda: stop.signal_number,
            )
            _write_result(run_dir, project, data, state, whole_model, run_id)
            mlflow_store.log_artifacts(store, run_id, [run_dir / BEST], folder="checkpoints")
        stop.raise_if_set()  # asked too late for the loop to see it: the training is whole, what follows it must not begin
    return key


def check_ready(project: Project) -> None:
    """Return if a training could begin now: dataset, device and tracking store are there; costs a second and writes no run.

    Raises:
        StaleDatasetError: the params changed since the dataset was made.
        ValueError: there is no dataset, or REPRISE_DEVICE names no device of this machine.
        TrackingUnreachable: nobody answers where the runs are kept.
    """
    choose_device()
    open_dataset(project.encoded_dir, project.config)
    mlflow_store.open_experiment(project.config.registry.experiment, project.workdir)


def _last_checkpoint(run_dir: Path, device: torch.device) -> State | None:
    """What training goes on from: ``last.pt``, or where that cannot be read the newest that can; None where there is none."""
    refusal: CheckpointError | None = None
    for path in (run_dir / LAST, *reversed(earlier_checkpoints(run_dir)), run_dir / BEST):
        try:
            saved = load_checkpoint(path, device)
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            logger.warning("%s; falling back one slot", error)
            refusal = error
            continue
        require_same_environment(saved.pop("environment"), training_environment(device), path)
        return saved
    if refusal:
        raise CheckpointError(
            f"no checkpoint of {run_dir} can be read; `reprise train --restart` sets the run aside and begins anew"
        )
    return None


@contextmanager
def _recorded_status(run_dir: Path, result: dict[str, str]) -> Iterator[None]:
    """result.json says ``running`` inside the block and the truth after it; a killed process leaves ``running``."""
    write_json(run_dir / "result.json", result)
    try:
        yield
    except (Stopped, KeyboardInterrupt):
        write_json(run_dir / "result.json", {**result, "status": "stopped"})
        raise
    except BaseException as error:
        write_json(run_dir / "result.json", {**result, "status": "failed", "error": str(error)})
        raise


def _write_result(run_dir: Path, project: Project, data: EncodedDataset, state: FitState, model: nn.Module, run_id: str) -> None:
    train = project.config.train
    epoch_steps = steps_per_epoch(len(data.splits["train"]), train.batch_size)
    best = load_checkpoint(run_dir / BEST, torch.device("cpu"))
    write_json(
        run_dir / "result.json",
        {
            "status": "finished",
            "recipe": project.recipe,
            "steps": state.step,
            "epochs": state.step // epoch_steps,
            "best_step": state.best_step,
            "best_metric": train.best_metric,
            "best_value": state.best_value,
            "seconds": round(state.seconds, 3),
            "examples_per_second": round(len(data.splits["train"]) * (state.step // epoch_steps) / state.seconds, 1),
            "parameters": count_parameters(model),
            "device": str(next(model.parameters()).device),
            "versions": {name: version(name) for name in ("reprise", "torch", "numpy", "mlflow", "dvc", "prefect", "onnx")},
            "state_digest": tensor_digest(trained_part(model).state_dict()),
            "best_state_digest": tensor_digest(shipped_weights(best)),
            "dataset_digest": data.manifest.digest,
            "mlflow_run_id": run_id,
        },
    )


def _log_epoch(values: dict[str, float], step: int, total_steps: int) -> None:
    figures = "  ".join(f"{name.removeprefix('validation/')} {value:.4f}" for name, value in values.items())
    logger.info("step %d of %d: validation %s", step, total_steps, figures)


def _set_aside(run_dir: Path) -> None:
    """Move a run out of the way, beside itself, so that nothing is lost."""
    if run_dir.exists():
        number = next(n for n in itertools.count(1) if not run_dir.with_name(f"{run_dir.name}.aside-{n}").exists())
        target = run_dir.with_name(f"{run_dir.name}.aside-{number}")
        run_dir.rename(target)
        logger.info("the earlier run lies in %s", target)
