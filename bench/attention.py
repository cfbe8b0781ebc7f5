"""Seconds of attention forward and backward on a CPU, fused kernel beside plain matrix products, for several lengths.

    python -m bench.attention

The ratio decides ``SHORT_LENGTH`` in ``src/reprise/training/kernels.py``.
"""

from __future__ import annotations

import time

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, WIDTH, TOKENS_AT_ONCE, REPEATS = 12, 32, 2048, 20


def seconds(backend: SDPBackend, length: int, dtype: torch.dtype) -> float:
    """Median time of one forward and backward pass over TOKENS_AT_ONCE tokens."""
    shape = (max(1, TOKENS_AT_ONCE // length), HEADS, length, WIDTH)
    query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.ones(shape[0], 1, 1, length, dtype=torch.bool)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        with sdpa_kernel(backend):
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mixed.backward(torch.ones_like(mixed))
        times.append(time.perf_counter() - start)
    return sorted(times)[REPEATS // 2]


def main() -> None:
    """Print a line per length and dtype."""
    print("tokens  dtype     fused ms  plain ms  fused / plain")
    for length in (16, 32, 64, 128, 256, 512):
        for dtype in (torch.float32, torch.bfloat16):
            fused, plain = (1000 * seconds(kind, length, dtype) for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH))
            print(f"{length:6d}  {str(dtype)[6:]:8}  {fused:8.1f}  {plain:8.1f}  {fused / plain:13.2f}")


if __name__ == "__main__":
    main()
