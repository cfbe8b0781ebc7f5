"""The tiny project of the kind that a test module names in ``KIND``, to be trained again and again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from reprise.project import Project, open_project


@pytest.fixture(scope="module")
def workdir(
    request: pytest.FixtureRequest, tiny_project: Callable[[str], Project], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The project's data; one MLflow database for the module, because making one takes seconds."""
    folder = tmp_path_factory.mktemp("steps") / "work"
    source = tiny_project(request.module.KIND).workdir
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("runs", "mlflow*", "mlartifacts"))
    return folder


@pytest.fixture
def project(workdir: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, deterministic: None) -> Project:
    """The project without runs."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.rmtree(workdir / "runs", ignore_errors=True)
    return open_project(None, workdir)
