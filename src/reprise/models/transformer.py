"""A transformer encoder from scratch: token embedding, convolution stem, explicit attention blocks, mean and max pooling.

B batch, L length, D width, H heads, C classes (see ``models/__init__.py``).

Source: Vaswani et al. 2017 (arXiv:1706.03762) for attention and the sinusoidal positions; Xiong et al. 2020 (arXiv:2002.04745)
for the norm before each sub-layer; Kim 2014 (arXiv:1408.5882) for parallel convolutions over word vectors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reprise.config import TransformerConfig
from reprise.models.pooling import drop_tokens, masked_max, masked_mean


class SelfAttention(nn.Module):
    """Multi-head self-attention in which padding is never attended to."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, attendable: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, D]; ``attendable`` bool [B, 1, 1, L] says which positions may be looked at."""
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, L, D / H]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attendable)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class Block(nn.Module):
    """Attention, then a feed-forward network; each is added to its input behind a norm of its own (pre-norm)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = SelfAttention(config.width, config.num_heads)
        self.feedforward_norm = nn.LayerNorm(config.width)
        self.feedforward = nn.Sequential(
            nn.Linear(config.width, config.feedforward_width),
            nn.GELU(),
            nn.Linear(config.feedforward_width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, attendable: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, D]."""
        x = x + self.dropout(self.attention(self.attention_norm(x), attendable))
        mixed: Tensor = x + self.dropout(self.feedforward(self.feedforward_norm(x)))
        return mixed


class ConvolutionStem(nn.Module):
    """Adds to each token what its neighbours say: one convolution per kernel size over zeroed padding, summed."""

    def __init__(self, width: int, kernels: tuple[int, ...]) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, kernel, padding=kernel // 2) for kernel in kernels)

    def forward(self, x: Tensor, token_mask: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, D]; ``token_mask`` [B, L, 1] is 1.0 for tokens and 0.0 for padding."""
        channels_first = (x * token_mask).transpose(1, 2)
        for convolution in self.convolutions:
            x = x + F.gelu(convolution(channels_first)).transpose(1, 2)
        return x


class Transformer(nn.Module):
    """Token ids to logits. No softmax inside: the loss takes logits."""

    positions: Tensor

    def __init__(
        self, config: TransformerConfig, *, vocab_size: int, num_classes: int, max_length: int, pad_id: int, unk_id: int
    ) -> None:
        super().__init__()
        self.token_dropout = config.token_dropout
        self.unk_id = unk_id
        self.scale = math.sqrt(config.width)
        self.embedding = nn.Embedding(vocab_size, config.width, padding_idx=pad_id)
        self.register_buffer("positions", sinusoidal_positions(max_length, config.width))
        self.stem = ConvolutionStem(config.width, config.stem_kernels)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(2 * config.width, num_classes)
        nn.init.normal_(self.embedding.weight, std=1 / self.scale)
        nn.init.zeros_(self.embedding.weight[pad_id].detach())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """int64 [B, L], int64 [B, L] -> logits [B, C]."""
        if self.training and self.token_dropout:
            input_ids = drop_tokens(input_ids, attention_mask, self.token_dropout, self.unk_id)
        token_mask = attention_mask.unsqueeze(-1).to(self.positions.dtype)
        x = self.embedding(input_ids) * self.scale + self.positions[: input_ids.shape[1]]
        x = self.stem(self.dropout(x), token_mask)
        # A row that is all padding would make the softmax 0 / 0, so it may look at its padding; pooling ignores it all the same.
        is_empty = attention_mask.sum(dim=1, keepdim=True) == 0
        attendable = ((attention_mask > 0) | is_empty)[:, None, None, :]
        for block in self.blocks:
            x = block(x, attendable)
        x = self.norm(x)
        pooled = torch.cat([masked_mean(x, token_mask), masked_max(x, token_mask)], dim=-1)
        logits: Tensor = self.head(self.dropout(pooled))
        return logits


def sinusoidal_positions(length: int, width: int) -> Tensor:
    """float32 [length, width]: sines in the even columns, cosines in the odd ones (Vaswani et al. 2017, section 3.5)."""
    position = torch.arange(length, dtype=torch.float32).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate[: width // 2])
    return table
