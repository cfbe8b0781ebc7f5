"""Split tables to memory-mappable token ids, the tokenizer and the manifest: the last thing DVC makes before training."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from numpy.typing import NDArray
from tokenizers import Tokenizer

from reprise.config import SPLITS, BpeTokenizerConfig, Config, flatten
from reprise.data.atomic import whole_folder
from reprise.data.dataset import (
    CONTRACT_VERSION,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    Manifest,
    TokenCounts,
    TokenizerInfo,
    dataset_params,
    dataset_params_digest,
    encoder_digest,
    name_differences,
)
from reprise.data.tokenizer import encode_with_counts, load_tokenizer, special_ids, train_tokenizer

log = logging.getLogger(__name__)

ROWS_PER_BATCH = 65_536
SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("label", pa.int32(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
    ]
)


@dataclass
class _Content:
    """What one split holds, gathered while it is written; the digest does not depend on how the rows were batched."""

    num_classes: int
    counts: NDArray[np.int64] = field(init=False)
    num_tokens: list[NDArray[np.int32]] = field(default_factory=list)
    num_truncated: int = 0

    def __post_init__(self) -> None:
        self.counts = np.zeros(self.num_classes, np.int64)
        self._hashes = [hashlib.sha256() for _ in range(4)]

    def add(self, ids: NDArray[np.int32], lengths: NDArray[np.int32], labels: NDArray[np.int32], row_ids: list[str]) -> None:
        lines = "".join(f"{row_id}\n" for row_id in row_ids)
        parts = [*(array.astype("<i4").tobytes() for array in (ids, lengths, labels)), lines.encode()]
        for digest, part in zip(self._hashes, parts, strict=True):
            digest.update(part)
        self.counts += np.bincount(labels, minlength=self.num_classes)

    def add_counts(self, num_tokens: NDArray[np.int32], max_length: int) -> None:
        self.num_tokens.append(num_tokens)
        self.num_truncated += int((num_tokens > max_length).sum())

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    def digests(self) -> list[str]:
        return [digest.hexdigest() for digest in self._hashes]

    def token_counts(self) -> TokenCounts:
        tokens = np.concatenate(self.num_tokens)
        p50, p99 = np.percentile(tokens, [50, 99], method="inverted_cdf")
        return TokenCounts(mean=round(float(tokens.mean()), 3), max=int(tokens.max()), p50=int(p50), p99=int(p99))


def encode_splits(split_dir: Path, encoder_dir: Path, out_dir: Path, config: Config) -> Path:
    """The path of manifest.json in ``out_dir``, which is replaced as a whole: {train,validation,test}.arrow and tokenizer.json.

    ``encoder_dir`` holds the files of a pretrained encoder, whose tokenizer is then used; else it is not read.

    Raises:
        ValueError: ``split_dir`` is absent, was made with other params, or holds a label that train never shows; the encoder is
            incomplete or takes fewer tokens than ``tokenizer.max_length``.
    """
    facts = _read_split_facts(split_dir, config)
    labels = sorted(set(pq.read_table(split_dir / "train.parquet", columns=["label"])["label"].unique().to_pylist()))
    if isinstance(config.tokenizer, BpeTokenizerConfig):
        tokenizer, encoder = train_tokenizer(_texts(split_dir / "train.parquet"), config.tokenizer), None
    else:
        encoder = encoder_digest(encoder_dir)
        tokenizer = _encoder_tokenizer(encoder_dir, config.tokenizer.max_length)
    tokenizer_json = tokenizer.to_str()
    tokenizer_info = _tokenizer_info(tokenizer, tokenizer_json, config)
    with whole_folder(out_dir) as folder:
        contents = {}
        for split in SPLITS:
            contents[split] = _encode_split(split_dir / f"{split}.parquet", folder / f"{split}.arrow", tokenizer, labels, config)
            log.info("encoded %s: %d rows, %d truncated", split, contents[split].num_rows, contents[split].num_truncated)
        (folder / TOKENIZER_NAME).write_text(tokenizer_json, encoding="utf-8", newline="\n")
        manifest = _manifest(contents, labels, tokenizer_info, encoder, facts["quarantined"], folder, config)
        (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8", newline="\n")
    return out_dir / MANIFEST_NAME


def _read_split_facts(split_dir: Path, config: Config) -> dict[str, Any]:
    """split.json, if it was made with the data section at hand."""
    path = split_dir / "split.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{split_dir}: no splits here (split.json is missing); run `dvc repro split`") from None
    params = flatten(config.data, "data")
    if facts["params"] != params:
        _, shown = name_differences(facts["params"], params)
        raise ValueError(f"{split_dir}: made with other params: {shown}. Run `dvc repro split`")
    return facts


def _encoder_tokenizer(encoder_dir: Path, max_length: int) -> Tokenizer:
    """The encoder's own tokenizer, without the padding and truncation that it may bring."""
    longest = json.loads((encoder_dir / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    if longest is not None and max_length > longest:
        raise ValueError(f"tokenizer.max_length: found {max_length}; this encoder has positions for {longest} tokens at most")
    return load_tokenizer((encoder_dir / "tokenizer.json").read_text(encoding="utf-8"))


def _texts(path: Path) -> Iterator[list[str]]:
    """Batches of texts: the trainer takes lists at once, which spares a call from Rust into Python per text."""
    for batch in pq.ParquetFile(path).iter_batches(ROWS_PER_BATCH, columns=["text"]):
        yield batch.column("text").to_pylist()


def _encode_split(path: Path, out_path: Path, tokenizer: Tokenizer, labels: list[str], config: Config) -> _Content:
    """What the split holds, after writing it to ``out_path``."""
    content = _Content(len(labels))
    label_values = pa.array(labels, pa.string())
    max_length = config.tokenizer.max_length
    with pa.OSFile(str(out_path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for batch in pq.ParquetFile(path).iter_batches(ROWS_PER_BATCH, columns=["row_id", "text", "label"]):
            label_ids = _label_ids(batch.column("label"), label_values, path)
            encoded = encode_with_counts(tokenizer, batch.column("text").to_pylist(), max_length)
            lengths = np.fromiter(map(len, encoded.input_ids), np.int32, len(encoded.input_ids))
            ids = np.fromiter(chain.from_iterable(encoded.input_ids), np.int32, int(lengths.sum()))
            num_tokens = np.asarray(encoded.num_tokens, np.int32)
            content.add(ids, lengths, label_ids, batch.column("row_id").to_pylist())
            content.add_counts(num_tokens, max_length)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            lists = pa.ListArray.from_arrays(offsets, ids, type=SCHEMA.field("input_ids").type)
            columns = [lists, pa.array(label_ids), batch.column("row_id"), pa.array(num_tokens)]
            writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
    return content


def _label_ids(column: pa.Array, labels: pa.Array, path: Path) -> NDArray[np.int32]:
    ids = pa.compute.index_in(column, value_set=labels)
    if ids.null_count:
        unseen = sorted(set(column.filter(ids.is_null()).to_pylist()))
        raise ValueError(
            f"{path}: {ids.null_count} rows have labels that no train row has: {', '.join(map(repr, unseen[:5]))}; "
            "the split is not the one that `split` wrote: run `dvc repro split`"
        )
    found: NDArray[np.int32] = ids.to_numpy()
    return found


def _tokenizer_info(tokenizer: Tokenizer, tokenizer_json: str, config: Config) -> TokenizerInfo:
    settings = config.tokenizer
    pad_id, unk_id = special_ids(tokenizer)
    return TokenizerInfo(
        kind=settings.kind,
        normaliser=settings.normaliser if isinstance(settings, BpeTokenizerConfig) else "the encoder's own",
        vocab_size=tokenizer.get_vocab_size(),
        sha256=hashlib.sha256(tokenizer_json.encode()).hexdigest(),
        pad_id=pad_id,
        unk_id=unk_id,
    )


def _manifest(
    contents: dict[str, _Content],
    labels: list[str],
    info: TokenizerInfo,
    encoder: str | None,
    quarantined: int,
    folder: Path,
    config: Config,
) -> Manifest:
    return Manifest(
        contract_version=CONTRACT_VERSION,
        digest=_content_digest(contents, labels, info, encoder, config.tokenizer.max_length),
        params_digest=dataset_params_digest(config),
        params=dataset_params(config),
        labels=labels,
        num_rows={split: content.num_rows for split, content in contents.items()},
        class_counts={s: dict(zip(labels, content.counts.tolist(), strict=True)) for s, content in contents.items()},
        quarantined=quarantined,
        tokenizer=info,
        encoder_digest=encoder,
        max_length=config.tokenizer.max_length,
        truncated={split: content.num_truncated for split, content in contents.items()},
        token_counts={split: content.token_counts() for split, content in contents.items()},
        versions={"python": platform.python_version(), "pyarrow": pa.__version__, "tokenizers": tokenizers.__version__},
        num_bytes={path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    )


def _content_digest(
    contents: dict[str, _Content], labels: list[str], tokenizer: TokenizerInfo, encoder: str | None, max_length: int
) -> str:
    """sha256 over what a model begins with, sees and carries; neither versions nor the way to write files are in it."""
    tree = {
        "labels": labels,
        "tokenizer": tokenizer.sha256,
        "encoder": encoder,
        "max_length": max_length,
        "special_ids": [tokenizer.pad_id, tokenizer.unk_id],
        "splits": {split: [content.num_rows, *content.digests()] for split, content in contents.items()},
    }
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
