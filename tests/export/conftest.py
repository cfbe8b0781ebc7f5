"""Two small torch models shaped like the real ones, each exported once for all tests of this folder."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from reprise.config import BpeTokenizerConfig
from reprise.data.tokenizer import PAD_ID, encode_texts, train_tokenizer
from reprise.export.onnx_export import export_onnx
from reprise.serving.classifier import METADATA_KEY, TOKENIZER_KEY, ModelMetadata

LABELS = ("card_lost", "top_up", "transfer", "fee", "other")
MAX_LENGTH = 40
OPSET = 20
TEXTS = (
    "I lost my card yesterday",
    "please top up my account",
    "the transfer has not arrived yet, what should I do now",
    "why was I charged a fee twice",
    "",
    "card",
    "my top up was cancelled and the transfer as well " * 5,
)


class Bag(nn.Module):
    """Embeddings of tokens and of hashed bigrams, masked mean, dropout, linear."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, 8)
        self.bigrams = nn.Embedding(64, 8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, len(LABELS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        first, second = input_ids[:, :-1], input_ids[:, 1:]
        pairs = self.bigrams((first * 31 + second) % 64) * attention_mask[:, 1:].unsqueeze(-1)
        tokens = self.tokens(input_ids) * attention_mask.unsqueeze(-1)
        count = attention_mask.sum(dim=1, keepdim=True).clamp(min=1)
        logits: Tensor = self.head(self.dropout((tokens.sum(dim=1) + pairs.sum(dim=1)) / count))
        return logits


class Transformer(nn.Module):
    """One attention block over scaled_dot_product_attention with a padding mask, then a masked mean."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, 16)
        self.positions = nn.Embedding(MAX_LENGTH, 16)
        self.norm = nn.LayerNorm(16)
        self.query_key_value = nn.Linear(16, 48)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, len(LABELS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        batch, length = input_ids.shape
        x = self.tokens(input_ids) + self.positions(torch.arange(length, device=input_ids.device))
        heads = self.query_key_value(self.norm(x)).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        x = self.dropout(x + self.attend(heads, attention_mask).transpose(1, 2).reshape(batch, length, 16))
        kept = attention_mask.unsqueeze(-1).to(x.dtype)
        logits: Tensor = self.head((x * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1))
        return logits

    def attend(self, heads: Tensor, attention_mask: Tensor) -> Tensor:
        """A row of padding only may look at its padding: nothing to look at would be 0 / 0."""
        is_empty = attention_mask.sum(dim=1, keepdim=True) == 0
        attendable = ((attention_mask > 0) | is_empty)[:, None, None, :]
        return F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=attendable)


@dataclass(frozen=True)
class Exported:
    """A trained model, its file, and what the file carries."""

    model: nn.Module
    path: Path
    metadata: ModelMetadata
    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def reference_logits(self, texts: list[str]) -> torch.Tensor:
        """What the torch model says about each text, one text at a time and without padding."""
        rows = encode_texts(self.tokenizer, texts, MAX_LENGTH)
        with torch.inference_mode():
            return torch.cat([self.model(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.int64)) for row in rows])

    def planted(
        self,
        path: Path,
        metadata: ModelMetadata | None = None,
        tokenizer: Tokenizer | None = None,
        change: Callable[[onnx.ModelProto], None] | None = None,
    ) -> Path:
        """The file again at ``path`` with a fault in it."""
        proto = onnx.load(self.path)
        if change is not None:
            change(proto)
        stored = {
            METADATA_KEY: (metadata or self.metadata).to_json(),
            TOKENIZER_KEY: (tokenizer or self.tokenizer).to_str(),
        }
        helper.set_model_props(proto, stored)
        path.write_bytes(proto.SerializeToString())
        return path


def bpe(texts: tuple[str, ...], normaliser: str = "nfc_spaces_lower") -> Tokenizer:
    config = BpeTokenizerConfig.model_validate(
        {
            "kind": "bpe",
            "vocab_size": 320,
            "min_frequency": 1,
            "normaliser": normaliser,
            "max_length": MAX_LENGTH,
            "encoder": None,
        }
    )
    return train_tokenizer(texts, config)


def export(model: nn.Module, folder: Path, tokenizer: Tokenizer) -> Exported:
    metadata = ModelMetadata(
        labels=LABELS,
        max_length=MAX_LENGTH,
        pad_id=PAD_ID,
        model_kind=type(model).__name__.lower(),
        run_key="abc",
        mlflow_run_id="def",
        dataset_digest="123",
        versions={"torch": torch.__version__},
    )
    path = folder / "model.onnx"
    export_onnx(model, path, opset=OPSET, metadata=metadata, tokenizer_json=tokenizer.to_str())
    return Exported(model, path, metadata, tokenizer)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return bpe(TEXTS)


@pytest.fixture(scope="session")
def other_tokenizer() -> Tokenizer:
    """No more tokens than ``tokenizer`` has, learnt from other texts: a file runs with it, but its ids mean something else."""
    return bpe(("quite another subject: boats, sails and harbours in the evening wind",) * 3)


@pytest.fixture(scope="session")
def bag_class() -> type[Bag]:
    return Bag


@pytest.fixture(scope="session")
def transformer_class() -> type[Transformer]:
    return Transformer


def seeded(kind: type[nn.Module], tokenizer: Tokenizer) -> nn.Module:
    generator_state = torch.get_rng_state()
    torch.manual_seed(11)
    model = kind(tokenizer.get_vocab_size())
    torch.set_rng_state(generator_state)
    return model.eval()


@pytest.fixture(scope="session")
def bag(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Exported:
    return export(seeded(Bag, tokenizer), tmp_path_factory.mktemp("bag"), tokenizer)


@pytest.fixture(scope="session")
def transformer(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Exported:
    return export(seeded(Transformer, tokenizer), tmp_path_factory.mktemp("transformer"), tokenizer)


@pytest.fixture(params=["bag", "transformer"])
def exported(request: pytest.FixtureRequest) -> Exported:
    found: Exported = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [*TEXTS, *(f"{a} {b}" for a in TEXTS[:4] for b in TEXTS[:4])]


@pytest.fixture(scope="session")
def with_labels() -> Callable[[ModelMetadata, tuple[str, ...]], ModelMetadata]:
    return lambda metadata, labels: dataclasses.replace(metadata, labels=labels)
