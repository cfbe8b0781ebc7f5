"""The step ``train``: what it leaves in runs/, what it does when called again, and what it makes of a stop that comes late."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reprise.checkpoint import CheckpointError
from reprise.data.dataset import StaleDatasetError
from reprise.project import Project
from reprise.steps import training
from reprise.stopping import Stopped

# MLflow's own database models.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:sqlalchemy.exc.SADeprecationWarning")
KIND = "bag"


def result(project: Project, key: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project.run_dir(key) / "result.json").read_text(encoding="utf-8"))
    return found


def mlflow_status(project: Project, key: str) -> str:
    from mlflow import MlflowClient

    run_id = json.loads((project.run_dir(key) / "tracking.json").read_text(encoding="utf-8"))["run_id"]
    return str(MlflowClient(f"sqlite:///{project.workdir / 'mlflow.db'}").get_run(run_id).info.status)


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("trained again")


def test_a_finished_run_is_not_trained_again_and_restart_sets_it_aside(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    key = training.train(project)
    first = result(project, key)
    assert first["status"] == "finished"
    assert {"steps", "epochs", "best_step", "seconds", "examples_per_second", "state_digest", "best_state_digest"} <= first.keys()
    with monkeypatch.context() as patched:
        patched.setattr(training, "fit", forbidden)
        assert training.train(project) == key
    assert result(project, key) == first

    assert training.train(project, restart=True) == key
    second = result(project, key)
    assert (second["state_digest"], second["best_state_digest"]) == (first["state_digest"], first["best_state_digest"])
    assert second["mlflow_run_id"] != first["mlflow_run_id"]
    assert (project.runs_dir / f"{key}.aside-1" / "result.json").exists()


def test_a_stop_that_comes_after_the_last_step_ends_what_follows_but_not_the_training(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = training.fit

    def fit_and_stop(*arguments: Any, **options: Any) -> Any:
        state = fit(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return state

    with monkeypatch.context() as patched:
        patched.setattr(training, "fit", fit_and_stop)
        with pytest.raises(Stopped) as caught:
            training.train(project)
    assert caught.value.exit_code == 143
    (key,) = (path.name for path in project.runs_dir.iterdir())
    assert result(project, key)["status"] == "finished"
    assert mlflow_status(project, key) == "KILLED"
    monkeypatch.setattr(training, "fit", forbidden)
    assert training.train(project) == key


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_a_kill_between_the_two_checkpoints_of_an_epoch_changes_no_bit(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in one order is a kill harmless: last.pt must never know of a best epoch that best.pt does not hold."""
    straight = result(project, training.train(project))
    shutil.rmtree(project.runs_dir)
    replace_file, bests = Path.replace, []

    def die_after_the_first_of_two(path: Path, target: Path) -> Path:
        done = replace_file(path, target)
        if path.name.endswith(".link.tmp"):  # a best epoch: the first of its two names is in place
            bests.append(target.name)
            if len(bests) == 2:
                raise Killed
        return done

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", die_after_the_first_of_two)
        with pytest.raises(Killed):
            training.train(project)
    resumed = result(project, training.train(project))
    for name in ("state_digest", "best_state_digest", "best_step", "best_value", "steps"):
        assert resumed[name] == straight[name], name


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Training is asked to stop once it took ``step`` steps."""
    fit = training.fit

    def fit_until(*arguments: Any, **options: Any) -> Any:
        state = arguments[-1]
        return fit(*arguments, **{**options, "stop_requested": lambda: 15 if state.step >= step else None})

    monkeypatch.setattr(training, "fit", fit_until)


def with_execution(project: Project, **changes: Any) -> Project:
    execution = project.config.execution.model_copy(update=changes)
    return replace(project, config=project.config.model_copy(update={"execution": execution}))


def test_earlier_checkpoints_are_kept_and_serve_where_the_last_is_torn(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS B4: one slot back, and it says so; the bits in the end are those of a straight run."""
    straight = result(project, training.train(project))
    shutil.rmtree(project.runs_dir)
    several = with_execution(project, checkpoint_every_steps=2, keep_last=3)
    stop_after(monkeypatch, 7)
    with pytest.raises(Stopped):
        training.train(several)
    monkeypatch.undo()
    (run_dir,) = project.runs_dir.iterdir()
    names = sorted(path.name for path in run_dir.glob("*.pt"))
    assert names == ["best.pt", "last.pt", "step-000000004.pt", "step-000000006.pt", "step-000000007.pt"]
    assert (run_dir / "last.pt").samefile(run_dir / "step-000000007.pt"), "a second name costs no disk"
    for name in ("last.pt", "step-000000007.pt"):
        (run_dir / name).write_bytes(b"torn")
    with caplog.at_level("INFO"):
        resumed = result(project, training.train(several))
    assert [f"{name} cannot be read" in caplog.text for name in ("last.pt", "step-000000007.pt")] == [True, True]
    assert "continues from step 6" in caplog.text
    for name in ("state_digest", "best_state_digest", "best_step", "best_value", "steps"):
        assert resumed[name] == straight[name], name


def test_a_disk_without_room_for_the_checkpoints_is_named_before_the_first_step(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.train(project)
    (run_dir,) = project.runs_dir.iterdir()
    size = (run_dir / "last.pt").stat().st_size
    shutil.rmtree(project.runs_dir)
    usage = shutil.disk_usage(project.workdir)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2 * size))
    monkeypatch.setattr(training, "fit", forbidden)
    with pytest.raises(CheckpointError, match=r"0\.00 GB are free, and 3 checkpoints of .* lower execution\.keep_last"):
        training.train(project)
    monkeypatch.undo()
    estimate: list[int] = []
    monkeypatch.setattr(training, "require_space", lambda folder, num_bytes, num_files: estimate.append(num_bytes))
    training.train(project)
    assert estimate[0] == pytest.approx(size, rel=0.2), "the estimate must be that of a real checkpoint"


def test_a_failure_is_recorded_as_one_and_the_next_call_continues(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def fall_over(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more memory")

    with monkeypatch.context() as patched:
        patched.setattr(training, "fit", fall_over)
        with pytest.raises(RuntimeError, match="no more memory"):
            training.train(project)
    (key,) = (path.name for path in project.runs_dir.iterdir())
    assert (result(project, key)["status"], result(project, key)["error"]) == ("failed", "no more memory")
    assert mlflow_status(project, key) == "FAILED"
    assert training.train(project) == key
    assert (result(project, key)["status"], mlflow_status(project, key)) == ("finished", "FINISHED")


def test_nothing_is_written_for_a_dataset_that_does_not_fit_the_params(
    project: Project, tiny_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = replace(project, config=tiny_config("bag", {"tokenizer.max_length": 48}))
    for call in (training.train, training.check_ready):
        with pytest.raises(StaleDatasetError, match=r"tokenizer\.max_length"):
            call(stale)
    monkeypatch.setenv("REPRISE_DEVICE", "gpu")
    with pytest.raises(ValueError, match="REPRISE_DEVICE=gpu"):
        training.check_ready(project)
    assert not project.runs_dir.exists()
