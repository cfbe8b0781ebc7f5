"""Memory of a training: what is kept between steps, and what is computed again instead of kept."""

from __future__ import annotations

import ctypes
import logging
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from reprise.models import repeated_layers

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_LARGEST_FROM_THE_HEAP = 32 * 2**20  # bytes; glibc allows no more
_NEVER_TRIM = 2**31 - 1


def keep_freed_memory() -> bool:
    """Whether the C library will keep freed blocks of up to 32 MB for the next step; only glibc can.

    By default glibc gives a tensor of a few MB back to the system when it is freed, and the next step asks for the same pages,
    zeroed one by one: a fifth of the time of a step of ``bag``. Bits are not affected.
    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        logger.debug("no mallopt in this C library: freed memory goes back to the system between steps")
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_FROM_THE_HEAP)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER_TRIM))


def recompute_activations(model: nn.Module) -> None:
    """From now on each layer keeps its input only and computes the rest again in the backward pass: more time, less memory.

    Gradients are the same: random draws (dropout) are repeated from the state that the generator had.
    Source: Chen et al. 2016 (arXiv:1604.06174).
    """
    for layer in repeated_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
