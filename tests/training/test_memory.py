"""Freed memory stays with the process; activations are computed again where that is asked for."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from reprise.batches import Collate
from reprise.config import Config, ConfigError
from reprise.data.dataset import EncodedDataset
from reprise.models import build_model
from reprise.training.memory import recompute_activations

STILL_HELD = """
import os, sys
import torch
from reprise.training.memory import keep_freed_memory

def held():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = held()
step = [torch.ones(2**20) for _ in range(10)]
del step
print(held() - before)
"""


def megabytes_held(mode: str) -> float:
    """What a process holds more than before, once it has made and dropped ten tensors of 4 MB."""
    command = [sys.executable, "-c", STILL_HELD, mode]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt, and only Linux /proc")
def test_what_a_step_frees_is_kept_for_the_next() -> None:
    assert megabytes_held("keep") > 35
    assert megabytes_held("give back") < 15, "the guard must see what happens without it"


# ------------------------------------------------------------------------------------------------ activation checkpointing

Dataset = Callable[[str], EncodedDataset]
Make = Callable[..., Config]


def bytes_kept(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Bytes that one forward pass keeps for the backward pass, weights not counted."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train()(*inputs).sum()
    return sum(kept.values())


@pytest.mark.parametrize("kind", ["transformer", "pretrained", "lora"])
def test_what_is_computed_again_is_not_kept(kind: str, tiny_dataset: Dataset, tiny_config: Make) -> None:
    data = tiny_dataset(kind)
    batch = Collate(0)(data.splits["train"].__getitems__(range(32)))
    model = build_model(tiny_config(kind, {"model.frozen_layers": 0} if kind != "transformer" else {}).model, data)
    before = bytes_kept(model, batch.inputs)
    recompute_activations(model)
    assert bytes_kept(model, batch.inputs) < before / 3


@pytest.mark.parametrize("kind", ["transformer", "pretrained", "lora"])
def test_a_training_that_computes_again_has_the_same_bits(kind: str, tiny_dataset: Dataset, tiny_config: Make, train: Any) -> None:
    data = tiny_dataset(kind)
    runs = [train(tiny_config(kind, {"train.activation_checkpointing": again}), data) for again in (False, True)]
    assert runs[0].bits() == runs[1].bits()
    assert runs[0].logged == runs[1].logged


@pytest.mark.parametrize("kind", ["bag", "cnn", "frozen"])
def test_nothing_to_compute_again(kind: str, tiny_config: Make) -> None:
    with pytest.raises(ConfigError, match="has no layers whose activations could be computed again"):
        tiny_config(kind, {"train.activation_checkpointing": True})
