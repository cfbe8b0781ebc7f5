"""Stop anywhere, go on, and get the same bits: FAULTS A1 to A6, A9."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reprise.config import Config
from reprise.data.dataset import EncodedDataset
from reprise.training import loop

Dataset = Callable[[str], EncodedDataset]
Make = Callable[..., Config]

ACCUMULATION = {"train.batch_size": 48, "train.micro_batch_size": 20}


def joined(first: Any, second: Any, what: str) -> Any:
    """What two parts of one training did, as one list: the second part begins behind the step at which the first was saved."""
    return getattr(first, what) + getattr(second, what)


@pytest.mark.parametrize("kind", ["bag", "cnn", "transformer", "pretrained", "lora"])
@pytest.mark.parametrize("order", ["global", "windows"])
def test_continued_is_the_straight_run(kind: str, order: str, tiny_dataset: Dataset, tiny_config: Make, train: Any) -> None:
    data, config = tiny_dataset(kind), tiny_config(kind, {**ACCUMULATION, "train.order": order})
    straight = train(config, data)
    epoch_steps = straight.state.step // config.train.max_epochs
    assert epoch_steps >= 6
    assert len(data.splits["train"]) % 48, "the last group must be ragged, or this shows less than it says"
    for stop_at in (1, 4, epoch_steps, epoch_steps + 3):
        first = train(config, data, stop_at=stop_at)
        assert first.stopped
        assert first.saved[-1][0] == first.state.step == stop_at
        second = train(config, data, resume=first)
        assert not second.stopped
        assert joined(first, second, "rows") == straight.rows
        assert joined(first, second, "logged") == straight.logged
        assert second.bits() == straight.bits()


def test_a_training_stopped_again_and_again_is_the_straight_run(tiny_dataset: Dataset, tiny_config: Make, train: Any) -> None:
    data, config = tiny_dataset("bag"), tiny_config("bag", {"train.max_epochs": 4})
    straight = train(config, data)
    part = train(config, data, stop_at=2)
    rows = list(part.rows)
    for stop_at in range(3, straight.state.step, 3):
        part = train(config, data, resume=part, stop_at=stop_at)
        rows += part.rows
    part = train(config, data, resume=part)
    assert rows + part.rows == straight.rows
    assert part.bits() == straight.bits()
    epochs = [tuple(p for s, ps in straight.rows if s * 4 // straight.state.step == e for p in ps) for e in range(4)]
    assert len(set(epochs)) == 4, "every epoch has an order of its own"
    assert {tuple(sorted(e)) for e in epochs} == {tuple(range(len(data.splits["train"])))}


def test_from_the_checkpoint_that_a_kill_would_leave(tiny_dataset: Dataset, tiny_config: Make, train: Any) -> None:
    """A killed process saved nothing when it died: what it did after its last checkpoint is done again, to the same bits."""
    data = tiny_dataset("bag")
    config = tiny_config("bag", {"train.batch_size": 32, "train.micro_batch_size": 32, "execution.checkpoint_every_steps": 4})
    straight = train(config, data)

    def die_at_seven(training: Any) -> None:
        original = training.optimizers[0].step

        def step(*arguments: Any) -> None:
            if training.state.step == 7:
                raise KeyboardInterrupt
            original(*arguments)

        training.optimizers[0].step = step

    killed: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        train(config, data, prepare=lambda training: (killed.append(training), die_at_seven(training)))
    second = train(config, data, resume=killed[0])
    assert second.rows[0][0] == 4
    assert second.bits() == straight.bits()


@pytest.mark.parametrize("kind", ["bag", "cnn", "transformer", "pretrained"])
def test_two_straight_runs_and_any_number_of_workers_give_the_same_bits(
    kind: str, tiny_dataset: Dataset, tiny_config: Make, train: Any
) -> None:
    data = tiny_dataset(kind)
    runs = [train(tiny_config(kind, {**ACCUMULATION, "execution.num_workers": n}), data) for n in (0, 0, 2)]
    assert runs[0].rows == runs[1].rows == runs[2].rows
    assert runs[0].logged == runs[1].logged == runs[2].logged
    assert runs[0].bits() == runs[1].bits() == runs[2].bits()


def test_another_seed_gives_another_training(tiny_dataset: Dataset, tiny_config: Make, train: Any) -> None:
    runs = [train(tiny_config("bag", {"train.seed": seed, "train.max_epochs": 1}), tiny_dataset("bag")) for seed in (1, 2)]
    assert runs[0].rows != runs[1].rows
    assert runs[0].bits()["weights"] != runs[1].bits()["weights"]


def test_patience_goes_on_counting(tiny_dataset: Dataset, tiny_config: Make, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS A5, A6: with no gain after the first epoch, patience 3 ends after epoch 4, interrupted or not."""
    data = tiny_dataset("bag")
    config = tiny_config("bag", {"train.max_epochs": 9, "train.patience": 3, "train.best_metric": "accuracy"})
    monkeypatch.setattr(loop, "validate", lambda *_: {"accuracy": 0.5, "macro_f1": 0.5, "loss": 1.0})
    straight = train(config, data)
    epoch_steps = -(-len(data.splits["train"]) // 64)
    assert straight.state.step == 4 * epoch_steps
    first = train(config, data, stop_at=3 * epoch_steps)
    assert first.saved[-1] == (3 * epoch_steps, False)
    assert first.state.epochs_without_gain == 2
    second = train(config, data, resume=first)
    assert second.bits() == straight.bits()
    # Stopped at the very end: there is nothing left to do, and that is what continuing does.
    third = train(config, data, resume=second)
    assert third.rows == []
    assert third.bits() == straight.bits()


def test_a_stop_after_the_last_step_is_a_finished_training(tiny_dataset: Dataset, tiny_config: Make, train: Any) -> None:
    data, config = tiny_dataset("bag"), tiny_config("bag", {"train.max_epochs": 1})
    total = -(-len(data.splits["train"]) // 64)
    run = train(config, data, stop_at=total)
    assert not run.stopped
    assert run.saved == [(total, True)]


def test_a_checkpoint_of_another_model_is_refused(tiny_dataset: Dataset, tiny_config: Make, train: Any, tmp_path: Path) -> None:
    first = train(tiny_config("bag", {"train.max_epochs": 1}), tiny_dataset("bag"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        train(tiny_config("bag", {"model.embedding_dim": 16}), tiny_dataset("bag"), resume=first)
