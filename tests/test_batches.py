"""The order of the examples and the batches made of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise.batches import Collate, MicroBatchSampler, batches_by_length, load_groups, plan_epoch, steps_per_epoch
from reprise.config import Config, TrainConfig
from reprise.data.dataset import EncodedDataset, Example

Make = Callable[..., Config]
Dataset = Callable[[str], EncodedDataset]


def lengths(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(1, 60, count).astype(np.int32)


def order(method: str, batch_size: int = 32, window_batches: int = 4, seed: int = 17) -> TrainConfig:
    return TrainConfig.model_construct(seed=seed, batch_size=batch_size, order=method, window_batches=window_batches)


@pytest.mark.parametrize("method", ["global", "windows"])
def test_10_000_examples_at_32_are_313_batches_and_one_of_16(method: str) -> None:
    groups = plan_epoch(lengths(10_000), order(method), epoch=0)
    assert len(groups) == steps_per_epoch(10_000, 32) == 313
    assert sorted(map(len, groups)) == [16] + [32] * 312
    if method == "global":
        assert len(groups[-1]) == 16


@given(
    count=st.integers(1, 300),
    batch_size=st.integers(1, 50),
    window_batches=st.integers(1, 9),
    epoch=st.integers(0, 1000),
    method=st.sampled_from(["global", "windows"]),
)
def test_every_example_once(count: int, batch_size: int, window_batches: int, epoch: int, method: str) -> None:
    groups = plan_epoch(lengths(count), order(method, batch_size, window_batches), epoch)
    assert sorted(np.concatenate(groups).tolist()) == list(range(count))
    assert len(groups) == steps_per_epoch(count, batch_size)
    assert max(map(len, groups)) <= batch_size


def test_a_pure_function_of_seed_and_epoch() -> None:
    def flat(seed: int, epoch: int, method: str = "windows") -> tuple[int, ...]:
        return tuple(np.concatenate(plan_epoch(lengths(500), order(method, seed=seed), epoch)).tolist())

    np.random.seed(1)
    first = flat(1, 0)
    torch.manual_seed(2)
    np.random.seed(2)
    assert flat(1, 0) == first
    assert len({flat(s, e, m) for s in (1, 2) for e in (0, 1, 2) for m in ("global", "windows")}) == 12
    assert flat(2**63 - 1, 0) != flat(2**63 - 2, 0)


def test_windows_save_padding_and_still_mix_the_texts() -> None:
    texts = lengths(4000)

    def padding(groups: list[Any]) -> int:
        return sum(len(g) * int(texts[g].max()) - int(texts[g].sum()) for g in groups)

    windows = [plan_epoch(texts, order("windows", window_batches=16), epoch) for epoch in (0, 1)]
    assert padding(windows[0]) < padding(plan_epoch(texts, order("global"), 0)) / 3
    # The same examples do not meet again in the next epoch: the windows are drawn anew.
    together = [{frozenset(g[:2].tolist()) for g in groups} for groups in windows]
    assert len(together[0] & together[1]) < 5
    # Not from short to long either.
    means = [texts[g].mean() for g in windows[0]]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.3


def example(position: int, length: int, label: int) -> Example:
    return Example(position, np.arange(1, length + 1, dtype=np.int32), label)


def test_lengths_5_3_7_are_padded_to_7_with_a_mask() -> None:
    batch = Collate(pad_id=9)([example(4, 5, 0), example(1, 3, 2), example(8, 7, 1)])
    input_ids, attention_mask = batch.inputs
    assert input_ids.tolist() == [[1, 2, 3, 4, 5, 9, 9], [1, 2, 3, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7]]
    assert attention_mask.tolist() == [[1] * 5 + [0] * 2, [1] * 3 + [0] * 4, [1] * 7]
    assert batch.labels.tolist() == [0, 2, 1]
    assert batch.positions.tolist() == [4, 1, 8]
    assert {t.dtype for t in (*batch.inputs, batch.labels, batch.positions)} == {torch.int64}


def test_collate_reaches_a_loader_process() -> None:
    assert pickle.loads(pickle.dumps(Collate(3))) == Collate(3)


def test_a_batch_moves_as_a_whole() -> None:
    batch = Collate(0)([example(0, 2, 0)])
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(torch.device("meta"))
    assert {t.device.type for t in (*moved.inputs, moved.labels, moved.positions)} == {"meta"}


def test_micro_batches_never_cross_a_group() -> None:
    groups = [np.arange(9), np.arange(9, 12)]
    sampler = MicroBatchSampler(groups, 4)
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8], [9, 10, 11]]
    assert len(sampler) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_groups_come_with_their_micro_batches_from_any_start(num_workers: int, tiny_dataset: Dataset, tiny_config: Make) -> None:
    split = tiny_dataset("bag").splits["train"]
    config = tiny_config("bag", {"train.micro_batch_size": 30, "execution.num_workers": num_workers})
    groups = plan_epoch(split.lengths, config.train, 1)
    start = 2
    seen = [
        (group.tolist(), [b.positions.tolist() for b in micro_batches])
        for group, micro_batches in load_groups(split, groups[start:], config.train, config.execution, Collate(0))
    ]
    assert [group for group, _ in seen] == [g.tolist() for g in groups[start:]]
    assert all([p for part in parts for p in part] == group for group, parts in seen)
    assert all(len(p) <= 30 for _, parts in seen for p in parts)


def test_by_length_reads_the_whole_split_once_and_hardly_pads(tiny_dataset: Dataset) -> None:
    split = tiny_dataset("bag").splits["train"]
    batches = list(batches_by_length(split, 32, Collate(0)))
    assert sorted(p for b in batches for p in b.positions.tolist()) == list(range(len(split)))
    widths = [b.inputs[0].shape[1] for b in batches]
    assert widths == sorted(widths)
    for batch in batches:
        for position, ids, mask, label in zip(batch.positions, *batch.inputs, batch.labels, strict=True):
            assert ids[mask.bool()].tolist() == split[int(position)].input_ids.tolist()
            assert int(label) == split[int(position)].label
