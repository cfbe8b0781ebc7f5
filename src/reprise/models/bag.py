"""A bag of hashed n-grams: fast on a CPU, and hard to beat on short texts.

Every n-gram of a text is an integer computed from ``input_ids`` inside ``forward``, so the model has the same two inputs as any
other and travels in one ONNX file. With a byte-level tokenizer without merges (``tokenizer.vocab_size: 258``) the pieces are
bytes, and the features are words, pairs of words and character n-grams.

B batch, L length, F features of a text (padded), D embedding_dim, C classes.

Source: Joulin et al. 2017 (arXiv:1607.01759), bag of word n-grams hashed into one table; Bojanowski et al. 2017
(arXiv:1607.04606), character n-grams.
"""

from __future__ import annotations

import string
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reprise.config import BagConfig

_HASH_MASK = 2**31 - 1  # codes stay below 2**31, so a product plus a term stays below 2**63 in PyTorch and ONNX alike
_COUNT_SLOTS = 8192  # where the n-grams of one text are counted
_MAX_PLACE = 32  # places in a word that are told apart
_CODE_SEED = 20240229  # the codes are constants: they decide which n-grams share a row of the table
_LEADING_SPACE = "\u0120"  # how byte-level BPE writes a space


def word_start_table(vocabulary: Mapping[str, int]) -> list[bool]:
    """For each piece id: does it open a word, by a leading space or by being ASCII punctuation?

    Other symbols are bytes of longer characters, which must not be torn apart.
    """
    table = [False] * (max(vocabulary.values()) + 1)
    for piece, index in vocabulary.items():
        table[index] = piece.startswith(_LEADING_SPACE) or piece[0] in string.punctuation
    return table


class Bag(nn.Module):
    """Embeddings of a text's n-grams, scaled to a unit-length bag and summed, then a linear layer.

    The features are word n-grams, pairs of words with others between them, and character n-grams within a word (the space that
    follows a word may close them, which tells its end).
    """

    word_starts: Tensor
    piece_codes: Tensor
    place_codes: Tensor

    def __init__(self, config: BagConfig, *, word_starts: list[bool], num_classes: int) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(_CODE_SEED)
        self.register_buffer("word_starts", torch.tensor(word_starts, dtype=torch.int64))
        self.register_buffer("piece_codes", _odd_codes(generator, len(word_starts)))
        self.register_buffer("place_codes", _odd_codes(generator, _MAX_PLACE))
        num_kinds = len(config.word_ngrams) + len(config.word_skips) + len(config.character_ngrams)
        self._chain_codes: list[int] = _odd_codes(generator, num_kinds).tolist()
        self._kind_codes: list[int] = _odd_codes(generator, num_kinds).tolist()
        self.table = nn.Embedding(config.num_buckets, config.embedding_dim, sparse=True)
        self.head = nn.Linear(config.embedding_dim, num_classes)
        nn.init.zeros_(self.table.weight)  # an n-gram that training never saw adds nothing

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """int64 [B, L], int64 [B, L] -> logits [B, C]."""
        buckets, weights = self.features(input_ids, attention_mask)
        pooled = self._pool_with_dropout(buckets, weights) if self.training else self._pool(buckets, weights)
        logits: Tensor = self.head(pooled)
        return logits

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the table, int64 [B, F], and their weights, float32 [B, F]; weight 0 where there is no n-gram."""
        codes, words, is_word, word_index = self._words(input_ids, attention_mask)
        hashes: list[Tensor] = []
        valid: list[Tensor] = []
        for n in self.config.word_ngrams:
            hashes.append(self._chain(words, range(n), kind=len(hashes)))
            valid.append(_ahead(is_word, n - 1))
        for skip in self.config.word_skips:
            hashes.append(self._chain(words, (0, skip + 1), kind=len(hashes)))
            valid.append(_ahead(is_word, skip + 1))
        for n in self.config.character_ngrams:
            hashes.append(self._chain(codes, range(n), kind=len(hashes)))
            ends_in_word = _ahead(word_index, max(n - 2, 0)) == word_index
            valid.append(_ahead(attention_mask, n - 1) * ends_in_word)
        is_feature = torch.cat(valid, dim=1)
        # Where there is no feature, the product makes it row 0 with weight 0.
        buckets = (torch.cat(hashes, dim=1) % (self.config.num_buckets - 1) + 1) * is_feature
        return buckets, _unit_weights(buckets, is_feature.float())

    def _words(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Code of each piece [B, L]; hash of each word [B, W]; 1 where there is a word [B, W]; word number of each piece [B, L].

        W is L, or in training the most words of a text in the batch.
        """
        codes = self.piece_codes[input_ids] * attention_mask
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        opens = torch.maximum(self.word_starts[input_ids], (position == 0).long()) * attention_mask
        word_index = (opens.cumsum(dim=1) - 1).clamp(min=0)
        zeros = torch.zeros_like(input_ids)
        opening = zeros.scatter_add(1, word_index, opens * position).gather(1, word_index)
        place = (position - opening).clamp(max=_MAX_PLACE - 1)
        # A word's hash is the sum over its pieces of piece code times place code, so it is order-aware and needs no loop.
        words = zeros.scatter_add(1, word_index, (codes * self.place_codes[place]) & _HASH_MASK) & _HASH_MASK
        num_words = opens.sum(dim=1, keepdim=True)
        is_word = (position < num_words).long()
        if self.training:  # columns without a word in any text: a saving of time, not of meaning
            most = int(num_words.max())
            words, is_word = words[:, :most], is_word[:, :most]
        return codes, words, is_word, word_index

    def _chain(self, codes: Tensor, offsets: range | tuple[int, ...], kind: int) -> Tensor:
        """Hash of the codes at ``offsets`` from each position, [B, L] -> [B, L]; each kind of n-gram hashes in its own way."""
        hashed = codes
        for offset in offsets[1:]:
            hashed = (hashed * self._chain_codes[kind] + _ahead(codes, offset)) & _HASH_MASK
        return (hashed * self._kind_codes[kind]) & _HASH_MASK

    def _pool(self, buckets: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of embeddings, [B, F] -> [B, D]."""
        return torch.bmm(weights.unsqueeze(1), self.table(buckets)).squeeze(1)

    def _pool_with_dropout(self, buckets: Tensor, weights: Tensor) -> Tensor:
        """The same sum without a random share of the features; what is left out is not even looked up."""
        kept = (weights > 0) & (torch.rand(weights.shape, device=weights.device) >= self.config.feature_dropout)
        num_kept = kept.sum(dim=1)
        return F.embedding_bag(
            buckets[kept],
            self.table.weight,
            offsets=num_kept.cumsum(dim=0) - num_kept,
            mode="sum",
            sparse=True,
            per_sample_weights=weights[kept] / (1 - self.config.feature_dropout),
        )


def _unit_weights(buckets: Tensor, is_feature: Tensor) -> Tensor:
    """Weights with which each distinct n-gram of a text counts once and the squares of a text sum to 1; [B, F] -> [B, F]."""
    slots = buckets % _COUNT_SLOTS
    counts = torch.zeros(slots.shape[0], _COUNT_SLOTS, device=slots.device).scatter_add(1, slots, is_feature)
    weights = is_feature / counts.gather(1, slots).clamp(min=1)
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=1).sqrt()


def _odd_codes(generator: torch.Generator, count: int) -> Tensor:
    """``count`` odd numbers below 2**31, int64: multiplying by an odd number modulo a power of two loses nothing."""
    return torch.randint(0, 2**30, (count,), generator=generator) * 2 + 1


def _ahead(x: Tensor, steps: int) -> Tensor:
    """Each column holds what lies ``steps`` further on, 0 past the end: [B, L] -> [B, L]."""
    return F.pad(x, (0, steps))[:, steps:] if steps else x
