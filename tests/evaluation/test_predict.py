"""Prediction: rows in their order, the mode as it was, no graph, the whole split whatever the batch size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reprise.batches import Collate
from reprise.config import Config
from reprise.data.dataset import EncodedDataset
from reprise.evaluation.predict import predict
from reprise.models import build_model

Dataset = Callable[[str], EncodedDataset]
Make = Callable[..., Config]
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def drawn_model(kind: str, data: EncodedDataset, config: Config) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(config.model, data)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("kind", ["bag", "cnn", "transformer", "pretrained"])
def test_each_row_gets_its_own_logits_whatever_the_batch_size(kind: str, tiny_dataset: Dataset, tiny_config: Make) -> None:
    data = tiny_dataset(kind)
    model, split = drawn_model(kind, data, tiny_config(kind)), data.splits["validation"]
    whole = predict(model, split, len(split), CPU, 0)
    assert whole.dtype == np.float32
    assert whole.shape == (len(split), 5)
    for batch_size in (1, 7):
        assert np.abs(predict(model, split, batch_size, CPU, 0) - whole).max() < 1e-5
    model.eval()
    with torch.no_grad():
        for position in (0, 3, len(split) - 1):
            batch = Collate(0)([split[position]])
            alone = model(*batch.inputs)[0].numpy()
            assert np.abs(alone - whole[position]).max() < 1e-5
    assert np.ptp(whole, axis=0).min() > 1e-3, "the rows differ, so a mixed-up order would be seen"


@pytest.mark.parametrize("training", [True, False])
def test_evaluates_in_eval_mode_without_a_graph_and_restores_the_mode(
    training: bool, tiny_dataset: Dataset, tiny_config: Make
) -> None:
    data = tiny_dataset("transformer")
    model = drawn_model("transformer", data, tiny_config("transformer")).train(training)
    seen: list[tuple[bool, bool, bool]] = []

    def watch(module: nn.Module, _: object, logits: Tensor) -> None:
        modes = {m.training for m in module.modules()}
        seen.append((True in modes, logits.requires_grad, logits.is_inference()))

    model.register_forward_hook(watch)
    predict(model, data.splits["test"], 16, CPU, 0)
    assert set(seen) == {(False, False, True)}
    assert {m.training for m in model.modules()} == {training}
    assert all(p.grad is None for p in model.parameters())


def test_the_mode_comes_back_after_an_error_too(tiny_dataset: Dataset, tiny_config: Make) -> None:
    data = tiny_dataset("bag")
    model = drawn_model("bag", data, tiny_config("bag")).train()

    def fail(*_: object) -> None:
        raise KeyError("planted")

    model.register_forward_hook(fail)
    with pytest.raises(KeyError, match="planted"):
        predict(model, data.splits["test"], 16, CPU, 0)
    assert model.training
