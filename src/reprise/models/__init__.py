"""The models, and the one place that builds them.

Every model maps ``input_ids`` and ``attention_mask`` (int64 [B, L]; mask 1 for a token, 0 for padding) to logits [B, C], whatever
stands in padded positions. Letters in shapes: B batch, L length, D width, H heads, C classes, F features.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from torch import nn

from reprise.config import BagConfig, CnnConfig, ModelConfig, PretrainedConfig
from reprise.data.dataset import EncodedDataset
from reprise.models.bag import Bag, word_start_table
from reprise.models.cnn import Cnn
from reprise.models.pretrained import Pretrained, merge_adapters
from reprise.models.transformer import Transformer


def build_model(config: ModelConfig, data: EncodedDataset) -> nn.Module:
    """A model for this dataset as training begins with it; weights that are drawn come from torch's global generator."""
    manifest, num_classes = data.manifest, len(data.manifest.labels)
    tokenizer = manifest.tokenizer
    if isinstance(config, BagConfig):
        vocabulary = Tokenizer.from_str(data.tokenizer_json).get_vocab()
        return Bag(config, word_starts=word_start_table(vocabulary), num_classes=num_classes)
    if isinstance(config, CnnConfig):
        return Cnn(
            config,
            vocab_size=tokenizer.vocab_size,
            num_classes=num_classes,
            pad_id=tokenizer.pad_id,
            unk_id=tokenizer.unk_id,
        )
    if isinstance(config, PretrainedConfig):
        return Pretrained(config, encoder_dir=data.encoder_dir, num_classes=num_classes)
    return Transformer(
        config,
        vocab_size=tokenizer.vocab_size,
        num_classes=num_classes,
        max_length=manifest.max_length,
        pad_id=tokenizer.pad_id,
        unk_id=tokenizer.unk_id,
    )


def trained_part(model: nn.Module) -> nn.Module:
    """What a training changes and a checkpoint holds: the model, or its head where the encoder below is frozen as a whole."""
    return model.head if isinstance(model, Pretrained) and model.config.trains_head_only else model


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that a deep model is a stack of, the lowest first; none for a shallow one."""
    if isinstance(model, Transformer):
        return list(model.blocks)
    return model.layers() if isinstance(model, Pretrained) else []


def make_servable(model: nn.Module) -> nn.Module:
    """``model`` as it is evaluated and exported: in eval mode, adapters merged into the weights they belong to."""
    if isinstance(model, Pretrained) and model.config.lora is not None:
        merge_adapters(model)
    return model.eval()


def learning_rate_scales(model: nn.Module) -> dict[nn.Parameter, float]:
    """The share of the peak learning rate of each weight that does not get all of it."""
    return model.learning_rate_scales() if isinstance(model, Pretrained) else {}
