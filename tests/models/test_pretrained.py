"""The pretrained encoder: what is loaded, what is frozen, what is refused. What every model must do stands in test_models.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from reprise.config import Config, ConfigError
from reprise.data.dataset import EncodedDataset, encoder_digest
from reprise.models import build_model, make_servable, trained_part
from reprise.models.pooling import first_token

Make = Callable[..., nn.Module]


def encoder_weights(data: EncodedDataset) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in load_file(data.encoder_dir / "model.safetensors").items() if "pooler" not in name}


def test_the_weights_are_those_of_the_file(make_model: Make, tiny_dataset: Callable[[str], EncodedDataset]) -> None:
    model = make_model("pretrained", drawn=False)
    expected = encoder_weights(tiny_dataset("pretrained"))
    found = model.encoder.transformer.state_dict()
    assert found.keys() == expected.keys(), "no weight of a pooling head that is never trained"
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_pooled_vectors_equal_a_computation_by_hand(make_model: Make) -> None:
    ids, mask = torch.tensor([[2, 40, 41, 3], [2, 40, 3, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    model = make_model("pretrained", drawn=False)
    tokens = model.encoder.transformer(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.allclose(model.encoder(ids, mask)[1], tokens[1, :3].mean(dim=0), atol=1e-6)
    largest = make_model("pretrained", {"model.pooling": "max"}, drawn=False)
    assert torch.allclose(largest.encoder(ids, mask)[1], tokens[1, :3].amax(dim=0), atol=1e-6)
    first = make_model("pretrained", {"model.pooling": "cls"}, drawn=False)
    assert torch.allclose(first.encoder(ids, mask), tokens[:, 0], atol=1e-6)
    assert torch.equal(first_token(torch.ones(1, 2, 3), torch.zeros(1, 2, 1)), torch.zeros(1, 3))


def trained(model: nn.Module) -> set[str]:
    """Parts of the model with a gradient after a backward pass: ``head``, ``embeddings``, ``layer 0``, ..."""
    model.train()
    model(torch.tensor([[2, 40, 41, 3]]), torch.ones(1, 4, dtype=torch.long)).square().sum().backward()
    names = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    parts = {name: name.removeprefix("encoder.transformer.").removeprefix("encoder.").split(".") for name in names}
    return {f"layer {words[1]}" if words[0] == "layer" else words[0] for words in parts.values()}


@pytest.mark.parametrize(
    ("embeddings", "layers", "expected"),
    [
        (False, 0, {"embeddings", "layer 0", "layer 1", "head"}),
        (True, 0, {"layer 0", "layer 1", "head"}),
        (True, 1, {"layer 1", "head"}),
        (True, 2, {"head"}),
        (True, "all", {"head"}),
    ],
)
def test_what_is_frozen_gets_no_gradient(make_model: Make, embeddings: bool, layers: Any, expected: set[str]) -> None:
    model = make_model("pretrained", {"model.frozen_embeddings": embeddings, "model.frozen_layers": layers})
    assert trained(model) == expected
    assert trained_part(model) is (model.head if layers == "all" else model)


def test_more_frozen_layers_than_there_are(make_model: Make) -> None:
    with pytest.raises(ValueError, match=r"model\.frozen_layers: found 3; this encoder has 2 layers"):
        make_model("pretrained", {"model.frozen_layers": 3})


def test_the_dropout_of_params_is_in_force_everywhere(make_model: Make) -> None:
    model = make_model("pretrained", {"model.encoder_dropout": 0.25, "model.head_dropout": 0.4})
    inside = {m.p for m in model.encoder.modules() if isinstance(m, nn.Dropout)}
    assert inside == {0.25}
    assert model.head[0].p == 0.4


# ------------------------------------------------------------------------------------------------------------------ LoRA


def test_with_adapters_the_encoder_begins_as_it_was_and_only_they_and_the_head_learn(make_model: Make) -> None:
    ids, mask = torch.tensor([[2, 40, 41, 3]]), torch.ones(1, 4, dtype=torch.long)
    plain, model = make_model("pretrained", drawn=False), make_model("lora", drawn=False)
    assert torch.equal(model.encoder(ids, mask), plain.encoder(ids, mask))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or name.startswith("head.") for name in trainable)
    assert not any("layer.0." in name for name in trainable), "frozen_layers: 1 leaves the first layer alone"
    # A and B beside query, key, value, attention output and the two feed-forward products of the second layer
    assert sum("lora_" in name for name in trainable) == 12
    model.train()(ids, mask).square().sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trainable


def test_merged_adapters_say_the_same_and_leave_no_trace(make_model: Make) -> None:
    ids, mask = torch.tensor([[2, 40, 41, 3], [2, 40, 3, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    model, plain = make_model("lora"), make_model("pretrained", drawn=False)
    before, weights = model(ids, mask), {n: t.clone() for n, t in model.encoder.transformer.state_dict().items()}
    assert any(name.endswith("lora_B.default.weight") and tensor.abs().max() > 0 for name, tensor in weights.items())
    merged = make_servable(model)
    assert torch.allclose(merged(ids, mask), before, atol=1e-5)
    assert merged.state_dict().keys() == plain.state_dict().keys()
    assert not torch.allclose(
        merged.encoder.transformer.encoder.layer[1].attention.self.query.weight,
        weights["encoder.layer.1.attention.self.query.base_layer.weight"],
    )


@pytest.mark.parametrize(("embeddings", "layers"), [(False, 0), (True, "all")])
def test_adapters_beside_weights_that_learn_or_have_no_use(
    embeddings: bool, layers: Any, tiny_config: Callable[..., Config]
) -> None:
    with pytest.raises(ConfigError, match="lora trains adapters beside the encoder's weights"):
        tiny_config("lora", {"model.frozen_embeddings": embeddings, "model.frozen_layers": layers})


@pytest.fixture
def spoil(tiny_dataset: Callable[[str], EncodedDataset], tmp_path: Path) -> Callable[[Callable[[Path], None]], EncodedDataset]:
    """The tiny dataset with a copy of its encoder that was changed, and a manifest that knows of the change."""

    def make(change: Callable[[Path], None]) -> EncodedDataset:
        data = tiny_dataset("pretrained")
        shutil.copytree(data.folder.parent, tmp_path / "data")
        change(tmp_path / "data" / "encoder")
        manifest = data.manifest.model_copy(update={"encoder_digest": encoder_digest(tmp_path / "data" / "encoder")})
        return replace(data, folder=tmp_path / "data" / "encoded", manifest=manifest)

    return make


def test_an_encoder_that_lacks_weights_is_refused(spoil: Callable[..., EncodedDataset], tiny_config: Callable[..., Config]) -> None:
    def drop_one(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("encoder.layer.1.output.dense.weight")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ValueError, match=r"lacks 1 weights of the encoder, encoder\.layer\.1\.output\.dense\.weight"):
        build_model(tiny_config("pretrained").model, spoil(drop_one))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"PK\x03\x04 not tensors"),
        ("config.json", b'{"model_type": "an encoder of tomorrow"}'),
        ("config.json", b"{"),
    ],
)
def test_an_encoder_that_cannot_be_read_is_named(
    spoil: Callable[..., EncodedDataset], tiny_config: Callable[..., Config], name: str, content: bytes
) -> None:
    def overwrite(folder: Path) -> None:
        (folder / name).write_bytes(content)

    with pytest.raises(ValueError, match=r"encoder: transformers \d.* cannot load this encoder"):
        build_model(tiny_config("pretrained").model, spoil(overwrite))


def test_code_of_the_encoders_own_is_never_run(
    spoil: Callable[..., EncodedDataset], tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    def plant(folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text())
        settings["model_type"] = "planted"
        settings["auto_map"] = {"AutoConfig": "planted.Settings", "AutoModel": "planted.Model"}
        (folder / "config.json").write_text(json.dumps(settings))
        (folder / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")

    with pytest.raises(ValueError, match="cannot load this encoder"):
        build_model(tiny_config("pretrained").model, spoil(plant))
    assert not (tmp_path / "ran").exists()


def test_an_encoder_changed_after_encode_is_refused(
    tiny_dataset: Callable[[str], EncodedDataset], tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    data = tiny_dataset("pretrained")
    shutil.copytree(data.folder.parent, tmp_path / "data")
    moved = replace(data, folder=tmp_path / "data" / "encoded")
    build_model(tiny_config("pretrained").model, moved)
    path = tmp_path / "data" / "encoder" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match=r"it was changed after encode: run `dvc repro encode`"):
        build_model(tiny_config("pretrained").model, replace(data, folder=tmp_path / "data" / "encoded"))
    path.unlink()
    with pytest.raises(ValueError, match=r"lacks model\.safetensors of the encoder; run `dvc repro fetch`"):
        build_model(tiny_config("pretrained").model, replace(data, folder=tmp_path / "data" / "encoded"))
