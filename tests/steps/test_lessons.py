"""Training a head alone: on vectors that a frozen encoder made once, by the same loop, and joined again afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from reprise.checkpoint import load_checkpoint
from reprise.data.dataset import EncodedDataset, open_dataset
from reprise.evaluation.predict import predict
from reprise.models import build_model
from reprise.project import Project
from reprise.steps import lessons, training
from reprise.steps.lessons import learner_and_lessons
from reprise.steps.runs import best_model
from reprise.stopping import Stopped

# MLflow's own database models.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:sqlalchemy.exc.SADeprecationWarning")
CPU = torch.device("cpu")
KIND = "frozen"


def parts(project: Project) -> tuple[nn.Module, EncodedDataset]:
    data = open_dataset(project.encoded_dir, project.config)
    torch.manual_seed(project.config.train.seed)
    return build_model(project.config.model, data), data


def test_vectors_are_those_of_the_encoder_and_the_test_split_is_not_touched(project: Project) -> None:
    model, data = parts(project)
    head, vectors = learner_and_lessons(project, model, data, CPU)
    assert head is model.head
    assert sorted(vectors.splits) == ["train", "validation"]
    for name, split in vectors.splits.items():
        expected = predict(model.encoder, data.splits[name], 7, CPU, 0)
        found = np.stack([example.features for example in split.__getitems__(range(len(split)))])
        assert np.abs(found - expected).max() < 1e-6


def test_vectors_are_made_once_for_all_heads_and_anew_for_other_data(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = parts(project)
    learner_and_lessons(project, model, data, CPU)
    (path,) = project.features_dir.iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(lessons, "predict", None)  # to compute them again would raise
        learner_and_lessons(project, model, data, CPU)
    seen = {lessons._features_digest(project, model, data)}
    assert seen == {path.stem}
    for change in ({"digest": "b" * 64}, {"encoder_digest": "b" * 64}):
        seen.add(
            lessons._features_digest(
                project, model, EncodedDataset(data.folder, data.manifest.model_copy(update=change), data.splits)
            )
        )
    monkeypatch.setattr(model, "config", model.config.model_copy(update={"pooling": "max"}))
    seen.add(lessons._features_digest(project, model, data))
    monkeypatch.setattr(lessons, "library_versions", lambda: {"torch": "another"})
    seen.add(lessons._features_digest(project, model, data))
    monkeypatch.setattr(lessons, "code_digest", lambda *_: "another")
    seen.add(lessons._features_digest(project, model, data))
    assert len(seen) == 6


def test_a_model_that_is_trained_as_a_whole_learns_from_token_ids(project: Project, tiny_config: Callable[..., Any]) -> None:
    _, data = parts(project)
    model = build_model(tiny_config("pretrained").model, data)
    assert learner_and_lessons(project, model, data, CPU) == (model, data)
    assert not project.features_dir.exists()


def test_head_and_encoder_are_joined_for_evaluation(project: Project) -> None:
    key = training.train(project)
    saved = load_checkpoint(project.run_dir(key) / "best.pt", CPU)["model"]
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {"1.weight": (5, 16), "1.bias": (5,)}
    _, data = parts(project)
    joined = best_model(project, data, project.run_dir(key), CPU)
    _, vectors = learner_and_lessons(project, joined, data, CPU)
    from_text = predict(joined, data.splits["validation"], 16, CPU, 0)
    from_vectors = predict(joined.head, vectors.splits["validation"], 16, CPU, 0)
    assert np.abs(from_text - from_vectors).max() < 1e-5
    result = json.loads((project.run_dir(key) / "result.json").read_text(encoding="utf-8"))
    assert result["parameters"] == sum(p.numel() for p in joined.parameters()) > 9_000


def test_a_stopped_training_of_a_head_ends_with_the_same_bits(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    key = training.train(project)
    path = project.run_dir(key) / "result.json"
    straight = json.loads(path.read_text(encoding="utf-8"))
    shutil.rmtree(project.runs_dir)
    fit = training.fit
    steps = iter(range(1000))

    def stop_at_step_three(*arguments: Any, **options: Any) -> Any:
        return fit(*arguments, **{**options, "stop_requested": lambda: 15 if next(steps) == 2 else None})

    with monkeypatch.context() as patched:
        patched.setattr(training, "fit", stop_at_step_three)
        with pytest.raises(Stopped):
            training.train(project)
    assert training.train(project) == key
    resumed = json.loads(path.read_text(encoding="utf-8"))
    for name in ("state_digest", "best_state_digest", "steps", "best_step"):
        assert resumed[name] == straight[name]
