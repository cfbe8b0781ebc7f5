"""A tiny model.onnx written node by node: no torch, no exporter, and its logits can be recomputed by hand in NumPy."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

from reprise.config import BpeTokenizerConfig
from reprise.data.tokenizer import PAD_ID, encode_texts, train_tokenizer
from reprise.serving.classifier import METADATA_KEY, TOKENIZER_KEY, Classifier, ModelMetadata

LABELS = ("card_lost", "Überweisung", "001", "null", "top up")
MAX_LENGTH = 16
SENTENCES = (
    "I lost my card yesterday",
    "please top up my account",
    "wann kommt meine Überweisung an?",
    "the transfer has not arrived yet, what should I do now",
    "card",
    "Why was I charged twice for the same payment?",
)


@dataclass(frozen=True)
class Toy:
    """The file, and what it was made of."""

    path: Path
    tokenizer: Tokenizer
    table: NDArray[np.float32]
    metadata: ModelMetadata
    proto: onnx.ModelProto

    def logits_by_hand(self, texts: list[str]) -> NDArray[np.float32]:
        """The mean of the table's rows over the tokens of each text, one text after the other."""
        ids = encode_texts(self.tokenizer, texts, MAX_LENGTH)
        return np.stack([self.table[row].mean(axis=0) for row in ids])

    def variant(self, path: Path, metadata: dict[str, str] | None = None, proto: onnx.ModelProto | None = None) -> Path:
        """A copy of the file at ``path`` with other metadata or another graph."""
        model = onnx.ModelProto()
        model.CopyFrom(proto or self.proto)
        stored = {METADATA_KEY: self.metadata.to_json(), TOKENIZER_KEY: self.tokenizer.to_str()} if metadata is None else metadata
        helper.set_model_props(model, stored)
        path.write_bytes(model.SerializeToString())
        return path


def mean_graph(
    table: NDArray[np.float32], names: tuple[str, str, str] = ("input_ids", "attention_mask", "logits")
) -> onnx.ModelProto:
    ids, mask, logits = names
    nodes = [
        helper.make_node("Gather", ["table", ids], ["rows"], axis=0),
        helper.make_node("Cast", [mask], ["weights"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["weights", "last"], ["column"]),
        helper.make_node("Mul", ["rows", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "length_axis"], ["sums"], keepdims=0),
        helper.make_node("ReduceSum", ["weights", "length_axis"], ["counts"], keepdims=1),
        helper.make_node("Max", ["counts", "one"], ["divisors"]),
        helper.make_node("Div", ["sums", "divisors"], [logits]),
    ]
    constants = {
        "table": table,
        "last": np.array([2]),
        "length_axis": np.array([1]),
        "one": np.array([1], np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "mean",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in (ids, mask)],
        [helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["batch", table.shape[1]])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    config = BpeTokenizerConfig(
        kind="bpe", vocab_size=400, min_frequency=1, normaliser="nfc_spaces_lower", max_length=MAX_LENGTH, encoder=None
    )
    tokenizer = train_tokenizer(SENTENCES, config)
    table = np.random.default_rng(5).normal(size=(tokenizer.get_vocab_size(), len(LABELS))).astype(np.float32)
    # Were padding counted, these values would show it.
    table[PAD_ID] = 1000.0
    metadata = ModelMetadata(
        labels=LABELS,
        max_length=MAX_LENGTH,
        pad_id=PAD_ID,
        model_kind="toy",
        run_key="abc",
        mlflow_run_id=None,
        dataset_digest="def",
        versions={"torch": "none"},
    )
    toy = Toy(tmp_path_factory.mktemp("toy") / "model.onnx", tokenizer, table, metadata, mean_graph(table))
    toy.variant(toy.path)
    return toy


@pytest.fixture(scope="session")
def classifier(toy: Toy) -> Classifier:
    return Classifier(toy.path, num_threads=1)


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """257 texts of many lengths, in no order of length."""
    generator = np.random.default_rng(3)
    words = " ".join(SENTENCES).split()
    return [" ".join(generator.choice(words, size=generator.integers(1, 30))) for _ in range(257)]


@pytest.fixture(scope="session")
def other_graph() -> Callable[..., onnx.ModelProto]:
    return mean_graph


@pytest.fixture
def fed_shapes(classifier: Classifier, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every batch that reaches onnxruntime during the test."""
    shapes: list[tuple[int, ...]] = []
    session = classifier._session

    class Watched:
        def run(self, outputs: list[str], inputs: dict[str, Any]) -> Any:
            shapes.append(inputs["input_ids"].shape)
            return session.run(outputs, inputs)

    monkeypatch.setattr(classifier, "_session", Watched())
    return shapes
