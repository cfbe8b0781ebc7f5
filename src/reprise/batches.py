"""Which examples are trained when: a pure function of (seed, epoch), cut into optimizer steps and micro-batches.

A *group* is the examples of one optimizer step; a *micro-batch* is what one forward pass sees. Nothing here is stored in a
checkpoint: the plan of any epoch can be computed again from its two numbers, and an epoch can be entered at any step without
loading what came before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from reprise.config import ExecutionConfig, TrainConfig
from reprise.data.dataset import Example, Split
from reprise.data.features import FeatureExample, FeatureSplit

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Examples side by side: ``inputs`` are what the model takes, in its order; ``labels`` int64 [B]; ``positions`` int64 [B], row
    numbers in the split."""

    inputs: tuple[Tensor, ...]
    labels: Tensor
    positions: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``; the copy runs beside the computation where the memory is pinned."""
        if device.type == "cpu":
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory (called by the DataLoader)."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(tuple(map(change, self.inputs)), change(self.labels), change(self.positions))


@dataclass(frozen=True)
class Collate:
    """Pads token ids to the longest among them: ``inputs`` are ``input_ids`` and ``attention_mask``, int64 [B, L], the mask 1 for a
    token and 0 for padding. An object rather than a closure, so that it reaches loader processes."""

    pad_id: int

    def __call__(self, examples: Sequence[Example]) -> Batch:
        lengths = np.fromiter((len(e.input_ids) for e in examples), dtype=np.int64, count=len(examples))
        mask = np.arange(lengths.max()) < lengths[:, None]
        input_ids = np.full(mask.shape, self.pad_id, dtype=np.int64)
        input_ids[mask] = np.concatenate([e.input_ids for e in examples])
        return Batch(
            inputs=(torch.from_numpy(input_ids), torch.from_numpy(mask.astype(np.int64))),
            labels=torch.tensor([e.label for e in examples]),
            positions=torch.tensor([e.position for e in examples]),
        )


def stack_features(examples: Sequence[FeatureExample]) -> Batch:
    """The one input is the vectors that a frozen encoder made, float32 [B, D]."""
    return Batch(
        inputs=(torch.from_numpy(np.stack([e.features for e in examples])),),
        labels=torch.tensor([e.label for e in examples]),
        positions=torch.tensor([e.position for e in examples]),
    )


def collate_for(split: Split, pad_id: int) -> Callable[[Sequence[Any]], Batch]:
    """The function that makes a Batch of examples of ``split``."""
    return stack_features if isinstance(split, FeatureSplit) else Collate(pad_id)


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Optimizer steps in one epoch: the ragged last group counts as one."""
    return -(-num_examples // batch_size)


def plan_epoch(lengths: NDArray[np.int32], config: TrainConfig, epoch: int) -> list[Positions]:
    """The groups of one epoch, each an array of positions; every position occurs once.

    ``order: global`` draws one permutation of the whole split. ``order: windows`` draws the same permutation, sorts each window
    of ``window_batches`` groups by length, so that a batch holds texts of like length and little padding, and shuffles the groups.
    """
    rng = np.random.default_rng((config.seed, epoch))
    order = rng.permutation(len(lengths))
    if config.order == "global":
        return _cut(order, config.batch_size)
    windows = _cut(order, config.window_batches * config.batch_size)
    by_length = np.concatenate([window[np.argsort(lengths[window], kind="stable")] for window in windows])
    groups = _cut(by_length, config.batch_size)
    return [groups[i] for i in rng.permutation(len(groups))]


def _cut(positions: Positions, size: int) -> list[Positions]:
    return [positions[start : start + size] for start in range(0, len(positions), size)]


class MicroBatchSampler(Sampler[list[int]]):
    """Yields the positions of each micro-batch of the given groups, in order."""

    def __init__(self, groups: Sequence[Positions], micro_batch_size: int) -> None:
        self._groups = groups
        self._micro_batch_size = micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for group in self._groups:
            for micro_batch in _cut(group, self._micro_batch_size):
                yield micro_batch.tolist()

    def __len__(self) -> int:
        return sum(steps_per_epoch(len(group), self._micro_batch_size) for group in self._groups)


def load_groups(
    split: Split,
    groups: Sequence[Positions],
    config: TrainConfig,
    execution: ExecutionConfig,
    collate: Callable[[Sequence[Any]], Batch],
) -> Iterator[tuple[Positions, Iterator[Batch]]]:
    """Each group's positions with an iterator over its micro-batches; the loader works ahead in ``num_workers`` processes."""
    workers = execution.num_workers
    loader: DataLoader[Any] = DataLoader(
        split,  # type: ignore[arg-type]  # a Dataset by its methods; the data room does not import torch
        batch_sampler=MicroBatchSampler(groups, config.micro_batch_size),
        collate_fn=collate,
        num_workers=workers,
        prefetch_factor=execution.prefetch_factor if workers else None,
        pin_memory=torch.cuda.is_available(),
        # Without a generator of its own the loader would draw its workers' seed from torch's global one.
        generator=torch.Generator().manual_seed(config.seed),
    )
    micro_batches = iter(loader)
    for group in groups:
        count = steps_per_epoch(len(group), config.micro_batch_size)
        yield group, (next(micro_batches) for _ in range(count))


def batches_by_length(split: Split, batch_size: int, collate: Callable[[Sequence[Any]], Batch]) -> Iterator[Batch]:
    """The whole split in order of length, so that a batch is hardly padded; for prediction, where order does not matter."""
    for positions in _cut(np.argsort(split.lengths, kind="stable").astype(np.int64), batch_size):
        yield collate(split.__getitems__(positions.tolist()))
