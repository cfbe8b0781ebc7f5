"""Parameter groups, the schedule, row-wise Adagrad and clipping, each against an independent way to compute it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from reprise.config import Config, ScheduleConfig
from reprise.data.dataset import EncodedDataset
from reprise.models import build_model
from reprise.training.optim import (
    RowAdagrad,
    build_optimizers,
    clip_gradients,
    learning_rate_factor,
    set_learning_rate,
    split_parameters,
)

Dataset = Callable[[str], EncodedDataset]
Make = Callable[..., Config]


def schedule(warmup: float, final: float) -> ScheduleConfig:
    return ScheduleConfig(warmup_fraction=warmup, final_lr_fraction=final)


# -------------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("kind", ["bag", "cnn", "transformer", "pretrained"])
def test_only_weights_of_linear_and_convolution_layers_decay(kind: str, tiny_dataset: Dataset, tiny_config: Make) -> None:
    config = tiny_config(kind)
    model = build_model(config.model, tiny_dataset(kind))
    names = {parameter: name for name, parameter in model.named_parameters()}
    rate, found = config.train.optimizer.weight_decay, {}
    assert rate > 0
    for optimizer in build_optimizers(model, config.train.optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert parameter not in found, "a parameter stands in two groups"
                found[parameter] = group.get("weight_decay", 0.0)
    assert set(found) == {p for p in model.parameters() if p.requires_grad}
    decayed = {names[p] for p, decay in found.items() if decay}
    assert {found[p] for p in found} == {0.0, rate}
    assert decayed == {
        n
        for n, p in model.named_parameters()
        if n.endswith("weight") and p.dim() > 1 and "embedding" not in n and n != "table.weight" and p.requires_grad
    }
    assert not {n for n in decayed if "norm" in n or "bias" in n or "embedding" in n or "table" in n}


def test_shared_and_frozen_parameters_are_taken_once_or_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[1].weight.requires_grad_(False)
    decayed, plain, sparse = split_parameters(model)
    assert [id(p) for p in decayed] == [id(model[0].weight)]
    assert {id(p) for p in plain} == {id(model[0].bias), id(model[1].bias), id(model[2].bias)}
    assert sparse == []


def test_layers_of_an_encoder_learn_the_slower_the_further_they_are_from_the_head(tiny_dataset: Dataset, tiny_config: Make) -> None:
    changes = {"model.layer_lr_decay": 0.5, "model.frozen_layers": 0, "model.frozen_embeddings": False}
    config = tiny_config("pretrained", changes)
    model = build_model(config.model, tiny_dataset("pretrained"))
    (optimizer,) = build_optimizers(model, config.train.optimizer)
    rate = {p: group["peak_lr"] / config.train.optimizer.peak_lr for group in optimizer.param_groups for p in group["params"]}
    by_name = {name: rate[parameter] for name, parameter in model.named_parameters()}
    assert {share for name, share in by_name.items() if name.startswith("head.")} == {1.0}
    assert {share for name, share in by_name.items() if ".layer.1." in name} == {0.5}
    assert {share for name, share in by_name.items() if ".layer.0." in name} == {0.25}
    assert {share for name, share in by_name.items() if ".embeddings." in name} == {0.125}
    set_learning_rate([optimizer], 0.5)
    assert all(group["lr"] == 0.5 * group["peak_lr"] for group in optimizer.param_groups)


def test_a_table_without_a_rate_is_an_error(tiny_dataset: Dataset, tiny_config: Make) -> None:
    config = tiny_config("bag")
    model = build_model(config.model, tiny_dataset("bag"))
    with pytest.raises(ValueError, match=r"sparse_peak_lr is null"):
        build_optimizers(model, config.train.optimizer.model_copy(update={"sparse_peak_lr": None}))


def test_each_group_keeps_its_own_peak_rate() -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [w], "peak_lr": rate} for w, rate in zip(weights, (0.1, 0.4), strict=True)], lr=1.0)
    set_learning_rate([optimizer], 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.2]


# ------------------------------------------------------------------------------------------------------------ schedule


def test_warm_up_then_half_a_cosine() -> None:
    factors = [learning_rate_factor(step, 100, schedule(0.1, 0.2)) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(factors) == factors[9] == factors[10] == 1.0
    assert factors[-1] == pytest.approx(0.2)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    # 89 steps from the first to the last of the cosine; step 44.5 of them is the middle.
    assert (factors[54] + factors[55]) / 2 == pytest.approx(0.6, abs=1e-3)


@given(total=st.integers(2, 400), warmup=st.floats(0, 1), final=st.floats(0, 1))
def test_the_last_step_has_the_final_fraction_and_no_step_leaves_the_range(total: int, warmup: float, final: float) -> None:
    config = schedule(warmup, final)
    factors = [learning_rate_factor(step, total, config) for step in range(total)]
    assert all(0 <= f <= 1 for f in factors)
    assert factors == [learning_rate_factor(step, total, config) for step in range(total)], "a pure function"
    if total - 1 >= round(warmup * total):
        assert math.isclose(factors[-1], final, abs_tol=1e-12)


@pytest.mark.parametrize(("total", "warmup"), [(1, 0.0), (1, 1.0), (2, 0.0), (5, 1.0)])
def test_the_shortest_trainings_have_a_rate_too(total: int, warmup: float) -> None:
    factors = [learning_rate_factor(step, total, schedule(warmup, 0.0)) for step in range(total)]
    assert factors[0] > 0
    assert max(factors) == 1.0


def test_agrees_with_torch_cosine() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=39, eta_min=0.1)
    for step in range(40):
        assert learning_rate_factor(step, 40, schedule(0.0, 0.1)) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        reference.step()


# ----------------------------------------------------------------------------------------------- row-wise Adagrad, clip


def test_row_adagrad_by_hand() -> None:
    """Two steps on a table of 4 x 2; row 1 is looked up twice in one step, so its gradient is the sum."""
    table = nn.Embedding(4, 2, sparse=True)
    start = table.weight.detach().clone()
    optimizer = RowAdagrad([{"params": [table.weight]}], lr=0.5)
    expected, sums = start.double().clone(), torch.zeros(4, dtype=torch.float64)
    for rows, gradient in (([1, 1, 3], torch.tensor([1.0, -2.0])), ([1], torch.tensor([0.5, 0.25]))):
        optimizer.zero_grad(set_to_none=True)
        (table(torch.tensor(rows)) * gradient).sum().backward()
        optimizer.step()
        for row in set(rows):
            g = gradient.double() * rows.count(row)
            sums[row] += float((g**2).mean())
            expected[row] -= 0.5 * g / (sums[row].sqrt() + 1e-10)
    assert torch.allclose(table.weight.double(), expected, atol=1e-6)
    assert torch.equal(table.weight[[0, 2]], start[[0, 2]]), "rows without a gradient are not touched"
    assert optimizer.state[table.weight]["sum"].shape == (4,)


def test_clipping_counts_sparse_and_dense_gradients_together() -> None:
    table, layer = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)
    dense_table = nn.Embedding(5, 3)
    dense_table.load_state_dict(table.state_dict())
    rows = torch.tensor([0, 2, 2, 4])
    results = []
    for embedding in (table, dense_table):
        layer.zero_grad(set_to_none=True)
        (layer(embedding(rows)) ** 2).sum().mul(10).backward()
        parameters = [embedding.weight, *layer.parameters()]
        norm = clip_gradients(parameters, 1.0) if embedding is table else nn.utils.clip_grad_norm_(parameters, 1.0)
        results.append((float(norm), [p.grad.to_dense() if p.grad.is_sparse else p.grad.clone() for p in parameters]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert results[0][0] > 1
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-7)


def test_small_gradients_are_left_alone() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    (weight * 0.1).sum().backward()
    before = weight.grad.clone()
    assert float(clip_gradients([weight], 1.0)) == pytest.approx(math.sqrt(0.02))
    assert torch.equal(weight.grad, before)
