"""The deployment `rebuild/local` with a real server and a real worker, started from another folder than the project's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # MLflow's own database models.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:sqlalchemy.exc.SADeprecationWarning"),
]


@pytest.fixture(scope="module")
def deployed(
    make_checkout: Callable[..., Any],
    surroundings: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    free_port: int,
    wait_for_server: Callable[..., str],
) -> Iterator[tuple[Any, str]]:
    """A project whose deployment is registered with a full server (the temporary kind has no page and no scheduler)."""
    checkout = make_checkout(tmp_path_factory.mktemp("deployed"), {"train.max_epochs": 60, "evaluate.baselines": []})
    process = subprocess.Popen(
        [sys.executable, "-m", "prefect", "server", "start", "--port", str(free_port), "--no-ui"],
        # A database of its own: two servers that make the same one at once break each other.
        env={**surroundings, "PREFECT_HOME": str(tmp_path_factory.mktemp("prefect"))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        address = wait_for_server(process, free_port)
        checkout.run("prefect", "--no-prompt", "work-pool", "create", "reprise", "--type", "process", PREFECT_API_URL=address)
        yield checkout, address
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def worker(deployed: tuple[Any, str]) -> Iterator[tuple[Any, Any, str]]:
    """The project, a worker that runs in another folder, and the server's address."""
    checkout, address = deployed
    # What `make deploy` does. Anew each time: a killed worker's place in the concurrency limit is free only after five minutes.
    checkout.run("prefect", "--no-prompt", "deployment", "delete", "--all", PREFECT_API_URL=address)
    checkout.run("prefect", "--no-prompt", "deploy", "--all", PREFECT_API_URL=address, PWD=str(checkout.folder))
    with checkout.started("env", "-C", "/", "prefect", "worker", "start", "--pool", "reprise", PREFECT_API_URL=address) as running:
        running.wait_for("started!")
        yield checkout, running, address


def rebuilt(checkout: Any, address: str, *options: str) -> Any:
    """What the server knows of a run of the deployment that was watched to its end."""
    checkout.run("prefect", "deployment", "run", "rebuild/local", "--watch", *options, PREFECT_API_URL=address)
    return latest(address)


def latest(address: str) -> Any:
    found = httpx.post(f"{address}/flow_runs/filter", json=LATEST_REBUILD, timeout=10, trust_env=False).json()
    return found[0]


def lines(address: str) -> str:
    """Every log line that the server kept."""
    found = httpx.post(f"{address}/logs/filter", json={"limit": 200, "sort": "TIMESTAMP_DESC"}, timeout=10, trust_env=False).json()
    return "\n".join(line["message"] for line in found)


LATEST_REBUILD = {
    "limit": 1,
    "sort": "START_TIME_DESC",
    "flows": {"name": {"any_": ["rebuild"]}},
    "flow_runs": {"state": {"type": {"not_any_": ["SCHEDULED", "PENDING"]}}},
}


def num_versions(checkout: Any) -> int:
    from mlflow import MlflowClient

    return len(MlflowClient(f"sqlite:///{checkout.folder / 'mlflow.db'}").search_model_versions())


def test_the_deployment_does_what_dvc_repro_does(worker: tuple[Any, Any, str]) -> None:
    checkout, _, address = worker
    run = rebuilt(checkout, address)
    assert run["state"]["name"] == "Completed"
    assert run["state"]["message"].endswith("is model version 1")
    said = lines(address)
    assert "Running stage 'encode':" in said, "what DVC says"
    assert "step 60 of" in said, "what the training says"
    assert "registered as" in said
    assert "up to date" in checkout.run("dvc", "repro").said
    assert num_versions(checkout) == 1

    second = rebuilt(checkout, address)
    assert second["id"] != run["id"]
    assert (second["state"]["name"], second["state"]["message"]) == ("Completed", run["state"]["message"])
    assert "nothing changed since the release was made" in lines(address)

    checkout.set_params({"registry.gate.minimum": {"accuracy": 1.0}})
    before = (checkout.folder / "release" / "run.json").read_bytes()
    refused = rebuilt(checkout, address)
    assert (refused["state"]["type"], refused["state"]["name"]) == ("COMPLETED", "Refused")
    assert "registry.gate.minimum asks for at least 1" in refused["state"]["message"]
    assert (checkout.folder / "release" / "run.json").read_bytes() == before
    assert "registry" in checkout.run("dvc", "status", "release").said, "DVC is not told that it is current"
    assert num_versions(checkout) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_worker_leaves_no_trainer_and_the_next_run_resumes(worker: tuple[Any, Any, str], number: signal.Signals) -> None:
    checkout, running, address = worker
    checkout.set_params({"registry.gate.minimum": {}, "train.max_epochs": 400, "train.seed": int(number)})
    checkout.run("prefect", "deployment", "run", "rebuild/local", PREFECT_API_URL=address)
    running.wait_for("step 60 of")
    running.send(number)
    running.wait_until_gone(60)
    # A worker that is asked to stop kills its flow runs at once; one that died leaves them to themselves, and they stop in order.
    assert status(checkout) in ({"stopped"} if number == signal.SIGKILL else {"stopped", "running"})
    assert "continues from step" in checkout.run("dvc", "repro").said
    assert status(checkout) == "finished"


def status(checkout: Any) -> str:
    """How the latest training ended."""
    result = max(checkout.folder.glob("runs/*/result.json"), key=lambda path: path.stat().st_mtime)
    return str(json.loads(result.read_text())["status"])
