"""The number format of the forward pass; weights, gradients and optimizer state stay in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

Precision = Literal["fp32", "bf16", "fp16"]
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """A context in which matrix products run in ``precision``; on CUDA softmax and norms keep fp32, on a CPU what they are given.

    The loss is no business of it: ``summed_loss`` takes logits in fp32 everywhere.
    bf16 has the exponent range of fp32, so gradients do not underflow and no loss scaler is needed; fp16 needs ``loss_scaler``.
    Source: Micikevicius et al. 2018 (arXiv:1710.03740); https://pytorch.org/docs/stable/amp.html
    """
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device_type=device.type, dtype=FORMATS[precision])


def allow_tf32(allowed: bool) -> None:
    """Let fp32 matrix products and convolutions on CUDA use TF32 (10 bits of mantissa instead of 23), or not.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def loss_scaler(device: torch.device, precision: Precision) -> GradScaler:
    """What multiplies the loss in fp16, so that small gradients do not become 0; it does nothing in other formats.

    Its scale (65,536 at first) is halved when a gradient overflows, and doubled after 2,000 steps without.
    Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2.
    """
    return GradScaler(device.type, enabled=precision == "fp16")


def unscale_gradients(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> None:
    """Divide the gradients by the scale of the loss, in place, before they are clipped."""
    for optimizer in optimizers:
        scaler.unscale_(optimizer)


def lowers_scale(scaler: GradScaler, loss: Tensor, norm: Tensor) -> bool:
    """Whether the scale was too large for this group, and is now half of it: the group must be tried again.

    Where the loss itself is not finite, or the scale is down to 1, a smaller scale is no remedy.
    """
    if not scaler.is_enabled() or math.isfinite(float(norm)) or not math.isfinite(float(loss)) or scaler.get_scale() <= 1:
        return False
    scaler.update()
    return True
