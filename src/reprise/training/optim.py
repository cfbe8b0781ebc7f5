"""Optimizers, parameter groups, the learning-rate schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from reprise.config import OptimizerConfig, ScheduleConfig
from reprise.models import learning_rate_scales


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    """AdamW for the dense parameters and, where the model has a table with row-sparse gradients, RowAdagrad for that table.

    Each parameter group carries ``peak_lr``, which ``set_learning_rate`` scales; layers of a pretrained encoder may have their own.
    Source: Loshchilov & Hutter 2019 (arXiv:1711.05101).
    """
    decayed, plain, sparse = split_parameters(model)
    scales = learning_rate_scales(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameters, weight_decay in ((decayed, config.weight_decay), (plain, 0.0)):
        for parameter in parameters:
            groups.setdefault((config.peak_lr * scales.get(parameter, 1.0), weight_decay), []).append(parameter)
    optimizers: list[Optimizer] = [
        AdamW(
            [{"params": params, "peak_lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()],
            lr=config.peak_lr,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )
    ]
    if sparse:
        if config.sparse_peak_lr is None:
            raise ValueError("the model has a table with sparse gradients, but train.optimizer.sparse_peak_lr is null")
        optimizers.append(RowAdagrad([{"params": sparse, "peak_lr": config.sparse_peak_lr}], lr=config.sparse_peak_lr))
    return optimizers


class RowAdagrad(Optimizer):
    """Adagrad with one accumulator per row, for an embedding table with sparse gradients: only rows with a gradient are touched.

    ``torch.optim.Adagrad`` keeps one per weight, which doubles a checkpoint for no gain.
    Source: Duchi et al. 2011 (Adagrad: rare rows keep a large step); FBGEMM's "exact row-wise Adagrad" (mean of squares of a row).
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are for optimizers that evaluate again
        """Move each row against its gradient, by less the more it has moved before."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros(parameter.shape[0], device=parameter.device)
                total = state["sum"][rows] + values.square().mean(dim=1)
                state["sum"][rows] = total
                scale = -group["lr"] / (total.sqrt() + group["eps"])
                parameter.index_add_(0, rows, values * scale.unsqueeze(1))


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """(decayed, not decayed, row-sparse) parameters; frozen ones are in none.

    Only the weights of linear and convolution layers decay: pulling biases, norms and embeddings towards zero does harm.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    sparse: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                (sparse if module.sparse else plain).append(parameter)
            elif isinstance(module, nn.Linear | nn.Conv1d) and name == "weight":
                decayed.append(parameter)
            else:
                plain.append(parameter)
    return decayed, plain, sparse


def optimizer_state_bytes(optimizers: Sequence[Optimizer]) -> int:
    """Bytes of what the optimizers will remember once they have stepped: two numbers a weight (AdamW), one a row (RowAdagrad)."""
    num_bytes = 0
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            numbers = parameter.shape[0] if isinstance(optimizer, RowAdagrad) else 2 * parameter.numel()
            num_bytes += numbers * parameter.element_size()
    return num_bytes


def learning_rate_factor(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """The share of the peak learning rate for optimizer step ``step`` (0-based): linear warm-up, then a half cosine.

    A pure function, so a checkpoint needs no scheduler state. The last step has ``final_lr_fraction``.
    Source: Loshchilov & Hutter 2017 (arXiv:1608.03983), equation 5 without restarts.
    """
    warmup_steps = round(config.warmup_fraction * total_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    last = total_steps - 1
    # Where warm-up takes all but the last step, the cosine is only its end; the one step of a training of one is no end.
    progress = (step - warmup_steps) / (last - warmup_steps) if last > warmup_steps else float(last > 0)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.final_lr_fraction + (1 - config.final_lr_fraction) * cosine


def set_learning_rate(optimizers: Sequence[Optimizer], factor: float) -> None:
    """Give each parameter group ``factor`` times its own peak rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """The L2 norm of all gradients together (a scalar); gradients are scaled down in place if it exceeds ``max_norm``.

    Differs from ``torch.nn.utils.clip_grad_norm_`` in that row-sparse gradients count too.
    Source: Pascanu et al. 2013 (arXiv:1211.5063).
    """
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # a row that occurs twice must count with its sum
            gradients.append(parameter.grad)
    values = [g.values() if g.is_sparse else g for g in gradients]
    norm: Tensor = nn.utils.get_total_norm(values)
    scale = (max_norm / (norm + 1.0e-6)).clamp(max=1.0)
    for value in values:
        value.mul_(scale)
    return norm
