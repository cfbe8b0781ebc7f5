"""The convolutional model against a computation by hand. What every model must do stands in test_models.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

Make = Callable[..., nn.Module]


def test_logits_equal_a_computation_by_hand(make_model: Make) -> None:
    """Every filter over every window that begins at a token, padding as zeros; ReLU, the largest, the linear head."""
    model = make_model("cnn")
    ids = [70, 80, 90, 33]
    embedded = model.embedding.weight.detach().numpy()[ids]
    rows = np.vstack([embedded, np.zeros((2, embedded.shape[1]), np.float32)])
    pooled = []
    for convolution, size in zip(model.convolutions, (1, 2, 3), strict=True):
        weight, bias = convolution.weight.detach().numpy(), convolution.bias.detach().numpy()
        windows = [np.einsum("kds,sd->k", weight, rows[start : start + size]) + bias for start in range(len(ids))]
        pooled.append(np.maximum(windows, 0).max(axis=0))
    expected = model.head.weight.detach().numpy() @ np.concatenate(pooled) + model.head.bias.detach().numpy()
    found = model(torch.tensor([ids]), torch.ones(1, 4, dtype=torch.long))[0].detach().numpy()
    assert np.abs(found - expected).max() < 1e-5


def test_embeddings_begin_small_and_padding_as_zero(make_model: Make) -> None:
    weight = make_model("cnn", drawn=False).embedding.weight.detach()
    assert torch.equal(weight[0], torch.zeros(8))
    assert 0.2 < weight.abs().max() <= 0.25


def test_a_text_shorter_than_the_largest_filter(make_model: Make) -> None:
    assert make_model("cnn")(torch.tensor([[70]]), torch.tensor([[1]])).isfinite().all()
