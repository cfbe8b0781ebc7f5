"""What a training changes, and what it learns from: the model on token ids, or its head on what a frozen encoder made of them."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from reprise.data.dataset import EncodedDataset
from reprise.data.features import FeatureSplit, write_features
from reprise.evaluation.predict import predict
from reprise.models import trained_part
from reprise.models.pretrained import Pretrained
from reprise.project import FEATURE_CODE, Project, code_digest, library_versions
from reprise.training.precision import autocast

logger = logging.getLogger(__name__)

SPLITS_IN_TRAINING = ("train", "validation")  # the test split is read by `evaluate` alone
TEXTS_AT_ONCE = 64  # fixed: with another number there is other padding, and the last bits of a vector differ


def learner_and_lessons(
    project: Project, model: nn.Module, data: EncodedDataset, device: torch.device
) -> tuple[nn.Module, EncodedDataset]:
    """The part of ``model`` that training changes, and the dataset that it maps to logits."""
    part = trained_part(model)
    if part is model:
        return model, data
    assert isinstance(model, Pretrained)
    return part, _feature_dataset(project, model, data, device)


def _feature_dataset(project: Project, model: Pretrained, data: EncodedDataset, device: torch.device) -> EncodedDataset:
    """``data`` with vectors in place of token ids; they are computed once and kept in runs/features."""
    path = project.features_dir / f"{_features_digest(project, model, data)}.arrow"
    if not path.exists():
        start = time.perf_counter()
        pad_id, tokens = data.manifest.tokenizer.pad_id, data.splits
        with autocast(device, project.config.train.precision):
            vectors = {name: predict(model.encoder, tokens[name], TEXTS_AT_ONCE, device, pad_id) for name in SPLITS_IN_TRAINING}
        write_features(path, vectors)
        logger.info("the encoder made its vectors of the texts in %.1f s; they are kept in %s", time.perf_counter() - start, path)
    return replace(data, splits={name: FeatureSplit(data.splits[name], path, name) for name in SPLITS_IN_TRAINING})


def _features_digest(project: Project, model: Pretrained, data: EncodedDataset) -> str:
    """16 hex digits that change with whatever can change the vectors."""
    parts = {
        "data": data.manifest.digest,
        "encoder": data.manifest.encoder_digest,
        "pooling": model.config.pooling,
        "precision": project.config.train.precision,
        "code": code_digest(Path(__file__).parents[1], FEATURE_CODE),
        "libraries": library_versions(),
        "threads": torch.get_num_threads(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
