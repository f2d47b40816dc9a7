"""The library's logger: structured events through the standard `logging` module, under the name "kvactors".

Nothing goes to stdout; an application that configures nothing sees warnings on stderr, and configures the rest with
`logging.getLogger("kvactors")`.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog


def get_logger(name: str) -> Any:
    """A structlog logger on top of the standard logger `name`."""
    return structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
    )
