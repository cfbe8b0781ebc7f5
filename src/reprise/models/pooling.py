"""One vector per text from the vectors of its tokens, padding left out; and leaving out tokens at random."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(x: Tensor, token_mask: Tensor) -> Tensor:
    """Mean over the tokens of each text: [B, L, D] -> [B, D]; zeros for a text without tokens. ``token_mask`` float [B, L, 1]."""
    return (x * token_mask).sum(dim=1) / token_mask.sum(dim=1).clamp(min=1.0)


def masked_max(x: Tensor, token_mask: Tensor) -> Tensor:
    """Largest value over the tokens of each text: [B, L, D] -> [B, D]. ``token_mask`` float [B, L, 1]."""
    # A finite floor instead of -inf: a text without tokens then still gives finite logits.
    return x.masked_fill(token_mask == 0, -1.0e4).amax(dim=1)


def first_token(x: Tensor, token_mask: Tensor) -> Tensor:
    """The first token of each text ([CLS], where an encoder writes one): [B, L, D] -> [B, D]; zeros for a text without tokens."""
    return x[:, 0] * token_mask[:, 0]


def drop_tokens(input_ids: Tensor, attention_mask: Tensor, share: float, unk_id: int) -> Tensor:
    """``input_ids`` with a share of the tokens replaced by the unknown token, so that no single word can decide; [B, L]."""
    dropped = torch.rand(input_ids.shape, device=input_ids.device) < share
    return input_ids.masked_fill(dropped & (attention_mask > 0), unk_id)
