"""The worked numbers of the lesson that are about torch itself: what the loop relies on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from reprise.training.loop import count_parameters


def test_gradients_add_up_until_they_are_zeroed() -> None:
    w, x = torch.tensor([2.0, -1.0], requires_grad=True), torch.tensor([3.0, 4.0])
    for expected in ([6.0, 8.0], [12.0, 16.0]):
        ((w @ x - 1) ** 2).backward()
        assert w.grad.tolist() == expected
    w.grad = None
    ((w @ x - 1) ** 2).backward()
    assert w.grad.tolist() == [6.0, 8.0]


def test_a_hand_written_backward_pass_equals_autograd() -> None:
    """Two layers, ReLU, softmax cross entropy, weighted by class: the chain rule in NumPy."""
    rng = np.random.default_rng(0)
    x, labels, class_weights = rng.normal(size=(12, 7)), rng.integers(0, 4, 12), np.array([1.0, 2.0, 0.5, 1.5])
    w1, b1 = rng.normal(size=(5, 7)), rng.normal(size=5)
    w2, b2 = rng.normal(size=(4, 5)), rng.normal(size=4)

    hidden = x @ w1.T + b1
    active = np.maximum(hidden, 0)
    logits = active @ w2.T + b2
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    row_weights = class_weights[labels] / class_weights[labels].sum()
    d_logits = (probabilities - np.eye(4)[labels]) * row_weights[:, None]
    d_hidden = d_logits @ w2 * (hidden > 0)
    by_hand = [d_hidden.T @ x, d_hidden.sum(0), d_logits.T @ active, d_logits.sum(0)]

    tensors = [torch.tensor(a, requires_grad=True) for a in (w1, b1, w2, b2)]
    out = F.linear(F.relu(F.linear(torch.tensor(x), tensors[0], tensors[1])), tensors[2], tensors[3])
    F.cross_entropy(out, torch.tensor(labels), weight=torch.tensor(class_weights)).backward()
    for ours, tensor in zip(by_hand, tensors, strict=True):
        assert np.abs(ours - tensor.grad.numpy()).max() < 1e-6


class Layers(nn.Module):
    """784 -> 256 -> 10, its layers kept in a ModuleList or hidden in a plain list."""

    def __init__(self, container: type) -> None:
        super().__init__()
        self.layers = container([nn.Linear(784, 256), nn.Linear(256, 10)])


def test_a_module_list_shows_its_parameters_and_a_plain_list_hides_them() -> None:
    assert count_parameters(Layers(nn.ModuleList)) == 200_960 + 2_570 == 203_530
    assert count_parameters(Layers(list)) == 0


def test_loss_is_a_scalar_and_takes_logits_and_integer_labels() -> None:
    logits = torch.tensor([[2.0, 0.0]], requires_grad=True)
    loss = F.cross_entropy(logits, torch.tensor([0])).detach()
    assert loss.shape == ()
    assert float(loss) == pytest.approx(float(torch.log(1 + torch.exp(torch.tensor(-2.0)))))
    assert float(loss) != pytest.approx(float(F.cross_entropy(logits.detach().softmax(dim=1), torch.tensor([0])))), (
        "not probabilities"
    )


def test_eval_alone_does_not_stop_gradients() -> None:
    layer = nn.Linear(2, 2).eval()
    assert layer(torch.ones(1, 2)).requires_grad
    with torch.inference_mode():
        assert not layer(torch.ones(1, 2)).requires_grad
    target = (layer(torch.ones(1, 2))).detach()
    assert not target.requires_grad
