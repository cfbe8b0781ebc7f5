"""The training loop: ``fit`` reads aloud in the order in which training happens.

Nothing random is stored: see ``randomness.py``. What a checkpoint holds is the weights, the optimizers' state and a few numbers
(``FitState``); with them, training goes on from any optimizer step to the same bits as if it had never stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from reprise.batches import Batch, Positions, collate_for, load_groups, plan_epoch, steps_per_epoch
from reprise.checkpoint import State
from reprise.config import ExecutionConfig, TrainConfig
from reprise.data.dataset import EncodedDataset, Split
from reprise.evaluation.metrics import classification_metrics
from reprise.evaluation.predict import predict
from reprise.stopping import Stopped
from reprise.training.kernels import attention_kernel
from reprise.training.optim import clip_gradients, learning_rate_factor, set_learning_rate
from reprise.training.precision import autocast, lowers_scale, unscale_gradients
from reprise.training.randomness import seed_forward

HIGHER_IS_BETTER = {"accuracy": True, "macro_f1": True, "loss": False}
"""Direction of each metric that can choose the best checkpoint: declared, never guessed from a name."""

Log = Callable[[int, dict[str, float]], None]
Save = Callable[[State, bool], None]
Show = Callable[["FitState", float], None]


class NonFiniteError(RuntimeError):
    """A loss or gradient became NaN or infinite; raised before the optimizer could spread it into the weights."""


@dataclass
class FitState:
    """Where a training is: all that a checkpoint needs beside weights and optimizer state."""

    step: int = 0
    """Optimizer steps taken."""
    best_value: float | None = None
    best_step: int | None = None
    epochs_without_gain: int = 0
    skipped_steps: int = 0
    """How often a step had to be tried again with a smaller loss scale (fp16)."""
    last_validation: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Time spent training and validating, over all processes that worked on this run."""


def fit(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    scaler: GradScaler,
    average: AveragedModel | None,
    data: EncodedDataset,
    config: TrainConfig,
    execution: ExecutionConfig,
    device: torch.device,
    state: FitState,
    *,
    evaluation_batch_size: int,
    log: Log,
    save: Save,
    show: Show,
    stop_requested: Callable[[], int | None],
) -> FitState:
    """The state at the end of training; ``model`` then holds the last weights, and ``save`` was given the best ones.

    Args:
        scaler: what ``loss_scaler`` gives for the precision.
        average: a moving average of the weights, which is then what is validated; see ``averaging.py``.
        state: where to begin: ``FitState()``, or what a checkpoint held (weights and optimizers are then already restored).
        log: takes (optimizer step, values by name).
        save: takes (everything needed to go on, whether these are the best weights so far).
        show: takes (state, loss of the step) after each step, for a progress bar.
        stop_requested: gives the number of a signal once somebody wants the training to stop.

    Raises:
        NonFiniteError: the loss or a gradient is NaN or infinite; the weights are still the ones before the step.
        Stopped: a stop was requested; the state was saved after the step that was under way.
    """
    split, labels = data.splits["train"], torch.from_numpy(data.splits["train"].labels)
    collate = collate_for(split, data.manifest.tokenizer.pad_id)
    class_weights = class_weights_for(config, labels, len(data.manifest.labels)).to(device)
    epoch_steps = steps_per_epoch(len(split), config.batch_size)
    total_steps = epoch_steps * config.max_epochs
    parameters = [p for p in model.parameters() if p.requires_grad]
    clock = _Clock(state.seconds)

    for epoch in range(state.step // epoch_steps, config.max_epochs):
        if config.patience is not None and state.epochs_without_gain >= config.patience:
            break
        model.train()
        groups = plan_epoch(split.lengths, config, epoch)[state.step % epoch_steps :]
        for group, loaded in load_groups(split, groups, config, execution, collate):
            micro_batches = [micro_batch.to(device) for micro_batch in loaded]
            while True:
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=True)
                loss = backward_group(model, micro_batches, class_weights, scaler, config, state.step)
                unscale_gradients(scaler, optimizers)
                norm = clip_gradients(parameters, config.optimizer.max_grad_norm)
                if not lowers_scale(scaler, loss, norm):
                    break
                state.skipped_steps += 1  # neither the step nor the schedule moves on: the same group is tried again
            factor = learning_rate_factor(state.step, total_steps, config.schedule)
            _require_finite(state.step, loss, norm, factor * config.optimizer.peak_lr, split, group)
            set_learning_rate(optimizers, factor)
            for optimizer in optimizers:
                optimizer.step()
            scaler.update()
            if average is not None:
                average.update_parameters(model)
            state.step += 1
            state.seconds = clock.seconds()

            show(state, float(loss))
            if state.step % execution.log_every_steps == 0:
                values = {"train/loss": float(loss), "train/grad_norm": float(norm), "train/lr": factor * config.optimizer.peak_lr}
                if scaler.is_enabled():
                    values |= {"train/loss_scale": scaler.get_scale(), "train/skipped_steps": float(state.skipped_steps)}
                log(state.step, values)
            if state.step % epoch_steps == 0:
                continue  # the epoch is over: validate first, then save
            signal_number = stop_requested()
            if signal_number or clock.checkpoint_is_due(state.step, execution):
                save(checkpoint_state(model, optimizers, scaler, average, state), False)
                clock.checkpoint_was_saved()
            if signal_number:
                raise Stopped(signal_number)

        metrics = validate(average.module if average is not None else model, data, evaluation_batch_size, device)
        state.last_validation = metrics
        is_best = strictly_better(metrics[config.best_metric], state.best_value, config.best_metric)
        if is_best:
            state.best_value, state.best_step, state.epochs_without_gain = metrics[config.best_metric], state.step, 0
        else:
            state.epochs_without_gain += 1
        state.seconds = clock.seconds()
        trained = state.step * config.batch_size / state.seconds
        log(state.step, {f"validation/{name}": value for name, value in metrics.items()})
        log(state.step, {"time/seconds": state.seconds, "time/examples_per_second": trained})
        save(checkpoint_state(model, optimizers, scaler, average, state), is_best)
        clock.checkpoint_was_saved()
        if (signal_number := stop_requested()) and state.step < total_steps:
            raise Stopped(signal_number)
    return state


def backward_group(
    model: nn.Module, micro_batches: Sequence[Batch], class_weights: Tensor, scaler: GradScaler, config: TrainConfig, step: int
) -> Tensor:
    """The loss of a group, a scalar; its gradient is added to ``.grad`` of the weights, times the scale of ``scaler``.

    ``class_weights`` [C] and the micro-batches are on the model's device. The divisor is the weight of the whole group, so that
    cutting it into micro-batches changes nothing but memory.
    """
    device = class_weights.device
    group_weight = torch.cat([class_weights[batch.labels] for batch in micro_batches]).sum()
    loss = torch.zeros((), device=device)
    for index, batch in enumerate(micro_batches):
        seed_forward(config.seed, step, index, device)
        with autocast(device, config.precision), attention_kernel(device, config.precision, batch.inputs[0].shape[1]):
            logits = model(*batch.inputs)
        micro_loss = summed_loss(logits, batch, class_weights, config.label_smoothing) / group_weight
        scaler.scale(micro_loss).backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        loss += micro_loss.detach()
    return loss


def summed_loss(logits: Tensor, batch: Batch, class_weights: Tensor, label_smoothing: float) -> Tensor:
    """Cross entropy summed over a micro-batch (a scalar, fp32), each example weighted by its class; logits [B, C]."""
    return F.cross_entropy(logits.float(), batch.labels, weight=class_weights, label_smoothing=label_smoothing, reduction="sum")


def class_weights_for(config: TrainConfig, labels: Tensor, num_classes: int) -> Tensor:
    """float32 [C]: ones, or ``N / (classes present * examples of the class)``; 0 for a class without examples."""
    if config.class_weights == "none":
        return torch.ones(num_classes)
    counts = torch.bincount(labels, minlength=num_classes).float()
    weights = len(labels) / (torch.count_nonzero(counts) * counts)
    return torch.where(counts > 0, weights, torch.zeros(()))


def validate(model: nn.Module, data: EncodedDataset, batch_size: int, device: torch.device) -> dict[str, float]:
    """Accuracy, macro F1 and mean loss over the whole validation split."""
    split = data.splits["validation"]
    logits = predict(model, split, batch_size, device, data.manifest.tokenizer.pad_id)
    if not np.isfinite(logits).all():
        raise NonFiniteError("the model gives logits that are not finite on the validation split; lower train.optimizer.peak_lr")
    metrics = classification_metrics(logits, split.labels, data.manifest.labels)
    return {"accuracy": metrics["accuracy"], "macro_f1": metrics["macro_f1"], "loss": metrics["loss"]}


def strictly_better(value: float, best: float | None, metric: str) -> bool:
    """Whether ``value`` beats ``best``; a tie does not, so the earliest of equals is kept."""
    if best is None:
        return not math.isnan(value)
    return value > best if HIGHER_IS_BETTER[metric] else value < best


def checkpoint_state(
    model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler, average: AveragedModel | None, state: FitState
) -> State:
    """All that ``restore`` needs to go on from here."""
    return {
        "model": model.state_dict(),
        "average": average.state_dict() if average is not None else {},
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "scaler": scaler.state_dict(),
        "fit": asdict(state),
    }


def restore(
    model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler, average: AveragedModel | None, saved: State
) -> FitState:
    """Put saved weights, optimizer state and loss scale in place; strict: a missing or unknown tensor is an error."""
    model.load_state_dict(saved["model"])
    if average is not None:
        average.load_state_dict(saved["average"])
    scaler.load_state_dict(saved["scaler"])
    for optimizer, optimizer_state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer_state)
    return FitState(**saved["fit"])


def _require_finite(step: int, loss: Tensor, norm: Tensor, learning_rate: float, split: Split, group: Positions) -> None:
    if not math.isfinite(float(loss)) or not math.isfinite(float(norm)):
        rows = ", ".join(split.row_ids[position] for position in group[:8])
        raise NonFiniteError(
            f"step {step}: loss {float(loss)}, gradient norm {float(norm)}, learning rate {learning_rate:.3g}; the weights were "
            f"not updated and the last checkpoint is good. Rows of this step (row_id in data/split/train.parquet): {rows}"
            f"{' ...' if len(group) > 8 else ''}. Lower train.optimizer.peak_lr or look at these rows."
        )


class _Clock:
    """Seconds since it was made, on top of those that earlier processes spent on the run; and when the next checkpoint is due."""

    def __init__(self, already: float) -> None:
        self._start = time.perf_counter() - already
        self._saved = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def checkpoint_is_due(self, step: int, execution: ExecutionConfig) -> bool:
        steps, minutes = execution.checkpoint_every_steps, execution.checkpoint_every_minutes
        by_steps = steps is not None and step % steps == 0
        return by_steps or (minutes is not None and time.perf_counter() - self._saved >= 60 * minutes)

    def checkpoint_was_saved(self) -> None:
        self._saved = time.perf_counter()


def count_bytes(model: nn.Module) -> int:
    """Bytes of all weights and buffers that a checkpoint holds."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def count_parameters(model: nn.Module) -> int:
    """Number of weights, trainable or not."""
    return sum(p.numel() for p in model.parameters())
