"""A training of the tiny dataset by the real ``fit``, watched: every step's rows, every logged value, every saved state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from reprise.batches import Batch
from reprise.checkpoint import load_checkpoint, save_checkpoint, state_digest, tensor_digest
from reprise.config import Config
from reprise.data.dataset import EncodedDataset
from reprise.models import build_model
from reprise.stopping import Stopped
from reprise.training import loop
from reprise.training.averaging import moving_average, shipped_weights
from reprise.training.loop import FitState, fit, restore
from reprise.training.memory import recompute_activations
from reprise.training.optim import build_optimizers
from reprise.training.precision import loss_scaler
from reprise.training.randomness import make_deterministic

CPU = torch.device("cpu")


@dataclass
class Training:
    """One call of ``fit`` and what was seen of it."""

    folder: Path
    model: nn.Module
    optimizers: list[Optimizer]
    scaler: GradScaler
    state: FitState
    rows: list[tuple[int, list[int]]] = field(default_factory=list)
    logged: list[tuple[int, str, float]] = field(default_factory=list)
    saved: list[tuple[int, bool]] = field(default_factory=list)
    stopped: bool = False

    @property
    def last(self) -> Path:
        return self.folder / "last.pt"

    @property
    def best(self) -> Path:
        return self.folder / "best.pt"

    def bits(self) -> dict[str, Any]:
        """Everything that must be equal to the bit between a straight run and one that was interrupted."""
        return {
            "weights": tensor_digest(self.model.state_dict()),
            "optimizers": state_digest({"optimizers": [o.state_dict() for o in self.optimizers]}),
            "step": self.state.step,
            "best": (self.state.best_step, self.state.best_value),
            "epochs_without_gain": self.state.epochs_without_gain,
            "scaler": self.scaler.state_dict(),
            "skipped": self.state.skipped_steps,
            "best.pt": tensor_digest(shipped_weights(load_checkpoint(self.best, CPU))),
        }


Train = Callable[..., Training]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, deterministic: None) -> Train:
    """``train(config, data, stop_at=7, resume=earlier, prepare=callable)`` as the step ``train`` does it, without MLflow."""
    counter = iter(range(100))
    summed_loss = loop.summed_loss

    def run(
        config: Config,
        data: EncodedDataset,
        *,
        stop_at: int | None = None,
        resume: Training | None = None,
        prepare: Callable[[Training], None] | None = None,
        on_log: Callable[[], None] | None = None,
    ) -> Training:
        # A resumed process starts from other random weights: all it may know comes from the checkpoint.
        make_deterministic(config.train.seed if resume is None else 999)
        model = build_model(config.model, data)
        if config.train.activation_checkpointing:
            recompute_activations(model)
        optimizers = build_optimizers(model, config.train.optimizer)
        scaler, average = loss_scaler(CPU, config.train.precision), moving_average(model, config.train.ema_decay)
        if resume is None:
            folder = tmp_path / f"run-{next(counter)}"
            folder.mkdir()
            state = FitState()
        else:
            folder = resume.folder
            state = restore(model, optimizers, scaler, average, load_checkpoint(resume.last, CPU))
        training = Training(folder, model, optimizers, scaler, state)

        def watched_loss(logits: Tensor, batch: Batch, class_weights: Tensor, label_smoothing: float) -> Tensor:
            training.rows.append((state.step, batch.positions.tolist()))
            return summed_loss(logits, batch, class_weights, label_smoothing)

        def log(step: int, values: dict[str, float]) -> None:
            training.logged += [(step, name, v) for name, v in values.items() if not name.startswith("time/")]
            if on_log:
                on_log()

        def save(new: dict[str, Any], is_best: bool) -> None:
            training.saved.append((state.step, is_best))
            save_checkpoint(new, *([training.best, training.last] if is_best else [training.last]))

        monkeypatch.setattr(loop, "summed_loss", watched_loss)
        if prepare:
            prepare(training)
        try:
            fit(
                model,
                optimizers,
                scaler,
                average,
                data,
                config.train,
                config.execution,
                CPU,
                state,
                evaluation_batch_size=config.evaluate.batch_size,
                log=log,
                save=save,
                show=lambda state, loss: None,
                stop_requested=lambda: 15 if stop_at is not None and state.step >= stop_at else None,
            )
        except Stopped:
            training.stopped = True
        return training

    return run


class BeforeStep(NamedTuple):
    """Gradients (dense, not clipped yet) and weights as an optimizer step finds them, by place of the parameter."""

    gradients: dict[int, Tensor]
    weights: list[Tensor]


@pytest.fixture
def before_steps(monkeypatch: pytest.MonkeyPatch) -> list[BeforeStep]:
    """What each optimizer step of ``fit`` finds."""
    steps: list[BeforeStep] = []
    clip = loop.clip_gradients

    def keep(parameters: Any, max_norm: float) -> Tensor:
        parameters = list(parameters)
        found = {i: p.grad for i, p in enumerate(parameters) if p.grad is not None}
        dense = {i: (g.to_dense() if g.is_sparse else g).detach().clone() for i, g in found.items()}
        steps.append(BeforeStep(dense, [p.detach().clone() for p in parameters]))
        return clip(parameters, max_norm)

    monkeypatch.setattr(loop, "clip_gradients", keep)
    return steps
