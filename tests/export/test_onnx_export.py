"""One whole file that any ONNX tool reads: dynamic, checked, without traces of the machine, written without a sound."""

import copy
import io
import logging
import stat
import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from reprise.export import onnx_export
from reprise.export.onnx_export import export_onnx, inference_copy
from reprise.serving.classifier import METADATA_KEY, TOKENIZER_KEY, Classifier, ModelMetadata


def test_the_file_is_alone_and_passes_the_checker(exported: Any) -> None:
    assert [path.name for path in exported.path.parent.iterdir()] == ["model.onnx"]
    assert stat.S_IMODE(exported.path.stat().st_mode) == 0o644
    onnx.checker.check_model(str(exported.path), full_check=True)


def test_the_interface_is_the_contract(exported: Any) -> None:
    proto = onnx.load(exported.path)

    def described(nodes: Any) -> list[tuple[str, int, list[str | int]]]:
        return [
            (node.name, node.type.tensor_type.elem_type, [d.dim_param or d.dim_value for d in node.type.tensor_type.shape.dim])
            for node in nodes
        ]

    assert described(proto.graph.input) == [
        ("input_ids", onnx.TensorProto.INT64, ["batch", "length"]),
        ("attention_mask", onnx.TensorProto.INT64, ["batch", "length"]),
    ]
    assert described(proto.graph.output) == [("logits", onnx.TensorProto.FLOAT, ["batch", 5])]
    assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 20)]


def test_metadata_and_tokenizer_travel_in_the_file(exported: Any) -> None:
    stored = {entry.key: entry.value for entry in onnx.load(exported.path).metadata_props}
    assert ModelMetadata.from_json(stored[METADATA_KEY]) == exported.metadata
    assert stored[TOKENIZER_KEY] == exported.tokenizer.to_str()
    assert Classifier(exported.path).metadata == exported.metadata


def test_no_trace_of_the_machine_stays_in_the_file(exported: Any) -> None:
    content = exported.path.read_bytes()
    for trace in (str(Path(__file__).parents[2]).encode(), b"site-packages", b".py", b"stack_trace", b"pkg.torch"):
        assert trace not in content, trace


def test_dropout_is_off_and_the_model_is_left_as_it_was(bag: Any, bag_class: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(bag.model).train()
    before = copy.deepcopy(model.state_dict())
    generator_state = torch.get_rng_state()
    path = tmp_path / "again" / "model.onnx"
    export_onnx(model, path, opset=20, metadata=bag.metadata, tokenizer_json=bag.tokenizer.to_str())
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator_state)
    # The same model gives the same bytes, in another folder and in training mode.
    assert path.read_bytes() == bag.path.read_bytes()


def test_half_precision_weights_ship_as_float32_and_the_original_keeps_its_own(bag: Any) -> None:
    model = copy.deepcopy(bag.model).to(torch.bfloat16).train()
    shipped = inference_copy(model)
    assert {weight.dtype for weight in shipped.parameters()} == {torch.float32}
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert (shipped.training, model.training) == (False, True)


def test_nothing_is_printed_warned_or_logged(
    bag: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    emit = logging.StreamHandler.emit

    def listen(handler: logging.StreamHandler[Any], record: logging.LogRecord) -> None:
        if not isinstance(handler.stream, io.StringIO):
            heard.append(record.getMessage())
        emit(handler, record)

    class Chatty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = bag.model

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            print("from the model")  # noqa: T201
            warnings.warn("from the model", stacklevel=1)
            logging.getLogger("torch.onnx").error("from torch")
            logits: Tensor = self.inner(input_ids, attention_mask)
            return logits

    monkeypatch.setattr(logging.StreamHandler, "emit", listen)
    handlers = logging.getLogger("torch").handlers[:]
    export_onnx(Chatty(), tmp_path / "m.onnx", opset=20, metadata=bag.metadata, tokenizer_json=bag.tokenizer.to_str())
    assert heard == []
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("torch").handlers == handlers


class Branching(nn.Module):
    """Its path depends on values, which no graph can hold."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        print("about to branch")  # noqa: T201
        if bool(attention_mask.sum() > 5):
            return input_ids[:, :1].expand(-1, 5).float()
        return attention_mask[:, :1].expand(-1, 5).float()


def test_a_failed_export_says_what_the_exporter_said_and_leaves_the_old_file(bag: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"the old one")
    with pytest.raises(RuntimeError, match="could not export Branching") as caught:
        export_onnx(Branching(), path, opset=20, metadata=bag.metadata, tokenizer_json="{}")
    assert "data-dependent" in str(caught.value)
    assert "about to branch" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert path.read_bytes() == b"the old one"


def test_a_length_that_the_exporter_bakes_in_silently_is_refused(bag: Any, bag_class: Any, tmp_path: Path) -> None:
    class Baked(bag_class):  # type: ignore[misc]  # the class comes from a fixture
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            batch, length = int(input_ids.shape[0]), int(input_ids.shape[1])
            weights = torch.linspace(0, 1, steps=13) if length == 13 else torch.zeros(length)
            rows: Tensor = self.tokens(input_ids).reshape(batch, length, 8)
            logits: Tensor = self.head((rows * weights[:, None]).sum(dim=1))
            return logits

    with pytest.raises(RuntimeError, match="is baked in"):
        export_onnx(Baked(bag.vocab_size), tmp_path / "m.onnx", opset=20, metadata=bag.metadata, tokenizer_json="{}")
    assert list(tmp_path.iterdir()) == []


def test_another_number_of_labels_is_refused(bag: Any, with_labels: Any) -> None:
    proto = onnx.load(bag.path)
    onnx_export._check_num_logits(proto, bag.metadata)
    with pytest.raises(ValueError, match="gives 5 logits, but the metadata lists 3 labels"):
        onnx_export._check_num_logits(proto, with_labels(bag.metadata, ("a", "b", "c")))


def test_a_model_too_large_for_one_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "MAX_FILE_BYTES", 10)
    proto = onnx.ModelProto(producer_name="more than ten bytes")
    with pytest.raises(ValueError, match="one ONNX file holds at most 2 GB"):
        onnx_export._check_size(proto)


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"the old one")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        onnx_export._write_atomically(path, b"the new one")
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]
