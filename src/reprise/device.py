"""Which device the tensors live on: the environment says where, never what."""

from __future__ import annotations

import os
import re

import torch


def choose_device() -> torch.device:
    """The device that REPRISE_DEVICE names: ``auto`` (default), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.

    Raises:
        ValueError: the name is unknown, or this machine has no such device.
    """
    name = os.environ.get("REPRISE_DEVICE", "auto")
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]+)?", name):
        raise ValueError(f"REPRISE_DEVICE={name}: unknown device; allowed are auto, cpu, cuda, cuda:N and mps")
    kind, _, index = name.partition(":")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError("REPRISE_DEVICE=mps: this machine has no such device; use auto or cpu")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"REPRISE_DEVICE={name}: this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu")
    return torch.device(name)
