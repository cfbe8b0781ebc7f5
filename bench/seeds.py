"""Score and time of a recipe over several seeds: mean and 95 % interval.

    python -m bench.seeds recipes/bag.yaml --seeds 5           # validation split only: for choosing
    python -m bench.seeds recipes/bag.yaml --seeds 5 --test    # once per recipe, when everything is chosen

Uses the dataset of the work folder (``reprise fetch``, ``split`` and ``encode`` come first) and the same ``fit`` as every run.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from reprise.data.dataset import EncodedDataset, open_dataset
from reprise.evaluation.metrics import classification_metrics
from reprise.evaluation.predict import predict
from reprise.models import build_model
from reprise.project import Project, open_project
from reprise.steps.lessons import learner_and_lessons
from reprise.training.averaging import moving_average, shipped_weights
from reprise.training.loop import FitState, fit
from reprise.training.memory import keep_freed_memory
from reprise.training.optim import build_optimizers
from reprise.training.precision import loss_scaler
from reprise.training.randomness import make_deterministic


def run_seed(project: Project, data: EncodedDataset, seed: int, splits: list[str]) -> dict[str, float]:
    """Seconds of training, and accuracy and macro F1 of the best checkpoint on each of ``splits``."""
    config = project.config
    train = config.train.model_copy(update={"seed": seed})
    device = torch.device("cpu")
    torch.set_num_threads(train.num_threads)
    make_deterministic(seed)
    keep_freed_memory()
    model = build_model(config.model, data)
    start = time.perf_counter()
    learner, lessons = learner_and_lessons(project, model, data, device)
    features_seconds = time.perf_counter() - start  # of the first seed: the others find the file
    optimizers = build_optimizers(learner, train.optimizer)
    scaler, average = loss_scaler(device, train.precision), moving_average(learner, train.ema_decay)
    best: dict[str, torch.Tensor] = {}

    def save(state: dict[str, Any], is_best: bool) -> None:
        if is_best:
            best.update({name: tensor.clone() for name, tensor in shipped_weights(state).items()})

    state = fit(
        learner, optimizers, scaler, average, lessons, train, config.execution, device, FitState(),
        evaluation_batch_size=config.evaluate.batch_size, log=lambda step, values: None, save=save,
        show=lambda state, loss: None, stop_requested=lambda: None,
    )  # fmt: skip
    learner.load_state_dict(best)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures = {"seconds": state.seconds, "features seconds": features_seconds, "peak GB": peak}
    figures["best_step"] = float(state.best_step or 0)
    for name in splits:
        logits = predict(model, data.splits[name], config.evaluate.batch_size, device, data.manifest.tokenizer.pad_id)
        metrics = classification_metrics(logits, data.splits[name].labels, data.manifest.labels)
        figures |= {
            f"{name} accuracy": metrics["accuracy"],
            f"{name} macro_f1": metrics["macro_f1"],
            f"{name} loss": metrics["loss"],
        }
    return figures


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half the width of its 95 % interval (Student's t); NaN for a single value."""
    spread = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1)) * spread


def main() -> None:
    """Train with each seed and print a line per seed, then mean and interval of each figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("params", type=Path)
    parser.add_argument("--workdir", type=Path, default=None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=17)
    parser.add_argument("--test", action="store_true", help="also read the test split")
    parser.add_argument("--json", action="store_true", help="the figures of every seed as one JSON list, for programs")
    arguments = parser.parse_args()
    project = open_project(arguments.params, arguments.workdir)
    data = open_dataset(project.encoded_dir, project.config)
    splits = ["validation", "test"] if arguments.test else ["validation"]
    rows = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        rows.append(run_seed(project, data, seed, splits))
        line = f"seed {seed}  " + "  ".join(f"{name} {value:.4f}" for name, value in rows[-1].items())
        print(line, file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        print(json.dumps(rows))
        return
    machine = platform.processor() or platform.machine()
    print(f"\n{arguments.params.stem}, {len(rows)} seeds, {machine}, {torch.get_num_threads()} threads")
    for name in rows[0]:
        mean, half = mean_and_interval([row[name] for row in rows])
        print(f"{name:>22}  {mean:.4f} ± {half:.4f}")


if __name__ == "__main__":
    main()
