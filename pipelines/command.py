"""How a flow runs as a command: log lines, signals, one clear message and the exit code of the contract."""

from __future__ import annotations

import logging
from collections.abc import Callable

from reprise.exits import exit_codes, wants_tracebacks
from reprise.stopping import raise_on_signals, watch_parent


def run_as_command(main: Callable[[], None]) -> None:
    """Run ``main`` and leave with its exit code.

    SIGTERM and Ctrl-C end it in good order, and so does the death of the DVC that started it.
    """
    if not wants_tracebacks():
        for name in ("prefect.flow_runs", "prefect.task_runs"):
            logging.getLogger(name).addFilter(_without_traceback)
    with exit_codes(), raise_on_signals():
        watch_parent()
        main()


def _without_traceback(record: logging.LogRecord) -> bool:
    """Prefect logs an error with its traceback, which would bury the one message that says what to do."""
    record.exc_info = record.exc_text = None
    return True
