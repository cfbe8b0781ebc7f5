"""The whole of training through the flow, on a small project: what it leaves, what a second run adds, what a refusal does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

# MLflow's own database models.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:sqlalchemy.exc.SADeprecationWarning")

# The command of the DVC stage several times in one process, each time with other params: starting one takes most of the time.
MARK = "==== after"
SEVERAL = f"""
import hashlib, json, sys
from pathlib import Path
from pipelines.command import run_as_command
from pipelines.train import main
for name in PARAMS:
    sys.argv = ["train.py", "--params", name]
    code = 0
    try:
        run_as_command(main)
    except SystemExit as left:
        code = left.code
    release = {{p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path("release").iterdir()}}
    facts = {{"code": code, "release": release, "runs": len(list(Path("runs").glob("*/result.json")))}}
    sys.stderr.flush()
    print("{MARK}", name, json.dumps(facts), flush=True)
"""


@pytest.fixture(scope="module")
def trained(make_checkout: Callable[..., Any], server: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A project after its first `dvc repro`."""
    checkout = make_checkout(tmp_path_factory.mktemp("trained"))
    checkout.run("dvc", "repro", PREFECT_API_URL=server)
    return checkout


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_params(target: Path, source: Path, minimum: dict[str, float]) -> None:
    tree = yaml.safe_load(source.read_text(encoding="utf-8"))
    tree["registry"]["gate"]["minimum"] = minimum
    target.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def tracked(checkout: Any) -> tuple[Any, Any]:
    """A client for the project's MLflow store, and the runs in it, the latest first."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{checkout.folder / 'mlflow.db'}")
    return client, client.search_runs([client.get_experiment_by_name("reprise").experiment_id])


def test_the_release_holds_what_other_tools_rely_on(trained: Any) -> None:
    release = trained.folder / "release"
    metrics, run = read(release / "metrics.json"), read(release / "run.json")
    assert {"accuracy", "macro_f1", "micro_f1", "loss"} <= metrics["test"].keys() & metrics["validation"].keys()
    assert metrics["baselines"].keys() == {"majority"}
    assert metrics["train"]["seconds"] > 0
    assert metrics["export"]["max_logit_difference"] < 1e-3
    assert metrics["export"]["label_agreement"] == 1
    assert {"mlflow_run_id", "run_key", "dataset_digest", "git_commit"} <= run.keys()
    assert run["dataset_digest"] == read(trained.folder / "data" / "encoded" / "manifest.json")["digest"]
    result = read(trained.folder / "runs" / run["run_key"] / "result.json")
    assert result["mlflow_run_id"] == run["mlflow_run_id"]
    rows = pq.read_table(release / "predictions.parquet")
    assert rows.column_names == ["row_id", "label", "predicted", "logits"]
    assert rows.num_rows == metrics["export"]["num_rows"]
    assert {len(logits) for logits in rows["logits"].to_pylist()} == {3}
    assert {"model.onnx", "params.yaml", "report.html"} <= {path.name for path in release.iterdir()}


def test_the_run_is_finished_and_its_model_is_registered_once(trained: Any) -> None:
    client, runs = tracked(trained)
    assert [(run.info.status, run.data.tags["gate"]) for run in runs] == [("FINISHED", "passed")]
    (version,) = client.search_model_versions()
    assert version.run_id == runs[0].info.run_id == read(trained.folder / "release" / "run.json")["mlflow_run_id"]
    assert client.get_model_version_by_alias(version.name, "candidate").version == version.version


def test_a_second_dvc_repro_does_nothing(trained: Any) -> None:
    said = trained.run("dvc", "repro").said
    assert "up to date" in said
    assert "Running stage" not in said


@pytest.fixture(scope="module")
def again(trained: Any, server: str) -> tuple[Any, list[str], list[dict[str, Any]]]:
    """The project after the flow ran a second time and was then refused; what each said; how each ended."""
    write_params(trained.folder / "refused.yaml", trained.folder / "params.yaml", {"accuracy": 1.0})
    code = SEVERAL.replace("PARAMS", repr(["params.yaml", "refused.yaml"]))
    said = trained.run("python", "-c", code, PREFECT_API_URL=server).said
    second, rest = said.split(f"{MARK} params.yaml ")
    released, rest = rest.split("\n", 1)
    refused, after = rest.split(f"{MARK} refused.yaml ")
    return trained, [second, refused], [json.loads(released), json.loads(after)]


def test_a_second_run_of_the_flow_adds_nothing(again: tuple[Any, list[str], list[dict[str, Any]]]) -> None:
    checkout, (said, _), (ended, _) = again
    assert ended["code"] == 0
    assert "finished already" in said
    client, runs = tracked(checkout)
    assert len(client.search_model_versions()) == 1
    assert len(client.get_metric_history(runs[-1].info.run_id, "test/accuracy")) == 1
    assert len({point.step for point in client.get_metric_history(runs[-1].info.run_id, "train/loss")}) == len(
        client.get_metric_history(runs[-1].info.run_id, "train/loss")
    )
    assert runs[-1].info.status == "FINISHED"
    assert ended["runs"] == 1


def test_a_refusal_is_a_finished_run_with_exit_code_3_that_leaves_the_old_release(
    again: tuple[Any, list[str], list[dict[str, Any]]],
) -> None:
    """Finished and tagged for MLflow, completed under its own name for Prefect."""
    checkout, (_, said), (before, ended) = again
    assert ended["code"] == 3
    assert "Finished in state Refused('refused: test accuracy is 0." in said
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith("reprise: refused: test accuracy is 0."), last
    assert "registry.gate.minimum asks for at least 1" in last
    assert ended["release"] == before["release"] == digests(checkout.folder / "release")
    client, runs = tracked(checkout)
    assert [(run.info.status, run.data.tags["gate"]) for run in runs] == [("FINISHED", "refused"), ("FINISHED", "passed")]
    assert len(client.search_model_versions()) == 1
    assert [path.name for path in checkout.folder.iterdir() if "release" in path.name] == ["release"]


BROKEN_EXPORT = """
def export_onnx(*args: object, **kwargs: object) -> None:
    raise RuntimeError("the exporter fell over")
"""


@pytest.mark.slow
def test_a_failure_leaves_the_old_release_too(trained: Any, server: str) -> None:
    before = digests(trained.folder / "release")
    path = trained.folder / "src" / "reprise" / "export" / "onnx_export.py"
    text = path.read_text()
    path.write_text(text + BROKEN_EXPORT)
    try:
        said = trained.run("dvc", "repro", code=255, PREFECT_API_URL=server).said
    finally:
        path.write_text(text)
    assert "reprise: the exporter fell over" in said
    assert "exited with 1" in said
    assert "Traceback" not in said
    assert digests(trained.folder / "release") == before
    assert tracked(trained)[1][0].info.status == "FAILED"


@pytest.mark.slow
def test_a_refused_stage_fails_for_dvc_and_leaves_the_old_release(trained: Any, server: str) -> None:
    before = digests(trained.folder / "release")
    trained.set_params({"registry.gate.minimum": {"accuracy": 0.999}})
    assert "exited with 3" in trained.run("dvc", "repro", code=255, PREFECT_API_URL=server).said
    assert digests(trained.folder / "release") == before

    said = trained.run("python", "-m", "pipelines.rebuild", code=3, PREFECT_API_URL=server).said
    assert "reprise: refused: test accuracy" in said
    assert digests(trained.folder / "release") == before
    trained.run("dvc", "status", "--quiet", "release", code=1)  # DVC was not told that the old release belongs to these params
