"""The MLflow side of a run. Every call names its run by id; MLflow's active run, which belongs to a thread, is never used.

A run is found by ``runs/<key>/tracking.json``. What is written once (params, dataset, files) is written again without harm when
a start was interrupted, and metrics come from the journal with the journal's own times, so that a resend changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit, urlunsplit

from reprise.stopping import Stopped
from reprise.tracking.journal import Journal, Point, read_points
from reprise.tracking.provenance import GitState

if TYPE_CHECKING:  # importing mlflow takes seconds: only who opens a store pays
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput

logger = logging.getLogger(__name__)

TRACKING_FILE = "tracking.json"
ALIAS = "candidate"
# Limits of MLflow. Source: mlflow/utils/validation.py.
METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100
DIGEST_LENGTH = 36
# Where the user set nothing: no telemetry, no chatter, and a dead server is known in seconds instead of minutes.
MLFLOW_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
PROBE_SECONDS = 5
LOCK_SECONDS = 120
DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
# Answers that mean "you asked for something wrong", not "I am not there".
_OUR_MISTAKES = {
    "BAD_REQUEST",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
    "NOT_FOUND",
}

# Which of its two faces MLflow's page shows first.
MODEL_TRAINING = {"mlflow.experimentKind": "custom_model_development"}

ParamValue = str | int | float | bool | None


class TrackingUnreachable(RuntimeError):  # noqa: N818  a state of the world
    """The tracking server or database does not answer, or lets nobody in."""


@dataclass(frozen=True)
class Store:
    """An open experiment. ``address`` is the tracking URI without credentials, fit for messages and files."""

    client: MlflowClient
    uri: str
    address: str
    experiment_id: str


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run at its birth.

    ``params`` are flat, by dotted path; ``files`` that do not exist (no dvc.lock outside DVC) are left out; ``source`` is the
    section data.source as a plain mapping.
    """

    key: str
    recipe: str
    command: str
    device: str
    params: Mapping[str, ParamValue]
    manifest: Mapping[str, Any]
    environment: Mapping[str, Any]
    git: GitState
    files: Sequence[Path]
    source: Mapping[str, Any]


# ---------------------------------------------------------------------------------------------------------------- opening


def open_experiment(name: str, workdir: Path, tracking_uri: str | None = None) -> Store:
    """The experiment ``name``, made where it is new, in ``tracking_uri``, else MLFLOW_TRACKING_URI, else <workdir>/mlflow.db.

    Raises:
        ValueError: the address is a folder (MLflow 3 refuses its file store), or the experiment was deleted.
        TrackingUnreachable: nobody answers.
    """
    for variable, value in MLFLOW_SETTINGS.items():
        os.environ.setdefault(variable, value)
    workdir = workdir.resolve()
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(workdir / 'mlflow.db').as_posix()}"
    _refuse_file_store(uri)
    probe(uri)
    from mlflow import MlflowClient

    with _creation_lock(uri), reaching(uri):
        client = MlflowClient(tracking_uri=uri)
        return Store(client, uri, without_credentials(uri), _experiment_id(client, name, uri, workdir))


def _refuse_file_store(uri: str) -> None:
    if urlsplit(uri).scheme in ("", "file") or (len(urlsplit(uri).scheme) == 1 and os.name == "nt"):
        raise ValueError(
            f"tracking address {uri!r} is a folder, and MLflow 3 no longer keeps runs in folders. Unset MLFLOW_TRACKING_URI to "
            "use mlflow.db in the project, or set it to sqlite:////path/to/mlflow.db or http://host:port"
        )


def without_credentials(uri: str) -> str:
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri


def probe(uri: str) -> None:
    """Return if somebody answers at ``uri``; a file-based database needs no answer.

    Raises:
        TrackingUnreachable: no answer within a few seconds.
    """
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        from mlflow.utils.credentials import get_default_host_creds
        from mlflow.utils.rest_utils import http_request

        with reaching(uri):
            http_request(
                get_default_host_creds(uri), "/version", "GET", max_retries=0, timeout=PROBE_SECONDS, raise_on_status=False
            )
    elif parts.hostname:
        port = parts.port or DATABASE_PORTS.get(parts.scheme.partition("+")[0])
        if port is None:
            return
        try:
            socket.create_connection((parts.hostname, port), timeout=PROBE_SECONDS).close()
        except OSError as error:
            raise _unreachable(uri, str(error)) from error


@contextmanager
def reaching(uri: str) -> Iterator[None]:
    """Turn every way in which MLflow says "nobody there" into ``TrackingUnreachable``."""
    import requests
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except MlflowException as error:
        if error.error_code in _OUR_MISTAKES:
            raise
        raise _unreachable(uri, str(error)) from error
    except (requests.RequestException, SQLAlchemyError) as error:
        raise _unreachable(uri, str(error)) from error


def _unreachable(uri: str, reason: str) -> TrackingUnreachable:
    address = without_credentials(uri)
    first = _in_short(reason).replace(uri, address)
    if "Invalid Host header" in reason:
        advice = "start the server with --allowed-hosts naming this address, port included"
    elif "401" in first or "403" in first or "UNAUTHENTICATED" in first or "PERMISSION_DENIED" in first:
        advice = "check MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the proxy in between"
    elif urlsplit(uri).scheme.startswith("sqlite"):
        advice = "check that the folder exists and can be written, that the disk is not full, and that no other program locks it"
    else:
        advice = "start the server or correct MLFLOW_TRACKING_URI (unset it to use mlflow.db in the project)"
    return TrackingUnreachable(
        f"the tracking store at {address} cannot be used: {first}. What to do: {advice}. Nothing measured is lost: it "
        "is in the run's journal, and running the same command again sends it"
    )


def _in_short(reason: str) -> str:
    """The heart of an error that wraps three others, else its first line."""
    if found := re.search(r"\[Errno -?\d+\] [A-Z][\w ]+|Read timed out|connect timeout|too many \d+ error responses", reason):
        return found.group()
    return next((line for line in reason.splitlines() if line.strip()), "no reason given")[:200]


@contextmanager
def _creation_lock(uri: str) -> Iterator[None]:
    """One process at a time creates or migrates a SQLite file: two at once crash. Servers see to it themselves."""
    parts = urlsplit(uri)
    if not parts.scheme.startswith("sqlite") or not parts.path.strip("/"):
        yield
        return
    from filelock import FileLock, Timeout

    file = Path(parts.path[1:])  # sqlite:///relative and sqlite:////absolute
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{file}.lock", timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except Timeout as error:
        raise _unreachable(uri, f"another process has held {file}.lock for {LOCK_SECONDS} s") from error
    try:
        yield
    finally:
        lock.release()


def _experiment_id(client: MlflowClient, name: str, uri: str, workdir: Path) -> str:
    from mlflow.exceptions import MlflowException

    # A server keeps the artifacts where it was told to. Without one MLflow would take ./mlruns of whatever folder we are in.
    location = None if urlsplit(uri).scheme in ("http", "https") else (workdir / "mlartifacts").as_uri()
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=location, tags=MODEL_TRAINING))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # somebody else was faster
    if found is None or found.lifecycle_stage != "active":
        raise ValueError(
            f"experiment {name!r} was deleted in {without_credentials(uri)}. Restore it (`mlflow experiments restore "
            f"--experiment-id {found.experiment_id if found else '...'}`) or write another name into registry.experiment"
        )
    if location is not None and found.artifact_location.rstrip("/") != location:
        logger.warning("experiment %r keeps its artifacts in %s, as it did when it was made", name, found.artifact_location)
    return str(found.experiment_id)


# ------------------------------------------------------------------------------------------------------------------- runs


def start_run(store: Store, run_dir: Path, facts: RunFacts) -> str:
    """The id of the MLflow run of ``run_dir``: continued where tracking.json names one, else born with all that is known of it.

    A run that the store does not know (another server, a deleted run) is born again, and its whole journal will be sent.
    """
    state = _read_state(run_dir)
    with reaching(store.uri):
        if state and _is_alive(store, state["run_id"]):
            run_id = str(state["run_id"])
            if state["born"]:
                _mark_resumed(store, run_id)
                return run_id
        else:
            if state:
                logger.warning("run %s is not in %s; a new one takes its place", state["run_id"], store.address)
            run_id = store.client.create_run(store.experiment_id, tags=_tags(facts), run_name=_run_name(facts)).info.run_id
            state = {"run_id": run_id, "experiment_id": store.experiment_id, "tracking_uri": store.address, "key": facts.key}
            _write_state(run_dir, {**state, "sent_bytes": 0, "born": False})
        _write_birth(store, run_id, facts)
    _update_state(run_dir, born=True)
    return run_id


def find_run(run_dir: Path) -> str | None:
    """The MLflow run id that tracking.json names."""
    state = _read_state(run_dir)
    return str(state["run_id"]) if state else None


def set_tags(store: Store, run_id: str, tags: Mapping[str, str]) -> None:
    """Facts that became known later: where it was resumed, what the gate said."""
    from mlflow.entities import RunTag

    with reaching(store.uri):
        store.client.log_batch(run_id, tags=[RunTag(name, str(value)) for name, value in tags.items()])


def count_test_evaluation(store: Store, run_id: str, dataset_digest: str) -> int:
    """How often the test split of this dataset was evaluated in the experiment, this time included; kept as tags of the runs."""
    tag = "reprise.test_evaluations"
    with reaching(store.uri):
        before = int(store.client.get_run(run_id).data.tags.get(tag, "0"))
        store.client.set_tag(run_id, tag, str(before + 1))
        runs = store.client.search_runs([store.experiment_id], f"tags.`reprise.dataset_digest` = '{dataset_digest}'")
    return sum(int(run.data.tags.get(tag, "0")) for run in runs)


def _run_name(facts: RunFacts) -> str:
    return f"{facts.recipe}-{facts.key[:8]}"


def _is_alive(store: Store, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return bool(store.client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False


def _mark_resumed(store: Store, run_id: str) -> None:
    times = int(store.client.get_run(run_id).data.tags.get("reprise.resumed", "0")) + 1
    store.client.set_tag(run_id, "reprise.resumed", str(times))
    store.client.set_tag(run_id, "reprise.resumed_at", datetime.now(UTC).isoformat(timespec="seconds"))


def _tags(facts: RunFacts) -> dict[str, str]:
    git = facts.git
    tags = {
        "mlflow.source.name": facts.command,
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": _run_description(facts),
        "reprise.run_key": facts.key,
        "reprise.recipe": facts.recipe,
        "reprise.command": facts.command,
        "reprise.dataset_digest": str(facts.manifest["digest"]),
        "reprise.device": facts.device,
        "reprise.cpu": str(facts.environment.get("cpu", {}).get("model", "unknown")),
        "reprise.git_commit": git.commit or git.note or "unknown",
        "reprise.git_dirty": str(git.dirty).lower(),
    }
    if git.commit is not None:
        tags["mlflow.source.git.commit"] = git.commit
    if git.branch is not None:
        tags["mlflow.source.git.branch"] = git.branch
    return tags


def _run_description(facts: RunFacts) -> str:
    manifest = facts.manifest
    rows = ", ".join(f"{count:,} {split}" for split, count in manifest.get("num_rows", {}).items())
    return (
        f"Recipe **{facts.recipe}** on {len(manifest.get('labels', []))} classes ({rows}).\n\n"
        f"- run key `{facts.key}`: the folder `runs/{facts.key}` of the project\n"
        f"- dataset `{manifest['digest']}`\n"
        f"- code `{facts.git.commit or facts.git.note}`{' with changes, see diff.patch' if facts.git.dirty else ''}\n"
    )


def _write_birth(store: Store, run_id: str, facts: RunFacts) -> None:
    from mlflow.entities import Param

    params = [Param(name, _param_text(value)) for name, value in facts.params.items()]
    for start in range(0, len(params), PARAMS_PER_CALL):
        store.client.log_batch(run_id, params=params[start : start + PARAMS_PER_CALL])
    store.client.log_inputs(run_id, datasets=[_dataset_input(facts)])
    for path in facts.files:
        if path.exists():
            store.client.log_artifact(run_id, str(path))
    with tempfile.TemporaryDirectory() as folder:
        for path in _written_facts(Path(folder), facts):
            store.client.log_artifact(run_id, str(path))


def _param_text(value: ParamValue) -> str:
    """As params.yaml writes it: null, true, false."""
    return value if isinstance(value, str) else json.dumps(value)


def _written_facts(folder: Path, facts: RunFacts) -> Iterator[Path]:
    git = {"commit": facts.git.commit, "branch": facts.git.branch, "dirty": facts.git.dirty, "note": facts.git.note}
    environment = folder / "environment.json"
    content = {**facts.environment, "git": {**git, "untracked": list(facts.git.untracked)}, "command": facts.command}
    environment.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    yield environment
    if facts.git.diff:
        patch = folder / "diff.patch"
        patch.write_text(facts.git.diff, encoding="utf-8", errors="surrogateescape", newline="")
        yield patch


def _dataset_input(facts: RunFacts) -> DatasetInput:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    manifest = facts.manifest
    kind, source = _dataset_source(facts.source)
    rows: Mapping[str, int] = manifest.get("num_rows", {})
    profile = {"num_rows": sum(rows.values()), **{f"num_rows_{split}": count for split, count in rows.items()}}
    columns = [{"name": name, "type": "string", "required": True} for name in ("text", "label")]
    dataset = Dataset(
        name=str(facts.source.get("package") or facts.source.get("repository") or facts.source.get("path") or "texts"),
        digest=str(manifest["digest"])[:DIGEST_LENGTH],
        source_type=kind,
        source=json.dumps(source),
        schema=json.dumps({"mlflow_colspec": columns}),
        profile=json.dumps({**profile, "num_classes": len(manifest.get("labels", []))}),
    )
    return DatasetInput(dataset, tags=[InputTag("mlflow.data.context", "training")])


def _dataset_source(source: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind and content of a source as ``mlflow.data.get_source`` reads them back."""
    if source["kind"] == "path":
        return "local", {"uri": source["path"]}
    if source["kind"] == "url":
        return "http", {"url": without_credentials(next(iter(source["files"].values()))["url"])}
    if source["kind"] == "hub":
        return "hugging_face", {"path": source["repository"], "revision": source["revision"], "split": None}
    return "code", {"tags": {name: value for name, value in source.items() if isinstance(value, str)}}


# ----------------------------------------------------------------------------------------------------------------- status


class run_status:  # noqa: N801  used as a function: with run_status(store, run_id): ...
    """The run is RUNNING inside, and afterwards what is true: FINISHED, FAILED, or KILLED where somebody stopped it.

    ``killed_by`` are the exceptions that mean a stop. When the block itself fails, an unreachable store is only a warning: the
    block's own error is the news.

    Raises:
        TrackingUnreachable: the status could not be written.
    """

    def __init__(
        self, store: Store, run_id: str, killed_by: tuple[type[BaseException], ...] = (KeyboardInterrupt, Stopped)
    ) -> None:
        self._store, self._run_id, self._killed_by = store, run_id, killed_by

    def __enter__(self) -> None:
        with reaching(self._store.uri):
            self._store.client.update_run(self._run_id, status="RUNNING")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        status = self._status(error)
        try:
            probe(self._store.uri)
            with reaching(self._store.uri):
                self._store.client.set_terminated(self._run_id, status=status)
        except TrackingUnreachable as unreachable:
            if error is None:
                raise
            logger.warning("run %s ended %s, which could not be recorded: %s", self._run_id, status, unreachable)

    def _status(self, error: BaseException | None) -> str:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return "FINISHED"
        return "KILLED" if isinstance(error, self._killed_by) else "FAILED"


# ---------------------------------------------------------------------------------------------------------------- metrics


def send_journal(store: Store, run_dir: Path) -> int:
    """How many points were sent: all that the journal of ``run_dir`` holds behind the last one sent.

    Raises:
        TrackingUnreachable: what was sent before it is remembered, the rest goes with the next call.
    """
    journal, state = run_dir / "journal.jsonl", _state(run_dir)
    sent = int(state["sent_bytes"])
    if not journal.exists() or journal.stat().st_size < sent:
        sent = 0  # another journal than the one that was sent; an identical point is ignored, so all of it may go
    points, end = read_points(journal, sent)
    with reaching(store.uri):
        for start in range(0, len(points), METRICS_PER_CALL):
            _send(store, str(state["run_id"]), points[start : start + METRICS_PER_CALL])
    if end != state["sent_bytes"]:
        _update_state(run_dir, sent_bytes=end)
    return len(points)


def _send(store: Store, run_id: str, points: Iterable[Point], model_id: str | None = None) -> None:
    from mlflow.entities import Metric

    metrics = [Metric(p.name, p.value, p.time, p.step, model_id=model_id, run_id=run_id) for p in points]
    store.client.log_batch(run_id, metrics=metrics)


class JournalSender:
    """Sends the journal of ``run_dir`` while a training goes on: ``flush`` costs it nothing, leaving the block sends the rest.

    An outage is one warning, and every later flush tries again.

    Raises:
        TrackingUnreachable: at the end of a block that went well, if points are still unsent.
    """

    def __init__(self, store: Store, run_dir: Path) -> None:
        self._store, self._run_dir = store, run_dir
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal-sender")
        self._sending: Future[int] | None = None
        self._warned = False

    def flush(self) -> None:
        """Start sending what is new; while the last sending still runs, nothing is started."""
        if self._sending is not None and not self._sending.done():
            return
        self._collect()
        self._sending = self._worker.submit(send_journal, self._store, self._run_dir)

    def finish(self) -> None:
        """Send all that is left, and wait for it."""
        self._collect()
        self._worker.shutdown()
        if self._warned:
            probe(self._store.uri)
        send_journal(self._store, self._run_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.finish()
        except TrackingUnreachable as unreachable:
            if error is None:
                raise
            logger.warning("%s", unreachable)

    def _collect(self) -> None:
        """Take note of how the last sending went: an outage is survivable, anything else is raised."""
        sending, self._sending = self._sending, None
        if sending is None:
            return
        try:
            sending.result()
        except TrackingUnreachable as unreachable:
            if not self._warned:
                logger.warning("training goes on without tracking: %s", unreachable)
            self._warned = True


def log_evaluation(store: Store, run_dir: Path, step: int, results: Mapping[str, Any]) -> None:
    """Write the numbers in ``results`` ({"test": {"accuracy": ...}} becomes test/accuracy) to the journal and send them.

    Through the journal, so that an evaluation that is run again adds no second point.

    Raises:
        Diverged: the same checkpoint was evaluated before, with another result.
    """
    with Journal(run_dir / "journal.jsonl") as journal:
        journal.log(step, dict(_numbers("", results)))
    send_journal(store, run_dir)


def _numbers(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number with its path; text, lists, truth values and nothing (null) are no metrics."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{name}/", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def log_artifacts(store: Store, run_id: str, paths: Iterable[Path], folder: str | None = None) -> None:
    """Upload files and whole folders into ``folder`` of the run; what is there under the same name is replaced."""
    with reaching(store.uri):
        for path in paths:
            if path.is_dir():
                store.client.log_artifacts(run_id, str(path), f"{folder}/{path.name}" if folder else path.name)
            else:
                store.client.log_artifact(run_id, str(path), folder)


# --------------------------------------------------------------------------------------------------------------- registry


@dataclass(frozen=True)
class RegisteredVersion:
    name: str
    version: int
    model_id: str


def register(store: Store, run_dir: Path, model_path: Path, name: str, description: str = "") -> RegisteredVersion:
    """The version of model ``name`` that holds ``model_path`` byte for byte, under the alias `candidate`.

    The same run key and the same bytes give the same version, however often this is called or was interrupted. ``description``
    is Markdown and stands above the test metrics of the run.
    """
    state = _state(run_dir)
    tags = {"run_key": str(state["key"]), "sha256": hashlib.sha256(model_path.read_bytes()).hexdigest()}
    run_id = str(state["run_id"])
    tested = _last_points(run_dir / "journal.jsonl", "test/")
    with reaching(store.uri):
        _ensure_registered_model(store, name)
        version = _find_version(store, name, tags)
        if version is None:
            model_id = _upload_model(store, run_id, model_path, name, tags, tested)
            text = _version_description(description, tested, str(state["key"]))
            version = _create_version(store, name, run_id, model_id, tags, text)
        store.client.set_registered_model_alias(name, ALIAS, str(version.version))
    return version


def _last_points(journal: Path, prefix: str) -> list[Point]:
    points = {point.name: point for point in read_points(journal)[0] if point.name.startswith(prefix)}
    return sorted(points.values(), key=lambda point: point.name)


def _ensure_registered_model(store: Store, name: str) -> None:
    from mlflow.exceptions import MlflowException

    text = (
        "Text classifier made by Reprise: one ONNX file that holds tokenizer, labels and its own origin.\n\n"
        f'`reprise predict --model model.onnx "some text"` uses it. The alias `{ALIAS}` is the last version to pass the gate.'
    )
    try:
        store.client.create_registered_model(name, description=text)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _find_version(store: Store, name: str, tags: Mapping[str, str]) -> RegisteredVersion | None:
    wanted = " and ".join(f"tags.{tag} = '{value}'" for tag, value in tags.items())
    found = [version for version in store.client.search_model_versions(wanted) if version.name == name]
    if not found:
        return None
    first = min(found, key=lambda version: int(version.version))
    return RegisteredVersion(name, int(first.version), str(first.tags["model_id"]))


def _upload_model(store: Store, run_id: str, model_path: Path, name: str, tags: Mapping[str, str], tested: Sequence[Point]) -> str:
    """The id of the logged model (MLflow's Models page) with these bytes; one that an interrupted call left is completed."""
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    client = store.client
    wanted = " and ".join(f"tags.{tag} = '{value}'" for tag, value in tags.items())
    found = [m for m in client.search_logged_models([store.experiment_id], wanted) if m.source_run_id == run_id]
    if found and found[0].status == LoggedModelStatus.READY:
        return str(found[0].model_id)
    if found:
        model = found[0]
    else:
        params = client.get_run(run_id).data.params
        plain_name = re.sub(r"[/:.%\"']", "_", name)  # MLflow is stricter with these names than with registered ones
        model = client.create_logged_model(store.experiment_id, plain_name, run_id, dict(tags), params, model_type="onnx")
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, max((p.step for p in tested), default=0))])
    with tempfile.TemporaryDirectory() as folder:
        _write_mlflow_model(Path(folder) / "model", model_path, run_id, model)
        client.log_model_artifacts(model.model_id, str(Path(folder) / "model"))
    _send(store, run_id, tested, model_id=str(model.model_id))
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    return str(model.model_id)


def _write_mlflow_model(folder: Path, model_path: Path, run_id: str, logged_model: Any) -> None:
    """``model_path`` as an MLflow model of the flavour ONNX; its bytes stay what they are."""
    with warnings.catch_warnings():
        # Said while MLflow imports itself, about type hints of its own. Source: mlflow/types/type_hints.py, 3.17.2.
        warnings.filterwarnings("ignore", message=".*Any type hint is inferred as AnyType", category=UserWarning)
        import mlflow.onnx
        import mlflow.pyfunc
    import onnx
    from mlflow.models import Model

    graph = onnx.load(str(model_path))
    mlflow.onnx.save_model(
        graph,
        str(folder),
        mlflow_model=Model(
            artifact_path=logged_model.artifact_location,
            run_id=run_id,
            model_uuid=logged_model.model_id,
            model_id=logged_model.model_id,
        ),
        signature=_signature(graph),
        # Left to itself MLflow loads the model to find out what it imports, which takes 4 to 14 seconds.
        pip_requirements=[f"{package}=={metadata.version(package)}" for package in ("onnx", "onnxruntime", "tokenizers", "numpy")],
        onnx_execution_providers=["CPUExecutionProvider"],
        save_as_external_data=False,
    )
    # MLflow writes the graph anew, which need not give the same bytes; what is registered is what was tested.
    (folder / "model.onnx").write_bytes(model_path.read_bytes())


def _signature(graph: Any) -> Any:
    """Names, types and shapes of the graph's inputs and outputs, with -1 for every dynamic dimension."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec
    from onnx.helper import tensor_dtype_to_np_dtype

    def schema(values: Iterable[Any]) -> Schema:
        return Schema(
            [
                TensorSpec(
                    tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
                    tuple(d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim),
                    value.name,
                )
                for value in values
            ]
        )

    return ModelSignature(inputs=schema(graph.graph.input), outputs=schema(graph.graph.output))


def _create_version(
    store: Store, name: str, run_id: str, model_id: str, tags: Mapping[str, str], description: str
) -> RegisteredVersion:
    client = store.client
    # The location itself, not models:/<id>: MLflow would look that id up in its global store, which need not be ours.
    location = client.get_logged_model(model_id).artifact_location
    all_tags = {**tags, "model_id": model_id}
    created = client.create_model_version(
        name, location, run_id, tags=all_tags, description=description, model_id=model_id, await_creation_for=60
    )
    version = RegisteredVersion(name, int(created.version), model_id)
    client.set_logged_model_tags(model_id, {"mlflow.modelVersions": json.dumps([{"name": name, "version": version.version}])})
    return version


def _version_description(text: str, tested: Sequence[Point], key: str) -> str:
    rows = "".join(f"| {point.name.removeprefix('test/')} | {point.value:.4f} |\n" for point in tested)
    table = f"| on the test split | |\n|---|---|\n{rows}\n" if tested else ""
    return f"{text}\n\n{table}Run key `{key}`."


# ------------------------------------------------------------------------------------------------------------------- state


def _read_state(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / TRACKING_FILE
    if not path.exists():
        return None
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return {"run_id": state["run_id"], "sent_bytes": state["sent_bytes"], "born": state["born"], **state}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not what Reprise wrote ({error!r}); delete it, and the run gets a new place in MLflow"
        ) from None


def _state(run_dir: Path) -> dict[str, Any]:
    state = _read_state(run_dir)
    if state is None:
        raise ValueError(f"{run_dir / TRACKING_FILE}: no such file, so this run is not in MLflow yet; train it first")
    return state


def _update_state(run_dir: Path, **changes: Any) -> None:
    _write_state(run_dir, {**_state(run_dir), **changes})


def _write_state(run_dir: Path, state: Mapping[str, Any]) -> None:
    """Whole or not at all: a kill in the middle leaves the file before it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / TRACKING_FILE
    temporary = path.with_name(f"{TRACKING_FILE}.{os.getpid()}.{time.monotonic_ns()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(state, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
