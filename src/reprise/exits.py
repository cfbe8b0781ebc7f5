"""How a command ends, whether it is the command line or a flow: one clear message, and the exit code that says what happened."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

# 130 and 143, stopped by a signal, come from Stopped.
DONE, FAILED, WRONG_INPUT, REFUSED = 0, 1, 2, 3


class Stopped(BaseException):  # a state, as asked for; not an error, so no `except Exception` of a library may swallow it
    """The job was asked to stop and did so in good order; ``exit_code`` is 128 + the signal's number."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; the same command continues where it stopped")

    @property
    def exit_code(self) -> int:
        return 128 + self.signal_number

    def __reduce__(self) -> tuple[type[Stopped], tuple[int]]:
        return type(self), (self.signal_number,)


class Refused(Exception):  # noqa: N818  a verdict, not an error
    """A gate refused: the run is finished and recorded, nothing was registered, the old release stays."""

    exit_code = REFUSED

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons
        super().__init__("refused: " + "; ".join(reasons))


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what is raised inside into one message on stderr and the exit code of the contract; REPRISE_DEBUG shows tracebacks."""
    try:
        yield
    except KeyboardInterrupt:
        print("reprise: stopped", file=sys.stderr)
        sys.exit(130)
    except Stopped as stopped:
        print(f"reprise: {stopped}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    except Exception as error:  # noqa: BLE001  the outermost frame: whatever it is, it becomes a message and an exit code
        if wants_tracebacks():
            traceback.print_exception(error)
        else:
            print(f"reprise: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def exit_code(error: Exception) -> int:
    """The error's own code if it has one, 2 for what the user wrote, 1 for everything else."""
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    return WRONG_INPUT if isinstance(error, ValueError) else FAILED


def wants_tracebacks() -> bool:
    """Whether --debug or REPRISE_DEBUG asked for them."""
    return bool(os.environ.get("REPRISE_DEBUG"))


class StderrHandler(logging.StreamHandler[TextIO]):
    """Log lines on stderr as it is at that moment: a progress bar puts itself in its place, to draw below what is printed."""

    def emit(self, record: logging.LogRecord) -> None:
        """As the parent does; a stderr that nobody reads any more ends no training."""
        self.stream = sys.stderr
        super().emit(record)


def set_up_logging(level: int) -> None:
    """Our own log lines on stderr, plain and without time stamps (DVC, Prefect and CI add theirs)."""
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    ours = logging.getLogger("reprise")
    ours.handlers[:] = [handler]
    ours.setLevel(level)
