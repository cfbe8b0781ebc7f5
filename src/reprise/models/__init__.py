"""The models, and the one place that builds them.

Every model maps ``input_ids`` and ``attention_mask`` (int64 [B, L]; mask 1 for a token, 0 for padding) to logits [B, C], whatever
stands in padded positions. Letters in shapes: B batch, L length, D width, H heads, C classes, F features.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from torch import nn

from reprise.config import BagConfig, ModelConfig
from reprise.data.dataset import EncodedDataset
from reprise.models.bag import Bag, word_start_table
from reprise.models.transformer import Transformer


def build_model(config: ModelConfig, data: EncodedDataset) -> nn.Module:
    """An untrained model for this dataset; its weights are drawn from torch's global generator."""
    manifest = data.manifest
    num_classes = len(manifest.labels)
    if isinstance(config, BagConfig):
        vocabulary = Tokenizer.from_str(data.tokenizer_json).get_vocab()
        return Bag(config, word_starts=word_start_table(vocabulary), num_classes=num_classes)
    return Transformer(
        config,
        vocab_size=manifest.tokenizer.vocab_size,
        num_classes=num_classes,
        max_length=manifest.max_length,
        pad_id=manifest.tokenizer.pad_id,
        unk_id=manifest.tokenizer.unk_id,
    )
