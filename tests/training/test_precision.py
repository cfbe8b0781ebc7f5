"""What 16 bits can hold, and what autocast leaves in 32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from reprise.config import Config
from reprise.data.dataset import EncodedDataset
from reprise.training.precision import autocast

CPU = torch.device("cpu")


def test_a_small_gradient_vanishes_in_fp16_unless_it_is_scaled() -> None:
    assert float(torch.tensor(1e-8).half()) == 0.0
    assert float((torch.tensor(1e-8) * 65_536).half()) == pytest.approx(6.6e-4, rel=0.01)
    assert float(torch.tensor(6e-8).half()) == pytest.approx(6e-8, rel=0.01)
    assert float(torch.tensor(1e-8).bfloat16()) == pytest.approx(1e-8, rel=0.01), "bf16 needs no scaler"


def test_autocast_runs_products_in_bf16_and_keeps_weights_and_gradients_in_fp32() -> None:
    layer = nn.Linear(4, 4)
    with autocast(CPU, "bf16"):
        out = layer(torch.ones(2, 4))
        assert out.dtype == torch.bfloat16
        assert nn.functional.cross_entropy(out.float(), torch.tensor([0, 1])).dtype == torch.float32
    out.float().sum().backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    with autocast(CPU, "fp32"):
        assert layer(torch.ones(2, 4)).dtype == torch.float32


@pytest.mark.parametrize("kind", ["bag", "cnn", "transformer", "pretrained"])
def test_a_training_in_bf16_keeps_fp32_weights_and_learns(
    kind: str, tiny_dataset: Callable[[str], EncodedDataset], tiny_config: Callable[..., Config], train: Any
) -> None:
    config = tiny_config(kind, {"train.precision": "bf16", "train.max_epochs": 4, "train.optimizer.peak_lr": 0.01})
    run = train(config, tiny_dataset(kind))
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    losses = [value for _, name, value in run.logged if name == "validation/loss"]
    assert losses[-1] < losses[0]
