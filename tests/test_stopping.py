"""Stopping, with real processes and real signals."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from reprise import stopping
from reprise.stopping import Stopped, catch_signals, raise_on_signals, watch_parent, watch_worker

PREAMBLE = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a script
from reprise.stopping import *
def say(word):
    print(word, flush=True)
"""

POLLING = """
try:
    with catch_signals() as stop:
        say("ready")
        while not stop:
            time.sleep(.01)
        say("flag")
        LINGER
        stop.raise_if_set()
except Stopped as error:
    say("saved")
    sys.exit(error.exit_code)
"""


@contextmanager
def child(body: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", PREAMBLE + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("DVC_")}, **env},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_sets_the_flag_and_the_work_ends_in_good_order(number, code):
    with child(POLLING.replace("LINGER", "")) as process:
        assert read_line(process) == "ready"
        process.send_signal(number)
        assert process.wait(10) == code
        assert process.stdout.read().split() == ["flag", "saved"]


def test_the_same_request_heard_twice_is_one_request():
    with child(POLLING.replace("LINGER", "time.sleep(.4)")) as process:
        assert read_line(process) == "ready"
        process.send_signal(signal.SIGINT)  # from the terminal
        assert read_line(process) == "flag"
        process.send_signal(signal.SIGTERM)  # and from a parent that passes it on
        assert process.wait(10) == 130
        assert read_line(process) == "saved"


def test_a_second_request_later_ends_it_at_once():
    with child(POLLING.replace("LINGER", "time.sleep(60)")) as process:
        assert read_line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert read_line(process) == "flag"
        time.sleep(1.1)
        process.send_signal(signal.SIGTERM)
        process.wait(10)
        assert "KeyboardInterrupt" in process.stderr.read()


def test_handlers_come_back_and_an_ignored_signal_stays_ignored():
    body = """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with catch_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(.05)
        say(bool(stop))
        with catch_signals() as inner:
            say(inner is stop)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(.05)
        say(stop.signal_number)
    say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
    """
    with child(body) as process:
        assert process.communicate(timeout=10)[0].split() == ["False", "True", "15", "True"]


def test_raise_on_signals_interrupts_where_it_stands_and_gives_way_to_a_flag():
    body = """
    try:
        with raise_on_signals():
            with catch_signals() as stop:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(.05)
                say(stop.signal_number)
            time.sleep(1.1)
            say("ready")
            time.sleep(60)
    except Stopped as error:
        say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        sys.exit(error.exit_code)
    """
    with child(body) as process:
        assert [read_line(process), read_line(process)] == ["15", "ready"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
        assert read_line(process) == "True"


FINALIZER = """
class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(.01)  # the handler runs here, and what it raises is dropped
"""


def test_a_request_that_python_drops_in_a_finalizer_is_heard_all_the_same():
    body = """
    try:
        with raise_on_signals():
            Last()
            say("dropped")
            time.sleep(60)
    except Stopped as error:
        say(sys.unraisablehook is sys.__unraisablehook__)
        sys.exit(error.exit_code)
    """
    with child(FINALIZER + textwrap.dedent(body)) as process:
        output, errors = process.communicate(timeout=20)
        assert (output.split(), errors, process.returncode) == (["dropped", "True"], "", 143)


def test_a_second_request_that_is_dropped_is_heard_and_other_dropped_errors_are_shown():
    body = """
    class Broken:
        def __del__(self):
            raise OSError("unrelated")

    with catch_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.1)
        Broken()
        Last()
        say(stop.signal_number)
        time.sleep(60)
    """
    with child(FINALIZER + textwrap.dedent(body)) as process:
        output, errors = process.communicate(timeout=20)
        assert output.split() == ["2"]
        assert errors.count("unrelated") == 1
        assert errors.count("\nKeyboardInterrupt: 15") == 1, "raised where the main thread stands"
        assert process.returncode != 0


def test_outside_the_main_thread_nothing_is_caught_and_nothing_fails():
    seen: list[object] = []

    def work() -> None:
        with catch_signals() as stop, raise_on_signals():
            seen.extend([bool(stop), stop.signal_number])

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [False, None]
    assert signal.getsignal(signal.SIGTERM) is before


def test_stopped_travels_between_processes_whole():
    again = pickle.loads(pickle.dumps(Stopped(15)))
    assert (again.signal_number, again.exit_code, str(again)) == (15, 143, str(Stopped(15)))
    assert "SIGTERM" in str(again)


def test_outside_dvc_no_parent_is_watched(monkeypatch):
    monkeypatch.delenv("DVC_STAGE", raising=False)
    assert watch_parent() is None


class Ancestor:
    """What psutil tells of a process; ``denied`` as it is for another user's."""

    def __init__(self, pid: int, words: list[str], variables: dict[str, str] | None = None, denied: bool = False) -> None:
        self.pid, self._words, self._variables, self._denied = pid, words, variables or {}, denied

    def cmdline(self) -> list[str]:
        return self._words

    def environ(self) -> dict[str, str]:
        if self._denied:
            raise psutil.AccessDenied(self.pid)
        return self._variables


SHELL = Ancestor(300, ["/bin/sh", "-c", "python -m pipelines.train; dvc status"], {"DVC_STAGE": "release"})
INIT = Ancestor(1, ["/sbin/init"])


@pytest.mark.parametrize(
    ("parents", "found"),
    [
        ([SHELL, Ancestor(200, ["python", "/venv/bin/dvc", "repro"]), INIT], 200),
        ([SHELL, Ancestor(200, ["python", "-m", "dvc", "repro"], denied=True), INIT], 200),  # sudo dvc repro
        ([SHELL, Ancestor(os.getpid(), ["python", "notebook.py"]), INIT], os.getpid()),  # DVC as a library
        ([SHELL, INIT], None),  # adopted by init
        ([SHELL, Ancestor(1, ["init"], denied=True)], None),
        ([SHELL, Ancestor(2**22 + 1, ["systemd", "--user"]), INIT], None),  # adopted by a process of another session
        ([], None),
    ],
    ids=["command", "other-user", "library", "init", "init-denied", "subreaper", "nobody"],
)
def test_which_ancestor_is_dvc(monkeypatch, parents, found):
    monkeypatch.setattr(stopping.psutil, "Process", lambda: type("Here", (), {"parents": lambda self: parents})())
    dvc = stopping._find_dvc()
    assert (dvc.pid if dvc else None) == found


# A stand-in for `dvc repro`, under its name: it starts a shell with DVC_STAGE set, the shell starts the stage, and no signal is
# passed on. (dvc/stage/run.py. With the real DVC: tests/pipelines.)
FAKE_DVC = """\
import os, subprocess, sys
subprocess.run(["/bin/sh", "-c", sys.argv[1] + "; exit $?"], env={**os.environ, "DVC_STAGE": "release"})
"""
STAGE = (
    PREAMBLE
    + """
out = open(sys.argv[1], "w", buffering=1)
if DELAY:
    out.write("started\\n")
    while "gone" not in os.listdir(os.path.dirname(sys.argv[1])):
        time.sleep(.02)
try:
    with catch_signals() as stop:
        WATCH(poll_seconds=.05)
        out.write("ready\\n")
        deadline = time.monotonic() + 20
        while not stop and time.monotonic() < deadline:
            time.sleep(.01)
        stop.raise_if_set()
    out.write("never stopped\\n")
except Stopped as error:
    out.write(f"saved {error.exit_code}\\n")
"""
)


@contextmanager
def stage_under_dvc(folder: Path, name: str, delay: bool) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    (folder / name).write_text(FAKE_DVC)
    (folder / "stage.py").write_text(STAGE.replace("DELAY", str(delay)).replace("WATCH", "watch_parent"))
    out = folder / "out"
    command = f"exec {sys.executable} {folder / 'stage.py'} {out}" if delay else f"{sys.executable} {folder / 'stage.py'} {out}"
    dvc = subprocess.Popen([sys.executable, str(folder / name), command])
    try:
        yield dvc, out
    finally:
        dvc.kill()
        dvc.wait()


def wait_for(path: Path, word: str, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and word in path.read_text():
            return
        time.sleep(0.02)
    pytest.fail(f"{word!r} did not come within {seconds} s; found {path.read_text() if path.exists() else 'no file'!r}")


@pytest.mark.parametrize("name", ["dvc", "host.py"], ids=["command", "library"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stage_stops_in_good_order_when_its_dvc_is_gone(tmp_path, name, number):
    with stage_under_dvc(tmp_path, name, delay=False) as (dvc, out):
        wait_for(out, "ready")
        dvc.send_signal(number)  # not waited for: a zombie counts as gone
        wait_for(out, "saved 143")


def test_a_stage_whose_dvc_died_before_it_looked_stops_too(tmp_path):
    with stage_under_dvc(tmp_path, "dvc", delay=True) as (dvc, out):
        wait_for(out, "started")
        dvc.kill()
        dvc.wait()
        (tmp_path / "gone").touch()
        wait_for(out, "saved 143")


def test_a_stage_whose_dvc_lives_is_left_alone(tmp_path):
    with stage_under_dvc(tmp_path, "dvc", delay=False) as (dvc, out):
        wait_for(out, "ready")
        time.sleep(0.5)
        assert out.read_text() == "ready\n"
        dvc.kill()
        wait_for(out, "saved 143")


def test_a_flow_run_stops_in_good_order_when_its_worker_is_gone(tmp_path):
    (tmp_path / "run.py").write_text(STAGE.replace("DELAY", "False").replace("WATCH", "watch_worker"))
    out = tmp_path / "out"
    start = f"import subprocess; subprocess.run({[sys.executable, str(tmp_path / 'run.py'), str(out)]!r})"
    worker = subprocess.Popen([sys.executable, "-c", start], env={**os.environ, "PREFECT__FLOW_RUN_ID": "a flow run"})
    try:
        wait_for(out, "ready")
        time.sleep(0.5)
        assert out.read_text() == "ready\n", "as long as the worker lives it goes on"
        worker.kill()
        wait_for(out, "saved 143")
    finally:
        worker.kill()
        worker.wait()


def test_without_a_worker_nobody_is_watched(monkeypatch):
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    assert watch_worker() is None
