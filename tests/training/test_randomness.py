"""Nothing draws from a global generator but the model's forward pass, and there only behind ``seed_forward``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reprise.config import Config
from reprise.data.dataset import EncodedDataset, EncodedSplit
from reprise.training import loop
from reprise.training.randomness import make_deterministic, mix, seed_forward

Dataset = Callable[[str], EncodedDataset]
Make = Callable[..., Config]
CPU = torch.device("cpu")


class Guard:
    """Watches torch's, NumPy's and Python's global generators from its making on; ``draws`` names what moved them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.draws: list[str] = []
        self.forwards = 0
        self._remember()
        seed = loop.seed_forward

        def watched_seed(*arguments: Any) -> None:
            self.check("before seed_forward")
            seed(*arguments)
            self._remember()

        monkeypatch.setattr(loop, "seed_forward", watched_seed)

    def watch(self, training: Any) -> None:
        """The training begins here (weights are drawn already); its model may draw in a training forward, nowhere else."""
        self._remember()

        def before(module: Any, _: Any) -> None:
            self.check("before forward")

        def after(module: Any, _: Any, __: Any) -> None:
            if module.training:
                self.forwards += 1
                self._torch = torch.default_generator.get_state()
            self.check("in an evaluating forward, or by NumPy or random in forward")

        training.model.register_forward_pre_hook(before)
        training.model.register_forward_hook(after)

    def check(self, where: str) -> None:
        if not torch.equal(self._torch, torch.default_generator.get_state()):
            self.draws.append(f"torch {where}")
        if self._numpy != repr(np.random.get_state(legacy=False)):
            self.draws.append(f"numpy {where}")
        if self._python != random.getstate():
            self.draws.append(f"random {where}")
        self._remember()

    def _remember(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._numpy = repr(np.random.get_state(legacy=False))
        self._python = random.getstate()


@pytest.mark.parametrize("kind", ["bag", "cnn", "transformer", "pretrained"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_other_draw_in_fit(
    kind: str, num_workers: int, tiny_dataset: Dataset, tiny_config: Make, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(kind, {"train.micro_batch_size": 40, "execution.num_workers": num_workers})
    guard = Guard(monkeypatch)
    training = train(config, tiny_dataset(kind), prepare=guard.watch)
    guard.check("after the last step")
    assert guard.forwards == len(training.rows) > training.state.step
    assert guard.draws == []


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: np.random.rand(), random.random])
def test_the_guard_sees_a_draw(
    draw: Callable[[], object], tiny_dataset: Dataset, tiny_config: Make, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in the dataset and in the logging: both places are outside the forward pass."""
    data, config = tiny_dataset("bag"), tiny_config("bag", {"train.max_epochs": 1})
    guard = Guard(monkeypatch)
    train(config, data, prepare=guard.watch, on_log=draw)
    assert guard.draws
    with monkeypatch.context() as patch:
        read = EncodedSplit.__getitems__
        patch.setattr(EncodedSplit, "__getitems__", lambda self, positions: (draw(), read(self, positions))[1])
        guard = Guard(patch)
        train(config, data, prepare=guard.watch)
        assert guard.draws


def test_the_guard_sees_a_loader_without_a_generator_of_its_own(
    tiny_dataset: Dataset, tiny_config: Make, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reprise.batches.torch.Generator", _NoGenerator)
    guard = Guard(monkeypatch)
    train(tiny_config("bag", {"train.max_epochs": 1}), tiny_dataset("bag"), prepare=guard.watch)
    assert guard.draws


class _NoGenerator:
    def manual_seed(self, seed: int) -> None:
        """Nothing: the loader then falls back on torch's global generator."""


def test_mix_spreads_and_stays_in_range() -> None:
    numbers = {mix(seed, step, micro) for seed in range(8) for step in range(64) for micro in range(8)}
    assert len(numbers) == 8 * 64 * 8
    assert all(0 <= n < 2**63 for n in (*numbers, mix(2**63 - 1, 10**12, 10**6)))
    bits = np.array([[n >> b & 1 for b in range(63)] for n in sorted(numbers)])
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.05
    assert mix(1, 2) != mix(2, 1)


def test_the_draw_of_a_forward_depends_on_step_and_micro_batch_only() -> None:
    def draw(*place: int) -> list[float]:
        seed_forward(*place, CPU)
        return torch.rand(4).tolist()

    first = draw(17, 3, 1)
    torch.rand(1000)
    assert draw(17, 3, 1) == first
    assert len({tuple(draw(*place)) for place in [(17, 3, 1), (17, 3, 2), (17, 4, 1), (18, 3, 1)]}) == 4


def test_make_deterministic_seeds_all_three_and_refuses_other_algorithms(deterministic: None) -> None:
    def draw() -> tuple[float, float, float]:
        make_deterministic(2**40 + 1)
        return float(torch.rand(())), float(np.random.rand()), random.random()

    assert draw() == draw()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
