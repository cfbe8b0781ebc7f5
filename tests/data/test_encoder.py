"""A pretrained encoder's files and tokenizer: fetched whole or not at all, and read as the encoder was trained to read."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from reprise.config import ENCODER_FILES, Config, ConfigError, parse_config
from reprise.data.dataset import EncodedDataset, encoder_digest
from reprise.data.encode import encode_splits
from reprise.data.sources import fetch_encoder
from reprise.data.tokenizer import encode_with_counts, load_tokenizer, special_ids
from reprise.project import Project

TEXTS = ["my card is late", "", "a [SEP] b [PAD]", "x" * 60, "Ünïcode 日本 42!", "w " * 40]


@pytest.fixture(scope="module")
def encoder(write_encoder: Callable[[Path], None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders") / "tiny"
    write_encoder(folder)
    return folder


@pytest.fixture
def source(tiny_config: Callable[..., Config]) -> Callable[..., Any]:
    """``source(kind="hub", ...)``: that section, validated."""
    return lambda **section: tiny_config("pretrained", {"tokenizer.encoder": section}).tokenizer.encoder


@pytest.fixture
def fetch(tmp_path: Path) -> Callable[..., Path]:
    def run(wanted: Any, governed_by_dvc: bool = False) -> Path:
        work = tmp_path / "work"
        return fetch_encoder(wanted, work, work / "data" / "encoder", tmp_path / "cache", governed_by_dvc)

    return run


# ---------------------------------------------------------------------------------------------------------------- fetch


def pinned(encoder: Path, places: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: {**places[name], "sha256": hashlib.sha256((encoder / name).read_bytes()).hexdigest()} for name in ENCODER_FILES}


def test_from_a_folder_of_ones_own(encoder: Path, source: Callable[..., Any], fetch: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(encoder, tmp_path / "work" / "data" / "source" / "mine")
    (tmp_path / "work" / "data" / "source" / "mine" / "README.md").write_text("not a part of it")
    folder = fetch(source(kind="path", path="data/source/mine"), governed_by_dvc=True)
    assert sorted(path.name for path in folder.iterdir()) == sorted(ENCODER_FILES)
    assert encoder_digest(folder) == encoder_digest(encoder)


def test_from_addresses(encoder: Path, source: Callable[..., Any], fetch: Callable[..., Path]) -> None:
    places = {name: {"url": (encoder / name).as_uri(), "mirrors": []} for name in ENCODER_FILES}
    folder = fetch(source(kind="url", files=pinned(encoder, places)))
    assert encoder_digest(folder) == encoder_digest(encoder)


def test_a_hub_keeps_encoders_elsewhere_than_data_sets(
    encoder: Path, source: Callable[..., Any], fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is seen where nobody answers: no repository's name may reach a hub of the world from a test."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    places = {name: {"path": name} for name in ENCODER_FILES}
    with pytest.raises(ConnectionError, match=rf"http://127\.0\.0\.1:9/some/encoder/resolve/{'c' * 40}/config\.json"):
        fetch(source(kind="hub", repository="some/encoder", revision="c" * 40, files=pinned(encoder, places)))


def test_without_an_encoder_the_folder_is_empty(encoder: Path, source: Callable[..., Any], fetch: Callable[..., Path]) -> None:
    fetch(source(kind="path", path=str(encoder)))
    assert list(fetch(None).iterdir()) == []


def test_a_folder_that_lacks_a_file_leaves_the_encoder_that_was_there(
    encoder: Path, source: Callable[..., Any], fetch: Callable[..., Path], tmp_path: Path
) -> None:
    folder = fetch(source(kind="path", path=str(encoder)))
    shutil.copytree(encoder, tmp_path / "half")
    (tmp_path / "half" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.encoder\.path: .*lacks tokenizer\.json\); name one that transformers saved"):
        fetch(source(kind="path", path=str(tmp_path / "half")))
    assert encoder_digest(folder) == encoder_digest(encoder)
    assert [path.name for path in folder.parent.iterdir()] == ["encoder"]


def test_a_place_that_dvc_does_not_watch_is_refused(encoder: Path, source: Callable[..., Any], fetch: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.encoder\.path: .*not in data/source/"):
        fetch(source(kind="path", path=str(encoder)), governed_by_dvc=True)
    with pytest.raises(ValueError, match=r"tokenizer\.encoder\.path: data/encoder: data/encoder is made by the pipeline"):
        fetch(source(kind="path", path="data/encoder"))


def test_a_list_of_files_that_is_no_encoder_is_wrong_params(tiny_params: Callable[..., Any]) -> None:
    file = {"url": "https://example.org/x", "mirrors": [], "sha256": "a" * 64}
    tree = tiny_params("pretrained", {"tokenizer.encoder": {"kind": "url", "files": {"config.json": file}}})
    with pytest.raises(ConfigError, match=r"tokenizer\.encoder: files are config\.json; an encoder is made of config\.json, model"):
        parse_config(tree, Path("params.yaml"))


# ------------------------------------------------------------------------------------------------------------ tokenizer


@pytest.fixture(scope="module")
def tokenizer(encoder: Path) -> Tokenizer:
    return load_tokenizer((encoder / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("max_length", [2, 3, 8, 64])
def test_ids_are_those_that_transformers_gives(encoder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Cut texts too: they end with [SEP], as the encoder was trained to expect."""
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(encoder / "tokenizer.json"),
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", split_special_tokens=True,
    )  # fmt: skip
    expected = reference(TEXTS, truncation=True, max_length=max_length, padding=False)["input_ids"]
    found = encode_with_counts(tokenizer, TEXTS, max_length)
    assert found.input_ids == expected
    assert found.num_tokens == [len(ids) for ids in reference(TEXTS, truncation=False, padding=False)["input_ids"]]
    assert all(ids[0] == 2 and ids[-1] == 3 and len(ids) <= max_length for ids in found.input_ids)


def test_special_ids(tokenizer: Tokenizer) -> None:
    assert special_ids(tokenizer) == (0, 1)
    from tokenizers import models

    with pytest.raises(ValueError, match=r"no padding token; looked for <pad>, \[PAD\]"):
        special_ids(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


# --------------------------------------------------------------------------------------------------------------- encode


def test_the_manifest_names_the_encoder(tiny_dataset: Callable[[str], EncodedDataset]) -> None:
    data = tiny_dataset("pretrained")
    manifest = data.manifest
    assert manifest.encoder_digest == encoder_digest(data.encoder_dir)
    assert (manifest.tokenizer.pad_id, manifest.tokenizer.unk_id, manifest.tokenizer.vocab_size) == (0, 1, 258)
    assert max(data.splits["train"].lengths) == 24 == manifest.max_length, "neither 7 nor 9, which the tokenizer brought along"
    assert tiny_dataset("bag").manifest.encoder_digest is None


def test_another_encoder_is_another_dataset(tiny_project: Callable[[str], Project], tmp_path: Path) -> None:
    project = tiny_project("pretrained")
    shutil.copytree(project.workdir / "data", tmp_path / "data")
    weights = tmp_path / "data" / "encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")

    def digest(folder: Path, encoder_dir: Path) -> str:
        path = encode_splits(project.split_dir, encoder_dir, folder, project.config)
        return str(json.loads(path.read_text(encoding="utf-8"))["digest"])

    assert digest(tmp_path / "same", project.encoder_dir) == digest(tmp_path / "again", project.encoder_dir)
    assert digest(tmp_path / "other", tmp_path / "data" / "encoder") != digest(tmp_path / "same", project.encoder_dir)


def test_longer_texts_than_the_encoder_has_positions_for(
    tiny_project: Callable[[str], Project], tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    project, config = tiny_project("pretrained"), tiny_config("pretrained", {"tokenizer.max_length": 65})
    with pytest.raises(ValueError, match=r"tokenizer\.max_length: found 65; this encoder has positions for 64 tokens"):
        encode_splits(project.split_dir, project.encoder_dir, tmp_path / "out", config)
    with pytest.raises(ValueError, match=r"lacks config\.json, model\.safetensors, tokenizer\.json .* run `dvc repro fetch`"):
        encode_splits(project.split_dir, tmp_path, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "tokenizer"), [("bag", "pretrained"), ("pretrained", "bag")])
def test_model_and_tokenizer_belong_together(kind: str, tokenizer: str, tiny_params: Callable[..., Any]) -> None:
    tree = {**tiny_params(kind), "tokenizer": tiny_params(tokenizer)["tokenizer"]}
    with pytest.raises(ConfigError, match=rf"model\.kind is {kind}, but tokenizer\.kind is"):
        parse_config(tree, Path("params.yaml"))
