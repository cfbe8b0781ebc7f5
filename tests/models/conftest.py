"""Untrained models of the tiny dataset, and models whose weights are all different, so that nothing cancels out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from reprise.config import Config
from reprise.data.dataset import EncodedDataset
from reprise.models import build_model


@pytest.fixture(scope="module")
def make_model(tiny_dataset: Callable[[str], EncodedDataset], tiny_config: Callable[..., Config]) -> Callable[..., nn.Module]:
    """``make_model(kind, {"model.dropout": 0.0})``: in eval mode, every weight drawn (the bag's table is born as zeros)."""

    def make(kind: str, changes: dict[str, object] | None = None, *, drawn: bool = True) -> nn.Module:
        torch.manual_seed(3)
        model = build_model(tiny_config(kind, changes).model, tiny_dataset(kind)).eval()
        if drawn:
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
        return model

    return make


@pytest.fixture(autouse=True)
def _quiet(one_thread: None) -> None:
    """Tensors this small only wait for a second thread."""
