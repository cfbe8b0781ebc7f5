"""The Prefect server that a flow reports to when it runs as a command: the one that the settings name, or a temporary one.

Prefect would start a temporary one by itself, but in our own process group: Ctrl-C in a terminal, or ``kill`` of the group, ends
that server before the flow could report to it, and Prefect then waits minutes for an answer; and SIGKILL of the flow leaves it
behind for ever. Ours has a group of its own and ends when the process that started it is gone.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

logger = logging.getLogger("reprise.pipelines.server")

CONNECT_SECONDS = 10.0
STOP_SECONDS = 5.0
POLL_SECONDS = 0.2
# Source: prefect/server/api/server.py, SubprocessASGIServer: what makes a server a temporary one.
TEMPORARY = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_UI_ENABLED": "0"}


@contextmanager
def prefect_server() -> Iterator[None]:
    """Inside the block there is a server for flows to report to.

    Raises:
        ConnectionError: the server that the settings name does not answer, or the temporary one did not start.
    """
    address = get_current_settings().api.url
    if address is not None:
        _require_answer(address)
        yield
        return
    with temporary_settings({PREFECT_API_URL: _start_temporary_server()}):
        logging.getLogger("prefect.flow_runs").addFilter(_names_no_page)
        yield


def _names_no_page(record: logging.LogRecord) -> bool:
    """A temporary server has no pages, though Prefect names them."""
    return not str(record.msg).startswith("View at")


def _require_answer(address: str) -> None:
    with get_client(httpx_settings={"timeout": CONNECT_SECONDS}, sync_client=True) as client:
        problem = client.api_healthcheck()
    if problem is not None:
        raise ConnectionError(
            f"the Prefect server at {address} does not answer ({str(problem).strip() or type(problem).__name__}). Start it with "
            "`prefect server start`, correct PREFECT_API_URL, or unset it: then a temporary server is started for the run"
        )


def _start_temporary_server() -> str:
    """The address of a server that answers, and that is ended when this process ends, however that happens."""
    port = _free_port()
    address = f"http://127.0.0.1:{port}/api"
    logger.info("starting a temporary Prefect server (PREFECT_API_URL names no other); this takes some seconds")
    command = [sys.executable, "-m", "pipelines.server", str(port), str(os.getpid())]
    # The package lies beside where we were started, which need not be the current folder.
    server = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdin=subprocess.DEVNULL, start_new_session=True)
    atexit.register(_stop, server)  # after Prefect's own hooks, which send the last log lines
    deadline = time.monotonic() + get_current_settings().server.ephemeral.startup_timeout_seconds
    with httpx.Client(trust_env=False) as client:
        while not _answers(client, address):
            if server.poll() is not None:
                raise ConnectionError(f"Prefect's temporary server ended with code {server.returncode}; see its output above")
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"Prefect's temporary server did not answer at {address} in time; on a slow machine raise "
                    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, or run `prefect server start` and set PREFECT_API_URL"
                )
            time.sleep(POLL_SECONDS)
    return address


def _answers(client: httpx.Client, address: str) -> bool:
    try:
        return client.get(f"{address}/health", timeout=CONNECT_SECONDS).is_success
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def serve(port: int, parent: int) -> None:
    """Serve until SIGTERM, or until ``parent`` is gone."""
    import uvicorn

    threading.Thread(target=_end_without, args=(parent,), daemon=True).start()
    os.environ.update(TEMPORARY)
    uvicorn.run(
        "prefect.server.api.server:create_app",
        factory=True,
        host="127.0.0.1",
        port=port,
        log_level="error",
        timeout_graceful_shutdown=1,
    )


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)  # nobody is left to serve; the database is SQLite's and safe


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
