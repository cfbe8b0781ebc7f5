"""Stopping a training in its middle: nobody is left, the records tell the truth, and the next call gives the undisturbed bits."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # MLflow's own database models.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:sqlalchemy.exc.SADeprecationWarning"),
]

# Long enough to hit, short enough to wait for; more epochs than any test lets pass before it stops the training.
LONG = {"train.max_epochs": 400, "execution.checkpoint_every_steps": 3, "evaluate.baselines": []}
IN_THE_MIDDLE = "step 60 of"


@pytest.fixture(scope="module")
def stopped(make_checkout: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A project with its data made, and how the training ends that nobody disturbs."""
    checkout = make_checkout(tmp_path_factory.mktemp("stopped"), LONG)
    checkout.run("dvc", "repro", "encode")
    elsewhere = tmp_path_factory.mktemp("undisturbed")
    (elsewhere / "data").mkdir()
    for name in ("encoded", "split"):
        (elsewhere / "data" / name).symlink_to(checkout.folder / "data" / name)
    checkout.run("python", "-m", "reprise", "train", "--params", "params.yaml", "--workdir", str(elsewhere))
    return checkout, result(elsewhere)


def result(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("runs/*/result.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def mlflow_run(checkout: Any) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{checkout.folder / 'mlflow.db'}")
    run = client.get_run(json.loads(next(checkout.folder.glob("runs/*/tracking.json")).read_text())["run_id"])
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert len(set(steps)) == len(steps), "a point was written twice"
    return run


@pytest.fixture
def fresh(stopped: tuple[Any, dict[str, Any]]) -> Any:
    """The project as if it was never trained, and the undisturbed result."""
    checkout, undisturbed = stopped
    for name in ("runs", "release", "mlartifacts"):
        shutil.rmtree(checkout.folder / name, ignore_errors=True)
    return checkout, undisturbed


@pytest.mark.parametrize(
    ("number", "to_group", "code"),
    [(signal.SIGTERM, False, -15), (signal.SIGINT, True, 255), (signal.SIGTERM, True, -15)],
    ids=["kill dvc", "ctrl-c", "kill the group"],
)
def test_a_stopped_dvc_repro_leaves_nobody_and_the_next_one_resumes(
    fresh: tuple[Any, dict[str, Any]], number: signal.Signals, to_group: bool, code: int
) -> None:
    """With the temporary Prefect server, which must be gone as well."""
    checkout, undisturbed = fresh
    with checkout.started("dvc", "repro") as dvc:
        dvc.wait_for(IN_THE_MIDDLE)
        assert dvc.member("pipelines.server")
        dvc.send(number, to_group=to_group)
        assert dvc.wait_until_gone(60) == code
        assert "Traceback" not in dvc.said()
        assert "Error logging to API" not in dvc.said()
    assert result(checkout.folder)["status"] == "stopped"
    assert mlflow_run(checkout).info.status == "KILLED"
    assert "continues from step" in checkout.run("dvc", "repro").said
    found = result(checkout.folder)
    assert {**found, "seconds": 0, "examples_per_second": 0, "mlflow_run_id": ""} == {
        **undisturbed, "seconds": 0, "examples_per_second": 0, "mlflow_run_id": "",
    }  # fmt: skip
    assert mlflow_run(checkout).info.status == "FINISHED"
    assert "up to date" in checkout.run("dvc", "repro").said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_trainer_says_by_what(fresh: tuple[Any, dict[str, Any]], server: str, number: signal.Signals, code: int) -> None:
    checkout, _ = fresh
    with checkout.started("python", "-m", "pipelines.train", PREFECT_API_URL=server) as trainer:
        trainer.wait_for(IN_THE_MIDDLE)
        trainer.send(number)
        assert trainer.wait_until_gone(60) == code
        assert "Finished in state Crashed" in trainer.said()
        assert "reprise: stopped by" in trainer.said()
        assert "Traceback" not in trainer.said()
    assert result(checkout.folder)["status"] == "stopped"
    assert mlflow_run(checkout).info.status == "KILLED"


def test_a_killed_trainer_is_continued_in_its_own_mlflow_run(fresh: tuple[Any, dict[str, Any]]) -> None:
    """SIGKILL: nothing could be said, and the temporary server ends all the same."""
    checkout, undisturbed = fresh
    with checkout.started("python", "-m", "pipelines.train") as trainer:
        trainer.wait_for(IN_THE_MIDDLE)
        trainer.send(signal.SIGKILL)
        trainer.wait_until_gone(60)
    assert result(checkout.folder)["status"] == "running"
    first = mlflow_run(checkout)
    assert first.info.status == "RUNNING"
    assert "continues from step" in checkout.run("python", "-m", "pipelines.train").said
    assert result(checkout.folder)["state_digest"] == undisturbed["state_digest"]
    second = mlflow_run(checkout)
    assert (second.info.run_id, second.info.status) == (first.info.run_id, "FINISHED")
    assert second.data.tags["reprise.resumed"] == "1"


def test_a_stopped_rebuild_leaves_neither_dvc_nor_a_stage(fresh: tuple[Any, dict[str, Any]], server: str) -> None:
    checkout, _ = fresh
    with checkout.started("python", "-m", "pipelines.rebuild", PREFECT_API_URL=server) as rebuild:
        rebuild.wait_for(IN_THE_MIDDLE)
        rebuild.send(signal.SIGTERM)
        assert rebuild.wait_until_gone(60) == 143
    assert mlflow_run(checkout).info.status == "KILLED"
