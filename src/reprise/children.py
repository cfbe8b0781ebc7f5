"""Child processes that are never left behind: each has a process group of its own, which gets the signals that we get."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

GRACE_SECONDS = 60.0
"""How long a child may take to save its state after SIGTERM before it is killed."""
POLL_SECONDS = 0.1


class ChildFailed(RuntimeError):  # noqa: N818  a fact about the child
    """A child process ended with a code that is not 0."""

    def __init__(self, command: Sequence[str], code: int) -> None:
        self.code = code
        shown = " ".join(command[2:] if list(command[1:2]) == ["-m"] else command)
        super().__init__(f"`{shown}` ended with code {code}; see its output above")


def run_child(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], show: Callable[[str], None]) -> None:
    """Run ``command`` to its end; whatever interrupts the wait also ends the child and all that it started.

    Args:
        show: takes each line that the child says, as it comes; what it says to stderr, too.

    Raises:
        ChildFailed: it ended with another code than 0.
    """
    child = subprocess.Popen(
        command,
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip():
                show(line.rstrip())
        code = child.wait()
    except BaseException:
        _end_group(child)
        raise
    finally:
        if child.stdout is not None:
            child.stdout.close()
    if code != 0:
        raise ChildFailed(command, code)


def _end_group(child: subprocess.Popen[str]) -> None:
    """SIGTERM to the child's group, SIGKILL to what is left of it after the grace time.

    The child itself may die at once (DVC does) while what it started still saves its state, so the whole group is waited for.
    """
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        while _is_group_alive(child) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    finally:  # a second, impatient interrupt leaves nothing behind either
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _is_group_alive(child: subprocess.Popen[str]) -> bool:
    """Whether a process of the child's group runs; one that ended and was not collected yet does not count."""
    child.poll()
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == child.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False
