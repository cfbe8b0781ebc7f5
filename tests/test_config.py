"""params.yaml is read strictly, and everything that is wrong with it is said at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from reprise.config import Config, ConfigError, digest, flatten, load_config, parse_config

Params = Callable[..., dict[str, Any]]


def problems(tree: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree, Path("params.yaml"))
    assert all(line in str(caught.value) for line in caught.value.problems)
    return caught.value.problems


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "params.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def load_problems(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    return "\n".join(caught.value.problems)


# ---------------------------------------------------------------------------------------------------- the shipped params


def recipes(root: Path) -> list[Path]:
    found = sorted((root / "recipes").glob("*.yaml"))
    assert found
    return found


def test_params_yaml_is_a_recipe_word_for_word(root: Path) -> None:
    assert (root / "params.yaml").read_text(encoding="utf-8") in [p.read_text(encoding="utf-8") for p in recipes(root)]


def test_every_recipe_is_valid_and_says_which_it_is(root: Path) -> None:
    for path in recipes(root):
        load_config(path)
        assert path.read_text(encoding="utf-8").startswith(f"# recipe: {path.stem}\n")


def test_params_yaml_explains_its_keys(root: Path) -> None:
    """Most leaves carry a comment; those that need none are few."""
    for path in recipes(root):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if ":" in line and not line.startswith("#")]
        assert sum("#" in line for line in lines) > len(lines) / 3


# ------------------------------------------------------------------------------------------------------- what is refused


def test_all_problems_at_once_each_with_its_path(tiny_params: Params) -> None:
    tree = tiny_params("bag")
    tree["train"]["max_epochs"] = 0
    tree["train"]["optimizer"]["peak_lr"] = "1e-3"
    tree["train"]["precision"] = "fp8"
    tree["model"]["embedding_dims"] = tree["model"].pop("embedding_dim")
    tree["data"]["source"]["paht"] = "x"
    tree["data"]["split"]["fractions"]["train"] = 1.5
    tree["execution"]["num_workers"] = 1.0
    tree["registry"]["gate"]["minimum"] = {"f1": 0.5}
    del tree["evaluate"]
    tree["typo"] = {}
    found = {line.split(":")[0]: line for line in problems(tree)}
    assert found.keys() == {
        "train.max_epochs",
        "train.optimizer.peak_lr",
        "train.precision",
        "model.embedding_dim",
        "model.embedding_dims",
        "data.source.paht",
        "data.split.fractions.train",
        "execution.num_workers",
        "registry.gate.minimum.f1.[key]",
        "evaluate",
        "typo",
    }
    assert "found 0; input should be greater than or equal to 1" in found["train.max_epochs"]
    assert "1.0e-3" in found["train.optimizer.peak_lr"]
    assert "'fp32', 'bf16' or 'fp16'" in found["train.precision"]
    assert "missing; there are no defaults in code" in found["model.embedding_dim"]
    assert "unknown key" in found["model.embedding_dims"]
    assert "missing" in found["evaluate"]


def test_the_message_counts_its_problems(tiny_params: Params) -> None:
    with pytest.raises(ConfigError, match=r"^params\.yaml: 1 problem\n  train\.seed: found -1; "):
        parse_config(tiny_params("bag", {"train.seed": -1}), Path("params.yaml"))


def test_yaml_reads_1e_3_as_text_and_we_say_so(tmp_path: Path, tiny_params: Params) -> None:
    text = yaml.safe_dump(tiny_params("bag", {"train.optimizer.peak_lr": 0.125})).replace("peak_lr: 0.125", "peak_lr: 1e-3")
    assert "train.optimizer.peak_lr: found '1e-3'" in (said := load_problems(written(tmp_path, text)))
    assert "write it with a dot and a signed exponent, as in 1.0e-3" in said


def test_a_quoted_number_is_told_to_lose_its_quotes(tiny_params: Params) -> None:
    assert problems(tiny_params("bag", {"train.seed": "17"}))[0].endswith("Remove the quotes")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train:\n  seed: 1\n  seed: 2\n", "key 'seed' stands on line 2 and again on line 3"),
        ("train: {seed: 1, seed: 2}\n", "key 'seed' stands on line 1 and again on line 1"),
        ("train: [\n", "not valid YAML"),
        ("{{name}}: 1\n", "not valid YAML"),
        ("", "found an empty file; a params file is a mapping with the sections data, tokenizer"),
        ("- 1\n", "found list"),
        (b"a: \xff\n", "not UTF-8 at byte 3"),
        ("!!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_files_that_are_not_params(text: str | bytes, said: str, tmp_path: Path) -> None:
    assert said in load_problems(written(tmp_path, text))


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    assert "reprise recipes use" in load_problems(tmp_path / "absent.yaml")
    assert "cannot be read: Is a directory" in load_problems(tmp_path)


def test_anchors_and_merge_keys_still_work(tmp_path: Path, tiny_params: Params) -> None:
    tree = tiny_params("bag")
    shared = yaml.safe_dump(tree.pop("execution")).replace("\n", "\n  ").rstrip()
    path = written(tmp_path, f"{yaml.safe_dump(tree)}execution: &x\n  {shared}\n")
    assert load_config(path) == parse_config(tiny_params("bag"), path)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("bag", "tokenizer.vocab_size", 257),
        ("bag", "model.num_buckets", 1023),
        ("bag", "model.feature_dropout", 1.0),
        ("bag", "model.word_ngrams", [0]),
        ("bag", "train.optimizer.beta1", 1.0),
        ("bag", "train.optimizer.peak_lr", 0.0),
        ("bag", "train.optimizer.peak_lr", float("nan")),
        ("bag", "train.optimizer.epsilon", float("inf")),
        ("bag", "train.schedule.warmup_fraction", 1.01),
        ("bag", "train.label_smoothing", 1.0),
        ("bag", "train.seed", True),
        ("bag", "train.seed", 2**63),
        ("bag", "train.patience", 0),
        ("bag", "export.opset", 17),
        ("bag", "evaluate.baselines", ["guess"]),
        ("bag", "registry.model_name", "a/b"),
        ("bag", "registry.gate.minimum", {"accuracy": 85}),
        ("bag", "execution.prefetch_factor", 0),
        ("bag", "tokenizer.encoder", "some/model"),
        ("transformer", "model.stem_kernels", [4]),
        ("transformer", "model.dropout", -0.1),
    ],
)
def test_bounds(kind: str, path: str, value: Any, tiny_params: Params) -> None:
    parse_config(tiny_params(kind), Path("params.yaml"))
    (line,) = problems(tiny_params(kind, {path: value}))
    assert line.startswith(path)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("bag", {"model.kind": "rnn"}, "model: found"),
        ("bag", {"data.source": {"kind": "ftp"}}, "data.source: found"),
        ("bag", {"data.source": {"path": "x"}}, "data.source: found"),
        ("bag", {"data.split.fractions": {"train": 0.5, "validation": 0.1, "test": 0.1}}, "add up to 0.7"),
        ("bag", {"train.micro_batch_size": 65}, "micro_batch_size 65 is larger than batch_size 64"),
        ("bag", {"model.word_ngrams": [], "model.character_ngrams": []}, "the model would see nothing"),
        ("bag", {"train.optimizer.sparse_peak_lr": None}, "give a number for bag"),
        ("transformer", {"train.optimizer.sparse_peak_lr": 0.1}, "null for every other model"),
        ("pretrained", {"model.frozen_embeddings": False}, "layers are frozen from below"),
        ("transformer", {"model.num_heads": 3}, "width 16 is not divisible by num_heads 3"),
    ],
)
def test_keys_that_must_agree(kind: str, changes: dict[str, Any], said: str, tiny_params: Params) -> None:
    (line,) = problems(tiny_params(kind, changes))
    assert said in line


@pytest.mark.parametrize("change", [{"column": "part"}, {"files": None}, {"validation_fraction": 0.1}])
def test_a_given_split_is_told_in_one_way(change: dict[str, Any], tiny_params: Params) -> None:
    given = {
        "method": "given",
        "seed": 1,
        "files": {"train": "a.csv", "validation": "b.csv", "test": "c.csv"},
        "column": None,
        "validation_fraction": None,
    }
    parse_config(tiny_params("bag", {"data.split": given}), Path("params.yaml"))
    (line,) = problems(tiny_params("bag", {"data.split": {**given, **change}}))
    assert line.startswith("data.split: set exactly one of")


# -------------------------------------------------------------------------------------------------------- what it gives


def test_nothing_can_be_changed_after_reading(tiny_config: Callable[..., Config]) -> None:
    config = tiny_config("bag")
    with pytest.raises(ValidationError, match="frozen"):
        config.train.seed = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.train = config.train


def sections() -> Iterator[type[BaseModel]]:
    from reprise import config

    for value in vars(config).values():
        if isinstance(value, type) and issubclass(value, config.Section):
            yield value


def test_no_section_has_a_default() -> None:
    found = list(sections())
    assert len(found) > 20
    assert [f"{s.__name__}.{n}" for s in found for n, f in s.model_fields.items() if not f.is_required()] == []
    assert all(s.model_config.get(key) for s in found for key in ("strict", "frozen"))
    assert {s.model_config.get("extra") for s in found} == {"forbid"}


def test_every_number_has_a_bound() -> None:
    unbounded = []

    def visit(node: Any, path: str) -> None:
        if isinstance(node, dict):
            bounds = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}
            if node.get("type") in {"integer", "number"} and not bounds & node.keys():
                unbounded.append(path)
            for key, child in node.items():
                visit(child, f"{path}/{key}")
        elif isinstance(node, list):
            for index, child in enumerate(node):
                visit(child, f"{path}/{index}")

    visit(Config.model_json_schema(), "")
    assert unbounded == []
    visit({"type": "number"}, "planted")
    assert unbounded == ["planted"]


def test_the_schema_is_json_and_knows_every_section() -> None:
    schema = json.loads(json.dumps(Config.model_json_schema()))
    assert set(schema["required"]) == set(schema["properties"]) == set(Config.model_fields)
    assert not schema["additionalProperties"]


def test_flatten_has_one_entry_per_leaf(tiny_config: Callable[..., Config]) -> None:
    flat = flatten(tiny_config("bag").train, "train")
    assert flat["train.optimizer.peak_lr"] == 0.003
    assert flat["train.patience"] is None
    assert flatten(tiny_config("bag").model, "model")["model.word_ngrams"] == "[1, 2]"


def test_digest_changes_with_every_value_and_nothing_else(tiny_params: Params, tiny_config: Callable[..., Config]) -> None:
    config = tiny_config("bag")
    assert digest(config.train) == digest(tiny_config("bag", {"execution.num_workers": 3}).train)
    assert digest(config.model) == digest(tiny_config("bag", {"model.feature_dropout": 0.3}).model)
    assert digest(tiny_config("bag", {"train.label_smoothing": 0}).train) == digest(config.train), "0 and 0.0 are one value"
    changed = [tiny_config("bag", {"train.seed": 3}), tiny_config("bag", {"train.optimizer.beta2": 0.9})]
    assert len({digest(c.train) for c in [config, *changed]}) == 3
    assert len(digest(config)) == 64
