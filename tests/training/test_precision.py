"""What 16 bits can hold, and what autocast leaves in 32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from reprise.config import Config
from reprise.data.dataset import EncodedDataset
from reprise.training.loop import NonFiniteError
from reprise.training.precision import allow_tf32, autocast

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


# ------------------------------------------------------------------------------------------------------------------ fp16


def overflowing(training: Any, at_step: int, above_scale: float) -> None:
    """Gradients of one step become infinite as long as the loss is scaled by more than ``above_scale``, as they do in fp16."""

    def hook(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        if module.training and training.state.step == at_step and training.scaler.get_scale() > above_scale:
            logits.register_hook(lambda gradient: gradient * float("inf"))
        return logits

    training.model.register_forward_hook(hook)


@pytest.mark.parametrize("kind", ["cnn", "transformer", "pretrained"])
def test_an_overflow_in_fp16_halves_the_scale_and_tries_the_same_group_again(
    kind: str, tiny_dataset: Callable[[str], EncodedDataset], tiny_config: Callable[..., Config], train: Any
) -> None:
    """FAULTS C4: neither step nor schedule moves on; no group is left out."""
    data, config = tiny_dataset(kind), tiny_config(kind, {"train.precision": "fp16", "train.max_epochs": 1})
    run = train(config, data, prepare=lambda training: overflowing(training, at_step=2, above_scale=20_000))
    steps = [step for step, _ in run.rows]
    total = -(-len(data.splits["train"]) // config.train.batch_size)
    assert steps == [0, 1, 2, 2, 2, *range(3, total)]
    assert run.rows[2] == run.rows[3] == run.rows[4]
    assert (run.state.skipped_steps, run.state.step, run.scaler.get_scale()) == (2, total, 65_536 / 4)
    logged = {(step, name): value for step, name, value in run.logged}
    assert [logged[step, "train/skipped_steps"] for step in (2, 3)] == [0, 2]
    assert [logged[step, "train/loss_scale"] for step in (2, 3)] == [65_536, 65_536 / 4]
    straight = train(config, data)
    rates = [[value for _, name, value in r.logged if name == "train/lr"] for r in (run, straight)]
    assert rates[0] == rates[1]


def test_a_training_in_fp16_goes_on_with_the_scale_it_had(
    tiny_dataset: Callable[[str], EncodedDataset], tiny_config: Callable[..., Config], train: Any
) -> None:
    """FAULTS A4."""
    data, config = tiny_dataset("transformer"), tiny_config("transformer", {"train.precision": "fp16"})

    def overflow(training: Any) -> None:
        overflowing(training, at_step=2, above_scale=300)

    straight = train(config, data, prepare=overflow)
    assert straight.scaler.get_scale() == 256
    first = train(config, data, stop_at=4, prepare=overflow)
    second = train(config, data, resume=first)
    assert first.rows + second.rows == straight.rows
    assert first.logged + second.logged == straight.logged
    assert second.bits() == straight.bits()
    assert {p.dtype for p in second.model.parameters()} == {torch.float32}


def test_an_overflow_at_every_scale_is_an_error(
    tiny_dataset: Callable[[str], EncodedDataset], tiny_config: Callable[..., Config], train: Any
) -> None:
    config = tiny_config("cnn", {"train.precision": "fp16"})
    seen: list[Any] = []
    with pytest.raises(NonFiniteError, match=r"step 2: loss 1\.\d+, gradient norm (inf|nan)"):
        train(
            config,
            tiny_dataset("cnn"),
            prepare=lambda training: (seen.append(training), overflowing(training, at_step=2, above_scale=0)),
        )
    assert seen[0].scaler.get_scale() == 1
    assert seen[0].state.skipped_steps == 16


def test_tf32_is_what_the_recipe_says() -> None:
    for allowed in (True, False):
        allow_tf32(allowed)
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (allowed, allowed)
