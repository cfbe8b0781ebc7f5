"""The loop against hand-made references: the whole batch at once, torch's own mean, validation values given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reprise.batches import Collate, plan_epoch
from reprise.checkpoint import load_checkpoint, tensor_digest
from reprise.config import Config
from reprise.data.dataset import EncodedDataset
from reprise.models import build_model
from reprise.training import loop
from reprise.training.loop import NonFiniteError, class_weights_for, count_parameters, strictly_better, summed_loss
from reprise.training.randomness import make_deterministic

Dataset = Callable[[str], EncodedDataset]
Make = Callable[..., Config]
CPU = torch.device("cpu")

NO_DROPOUT = {
    "bag": {"model.feature_dropout": 0.0},
    "transformer": {"model.dropout": 0.0, "model.token_dropout": 0.0},
}


def first_group(data: EncodedDataset, config: Config) -> Any:
    """The whole first optimizer step's examples as one batch."""
    group = plan_epoch(data.splits["train"].lengths, config.train, 0)[0]
    return Collate(0)(data.splits["train"].__getitems__(group))


def untrained(config: Config, data: EncodedDataset) -> nn.Module:
    make_deterministic(config.train.seed)
    return build_model(config.model, data)


def reference_gradients(config: Config, data: EncodedDataset, step: int, weights: list[Tensor]) -> tuple[float, dict[int, Tensor]]:
    """Loss and gradients of the whole group of ``step`` at once, by torch's own weighted mean, with the weights of that moment."""
    split = data.splits["train"]
    epoch, number = divmod(step, -(-len(split) // config.train.batch_size))
    batch = Collate(0)(split.__getitems__(plan_epoch(split.lengths, config.train, epoch)[number]))
    model = build_model(config.model, data).train()
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(value)
    counts = np.bincount(split.labels, minlength=5)
    balanced = torch.tensor(len(split) / (5 * counts), dtype=torch.float32)
    loss = F.cross_entropy(
        model(*batch.inputs),
        batch.labels,
        weight=balanced if config.train.class_weights == "balanced" else None,
        label_smoothing=config.train.label_smoothing,
    )
    loss.backward()
    found = {i: p.grad for i, p in enumerate(model.parameters()) if p.grad is not None}
    return loss.item(), {i: g.to_dense() if g.is_sparse else g for i, g in found.items()}


def largest_difference(a: dict[int, Tensor], b: dict[int, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[i] - b[i]).abs().max()) for i in a)


# ---------------------------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("kind", ["bag", "transformer"])
@pytest.mark.parametrize(("batch", "micro", "smoothing"), [(256, 32, 0.0), (9, 4, 0.1)])
def test_a_group_in_micro_batches_has_the_gradient_of_the_whole(
    kind: str, batch: int, micro: int, smoothing: float, tiny_dataset: Dataset, tiny_config: Make, train: Any, before_steps: Any
) -> None:
    """8 x 32 = 256, and the ragged 4 + 4 + 1, weighted by class and smoothed: torch's own mean over the batch is the reference."""
    data = tiny_dataset(kind)
    config = tiny_config(
        kind,
        {
            **NO_DROPOUT[kind],
            "train.batch_size": batch,
            "train.micro_batch_size": micro,
            "train.class_weights": "balanced",
            "train.label_smoothing": smoothing,
        },
    )
    cut = train(config, data, stop_at=1)
    assert [len(rows) for _, rows in cut.rows] == ([32] * 8 if batch == 256 else [4, 4, 1])

    loss, reference = reference_gradients(config, data, 0, before_steps[0].weights)
    assert largest_difference(before_steps[0].gradients, reference) < 1e-6
    assert max(float(g.abs().max()) for g in reference.values()) > 1e-3
    assert {n: v for _, n, v in cut.logged}["train/loss"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("kind", ["bag", "transformer"])
def test_no_gradient_crosses_a_step_and_the_schedule_counts_optimizer_steps(
    kind: str, tiny_dataset: Dataset, tiny_config: Make, train: Any, before_steps: Any
) -> None:
    """FAULTS C2, C3: every step has its own group's gradient and no other; the rate is 0 at the last of ceil(n / batch) steps."""
    data = tiny_dataset(kind)
    config = tiny_config(kind, {**NO_DROPOUT[kind], "train.batch_size": 100, "train.micro_batch_size": 30})
    run = train(config, data)
    assert run.state.step == len(before_steps) == 2 * -(-len(data.splits["train"]) // 100)
    for step, (gradients, weights) in enumerate(before_steps):
        assert largest_difference(gradients, reference_gradients(config, data, step, weights)[1]) < 1e-6
    rates = [v for _, name, v in run.logged if name == "train/lr"]
    assert len(rates) == run.state.step
    assert rates[-1] == pytest.approx(0, abs=1e-12)
    assert max(rates) == pytest.approx(0.003, rel=0.1)
    assert all(abs(group["lr"]) < 1e-12 for o in run.optimizers for group in o.param_groups)


def test_summed_loss_is_torch_mean_times_its_divisor(tiny_dataset: Dataset, tiny_config: Make) -> None:
    data, config = tiny_dataset("bag"), tiny_config("bag", {"train.class_weights": "balanced"})
    batch = first_group(data, config)
    labels = torch.from_numpy(data.splits["train"].labels)
    weights = class_weights_for(config.train, labels, 5)
    logits = torch.randn(len(batch.labels), 5)
    mean = F.cross_entropy(logits, batch.labels, weight=weights, label_smoothing=0.2)
    ours = summed_loss(logits.bfloat16(), batch, weights, 0.2)
    assert ours.dtype == torch.float32
    assert float(summed_loss(logits, batch, weights, 0.2) / weights[batch.labels].sum()) == pytest.approx(float(mean), rel=1e-5)


def test_balanced_class_weights(tiny_config: Make) -> None:
    labels = torch.tensor([0, 0, 0, 2])
    config = tiny_config("bag", {"train.class_weights": "balanced"}).train
    assert class_weights_for(config, labels, 3).tolist() == pytest.approx([4 / (2 * 3), 0.0, 4 / (2 * 1)])
    assert class_weights_for(tiny_config("bag").train, labels, 3).tolist() == [1, 1, 1]


# ------------------------------------------------------------------------------------------------------------------ best


def given_validation(monkeypatch: pytest.MonkeyPatch, values: list[float], metric: str = "macro_f1") -> None:
    figures = iter(values)
    monkeypatch.setattr(loop, "validate", lambda *_: {"accuracy": 0.1, "macro_f1": 0.1, "loss": 9.0, metric: next(figures)})


@pytest.mark.parametrize(
    ("metric", "values", "best_epoch"),
    [
        ("macro_f1", [0.81, 0.85, 0.84], 2),
        ("macro_f1", [0.81, 0.85, 0.85], 2),
        ("accuracy", [0.5, 0.5, 0.5], 1),
        ("loss", [0.9, 0.3, 0.4], 2),
        ("loss", [0.9, math.nan, 0.4], 3),
    ],
)
def test_keeps_the_epoch_that_is_strictly_better(
    metric: str,
    values: list[float],
    best_epoch: int,
    tiny_dataset: Dataset,
    tiny_config: Make,
    train: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = tiny_dataset("bag")
    given_validation(monkeypatch, values, metric)
    weights: dict[int, str] = {}
    config = tiny_config("bag", {"train.max_epochs": 3, "train.best_metric": metric})

    def remember(training: Any) -> None:
        steps = -(-len(data.splits["train"]) // 64)
        step = training.optimizers[-1].step

        def after_step() -> None:
            step()
            weights[training.state.step + 1] = tensor_digest(training.model.state_dict())

        training.optimizers[-1].step = after_step
        training.epoch_steps = steps

    run = train(config, data, prepare=remember)
    assert run.state.best_step == best_epoch * run.epoch_steps
    assert run.state.best_value == values[best_epoch - 1]
    best = load_checkpoint(run.best, CPU)
    assert best["fit"]["step"] == run.state.best_step
    assert tensor_digest(best["model"]) == weights[run.state.best_step], "best.pt holds the weights of that very step"
    assert load_checkpoint(run.last, CPU)["fit"]["step"] == run.state.step


@pytest.mark.parametrize(
    ("value", "best", "metric", "better"),
    [
        (0.5, None, "accuracy", True),
        (math.nan, None, "accuracy", False),
        (math.nan, 0.1, "accuracy", False),
        (0.5, 0.5, "macro_f1", False),
        (0.4, 0.5, "loss", True),
        (0.6, 0.5, "loss", False),
    ],
)
def test_strictly_better(value: float, best: float | None, metric: str, better: bool) -> None:
    assert strictly_better(value, best, metric) is better


def test_the_direction_of_every_metric_is_declared() -> None:
    from typing import get_args

    from reprise.config import TrainConfig

    assert set(get_args(TrainConfig.model_fields["best_metric"].annotation)) == set(loop.HIGHER_IS_BETTER)
    with pytest.raises(KeyError):
        strictly_better(0.1, 0.2, "product_loss")


def test_patience_ends_a_training(tiny_dataset: Dataset, tiny_config: Make, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given_validation(monkeypatch, [0.5, 0.6, 0.6, 0.55, 0.9])
    config = tiny_config("bag", {"train.max_epochs": 5, "train.patience": 2, "train.best_metric": "macro_f1"})
    run = train(config, tiny_dataset("bag"))
    assert [is_best for _, is_best in run.saved] == [True, True, False, False]


# ---------------------------------------------------------------------------------------------------------------- not NaN


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_value_that_is_not_finite_stops_before_the_weights_change(
    fault: str, tiny_dataset: Dataset, tiny_config: Make, train: Any
) -> None:
    """FAULTS C5: the message holds step, rate, norm and the rows; the weights are those before the step."""
    data, config = tiny_dataset("transformer"), tiny_config("transformer")
    seen: dict[str, Any] = {}

    def poison(training: Any) -> None:
        seen["training"] = training

        def hook(module: nn.Module, _: Any, logits: Tensor) -> Tensor:
            if not module.training or training.state.step < 3:
                return logits
            seen.setdefault("before", tensor_digest(module.state_dict()))
            if fault == "loss":
                return logits * math.nan
            logits.register_hook(lambda gradient: gradient * math.inf)
            return logits

        training.model.register_forward_hook(hook)

    with pytest.raises(NonFiniteError) as caught:
        train(config, data, prepare=poison)
    training, message = seen["training"], str(caught.value)
    assert training.state.step == 3
    assert tensor_digest(training.model.state_dict()) == seen["before"]
    assert message.startswith("step 3: loss nan" if fault == "loss" else "step 3: loss 1.")
    row_ids = data.splits["train"].row_ids
    assert [row_ids[p] for p in training.rows[-1][1][:8]] == [w.strip(", .") for w in message.split("): ")[1].split()[:8]]
    assert "learning rate 0.00" in message
    assert all(math.isfinite(v) for _, _, v in training.logged)
    assert training.saved == []


# ----------------------------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_come_every_so_many_steps_or_minutes(tiny_dataset: Dataset, tiny_config: Make, train: Any) -> None:
    data = tiny_dataset("bag")

    def saved(execution: dict[str, Any]) -> list[int]:
        run = train(tiny_config("bag", {"train.max_epochs": 1, **execution}), data)
        return [step for step, _ in run.saved]

    total = -(-len(data.splits["train"]) // 64)
    assert saved({}) == [total]
    assert saved({"execution.checkpoint_every_steps": 2}) == [*range(2, total, 2), total]
    assert saved({"execution.checkpoint_every_minutes": 1e-9}) == list(range(1, total + 1))
    assert saved({"execution.checkpoint_every_minutes": 60.0}) == [total]


# ------------------------------------------------------------------------------------------------------ frozen, detached


def test_frozen_weights_do_not_move_and_logged_values_carry_no_graph(tiny_dataset: Dataset, tiny_config: Make, train: Any) -> None:
    config = tiny_config("transformer", {"train.max_epochs": 1})
    frozen: dict[str, Tensor] = {}

    def freeze(training: Any) -> None:
        training.model.embedding.requires_grad_(False)
        frozen["before"] = training.model.embedding.weight.detach().clone()
        frozen["head"] = training.model.head.weight.detach().clone()

    run = train(config, tiny_dataset("transformer"), prepare=freeze)
    assert torch.equal(run.model.embedding.weight, frozen["before"])
    assert not torch.equal(run.model.head.weight, frozen["head"])
    assert all(type(value) is float for _, _, value in run.logged)


@pytest.mark.parametrize("kind", ["bag", "transformer"])
@pytest.mark.usefixtures("one_thread", "deterministic")
def test_overfits_one_batch(kind: str, tiny_dataset: Dataset, tiny_config: Make) -> None:
    """The first thing to look at when a training does not learn: 32 rows must be learnt by heart."""
    data, config = tiny_dataset(kind), tiny_config(kind, NO_DROPOUT[kind])
    model = untrained(config, data).train()
    batch = Collate(0)(data.splits["train"].__getitems__(range(32)))
    from reprise.training.optim import build_optimizers

    optimizers = build_optimizers(model, config.train.optimizer.model_copy(update={"peak_lr": 0.01}))
    for _ in range(60):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        logits = model(*batch.inputs)
        (summed_loss(logits, batch, torch.ones(5), 0.0) / 32).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert (logits.argmax(dim=1) == batch.labels).all()


def test_counts_parameters() -> None:
    assert count_parameters(nn.Linear(784, 256)) == 200_960
