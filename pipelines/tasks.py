"""One task per step, a few lines each: the work is in ``reprise.steps``.

Arguments are a ``Project`` (paths and config) and ids, never tensors or models. Nothing is cached here: DVC owns the data, and a
training that ran before finds its own checkpoint. A retry runs the body again, and the body continues where the last try stopped.
"""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from reprise.project import Project
from reprise.steps import evaluation, release, training


@task(name="train", cache_policy=NO_CACHE)
def train(project: Project) -> str:
    """The key of the trained run."""
    return training.train(project)


@task(name="evaluate", cache_policy=NO_CACHE)
def evaluate(project: Project, key: str) -> dict[str, Any]:
    """The figures on validation and test."""
    return evaluation.evaluate(project, key)


@task(name="export", cache_policy=NO_CACHE)
def export(project: Project, key: str) -> dict[str, Any]:
    """The proof that model.onnx says what the trained model says."""
    return release.export(project, key)


@task(name="gate", cache_policy=NO_CACHE)
def gate(project: Project, key: str) -> list[str]:
    """Why the run must not be released; empty if it may."""
    return release.gate(project, key)


@task(name="register", cache_policy=NO_CACHE)
def register(project: Project, key: str) -> int:
    """The version of the registered model."""
    return release.register(project, key)


@task(name="release", cache_policy=NO_CACHE)
def publish(project: Project, key: str, model_version: int) -> str:
    """The folder of the release."""
    return str(release.release(project, key, model_version))
