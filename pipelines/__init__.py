"""Prefect flows: the order of the steps, and nothing else. The only place that imports prefect.

What the flows need of their surroundings is set before prefect is imported, where the user set nothing.
"""

import logging

from reprise.surroundings import set_defaults

set_defaults()
logging.getLogger("reprise").setLevel(logging.INFO)  # Prefect shows its lines: PREFECT_LOGGING_EXTRA_LOGGERS
