"""REPRISE_DEVICE says where; what it cannot mean is refused with what it may say."""

from __future__ import annotations

import pytest
import torch

from reprise.device import choose_device


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without accelerators, whatever runs the tests."""
    monkeypatch.delenv("REPRISE_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def with_cuda(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_auto_takes_the_best_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device() == torch.device("cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device() == torch.device("mps")
    with_cuda(monkeypatch, 1)
    assert choose_device() == torch.device("cuda")
    monkeypatch.setenv("REPRISE_DEVICE", "auto")
    assert choose_device() == torch.device("cuda")


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:1", "mps"])
def test_a_device_that_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("REPRISE_DEVICE", name)
    assert choose_device() == torch.device(name)


@pytest.mark.parametrize("name", ["gpu", "cpu:0", "cpu:", "cuda:", "cuda:x", "cuda:-1", "CUDA", "mps:0", "", "cuda:0:1"])
def test_a_name_that_means_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, 2)
    monkeypatch.setenv("REPRISE_DEVICE", name)
    with pytest.raises(ValueError, match=r"unknown device; allowed are auto, cpu, cuda, cuda:N and mps"):
        choose_device()


@pytest.mark.parametrize(("name", "there"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2), ("mps", 0)])
def test_a_device_that_is_not_there(name: str, there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, there)
    monkeypatch.setenv("REPRISE_DEVICE", name)
    with pytest.raises(ValueError, match=rf"REPRISE_DEVICE={name}: this machine has .*; use auto or cpu"):
        choose_device()
