"""Child processes end with us, with all that they started, and their failure is ours."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from reprise import children, stopping
from reprise.children import ChildFailed, run_child
from reprise.stopping import ECHO_SECONDS, Stopped, raise_on_signals

PYTHON = sys.executable


@pytest.fixture(autouse=True)
def no_request_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal of one test is not taken for the echo of the last test's."""
    monkeypatch.setattr(stopping, "_asked_at", None)


def run(code: str, tmp_path: Path) -> None:
    run_child([PYTHON, "-S", "-c", code], cwd=tmp_path, env=os.environ, show=print)


def wait_for(path: Path) -> str:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text()).endswith("\n"):
            return text.strip()
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_alive(pid)


def after(path: Path, action: object) -> threading.Thread:
    def run_it() -> None:
        wait_for(path)
        action()  # type: ignore[operator]  # a callable, given by the tests below

    thread = threading.Thread(target=run_it)
    thread.start()
    return thread


def test_runs_where_it_is_told_with_the_environment_it_is_given(tmp_path: Path) -> None:
    env = {**os.environ, "GREETING": "hello"}
    code = "import os; open('out', 'w').write(os.environ['GREETING'] + str(os.getsid(0) == os.getpid()))"
    run_child([PYTHON, "-S", "-c", code], cwd=tmp_path, env=env, show=print)
    assert (tmp_path / "out").read_text() == "helloTrue", "a group of its own"


def test_a_failure_names_the_command_and_the_code(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match="ended with code 7") as caught:
        run("raise SystemExit(7)", tmp_path)
    assert caught.value.code == 7
    (tmp_path / "failing.py").write_text("raise SystemExit(5)")
    with pytest.raises(ChildFailed, match="`failing --now` ended with code 5; see its output above"):
        run_child((PYTHON, "-m", "failing", "--now"), cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, show=print)


def test_each_line_is_shown_as_it_comes_whatever_stream_and_bytes(tmp_path: Path) -> None:
    lines: list[str] = []
    code = "import os; os.write(1, b'one\\n\\n'); os.write(2, b'two\\xff\\n'); os.write(1, b'three')"
    run_child([PYTHON, "-S", "-c", code], cwd=tmp_path, env=os.environ, show=lines.append)
    assert lines == ["one", "two\ufffd", "three"]


FAMILY = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
def save(*_):
    open("saved", "w").write("yes")
    raise SystemExit(0)
signal.signal(signal.SIGTERM, {handler})
open("pids.tmp", "w").write(f"{{os.getpid()}} {{child.pid}}\\n")
os.rename("pids.tmp", "pids")
while True:
    time.sleep(0.05)
"""


def test_sigterm_reaches_the_child_which_may_save_and_nobody_is_left(tmp_path: Path) -> None:
    thread = after(tmp_path / "pids", lambda: os.kill(os.getpid(), signal.SIGTERM))
    with raise_on_signals(), pytest.raises(Stopped) as caught:
        run(FAMILY.format(handler="save"), tmp_path)
    thread.join()
    assert caught.value.exit_code == 143
    assert (tmp_path / "saved").read_text() == "yes"
    assert all(gone(int(pid)) for pid in wait_for(tmp_path / "pids").split()), "the grandchild too"


def test_who_does_not_listen_is_killed_after_the_grace_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "GRACE_SECONDS", 0.2)
    thread = after(tmp_path / "pids", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(FAMILY.format(handler="signal.SIG_IGN"), tmp_path)
    thread.join()
    assert all(gone(int(pid)) for pid in wait_for(tmp_path / "pids").split())


def test_a_second_interrupt_cuts_the_grace_time_short_and_leaves_nobody(tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(2 * ECHO_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)

    thread = after(tmp_path / "pids", twice)
    start = time.monotonic()
    with raise_on_signals(), pytest.raises(Stopped):
        run(FAMILY.format(handler="signal.SIG_IGN"), tmp_path)
    thread.join()
    assert time.monotonic() - start < 30 < children.GRACE_SECONDS
    assert all(gone(int(pid)) for pid in wait_for(tmp_path / "pids").split())
