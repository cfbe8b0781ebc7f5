"""The number format of the forward pass; weights, gradients and optimizer state stay in fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["fp32", "bf16"]


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """A context in which matrix products run in ``precision``; on CUDA softmax and norms keep fp32, on a CPU what they are given.

    The loss is no business of it: ``summed_loss`` takes logits in fp32 everywhere.
    bf16 has the exponent range of fp32, so gradients do not underflow and no loss scaler is needed.
    Source: Micikevicius et al. 2018 (arXiv:1710.03740); https://pytorch.org/docs/stable/amp.html
    """
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device_type=device.type, dtype=torch.bfloat16)
