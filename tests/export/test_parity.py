"""The proof passes what is right, and shows every fault that was planted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor

from reprise.export.onnx_export import export_onnx
from reprise.export.parity import ParityError, check_shapes, check_split
from reprise.serving.classifier import Classifier

TOLERANCE = 1e-4


@pytest.fixture
def labels(texts: list[str]) -> list[str]:
    return [("card_lost", "top_up", "transfer", "fee", "other")[i % 5] for i in range(len(texts))]


def shapes(exported: Any, path: Path | None = None, **changes: Any) -> dict[str, float]:
    settings = {"vocab_size": exported.vocab_size, "max_length": exported.metadata.max_length, "tolerance": TOLERANCE}
    return check_shapes(exported.model, path or exported.path, **{**settings, **changes})


# ------------------------------------------------------------------------------------------------------ what is right


def test_a_good_file_agrees_at_every_shape(exported: Any) -> None:
    differences = shapes(exported)
    assert len(differences) == 7
    assert all(difference < 1e-5 for difference in differences.values())
    assert {"full rows [1, 1]", "full rows [5, 40]", "a row of padding only [2, 17]"} <= set(differences)


def test_short_maximum_lengths_are_checked_too(exported: Any) -> None:
    assert all(name.endswith((", 1]", ", 2]")) for name in shapes(exported, max_length=2))


def test_a_good_file_agrees_over_a_split(exported: Any, texts: list[str], labels: list[str]) -> None:
    reference = exported.reference_logits(texts).numpy()
    parity = check_split(Classifier(exported.path), texts, reference, labels, exported.metadata.labels, TOLERANCE, batch_size=4)
    assert parity.num_rows == len(texts)
    assert parity.max_logit_difference < 1e-5
    assert (parity.label_agreement, parity.num_flips, parity.flips) == (1.0, 0, {})
    assert parity.refusals(max_metric_drop=0.0) == []
    predicted = [exported.metadata.labels[best] for best in reference.argmax(axis=1)]
    assert parity.metrics["accuracy"].reference == pytest.approx(accuracy_score(labels, predicted))
    macro = f1_score(labels, predicted, labels=list(exported.metadata.labels), average="macro", zero_division=0)
    assert parity.metrics["macro_f1"].shipped == pytest.approx(macro)
    assert json.loads(json.dumps(parity.as_dict()))["metrics"]["accuracy"]["drop"] == 0


@pytest.mark.parametrize("batch_size", [1, 64])
def test_batch_size_changes_nothing(exported: Any, texts: list[str], batch_size: int) -> None:
    reference = exported.reference_logits(texts).numpy()
    np.testing.assert_allclose(Classifier(exported.path).logits(texts, batch_size), reference, atol=1e-5)


# -------------------------------------------------------------------------------------- planted: shapes and padding


def baked_length(proto: onnx.ModelProto) -> None:
    """As the legacy exporter leaves it: inputs look dynamic, a Reshape inside holds the traced length."""
    for node in proto.graph.node:
        for position, name in enumerate(node.input):
            if name == "input_ids":
                node.input[position] = "reshaped"
    proto.graph.initializer.append(numpy_helper.from_array(np.array([-1, 13]), "traced"))
    proto.graph.node.insert(0, helper.make_node("Reshape", ["input_ids", "traced"], ["reshaped"]))


def set_weights(name: str, value: float, row: int) -> Any:
    def change(proto: onnx.ModelProto) -> None:
        (tensor,) = [tensor for tensor in proto.graph.initializer if tensor.name == name]
        weights = numpy_helper.to_array(tensor).copy()
        weights[row] = value
        tensor.CopyFrom(numpy_helper.from_array(weights, name))

    return change


def test_a_baked_length_is_caught(bag: Any, tmp_path: Path) -> None:
    path = bag.planted(tmp_path / "m.onnx", change=baked_length)
    with pytest.raises(ParityError, match=r"full rows \[1, 1\]: onnxruntime fails, though the traced shape may run"):
        shapes(bag, path)


def test_other_weights_are_caught(exported: Any, tmp_path: Path) -> None:
    path = exported.planted(tmp_path / "m.onnx", change=set_weights("head.bias", 0.9, row=2))
    with pytest.raises(ParityError, match=r"full rows \[1, 1\]: logits differ by"):
        shapes(exported, path)


def test_nan_from_padding_in_the_file_is_caught(bag: Any, tmp_path: Path) -> None:
    path = bag.planted(tmp_path / "m.onnx", change=set_weights("tokens.weight", np.nan, row=0))
    with pytest.raises(ParityError, match=r"ragged rows \[3, 17\]: the file gives logits that are not finite in row 1"):
        shapes(bag, path)


def test_nan_for_a_row_of_padding_in_the_model_is_caught(bag: Any, bag_class: Any) -> None:
    class Dividing(bag_class):  # type: ignore[misc]  # the class comes from a fixture
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            logits: Tensor = super().forward(input_ids, attention_mask)
            return logits * (attention_mask.sum(dim=1, keepdim=True) / attention_mask.sum(dim=1, keepdim=True))

    model = Dividing(bag.vocab_size)
    model.load_state_dict(bag.model.state_dict())
    with pytest.raises(ParityError, match=r"a row of padding only \[2, 17\]: the trained model gives .* not finite in row 1"):
        check_shapes(model, bag.path, vocab_size=bag.vocab_size, max_length=40, tolerance=TOLERANCE)


def test_a_model_that_fails_at_another_length_is_caught(bag: Any, bag_class: Any) -> None:
    class Fixed(bag_class):  # type: ignore[misc]  # the class comes from a fixture
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            logits: Tensor = self.head(self.tokens(input_ids).view(-1, 13 * 8)[:, :8])
            return logits

    with pytest.raises(ParityError, match="the trained model itself fails at"):
        check_shapes(Fixed(bag.vocab_size), bag.path, vocab_size=bag.vocab_size, max_length=40, tolerance=TOLERANCE)


def test_a_model_that_ignores_the_mask_is_caught(bag: Any, bag_class: Any, tmp_path: Path) -> None:
    class Unmasked(bag_class):  # type: ignore[misc]  # the class comes from a fixture
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            logits: Tensor = self.head(self.tokens(input_ids).mean(dim=1))
            return logits

    model = Unmasked(bag.vocab_size)
    export_onnx(model, tmp_path / "m.onnx", opset=20, metadata=bag.metadata, tokenizer_json=bag.tokenizer.to_str())
    assert Classifier(tmp_path / "m.onnx").predict(["card"]), "an unused input must stay an input"
    with pytest.raises(ParityError, match=r"ragged rows \[3, 17\], row 1 alone and padded: logits differ"):
        check_shapes(model, tmp_path / "m.onnx", vocab_size=bag.vocab_size, max_length=40, tolerance=TOLERANCE)


# ----------------------------------------------------------------------------------------------- planted: a whole split


def split(exported: Any, path: Path, texts: list[str], labels: list[str], **changes: Any) -> Any:
    settings = {
        "reference_logits": exported.reference_logits(texts).numpy(),
        "labels": labels,
        "class_names": exported.metadata.labels,
        "tolerance": TOLERANCE,
    }
    return check_split(Classifier(path), texts, **{**settings, **changes})


def test_a_wrong_tokenizer_is_caught(
    exported: Any, other_tokenizer: Any, texts: list[str], labels: list[str], tmp_path: Path
) -> None:
    path = exported.planted(tmp_path / "m.onnx", tokenizer=other_tokenizer)
    assert shapes(exported, path), "the graph alone is right"
    parity = split(exported, path, texts, labels)
    assert parity.max_logit_difference > 100 * TOLERANCE
    assert any("logits differ by up to" in reason for reason in parity.refusals(max_metric_drop=1.0))


def test_a_wrong_normaliser_is_caught(exported: Any, texts: list[str], labels: list[str], tmp_path: Path) -> None:
    tree = json.loads(exported.tokenizer.to_str())
    tree["normalizer"]["normalizers"] = [step for step in tree["normalizer"]["normalizers"] if step["type"] != "Lowercase"]
    tokenizer = exported.tokenizer.from_str(json.dumps(tree))
    parity = split(exported, exported.planted(tmp_path / "m.onnx", tokenizer=tokenizer), texts, labels)
    assert parity.refusals(max_metric_drop=1.0)
    assert texts[parity.worst_row] != texts[parity.worst_row].lower()


def test_a_wrong_label_order_is_caught(
    exported: Any, with_labels: Any, texts: list[str], labels: list[str], tmp_path: Path
) -> None:
    metadata = with_labels(exported.metadata, ("card_lost", "transfer", "top_up", "fee", "other"))
    path = exported.planted(tmp_path / "m.onnx", metadata=metadata)
    with pytest.raises(ParityError, match="label 1 is 'transfer', in the dataset it is 'top_up': the label order differs"):
        split(exported, path, texts, labels)


def test_another_maximum_length_is_caught(bag: Any, texts: list[str], labels: list[str], tmp_path: Path) -> None:
    metadata = type(bag.metadata).from_json(json.dumps({**json.loads(bag.metadata.to_json()), "max_length": 10}))
    parity = split(bag, bag.planted(tmp_path / "m.onnx", metadata=metadata), texts, labels)
    assert parity.refusals(max_metric_drop=1.0)


def test_flips_are_counted_by_class_and_lower_metrics_are_refused(exported: Any, texts: list[str], tmp_path: Path) -> None:
    names = exported.metadata.labels
    reference = exported.reference_logits(texts).numpy()
    truth = [names[best] for best in reference.argmax(axis=1)]
    path = exported.planted(tmp_path / "m.onnx", change=set_weights("head.bias", 100.0, row=4))
    parity = split(exported, path, texts, truth)
    expected = {name: {"other": truth.count(name)} for name in names if name != "other" and name in truth}
    assert parity.flips == expected
    assert parity.num_flips == parity.num_clear_flips == sum(truth.count(name) for name in expected) > 0
    assert parity.metrics["accuracy"].reference == 1.0
    assert parity.metrics["accuracy"].drop == pytest.approx(parity.num_flips / len(texts))
    reasons = parity.refusals(max_metric_drop=0.0)
    assert [reason.partition(" ")[0] for reason in reasons] == ["logits", str(parity.num_flips), "accuracy", "macro_f1"]


def test_a_flip_between_equals_is_no_clear_flip(bag: Any, texts: list[str], labels: list[str]) -> None:
    """The reference is shifted by half the tolerance towards the second best label of a row that is nearly a tie."""
    shipped = Classifier(bag.path).logits(texts)
    reference = shipped.copy()
    best, second = np.argsort(shipped[0])[::-1][:2]
    reference[0, second] = shipped[0, best] + TOLERANCE / 2
    parity = check_split(Classifier(bag.path), texts, reference, labels, bag.metadata.labels, tolerance=TOLERANCE)
    assert (parity.num_flips, parity.num_clear_flips) == (1, 0)
    reference[0, second] = shipped[0, best] + 2 * TOLERANCE
    parity = check_split(Classifier(bag.path), texts, reference, labels, bag.metadata.labels, tolerance=TOLERANCE)
    assert (parity.num_flips, parity.num_clear_flips) == (1, 1)


def test_nan_on_either_side_is_broken(bag: Any, texts: list[str], labels: list[str], tmp_path: Path) -> None:
    reference = bag.reference_logits(texts).numpy()
    reference[3, 1] = np.nan
    with pytest.raises(ParityError, match="the trained model gives logits that are not finite in row 3"):
        split(bag, bag.path, texts, labels, reference_logits=reference)
    path = bag.planted(tmp_path / "m.onnx", change=set_weights("head.bias", np.inf, row=0))
    with pytest.raises(ParityError, match="not finite for text 0"):
        split(bag, path, texts, labels)


def test_arguments_of_other_rows_are_refused(bag: Any, texts: list[str], labels: list[str]) -> None:
    with pytest.raises(ValueError, match="22 rows of logits and 23 labels"):
        split(bag, bag.path, texts, labels, reference_logits=np.zeros((22, 5), np.float32))
    with pytest.raises(ValueError, match=r"labels \['refund'\] are not among the 5 labels"):
        split(bag, bag.path, texts, ["refund", *labels[1:]])
    with pytest.raises(ParityError, match="5 labels, the dataset has 4"):
        split(bag, bag.path, texts, labels, class_names=("card_lost", "fee", "other", "top_up"))
    with pytest.raises(ParityError, match=r"shape \[23, 5\], the trained model's \[23, 4\]"):
        split(bag, bag.path, texts, labels, reference_logits=np.zeros((23, 4), np.float32))
    with pytest.raises(ValueError, match="0 texts"):
        check_split(Classifier(bag.path), [], np.zeros((0, 5), np.float32), [], bag.metadata.labels, TOLERANCE)
