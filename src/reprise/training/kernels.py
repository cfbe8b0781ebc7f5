"""Which of PyTorch's implementations of attention computes; all give the same numbers but for rounding."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from reprise.training.precision import Precision

SHORT_LENGTH = 128
"""Tokens up to which plain matrix products beat the fused kernel in bf16 on a CPU, measured by ``python -m bench.attention``."""


def attention_kernel(device: torch.device, precision: Precision, length: int) -> AbstractContextManager[None]:
    """A context in which ``scaled_dot_product_attention`` takes the kernel that is fastest for texts of ``length`` tokens.

    The backward pass of the CPU's fused kernel is slow in bf16, which only longer texts make up for.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html
    """
    if device.type == "cpu" and precision == "bf16" and length <= SHORT_LENGTH:
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()
