"""The moving average of the weights: by hand, resumed, validated and shipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reprise.checkpoint import load_checkpoint, tensor_digest
from reprise.config import Config
from reprise.data.dataset import EncodedDataset
from reprise.evaluation.predict import predict
from reprise.models import build_model
from reprise.training.averaging import shipped_weights

Dataset = Callable[[str], EncodedDataset]
Make = Callable[..., Config]
CPU = torch.device("cpu")
DECAY = 0.8


def averaged(tiny_config: Make, kind: str, changes: dict[str, Any] | None = None) -> Config:
    return tiny_config(kind, {"train.ema_decay": DECAY, "train.patience": None, **(changes or {})})


@pytest.mark.parametrize("kind", ["bag", "transformer"])
def test_the_average_is_the_one_computed_by_hand(kind: str, tiny_dataset: Dataset, tiny_config: Make, train: Any) -> None:
    weights: list[list[np.ndarray]] = []

    def record(training: Any) -> None:
        original = training.optimizers[-1].step

        def step(*arguments: Any) -> None:
            original(*arguments)
            weights.append([p.detach().numpy().copy() for p in training.model.parameters()])

        training.optimizers[-1].step = step

    run = train(averaged(tiny_config, kind, {"train.max_epochs": 1}), tiny_dataset(kind), prepare=record)
    expected = weights[0]
    for later in weights[1:]:
        expected = [DECAY * mean + (1 - DECAY) * new for mean, new in zip(expected, later, strict=True)]
    found = shipped_weights(load_checkpoint(run.last, CPU))
    names = [name for name, _ in run.model.named_parameters()]
    for name, mean in zip(names, expected, strict=True):
        np.testing.assert_allclose(found[name].numpy(), mean, rtol=1e-4, atol=1e-6)
    assert tensor_digest(found) != tensor_digest(run.model.state_dict()), "the last weights are others"


@pytest.mark.parametrize("kind", ["bag", "pretrained"])
def test_continued_it_is_the_average_of_the_straight_run(kind: str, tiny_dataset: Dataset, tiny_config: Make, train: Any) -> None:
    data, config = tiny_dataset(kind), averaged(tiny_config, kind)
    straight = train(config, data)
    first = train(config, data, stop_at=7)
    second = train(config, data, resume=first)
    assert first.logged + second.logged == straight.logged
    assert second.bits() == straight.bits()
    averages = [load_checkpoint(run.last, CPU)["average"] for run in (second, straight)]
    assert tensor_digest(averages[0]) == tensor_digest(averages[1])


def test_what_was_validated_is_what_ships(tiny_dataset: Dataset, tiny_config: Make, train: Any) -> None:
    data, config = tiny_dataset("bag"), averaged(tiny_config, "bag", {"train.max_epochs": 1})
    run = train(config, data)
    (accuracy,) = (value for _, name, value in run.logged if name == "validation/accuracy")
    (loss,) = (value for _, name, value in run.logged if name == "validation/loss")
    model = build_model(config.model, data)
    model.load_state_dict(shipped_weights(load_checkpoint(run.best, CPU)))
    split = data.splits["validation"]
    logits = torch.from_numpy(predict(model, split, 32, CPU, data.manifest.tokenizer.pad_id))
    assert float((logits.argmax(dim=1).numpy() == split.labels).mean()) == accuracy
    labels = torch.from_numpy(split.labels)
    assert float(torch.nn.functional.cross_entropy(logits, labels)) == pytest.approx(loss, rel=1e-5)
    last = float(torch.nn.functional.cross_entropy(torch.from_numpy(predict(run.model, split, 32, CPU, 0)), labels))
    assert last != pytest.approx(loss, rel=1e-3), "the last weights must judge otherwise, or this shows nothing"


def test_without_a_decay_there_is_no_average(tiny_dataset: Dataset, tiny_config: Make, train: Any) -> None:
    run = train(tiny_config("bag", {"train.max_epochs": 1}), tiny_dataset("bag"))
    saved = load_checkpoint(run.last, CPU)
    assert saved["average"] == {}
    assert shipped_weights(saved) is saved["model"]
