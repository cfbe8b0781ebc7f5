"""One vector per text from the vectors of its tokens, padding left out."""

from __future__ import annotations

from torch import Tensor


def masked_mean(x: Tensor, token_mask: Tensor) -> Tensor:
    """Mean over the tokens of each text: [B, L, D] -> [B, D]; zeros for a text without tokens. ``token_mask`` float [B, L, 1]."""
    return (x * token_mask).sum(dim=1) / token_mask.sum(dim=1).clamp(min=1.0)


def masked_max(x: Tensor, token_mask: Tensor) -> Tensor:
    """Largest value over the tokens of each text: [B, L, D] -> [B, D]. ``token_mask`` float [B, L, 1]."""
    # A finite floor instead of -inf: a text without tokens then still gives finite logits.
    return x.masked_fill(token_mask == 0, -1.0e4).amax(dim=1)
