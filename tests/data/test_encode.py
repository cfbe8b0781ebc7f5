from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reprise.config import SPLITS
from reprise.data import encode
from reprise.data.encode import encode_splits
from reprise.data.tokenizer import encode_texts, load_tokenizer

Make = Callable[..., Any]


@pytest.fixture
def encoded(project: Make, rows: Callable[..., str]) -> Any:
    made = project()
    made.put("rows.csv", rows(120))
    made.encode()
    return made


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def manifest_of(project: Any) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((project.data / "encoded/manifest.json").read_text(encoding="utf-8"))
    return tree


def test_encoding_twice_gives_the_same_bytes_in_another_process_too(encoded: Any) -> None:
    first = bytes_of(encoded.data / "encoded")
    assert sorted(first) == ["manifest.json", "test.arrow", "tokenizer.json", "train.arrow", "validation.arrow"]
    script = f"""
import sys
from pathlib import Path
from reprise.config import BpeTokenizerConfig, Config, DataConfig
from reprise.data.encode import encode_splits
config = Config.model_construct(
    data=DataConfig.model_validate_json({encoded.config.data.model_dump_json()!r}),
    tokenizer=BpeTokenizerConfig.model_validate_json({encoded.config.tokenizer.model_dump_json()!r}),
)
data = Path(sys.argv[1])
encode_splits(data / "split", data / "encoder", data / "encoded", config)
assert "torch" not in sys.modules and "mlflow" not in sys.modules and "prefect" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script, str(encoded.data)], check=True, timeout=60)
    assert bytes_of(encoded.data / "encoded") == first
    assert str(encoded.workdir).encode() not in b"".join(first.values())


def test_the_manifest_says_what_is_there(encoded: Any) -> None:
    manifest = manifest_of(encoded)
    tables = {name: pq.read_table(encoded.data / f"split/{name}.parquet") for name in SPLITS}
    assert manifest["labels"] == ["maybe", "no", "yes"]
    assert manifest["num_rows"] == {name: len(table) for name, table in tables.items()}
    for name, table in tables.items():
        assert manifest["class_counts"][name] == {label: table["label"].to_pylist().count(label) for label in manifest["labels"]}
    tokenizer_json = (encoded.data / "encoded/tokenizer.json").read_bytes()
    assert manifest["tokenizer"] == {
        "kind": "bpe", "normaliser": "nfc_spaces_lower", "vocab_size": len(json.loads(tokenizer_json)["model"]["vocab"]),
        "sha256": hashlib.sha256(tokenizer_json).hexdigest(), "pad_id": 0, "unk_id": 1,
    }  # fmt: skip
    assert manifest["max_length"] == 5
    assert manifest["quarantined"] == 0
    assert manifest["contract_version"] == 1
    assert set(manifest["versions"]) == {"python", "pyarrow", "tokenizers"}


def test_arrays_hold_what_the_tokenizer_says(encoded: Any) -> None:
    dataset = encoded.open()
    tokenizer = load_tokenizer(dataset.tokenizer_json)
    for name, split in dataset.splits.items():
        table = pq.read_table(encoded.data / f"split/{name}.parquet")
        texts = table["text"].to_pylist()
        assert [example.input_ids.tolist() for example in split] == encode_texts(tokenizer, texts, 5)
        whole = [len(ids) for ids in encode_texts(tokenizer, texts, 10_000)]
        assert split.num_tokens.tolist() == whole
        assert [dataset.manifest.labels[label] for label in split.labels] == table["label"].to_pylist()
        assert split.row_ids == table["row_id"].to_pylist()
        assert dataset.manifest.truncated[name] == sum(length > 5 for length in whole) > 0
        counts = dataset.manifest.token_counts[name]
        assert (counts.mean, counts.max) == (round(np.mean(whole), 3), max(whole))
        assert counts.p50 == sorted(whole)[(len(whole) - 1) // 2]


def test_the_tokenizer_is_learnt_from_train_only(project: Make) -> None:
    files = {"train": "t.csv", "validation": "d.csv", "test": "e.csv"}
    given = {"method": "given", "seed": 0, "files": files, "column": None, "validation_fraction": None}
    made = project({"data.source": {"kind": "path", "path": "data/source"}, "data.split": given})
    made.put("t.csv", "text,label\nplain words,x\nother words,y\n")
    made.put("d.csv", "text,label\n" + "zebra zebra,x\n" * 9)
    made.put("e.csv", "text,label\n" + "zebra zebra,x\n" * 9)
    made.encode()
    vocabulary = json.loads((made.data / "encoded/tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert "Ġwords" in vocabulary
    assert not [token for token in vocabulary if "ze" in token]


def digest_with(project: Make, rows: str, changes: dict[str, Any] | None = None) -> tuple[str, str]:
    made = project(changes)
    made.put("rows.csv", rows)
    made.encode()
    manifest = manifest_of(made)
    return manifest["digest"], manifest["params_digest"]


def test_the_digest_changes_with_content_and_only_with_it(project: Make, rows: Callable[..., str]) -> None:
    base, params = digest_with(project, rows(120))
    lines = rows(120).splitlines()
    other = {
        "a label": "\n".join([*lines[:5], lines[5].replace(",maybe", ",no").replace(",no", ",yes"), *lines[6:]]),
        "a label's name": rows(120).replace(",maybe\n", ",perhaps\n"),
        "the order": "\n".join([lines[0], *reversed(lines[1:])]),
        "a row more": rows(121),
    }
    digests = {what: digest_with(project, content)[0] for what, content in other.items()}
    settings = {
        "vocabulary": {"tokenizer.min_frequency": 100},
        "length": {"tokenizer.max_length": 7},
        "unused length": {"tokenizer.max_length": 500},
        "longer unused length": {"tokenizer.max_length": 501},
        "normaliser": {"tokenizer.normaliser": "nfc_spaces"},
        "seed": {"data.split.seed": 14},
    }
    digests |= {what: digest_with(project, rows(120), changes)[0] for what, changes in settings.items()}
    assert [what for what, digest in digests.items() if digest == base] == []
    assert len(set(digests.values())) == len(digests)
    harmless = {"data.cleaning.max_quarantined_fraction": 0.5}
    assert digest_with(project, rows(120), harmless)[0] == base
    assert digest_with(project, rows(120), harmless)[1] != params


def test_the_digest_does_not_depend_on_how_rows_are_batched(encoded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base = manifest_of(encoded)["digest"]
    first = [example.input_ids.tolist() for example in encoded.open().splits["train"]]
    monkeypatch.setattr(encode, "ROWS_PER_BATCH", 7)
    encode_splits(encoded.data / "split", encoded.data / "encoder", encoded.data / "encoded", encoded.config)
    assert manifest_of(encoded)["digest"] == base
    train = encoded.open().splits["train"]
    assert pa.ipc.open_file(train.path).num_record_batches > 5
    assert [example.input_ids.tolist() for example in train] == first


def test_appended_rows_keep_the_hash_split(encoded: Any, rows: Callable[..., str]) -> None:
    before = {name: set(split.row_ids) for name, split in encoded.open().splits.items()}
    encoded.put("rows.csv", rows(150))
    encoded.encode()
    after = {name: set(split.row_ids) for name, split in encoded.open().splits.items()}
    assert all(before[name] < after[name] for name in SPLITS)


def test_texts_without_a_token_and_huge_texts(project: Make, rows: Callable[..., str]) -> None:
    made = project()
    made.put("rows.csv", rows(100) + "\x00,yes\n" + "word " * 100_000 + ",no\n")
    made.encode()
    examples = [example for split in made.open().splits.values() for example in split]
    assert [1] in [example.input_ids.tolist() for example in examples]
    assert all(1 <= len(example.input_ids) <= 5 for example in examples)
    assert max(counts.max for counts in made.open().manifest.token_counts.values()) >= 100_000


def test_missing_splits_and_other_params_are_refused(encoded: Any, make_config: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no splits here \(split.json is missing\); run `dvc repro split`"):
        encode_splits(tmp_path / "none", encoded.data / "encoder", encoded.data / "encoded", encoded.config)
    other = make_config({"data.split.seed": 14})
    with pytest.raises(ValueError, match=r"made with other params: data.split.seed \(dataset: 13, params: 14\). Run `dvc repro sp"):
        encode_splits(encoded.data / "split", encoded.data / "encoder", encoded.data / "encoded", other)


def test_a_failure_leaves_the_old_dataset_whole(encoded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bytes_of(encoded.data / "encoded")
    test = encoded.data / "split/test.parquet"
    table = pq.read_table(test)
    pq.write_table(table.set_column(table.column_names.index("label"), "label", pa.array(["new"] * len(table))), test)
    with pytest.raises(ValueError, match=r"test.parquet: \d+ rows have labels that no train row has: 'new'"):
        encode_splits(encoded.data / "split", encoded.data / "encoder", encoded.data / "encoded", encoded.config)
    assert bytes_of(encoded.data / "encoded") == first
    assert sorted(path.name for path in encoded.data.iterdir()) == [
        "encoded", "quarantine.jsonl", "raw", "source", "split",
    ]  # fmt: skip


def test_a_half_written_folder_has_no_manifest(encoded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    describe = encode._manifest

    def look(*arguments: Any) -> Any:
        seen.append(sorted(path.name for path in arguments[5].iterdir()))
        return describe(*arguments)

    monkeypatch.setattr(encode, "_manifest", look)
    encode_splits(encoded.data / "split", encoded.data / "encoder", encoded.data / "encoded", encoded.config)
    assert seen == [["test.arrow", "tokenizer.json", "train.arrow", "validation.arrow"]]
