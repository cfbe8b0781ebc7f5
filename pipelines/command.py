"""How a flow runs as a command: log lines, signals, one clear message and the exit code of the contract."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prefect.client.orchestration import get_client
from prefect.settings import get_current_settings

from reprise.exits import exit_codes, wants_tracebacks
from reprise.stopping import raise_on_signals, watch_parent

CONNECT_SECONDS = 10.0


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


def require_server() -> None:
    """Return if the Prefect server that the settings name answers; where none is named, a temporary one will be started.

    Raises:
        ConnectionError: it does not answer.
    """
    address = get_current_settings().api.url
    if address is None:
        return
    with get_client(httpx_settings={"timeout": CONNECT_SECONDS}, sync_client=True) as client:
        problem = client.api_healthcheck()
    if problem is not None:
        raise ConnectionError(
            f"the Prefect server at {address} does not answer ({str(problem).strip() or type(problem).__name__}). Start it with "
            "`prefect server start`, correct PREFECT_API_URL, or unset it: then a temporary server is started for the run"
        )


def _without_traceback(record: logging.LogRecord) -> bool:
    """Prefect logs an error with its traceback, which would bury the one message that says what to do."""
    record.exc_info = record.exc_text = None
    return True
