"""A tiny project whose params are the repository's own with a few values changed, and its dataset made by the real steps.

Deriving the params keeps these tests honest: a key that is added, renamed or removed in params.yaml reaches every one of them.
"""

from __future__ import annotations

import copy
import csv
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from reprise.config import Config, parse_config
from reprise.data.dataset import EncodedDataset, open_dataset
from reprise.project import Project

ROOT = Path(__file__).parents[1]

TINY: dict[str, Any] = {
    "data.source": {"kind": "path", "path": "data/source/rows.csv"},
    "data.split": {
        "method": "hash",
        "seed": 13,
        "fractions": {"train": 0.8, "validation": 0.1, "test": 0.1},
        "rare_class": "keep_in_train",
    },
    "train.max_epochs": 2,
    "train.batch_size": 64,
    "train.micro_batch_size": 64,
    "train.window_batches": 2,
    "train.patience": None,
    "evaluate.batch_size": 32,
    "evaluate.baselines": ["majority"],
    "registry.gate.minimum": {},
    "execution.log_every_steps": 1,
}
ENCODER_TOKENIZER = {"kind": "encoder", "max_length": 24, "encoder": {"kind": "path", "path": "data/source/encoder"}}
KINDS: dict[str, dict[str, Any]] = {
    "bag": {"model.embedding_dim": 8, "model.num_buckets": 1024, "tokenizer.max_length": 64},
    "cnn": {
        "tokenizer.vocab_size": 320,
        "tokenizer.max_length": 24,
        "model": {
            "kind": "cnn",
            "embedding_dim": 8,
            "kernels": [1, 2, 3],
            "num_filters": 8,
            "dropout": 0.1,
            "token_dropout": 0.1,
        },
        "train.optimizer.sparse_peak_lr": None,
    },
    "pretrained": {
        "tokenizer": ENCODER_TOKENIZER,
        "model": {
            "kind": "pretrained",
            "pooling": "mean",
            "encoder_dropout": 0.1,
            "head_dropout": 0.1,
            "frozen_embeddings": True,
            "frozen_layers": 1,
            "layer_lr_decay": 0.9,
            "lora": None,
        },
        "train.optimizer.sparse_peak_lr": None,
    },
    "transformer": {
        "tokenizer.vocab_size": 320,
        "tokenizer.max_length": 24,
        "model": {
            "kind": "transformer",
            "width": 16,
            "num_layers": 2,
            "num_heads": 2,
            "feedforward_width": 32,
            "stem_kernels": [3, 5],
            "dropout": 0.1,
            "token_dropout": 0.1,
        },
        "train.optimizer.sparse_peak_lr": None,
    },
}
# The same with its encoder frozen as a whole.
KINDS["frozen"] = {**KINDS["pretrained"], "model": {**KINDS["pretrained"]["model"], "frozen_layers": "all"}}
# The same with adapters beside its weights.
KINDS["lora"] = {
    **KINDS["pretrained"],
    "model": {**KINDS["pretrained"]["model"], "lora": {"rank": 2, "alpha": 4, "dropout": 0.1}},
}
TOPICS = {
    "card": ("card", "pin", "chip"),
    "loan": ("loan", "interest", "debt"),
    "shop": ("order", "parcel", "refund"),
    "trip": ("flight", "hotel", "visa"),
    "weather": ("rain", "frost", "wind"),
}
FILLERS = ("my", "the", "is late", "again", "please help", "why", "since monday", "and nobody answers the phone", "ünïcode", "42")


def _set(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``tree`` with ``{"train.seed": 3, ...}`` set. The key must exist already: a renamed one fails here."""
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = tree
        for section in sections:
            place = place[section]
        assert key in place, f"params.yaml has no {path}"
        place[key] = copy.deepcopy(value)
    return tree


def _tiny_params(kind: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / "bag.yaml").read_text(encoding="utf-8"))
    return _set(_set(_set(tree, TINY), KINDS[kind]), changes or {})


def _write_rows(path: Path, count: int = 400) -> None:
    """Texts that all differ, of 1 to 40 words, in five classes of unequal size."""
    rng = random.Random(5)
    path.parent.mkdir(parents=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(count):
            label = rng.choices(list(TOPICS), weights=[5, 4, 3, 2, 1])[0]
            words = [rng.choice(FILLERS) for _ in range(rng.randrange(8))]
            words.insert(rng.randrange(len(words) + 1), rng.choice(TOPICS[label]))
            writer.writerow([" ".join([*words, str(number)]), label])


def _write_encoder(folder: Path) -> None:
    """A BERT of two layers with drawn weights and a word-piece tokenizer that knows letters, as transformers saves them."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    letters = [chr(code) for code in range(33, 127)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    tokens += [f"[unused{number}]" for number in range(258 - len(tokens))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(7)  # a trap: what an encoder's tokenizer brings along must not decide
    tokenizer.enable_padding(length=9)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        encoder = BertModel(BertConfig(vocab_size=258, max_position_embeddings=64, **sizes))
    folder.mkdir(parents=True)
    encoder.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def write_encoder() -> Callable[[Path], None]:
    """``write_encoder(folder)``: a tiny pretrained encoder in that folder."""
    return _write_encoder


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_params() -> Callable[..., dict[str, Any]]:
    """``tiny_params(kind, {"train.seed": 3})``: the repository's params as a tree, made tiny."""
    return _tiny_params


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., Config]:
    """``tiny_config(kind, {"train.seed": 3})``: the same, validated."""
    return lambda kind, changes=None: parse_config(_tiny_params(kind, changes), Path("params.yaml"))


@pytest.fixture(scope="session")
def tiny_project(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Project]:
    """``tiny_project(kind)``: fetched, split and encoded once a session. Tests read it; those that write take a copy."""
    made: dict[str, Project] = {}

    def make(kind: str) -> Project:
        if kind not in made:
            from reprise.project import open_project
            from reprise.steps import data

            workdir = tmp_path_factory.mktemp(kind)
            _write_rows(workdir / "data" / "source" / "rows.csv")
            if "tokenizer" in KINDS[kind]:
                _write_encoder(workdir / "data" / "source" / "encoder")
            (workdir / "params.yaml").write_text(yaml.safe_dump(_tiny_params(kind), sort_keys=False), encoding="utf-8")
            made[kind] = open_project(None, workdir)
            data.fetch(made[kind])
            data.split(made[kind])
            data.encode(made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="session")
def tiny_dataset(tiny_project: Callable[[str], Project]) -> Callable[[str], EncodedDataset]:
    """``tiny_dataset(kind)``: the encoded dataset of that project."""

    def open_it(kind: str) -> EncodedDataset:
        project = tiny_project(kind)
        return open_dataset(project.encoded_dir, project.config)

    return open_it


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: tiny tensors gain nothing from two, and a forked child cannot use the parent's pool."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """What ``make_deterministic`` switches on is off again after the test."""
    import torch

    yield
    torch.use_deterministic_algorithms(False)
