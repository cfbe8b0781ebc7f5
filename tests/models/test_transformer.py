"""Attention and positions of the transformer against their definitions in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from reprise.models.pooling import drop_tokens, masked_max, masked_mean
from reprise.models.transformer import ConvolutionStem, SelfAttention, sinusoidal_positions


def test_attention_is_its_definition_and_ignores_padding() -> None:
    """softmax(QK' / sqrt(d)) V per head over the tokens that may be looked at, by hand."""
    torch.manual_seed(0)
    attention, heads, width = SelfAttention(8, 2), 2, 8
    x = torch.randn(3, 5, width)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()
    ours = attention(x, mask[:, None, None, :]).detach().numpy()

    w, b = attention.query_key_value.weight.detach().numpy(), attention.query_key_value.bias.detach().numpy()
    for row in range(3):
        n = int(mask[row].sum())
        qkv = x[row].numpy() @ w.T + b
        q, k, v = (qkv[:, i * width : (i + 1) * width].reshape(5, heads, 4) for i in range(3))
        mixed = np.zeros((5, heads, 4))
        for head in range(heads):
            scores = q[:, head] @ k[:n, head].T / np.sqrt(4)  # keys and values of tokens alone
            share = np.exp(scores - scores.max(1, keepdims=True))
            mixed[:, head] = share / share.sum(1, keepdims=True) @ v[:n, head]
        by_hand = mixed.reshape(5, width) @ attention.output.weight.detach().numpy().T + attention.output.bias.detach().numpy()
        assert np.abs(ours[row, :n] - by_hand[:n]).max() < 1e-5


def test_no_gradient_reaches_padding(make_model: Callable[..., nn.Module]) -> None:
    model = make_model("transformer")
    ids, mask = torch.tensor([[70, 80, 0, 0]]), torch.tensor([[1, 1, 0, 0]])
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, _: object, output: torch.Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    model.embedding.register_forward_hook(keep)
    model(ids, mask).sum().backward()
    gradient = kept[0].grad
    assert gradient[0, :2].abs().min() > 0
    assert torch.equal(gradient[0, 2:], torch.zeros(2, 16))


def test_the_stem_sees_neighbours_within_its_kernels_only() -> None:
    torch.manual_seed(0)
    stem = ConvolutionStem(4, (3, 5))
    x, mask = torch.randn(1, 9, 4), torch.ones(1, 9, 1)
    moved = x.clone()
    moved[0, 0] += 1
    changed = (stem(x, mask) - stem(moved, mask)).abs().amax(dim=2)[0] > 1e-6
    assert changed.tolist() == [True] * 3 + [False] * 6


@pytest.mark.parametrize("width", [8, 7])
def test_positions_are_those_of_the_paper(width: int) -> None:
    table = sinusoidal_positions(50, width)
    assert table.shape == (50, width)
    for position in (0, 1, 7, 49):
        for column in range(width):
            angle = position / 10_000 ** (2 * (column // 2) / width)
            expected = np.cos(angle) if column % 2 else np.sin(angle)
            assert float(table[position, column]) == pytest.approx(expected, abs=1e-4)


def test_token_dropout_replaces_tokens_by_unknown_and_never_padding() -> None:
    ids, mask = torch.full((4, 100), 70), torch.ones(4, 100, dtype=torch.long)
    ids[:, 60:], mask[:, 60:] = 0, 0
    torch.manual_seed(0)
    dropped = drop_tokens(ids, mask, 0.5, unk_id=1)
    assert set(dropped[:, :60].unique().tolist()) == {1, 70}
    assert 0.4 < (dropped[:, :60] == 1).float().mean() < 0.6
    assert (dropped[:, 60:] == 0).all()


def test_the_padding_embedding_starts_as_zero_and_gets_no_gradient(make_model: Callable[..., nn.Module]) -> None:
    model = make_model("transformer", drawn=False)
    assert torch.equal(model.embedding.weight[0], torch.zeros(16))
    model(torch.tensor([[70, 0]]), torch.tensor([[1, 0]])).sum().backward()
    assert torch.equal(model.embedding.weight.grad[0], torch.zeros(16))


def test_pooling_leaves_padding_out() -> None:
    x = torch.tensor([[[1.0, -5.0], [3.0, -7.0], [99.0, 99.0]], [[9.0, 9.0], [9.0, 9.0], [9.0, 9.0]]])
    mask = torch.tensor([[[1.0], [1.0], [0.0]], [[0.0], [0.0], [0.0]]])
    assert masked_mean(x, mask).tolist() == [[2.0, -6.0], [0.0, 0.0]]
    assert masked_max(x, mask)[0].tolist() == [3.0, -5.0]
    assert masked_max(x, mask).isfinite().all()


def test_every_query_may_look_at_something(make_model: Callable[..., nn.Module]) -> None:
    """torch's attention gives zeros for a row without any key, other runtimes 0 / 0: such a row must never reach them."""
    model, seen = make_model("transformer"), []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    model(torch.tensor([[70, 80], [70, 0], [0, 0]]), torch.tensor([[1, 1], [1, 0], [0, 0]]))
    assert seen[0].squeeze().tolist() == [[True, True], [True, False], [True, True]]
