"""A transformer encoder that somebody else trained on much text, pooled to one vector, with a linear head.

The encoder is one of the transformers library, read from data/encoder; weights are taken from safetensors only, and no code of
the encoder's own is run. B batch, L length, D width of the encoder, C classes (see ``models/__init__.py``).

Source: Devlin et al. 2019 (arXiv:1810.04805), fine-tuning; Reimers & Gurevych 2019 (arXiv:1908.10084), mean pooling;
Howard & Ruder 2018 (arXiv:1801.06146), learning rates that fall from layer to layer, and freezing; Hu et al. 2021
(arXiv:2106.09685), LoRA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reprise.config import LoraConfig, PretrainedConfig
from reprise.models.pooling import first_token, masked_max, masked_mean

DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
"""What the configurations of transformers call the dropout inside an encoder."""

POOLINGS = {"mean": masked_mean, "max": masked_max, "cls": first_token}


class Encoder(nn.Module):
    """Token ids to one vector per text."""

    def __init__(self, config: PretrainedConfig, encoder_dir: Path) -> None:
        super().__init__()
        self.transformer = load_transformer(encoder_dir, config.encoder_dropout)
        self.pool = POOLINGS[config.pooling]
        self.width: int = self.transformer.config.hidden_size

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """int64 [B, L], int64 [B, L] -> [B, D]."""
        # A row that is all padding would make the softmax 0 / 0, so it may look at its padding; pooling ignores it all the same.
        is_empty = attention_mask.sum(dim=1, keepdim=True) == 0
        attendable = attention_mask.masked_fill(is_empty, 1)
        tokens = self.transformer(input_ids=input_ids, attention_mask=attendable).last_hidden_state
        pooled: Tensor = self.pool(tokens, attention_mask.unsqueeze(-1).to(tokens.dtype))
        return pooled


class Pretrained(nn.Module):
    """Token ids to logits: encoder, dropout, linear head; what the config freezes has no gradient."""

    def __init__(self, config: PretrainedConfig, *, encoder_dir: Path, num_classes: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config, encoder_dir)
        self.head = nn.Sequential(nn.Dropout(config.head_dropout), nn.Linear(self.encoder.width, num_classes))
        if config.lora is not None:
            add_adapters(self.encoder.transformer, config.lora)
        self._freeze()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """int64 [B, L], int64 [B, L] -> logits [B, C]."""
        logits: Tensor = self.head(self.encoder(input_ids, attention_mask))
        return logits

    def learning_rate_scales(self) -> dict[nn.Parameter, float]:
        """The share of the peak learning rate that each weight of the encoder gets: ``layer_lr_decay`` to the power of its
        distance from the head, which has 1 and is not listed."""
        if self.config.layer_lr_decay == 1:
            return {}
        layers = self.layers()
        scales: dict[nn.Parameter, float] = {}
        for depth, module in enumerate([self._embeddings(), *layers]):
            scale = self.config.layer_lr_decay ** (len(layers) + 1 - depth)
            scales |= dict.fromkeys(module.parameters(), scale)
        return scales

    def _freeze(self) -> None:
        if self.config.frozen_layers == "all":
            self.encoder.requires_grad_(requires_grad=False)
            return
        if self.config.frozen_embeddings:
            self._embeddings().requires_grad_(requires_grad=False)
        if self.config.frozen_layers:
            layers = self.layers()
            if self.config.frozen_layers > len(layers):
                raise ValueError(f"model.frozen_layers: found {self.config.frozen_layers}; this encoder has {len(layers)} layers")
            for layer in layers[: self.config.frozen_layers]:
                layer.requires_grad_(requires_grad=False)

    def _embeddings(self) -> nn.Module:
        module: nn.Module = self.encoder.transformer.embeddings
        return module

    def layers(self) -> list[nn.Module]:
        """The encoder's layers, the one above the embeddings first.

        Raises:
            ValueError: they are not kept as a list (some encoders use one layer again and again).
        """
        transformer = self.encoder.transformer
        for module in transformer.modules():
            if isinstance(module, nn.ModuleList) and len(module) == transformer.config.num_hidden_layers:
                return list(module)
        raise ValueError(
            f"{type(transformer).__name__} keeps no list of {transformer.config.num_hidden_layers} layers; set "
            "model.frozen_layers: 0 and model.layer_lr_decay: 1.0"
        )


def load_transformer(encoder_dir: Path, dropout: float) -> Any:
    """The encoder in ``encoder_dir``, in fp32, without a pooling head.

    Raises:
        ValueError: it is no encoder that transformers knows, or some of its weights are missing.
    """
    import transformers  # takes seconds, and comes with an extra of its own
    from safetensors import SafetensorError
    from transformers.utils import logging as chatter

    chatter.set_verbosity_error()  # type: ignore[no-untyped-call]  # it would report the heads that we leave out
    chatter.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        settings = transformers.AutoConfig.from_pretrained(encoder_dir, local_files_only=True, trust_remote_code=False)
        for name in DROPOUTS:
            if hasattr(settings, name):
                setattr(settings, name, dropout)
        transformer, report = transformers.AutoModel.from_pretrained(
            encoder_dir, config=settings, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    except (ValueError, OSError, KeyError, SafetensorError) as error:
        raise ValueError(f"{encoder_dir}: transformers {transformers.__version__} cannot load this encoder: {error}") from error
    if missing := sorted(name for name in report["missing_keys"] if not name.startswith("pooler.")):
        raise ValueError(f"{encoder_dir}: model.safetensors lacks {len(missing)} weights of the encoder, {missing[0]} for one")
    transformer.pooler = None  # we pool ourselves; its weights would be carried and never trained
    return transformer


def add_adapters(transformer: nn.Module, config: LoraConfig) -> None:
    """Give each linear layer an adapter, ``alpha / rank * B A``, and freeze everything else.

    B begins as zeros, so the encoder begins as it was. A is drawn from torch's global generator.
    """
    import peft

    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, bias="none", target_modules="all-linear"
    )
    peft.inject_adapter_in_model(settings, transformer)


def merge_adapters(model: nn.Module) -> None:
    """Add each adapter to the weights it lies beside and remove it: what is left is an encoder like any other."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
