"""A small project folder, its params, and the steps of the data room over it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from reprise.config import BpeTokenizerConfig, Config, DataConfig
from reprise.data.dataset import EncodedDataset, open_dataset
from reprise.data.encode import encode_splits
from reprise.data.sources import fetch_source
from reprise.data.split import make_splits

PARAMS: dict[str, Any] = {
    "data": {
        "source": {"kind": "path", "path": "data/source/rows.csv"},
        "columns": {"text": "text", "label": "label", "group": None, "time": None, "metadata": []},
        "cleaning": {"on_bad_row": "fail", "max_quarantined_fraction": 0.05},
        "split": {
            "method": "hash",
            "seed": 13,
            "fractions": {"train": 0.6, "validation": 0.2, "test": 0.2},
            "rare_class": "keep_in_train",
        },
    },
    "tokenizer": {
        "kind": "bpe",
        "vocab_size": 400,
        "min_frequency": 2,
        "normaliser": "nfc_spaces_lower",
        "max_length": 5,
        "encoder": None,
    },
}


def config_with(changes: dict[str, Any]) -> Config:
    """The params above with ``{"data.split.seed": 14, ...}`` set; a whole section may be given."""
    tree = copy.deepcopy(PARAMS)
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = tree
        for section in sections:
            place = place[section]
        place[key] = value
    data, tokenizer = DataConfig.model_validate(tree["data"]), BpeTokenizerConfig.model_validate(tree["tokenizer"])
    # Without the other sections: the data room must not read them.
    return Config.model_construct(data=data, tokenizer=tokenizer)


@dataclass
class Project:
    """A work folder with the steps fetch, split and encode."""

    workdir: Path
    config: Config
    files: dict[str, str] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        return self.workdir / "data"

    def put(self, name: str, content: str | bytes) -> Path:
        path = self.data / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def fetch(self) -> Path:
        return fetch_source(self.config.data.source, self.workdir, self.data / "raw", self.workdir / "cache", True)

    def split(self) -> Path:
        return make_splits(self.fetch(), self.workdir, self.data / "split", self.data / "quarantine.jsonl", self.config.data)

    def encode(self) -> Path:
        self.split()
        return encode_splits(self.data / "split", self.data / "encoder", self.data / "encoded", self.config)

    def open(self) -> EncodedDataset:
        return open_dataset(self.data / "encoded", self.config)


@pytest.fixture
def make_config() -> Callable[..., Config]:
    return lambda changes=None: config_with(changes or {})


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Callable[..., Project]]:
    def make(changes: dict[str, Any] | None = None, **files: str | bytes) -> Project:
        made = Project(tmp_path, config_with(changes or {}))
        for name, content in files.items():
            made.put(name.replace("__", "."), content)
        return made

    yield make
    # Whatever happened, nothing half-written stays.
    assert [path for path in tmp_path.rglob("*") if ".partial" in path.name or ".download-" in path.name] == []


def csv_rows(count: int, labels: tuple[str, ...] = ("yes", "no", "maybe")) -> str:
    """A CSV file of ``count`` rows with texts that all differ."""
    rows = [f"text number {i} about {labels[i % len(labels)]} things,{labels[i % len(labels)]}" for i in range(count)]
    return "\n".join(["text,label", *rows]) + "\n"


@pytest.fixture
def rows() -> Callable[..., str]:
    return csv_rows
