"""Child processes that are never left behind: each has a process group of its own, which gets the signals that we get."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 60.0
"""How long a child may take to save its state after SIGTERM before it is killed."""


class ChildFailed(RuntimeError):  # noqa: N818  a fact about the child
    """A child process ended with a code that is not 0."""


def run_child(command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
    """Run ``command`` to its end; whatever interrupts the wait also ends the child and all that it started.

    Raises:
        ChildFailed: it ended with another code than 0.
    """
    child = subprocess.Popen(command, cwd=cwd, env=dict(env), start_new_session=True)
    try:
        code = child.wait()
    except BaseException:
        _end_group(child)
        raise
    if code != 0:
        raise ChildFailed(
            f"`{' '.join(command[2:] if command[1:2] == ['-m'] else command)}` ended with code {code}; see its output above"
        )


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the child's group, SIGKILL to what is left of it after the grace time."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
