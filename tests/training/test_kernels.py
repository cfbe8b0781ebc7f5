"""The choice of attention's implementation: where it pays, and without a change of meaning."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from reprise.training.kernels import SHORT_LENGTH, attention_kernel
from reprise.training.precision import Precision

CPU = torch.device("cpu")


def plain_is_forced(device: torch.device, precision: Precision, length: int) -> bool:
    before = torch.backends.cuda.flash_sdp_enabled()
    with attention_kernel(device, precision, length):
        inside = torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() == before, "the choice ends with the block"
    return before and not inside


@pytest.mark.parametrize(
    ("device", "precision", "length", "plain"),
    [
        ("cpu", "bf16", SHORT_LENGTH, True),
        ("cpu", "bf16", SHORT_LENGTH + 1, False),
        ("cpu", "fp32", 8, False),
        ("cuda", "bf16", 8, False),
    ],
)
def test_plain_products_only_where_they_were_measured_to_be_faster(
    device: str, precision: Precision, length: int, plain: bool
) -> None:
    assert plain_is_forced(torch.device(device), precision, length) is plain


def test_both_kernels_give_the_same_attention_and_gradient() -> None:
    torch.manual_seed(2)
    drawn = [torch.randn(3, 2, 9, 8) for _ in range(3)]
    mask = (torch.arange(9) < torch.tensor([9, 4, 1])[:, None])[:, None, None, :]
    results = []
    for precision in ("bf16", "fp32"):
        query, key, value = (tensor.clone().requires_grad_() for tensor in drawn)
        with attention_kernel(CPU, precision, 9):
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mixed.square().sum().backward()
        results.append([mixed.detach(), query.grad, key.grad, value.grad])
    for plain, fused in zip(*results, strict=True):
        assert torch.allclose(plain, fused, atol=1e-5)
