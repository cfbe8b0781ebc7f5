"""How a running job is asked to stop, and what it raises then. Nothing here knows what the job does.

A training polls a flag between two optimizer steps, so that it can save where it is; a step without such a place is interrupted
where it stands. A job that DVC started also stops when DVC is gone: DVC does not pass signals on to its stages.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from reprise.exits import Stopped as Stopped  # what a stopped job raises belongs to both

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# One request often arrives twice: from the terminal or `kill -- -group`, and again from a parent that passes it on.
ECHO_SECONDS = 1.0
POLL_SECONDS = 0.5
ASK_AGAIN_SECONDS = 0.05

Handler = Callable[[int, FrameType | None], None]


class StopFlag:
    """True once a stop was asked for; ``signal_number`` says by which signal."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None

    def raise_if_set(self) -> None:
        if self.signal_number is not None:
            raise Stopped(self.signal_number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_echo = _note_request()
        if self.signal_number is None:
            self.signal_number = number
        elif not is_echo:
            raise KeyboardInterrupt(number)


# Handlers belong to the process, so there is one flag in force at a time, if any, and one time of the last request.
_flag: StopFlag | None = None
_asked_at: float | None = None
_was_dropped = False


def _note_request() -> bool:
    """Whether the signal that came now repeats one that was just heard, and heeded."""
    global _asked_at, _was_dropped
    now = time.monotonic()
    if _was_dropped:
        _was_dropped, _asked_at = False, now
        return False
    if _asked_at is not None and now - _asked_at <= ECHO_SECONDS:
        return True
    _asked_at = now
    return False


@contextmanager
def catch_signals() -> Iterator[StopFlag]:
    """A flag that the first SIGTERM or SIGINT sets; a second one, later than an echo of the first, raises KeyboardInterrupt.

    Handlers can be set in the main thread only: elsewhere, and inside another ``catch_signals``, the flag in force is handed
    out, and where there is none, one that is never set. A signal that the process was told to ignore (a background job of a
    script ignores SIGINT) stays ignored.
    """
    global _flag
    if _flag is not None or not _in_main_thread():
        yield StopFlag() if _flag is None else _flag
        return
    _flag = StopFlag()
    try:
        with _handlers(_flag._on_signal):
            yield _flag
    finally:
        _flag = None


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise ``Stopped`` where the main thread stands, for work that has no place to poll a flag.

    A ``catch_signals`` inside takes over while it lasts. An echo of a request does not disturb the cleaning up after it. Outside
    the main thread nothing happens.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _note_request():
            raise Stopped(number)

    if not _in_main_thread():
        yield
        return
    with _handlers(interrupt):
        yield


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _handlers(handler: Handler) -> Iterator[None]:
    """``handler`` in force for the stop signals that are not ignored; the handlers before it come back at the end."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    taken = [number for number, old in before.items() if old is not signal.SIG_IGN and old is not None]
    for number in taken:
        signal.signal(number, handler)
    try:
        with _ask_again_when_dropped():
            yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


@contextmanager
def _ask_again_when_dropped() -> Iterator[None]:
    """What a handler raised while a finalizer ran (``__del__``, a weakref callback) is dropped by Python: the signal comes again.

    Source: https://docs.python.org/3/library/sys.html#sys.unraisablehook
    """
    hook_before = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        global _was_dropped
        if isinstance(dropped.exc_value, Stopped):
            number = dropped.exc_value.signal_number
        elif isinstance(dropped.exc_value, KeyboardInterrupt):
            number = dropped.exc_value.args[0] if dropped.exc_value.args else signal.SIGINT
        else:
            hook_before(dropped)
            return
        _was_dropped = True
        threading.Timer(ASK_AGAIN_SECONDS, os.kill, (os.getpid(), number)).start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = hook_before


def watch_parent(poll_seconds: float = POLL_SECONDS) -> threading.Thread | None:
    """A daemon thread that sends SIGTERM to this process when the DVC that started it is gone; None outside a DVC stage.

    To be called where that signal is caught already: it comes at once where DVC died while we were starting.

    Source: dvc/stage/run.py starts a stage's command through a shell with DVC_STAGE in its environment and passes no signal on:
    SIGTERM to ``dvc repro`` kills DVC and leaves the command running.
    """
    if "DVC_STAGE" not in os.environ:
        return None
    return _watch("the dvc process that started this stage", _find_dvc(), poll_seconds)


def watch_worker(poll_seconds: float = POLL_SECONDS) -> threading.Thread | None:
    """The same for a flow run that a Prefect worker started in a process of its own; None for any other.

    Source: prefect/cli/worker.py: a second SIGTERM makes the worker kill itself, and its flow runs go on without it.
    """
    if "PREFECT__FLOW_RUN_ID" not in os.environ:
        return None
    return _watch("the worker that started this flow run", psutil.Process().parent(), poll_seconds)


def _watch(name: str, process: psutil.Process | None, poll_seconds: float) -> threading.Thread:
    thread = threading.Thread(target=_stop_when_gone, args=(name, process, poll_seconds), name="watch-parent", daemon=True)
    thread.start()
    return thread


def _stop_when_gone(name: str, process: psutil.Process | None, poll_seconds: float) -> None:
    while process is not None and _is_alive(process):
        time.sleep(poll_seconds)
    # A stop that is already under way (the whole group got the signal) must not look like a second, impatient request.
    if _asked_at is None:
        logger.warning("%s is gone; stopping", name)
        os.kill(os.getpid(), signal.SIGTERM)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _find_dvc() -> psutil.Process | None:
    """The process that started this stage: the nearest ancestor without the DVC_STAGE that everything under it inherits.

    None where that process died before we looked: we find whoever adopted us then, init or a process of another session.
    """
    for ancestor in psutil.Process().parents():
        try:
            if _is_dvc_command(ancestor.cmdline()):
                return ancestor
            if "DVC_STAGE" in ancestor.environ():
                continue
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        # DVC used as a library has no tell-tale command line, but shares our session.
        return ancestor if ancestor.pid != 1 and _same_session(ancestor.pid) else None
    return None


def _is_dvc_command(words: list[str]) -> bool:
    names = [Path(word).name for word in words]
    return "dvc" in names or "dvc.exe" in names


def _same_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == os.getsid(0)
    except (ProcessLookupError, PermissionError):
        return False
