"""Real processes on a small project of their own: a copy of this checkout with one file of noisy rows, under Git and DVC.

One Prefect server serves the whole session; what a test starts it also ends, by its own process id.
"""

from __future__ import annotations

import csv
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

# What `dvc repro`, `python -m pipelines.train` and `make deploy` read; `git init` makes the rest.
COPIED = (".dvc/config", ".dvcignore", ".gitignore", "dvc.yaml", "pipelines", "prefect.yaml", "recipes", "requirements.lock", "src")
TOPICS = {"card": ("card", "pin", "chip"), "loan": ("loan", "interest", "debt"), "shop": ("order", "parcel", "refund")}
FILLERS = ("my", "the", "is late", "again", "please help", "why", "since monday", "and nobody answers")
START_SECONDS = 120


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said on both streams together."""

    code: int
    said: str


@dataclass(frozen=True)
class Checkout:
    """The small project, and the commands that run in it."""

    folder: Path
    env: Mapping[str, str]

    def run(self, *words: str, code: int | None = 0, **env: str) -> Ended:
        """Run a command to its end; ``python``, ``dvc`` and ``prefect`` are those of this environment."""
        ended = subprocess.run(
            words,
            cwd=self.folder,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
            check=False,
        )
        assert code is None or ended.returncode == code, f"{' '.join(words)} ended with {ended.returncode}:\n{ended.stdout}"
        return Ended(ended.returncode, ended.stdout)

    @contextmanager
    def started(self, *words: str, **env: str) -> Iterator[Running]:
        """A command that runs in a session of its own, and is gone with all that it started when the block ends."""
        log = self.folder / ".git" / f"{time.monotonic_ns()}.log"
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        with log.open("wb") as out:
            # A background job of a script ignores Ctrl-C; ours must not.
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", LISTENS, *words],
                cwd=self.folder,
                env={**self.env, **env, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running = Running(process, log, mark)
        try:
            yield running
        finally:
            for left in running.family():
                left.kill()
            process.wait(10)

    def set_params(self, changes: Mapping[str, Any]) -> None:
        """Write ``{"train.seed": 3}`` into params.yaml; the key must exist."""
        path = self.folder / "params.yaml"
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        for dotted, value in changes.items():
            *sections, key = dotted.split(".")
            place = tree
            for section in sections:
                place = place[section]
            assert key in place
            place[key] = value
        path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


MARK = "REPRISE_TEST_MARK"
LISTENS = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    log: Path
    mark: str

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, word: str, seconds: float = START_SECONDS) -> None:
        end = time.monotonic() + seconds
        while word not in self.said():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {word!r}:\n{self.said()}"
            assert time.monotonic() < end, f"{word!r} did not come:\n{self.said()}"
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        """Every living process that came from the command, whatever its group and parent are now: it carries our mark."""
        return [p for p in psutil.process_iter() if _carries(p, self.mark)]

    def member(self, words: str) -> psutil.Process:
        return next(p for p in self.family() if words in " ".join(p.cmdline()) and "sh" not in p.name())

    def wait_until_gone(self, seconds: float = 60) -> int:
        """The command's exit code, once nothing is left of what it started."""
        end = time.monotonic() + seconds
        while (left := self.family()) and time.monotonic() < end:
            self.process.poll()
            time.sleep(0.1)
        assert not left, f"after {seconds} s there still run {[' '.join(p.cmdline()) for p in left]}:\n{self.said()}"
        return self.process.wait(5)

    def send(self, number: signal.Signals, *, to_group: bool = False) -> None:
        if to_group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except psutil.Error:
        return False


def pick_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_answer(process: subprocess.Popen[bytes], port: int) -> str:
    """The address of the server once it answers."""
    address, end = f"http://127.0.0.1:{port}/api", time.monotonic() + START_SECONDS
    while True:
        try:
            if httpx.get(f"{address}/health", timeout=5, trust_env=False).is_success:
                return address
        except httpx.TransportError:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)


@pytest.fixture(scope="session")
def surroundings(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of every command: nothing of the user's own, and no address of any server."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "GIT_", "MLFLOW_", "PREFECT_", "REPRISE_"))}
    return {
        **kept,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PREFECT_HOME": str(tmp_path_factory.mktemp("prefect")),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DVC_NO_ANALYTICS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": "1",
        **{f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        "GIT_CONFIG_GLOBAL": os.devnull,
        "ROOT": str(root),
    }


@pytest.fixture(scope="module")
def free_port() -> int:
    return pick_port()


@pytest.fixture(scope="session")
def wait_for_server() -> Callable[..., str]:
    """``wait_for_server(process, port)``: the address of a server once it answers."""
    return wait_for_answer


@pytest.fixture(scope="session")
def starting_server(surroundings: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A Prefect server that was started and may not answer yet: other things are made ready meanwhile."""
    port = pick_port()
    command = [sys.executable, "-m", "pipelines.server", str(port), str(os.getpid())]
    env = {**surroundings, "PREFECT_LOGGING_SERVER_LEVEL": "CRITICAL"}
    process = subprocess.Popen(command, cwd=surroundings["ROOT"], env=env, start_new_session=True)
    try:
        yield process, port
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="session")
def server(starting_server: tuple[subprocess.Popen[bytes], int]) -> str:
    """The address of that server, which answers."""
    return wait_for_answer(*starting_server)


@pytest.fixture(scope="session")
def make_checkout(
    root: Path,
    surroundings: dict[str, str],
    tiny_params: Callable[..., dict[str, Any]],
    starting_server: tuple[subprocess.Popen[bytes], int],
) -> Callable[..., Checkout]:
    """``make_checkout(folder, {"train.seed": 3}, num_rows=400)``: a small project in that folder, committed."""

    def make(folder: Path, changes: dict[str, Any] | None = None, num_rows: int = 400) -> Checkout:
        for name in COPIED:
            source, target = root / name, folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, target)
        write_rows(folder / "data" / "source" / "rows.csv", num_rows)
        params = tiny_params("bag", {"registry.gate.minimum": {"accuracy": 0.2}, **(changes or {})})
        (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False), encoding="utf-8")
        # The copy's own code, not that of the checkout these tests came from.
        checkout = Checkout(folder, {**surroundings, "PYTHONPATH": str(folder / "src")})
        git(folder, surroundings, ["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "as copied"])
        return checkout

    return make


def write_rows(path: Path, count: int) -> None:
    """Three classes told apart by their words, one label in ten drawn blindly: no model gets all of them right."""
    rng = random.Random(11)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(count):
            label = rng.choice(list(TOPICS))
            words = [*rng.choices(FILLERS, k=4), rng.choice(TOPICS[label]), str(number)]
            rng.shuffle(words)
            writer.writerow([" ".join(words), rng.choice(list(TOPICS)) if number % 10 == 0 else label])


def git(folder: Path, env: Mapping[str, str], *commands: Sequence[str]) -> None:
    for words in commands:
        subprocess.run(["git", *words], cwd=folder, env=dict(env), check=True)
