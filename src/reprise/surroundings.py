"""Environment variables that must stand before the libraries that read them are imported; what the user set is left alone."""

from __future__ import annotations

import os

DEFAULTS = {
    # Nobody is told that this runs.
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "ORT_DISABLE_TELEMETRY": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # How often a thread of libgomp looks for work before it sleeps. Its own 300,000 make a step many times slower where cores are
    # shared; not at all makes it half as fast where they are not.
    "GOMP_SPINCOUNT": "1000",
    # Prefect's temporary server needs longer than its own limit of 20 s on a busy machine, and prints tracebacks when it is ended.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_SERVER_LEVEL": "CRITICAL",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    # Our own log lines belong on the flow run's page.
    "PREFECT_LOGGING_EXTRA_LOGGERS": "reprise",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}


def set_defaults() -> None:
    """Set each of DEFAULTS that the environment does not hold."""
    for name, value in DEFAULTS.items():
        if name == "GOMP_SPINCOUNT" and "OMP_WAIT_POLICY" in os.environ:
            continue  # it would overrule what the user said in other words
        os.environ.setdefault(name, value)
