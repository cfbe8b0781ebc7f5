"""A trained model becomes one ONNX file that carries its tokenizer, its labels and where it came from."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx
import torch
from onnx.onnx_ml_pb2 import ModelProto
from torch import nn

from reprise.serving.classifier import INPUT_NAMES, METADATA_KEY, OUTPUT_NAME, TOKENIZER_KEY, ModelMetadata

# The traced shape. Every other one must work as well, which parity.check_shapes proves; 0 and 1 would be taken as constants.
TRACED_BATCH = 3
TRACED_LENGTH = 13
# protobuf holds no message of 2 GiB.
MAX_FILE_BYTES = 2**31 - 1


def export_onnx(model: nn.Module, path: Path, *, opset: int, metadata: ModelMetadata, tokenizer_json: str) -> None:
    """Writes ``model`` to ``path``: one file, batch and length dynamic, float32, the same bytes for the same model.

    ``model`` maps ``(input_ids, attention_mask)``, int64 [B, L] each, to logits [B, C]; it is left untouched. ``path`` appears
    only when it is whole and passed the checker.

    Raises:
        ValueError: the number of logits differs from the number of labels, or the file would be over 2 GB.
        RuntimeError: the exporter failed (the message ends with what it printed), or baked the traced shape in.
    """
    proto = _to_proto(inference_copy(model), opset, metadata.max_length)
    _check_size(proto)
    _check_dynamic(proto)
    _check_num_logits(proto, metadata)
    _strip_traces(proto)
    for key, value in ((METADATA_KEY, metadata.to_json()), (TOKENIZER_KEY, tokenizer_json)):
        proto.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(proto, full_check=True)
    _write_atomically(path, proto.SerializeToString(deterministic=True))


def inference_copy(model: nn.Module) -> nn.Module:
    """A float32 CPU copy of ``model`` in evaluation mode."""
    return copy.deepcopy(model).to(device="cpu", dtype=torch.float32).eval()


def _to_proto(model: nn.Module, opset: int, max_length: int) -> ModelProto:
    length = min(TRACED_LENGTH, max_length)
    ids = torch.ones(TRACED_BATCH, length, dtype=torch.int64)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=max_length)}
    chatter = io.StringIO()
    try:
        with _captured(chatter):
            program = torch.onnx.export(
                model,
                (ids, torch.ones_like(ids)),
                dynamo=True,
                opset_version=opset,
                input_names=list(INPUT_NAMES),
                output_names=[OUTPUT_NAME],
                dynamic_shapes=(axes, axes),
                external_data=False,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise RuntimeError(
            f"torch could not export {type(model).__name__} to ONNX opset {opset}: {error}\n{chatter.getvalue()[-4000:]}"
        ) from error
    if program is None:
        raise RuntimeError(f"torch's exporter returned nothing for {type(model).__name__}\n{chatter.getvalue()[-4000:]}")
    proto: ModelProto = program.model_proto
    return proto


@contextlib.contextmanager
def _captured(chatter: io.StringIO) -> Iterator[None]:
    """What the exporter prints, warns and logs in this block goes into ``chatter`` instead of onto the terminal."""
    handler = logging.StreamHandler(chatter)
    loggers = _loggers_with_handlers(("torch", "onnxscript", "onnx_ir"))
    before = [(logger, logger.handlers[:], logger.propagate) for logger in loggers]
    with (
        contextlib.redirect_stdout(chatter),
        contextlib.redirect_stderr(chatter),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for logger in loggers:
            logger.handlers, logger.propagate = [handler], False
        try:
            yield
        finally:
            for logger, handlers, propagate in before:
                logger.handlers, logger.propagate = handlers, propagate
            chatter.writelines(f"{warning.category.__name__}: {warning.message}\n" for warning in caught)


def _loggers_with_handlers(packages: tuple[str, ...]) -> list[logging.Logger]:
    """The loggers of ``packages``, and those below them that print by a handler of their own (torch has dozens)."""
    below = [logger for logger in logging.Logger.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    own = [logger for logger in below if logger.handlers and logger.name.partition(".")[0] in packages]
    return list({logger.name: logger for logger in (*map(logging.getLogger, packages), *own)}.values())


def _check_dynamic(proto: ModelProto) -> None:
    """Where it cannot trace a dynamic size, the exporter falls back to the traced one and says nothing."""
    for node in proto.graph.input:
        sizes = [dimension.dim_param or dimension.dim_value for dimension in node.type.tensor_type.shape.dim]
        if fixed := [size for size in sizes if isinstance(size, int)]:
            raise RuntimeError(
                f"the exported graph takes {node.name} of shape {sizes} only: the traced size {fixed[0]} is baked in. "
                "Keep int(x.shape[i]) and constants of that size out of the model's forward"
            )


def _check_size(proto: ModelProto) -> None:
    if (size := proto.ByteSize()) > MAX_FILE_BYTES:
        raise ValueError(f"the model takes {size / 1e9:.1f} GB; one ONNX file holds at most 2 GB. Choose a smaller model")


def _check_num_logits(proto: ModelProto, metadata: ModelMetadata) -> None:
    dimension = proto.graph.output[0].type.tensor_type.shape.dim[-1]
    found = dimension.dim_value if dimension.HasField("dim_value") else f"a dynamic number ({dimension.dim_param}) of"
    if found != len(metadata.labels):
        raise ValueError(f"the model gives {found} logits, but the metadata lists {len(metadata.labels)} labels")


def _strip_traces(proto: ModelProto) -> None:
    """Drops the exporter's notes on the Python source: they are a third of a small file and name lines and folders."""
    graph = proto.graph
    for noted in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        noted.ClearField("doc_string")
        noted.ClearField("metadata_props")


def _write_atomically(path: Path, content: bytes) -> None:
    """``path`` holds ``content`` or what it held before, whenever the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp makes it private; a model is read by others (a server, a container)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
