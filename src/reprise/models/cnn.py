"""Convolutions over token embeddings, the largest answer of each filter kept, and a linear layer.

B batch, L length, D embedding_dim, K filters of one kernel size, C classes (see ``models/__init__.py``).

Source: Kim 2014 (arXiv:1408.5882), the variant whose embeddings are learnt from scratch (CNN-rand).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reprise.config import CnnConfig
from reprise.models.pooling import drop_tokens, masked_max


class Cnn(nn.Module):
    """Token ids to logits. A filter of kernel size k looks at k tokens in a row and answers once per place."""

    def __init__(self, config: CnnConfig, *, vocab_size: int, num_classes: int, pad_id: int, unk_id: int) -> None:
        super().__init__()
        self.token_dropout = config.token_dropout
        self.unk_id = unk_id
        self.embedding = nn.Embedding(vocab_size, config.embedding_dim, padding_idx=pad_id)
        self.convolutions = nn.ModuleList(nn.Conv1d(config.embedding_dim, config.num_filters, k) for k in config.kernels)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.num_filters * len(config.kernels), num_classes)
        # As in the paper. PyTorch's own draw is four times as large, and a piece that training hardly saw would shout.
        nn.init.uniform_(self.embedding.weight, -0.25, 0.25)
        nn.init.zeros_(self.embedding.weight[pad_id].detach())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """int64 [B, L], int64 [B, L] -> logits [B, C]."""
        if self.training and self.token_dropout:
            input_ids = drop_tokens(input_ids, attention_mask, self.token_dropout, self.unk_id)
        token_mask = attention_mask.unsqueeze(-1).to(self.embedding.weight.dtype)
        x = self.dropout(self.embedding(input_ids)) * token_mask
        channels_first = x.transpose(1, 2)  # [B, D, L]
        pooled = [self._strongest(convolution, channels_first, token_mask) for convolution in self.convolutions]
        logits: Tensor = self.head(self.dropout(torch.cat(pooled, dim=-1)))
        return logits

    def _strongest(self, convolution: nn.Module, channels_first: Tensor, token_mask: Tensor) -> Tensor:
        """[B, D, L] -> [B, K]: over all places that begin at a token; what lies behind the end counts as zeros."""
        assert isinstance(convolution, nn.Conv1d)
        answers = convolution(F.pad(channels_first, (0, convolution.kernel_size[0] - 1)))  # [B, K, L]
        return masked_max(F.relu(answers).transpose(1, 2), token_mask)
