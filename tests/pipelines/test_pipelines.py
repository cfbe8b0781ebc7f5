"""The flows as code: what travels between tasks, what is cached, what a person's mistake costs."""

from __future__ import annotations

import ast
import inspect
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from pipelines.command import run_as_command
from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.settings import PREFECT_API_URL, temporary_settings

from pipelines import rebuild, tasks, train
from reprise.project import Project, open_project

# MLflow's own database models.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:sqlalchemy.exc.SADeprecationWarning")

ALL_TASKS = [value for module in (tasks, rebuild) for value in vars(module).values() if isinstance(value, Task)]


def test_the_tasks_are_found() -> None:
    assert {task.name for task in ALL_TASKS} == {
        "train", "evaluate", "export", "gate", "register", "release", "data", "compare", "commit",
    }  # fmt: skip


@pytest.mark.parametrize("task", ALL_TASKS, ids=lambda task: task.name)
def test_a_task_takes_paths_ids_and_config_and_is_never_cached(task: Any) -> None:
    hints = get_type_hints(task.fn)
    del hints["return"]
    assert set(hints.values()) <= {Project, Path, str, int}
    assert task.cache_policy == NO_CACHE
    assert not task.persist_result
    body = ast.parse(inspect.getsource(task.fn)).body[0]
    assert isinstance(body, ast.FunctionDef)
    assert len(body.body) <= 5, "a few lines: the work is in reprise.steps"


def test_only_the_flows_know_prefect(root: Path) -> None:
    files = list((root / "src").rglob("*.py"))
    assert len(files) > 40
    assert [
        f for f in files if "import prefect" in f.read_text(encoding="utf-8") or "from prefect" in f.read_text(encoding="utf-8")
    ] == []


def test_the_deployment_is_scheduled_in_a_named_time_zone_and_runs_in_this_folder(root: Path) -> None:
    tree = yaml.safe_load((root / "prefect.yaml").read_text(encoding="utf-8"))
    (deployment,) = tree["deployments"]
    assert (deployment["flow_name"], deployment["name"]) == ("rebuild", "local")
    path, name = deployment["entrypoint"].split(":")
    assert (root / path).is_file()
    assert name == rebuild.rebuild.name
    assert deployment["parameters"] == {"recipe": None}
    assert deployment["schedules"] == [{"cron": "0 3 * * 1", "timezone": "Europe/Berlin", "slug": "weekly"}]
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert deployment["work_pool"]["name"] == "reprise"
    assert deployment["work_pool"]["job_variables"]["working_dir"] == "{{ $PWD }}"
    assert deployment["work_pool"]["job_variables"]["env"]["PREFECT_LOGGING_EXTRA_LOGGERS"] == "reprise"


# ------------------------------------------------------------------------------------------------ a person's mistakes


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """``leave(workdir)``: exit code and stderr of ``python -m pipelines.train --workdir ...``, which must fail before any flow."""

    def run(workdir: Path, *options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", "--workdir", str(workdir), *options])
        monkeypatch.setattr(train, "train", None)  # a flow that is called here is a bug
        with pytest.raises(SystemExit) as caught:
            run_as_command(train.main)
        return int(str(caught.value.code)), capsys.readouterr().err

    return run


@pytest.fixture
def project(tiny_project: Callable[[str], Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The tiny project's data in a folder of its own."""
    shutil.copytree(tiny_project("bag").workdir, tmp_path / "work", ignore=shutil.ignore_patterns("runs", "mlflow*", "mlartifacts"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return open_project(None, tmp_path / "work")


def rewrite(project: Project, changes: Callable[[dict[str, Any]], object]) -> None:
    tree = yaml.safe_load(project.params_path.read_text(encoding="utf-8"))
    changes(tree)
    project.params_path.write_text(yaml.safe_dump(tree), encoding="utf-8")


def is_one_message(text: str) -> bool:
    return "Traceback" not in text and text.count("reprise: ") == 1


def nothing_new(project: Project) -> bool:
    return not (project.workdir / "runs").exists() and not (project.workdir / "release").exists()


def test_params_changed_after_the_dataset_was_made(project: Project, leave: Callable[..., tuple[int, str]]) -> None:
    rewrite(project, lambda tree: tree["tokenizer"].update(max_length=48))
    code, said = leave(project.workdir)
    assert code == 2
    assert is_one_message(said)
    assert "tokenizer.max_length" in said
    assert "dvc repro" in said
    assert nothing_new(project)


def test_an_unknown_key(project: Project, leave: Callable[..., tuple[int, str]]) -> None:
    rewrite(project, lambda tree: tree["train"].update(epochs=3))
    code, said = leave(project.workdir)
    assert code == 2
    assert is_one_message(said)
    assert "train.epochs" in said
    assert nothing_new(project)


def test_an_unknown_device(project: Project, leave: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRISE_DEVICE", "gpu")
    code, said = leave(project.workdir)
    assert code == 2
    assert is_one_message(said)
    assert "REPRISE_DEVICE=gpu" in said
    assert "cuda:N" in said
    assert nothing_new(project)


@pytest.fixture
def dead_port() -> Any:
    """A port that refuses: bound, so that nobody else gets it, but not listening."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_a_tracking_server_that_does_not_answer(
    project: Project, leave: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, dead_port: int
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{dead_port}")
    code, said = leave(project.workdir)
    assert code == 1
    assert is_one_message(said)
    assert f"http://127.0.0.1:{dead_port}" in said
    assert "MLFLOW_TRACKING_URI" in said
    assert nothing_new(project)


def test_a_prefect_server_that_does_not_answer(project: Project, leave: Callable[..., tuple[int, str]], dead_port: int) -> None:
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{dead_port}/api"}):
        code, said = leave(project.workdir)
    assert code == 1
    assert is_one_message(said)
    assert f"http://127.0.0.1:{dead_port}/api" in said
    assert "PREFECT_API_URL" in said
    assert nothing_new(project)


def test_help(leave: Callable[..., tuple[int, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = leave(tmp_path, "--help")
    assert code == 0
    code, said = leave(tmp_path, "--workers", "3")
    assert code == 2
    assert "unrecognized arguments: --workers" in said
