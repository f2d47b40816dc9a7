"""The library's logger: structured events through the standard `logging` module, under the name "kvactors".

Nothing goes to stdout; an application that configures nothing sees warnings on stderr, and configures the rest with
`logging.getLogger("kvactors")`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog


class RateLimit:
    """Lets through the first `burst` events of a text in `window_s` seconds, then none until the window is over.

    The next one says how many were left out (`suppressed`). An outage is told a few times a minute, not once a request.
    """

    def __init__(self, burst: int, window_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._window_s, self._now = burst, window_s, now
        self._lock = threading.Lock()
        self._windows: dict[str, tuple[float, int]] = {}
        """text -> when its window began, and how many came since"""

    def __call__(self, _logger: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        text, now = str(fields.get("event")), self._now()
        with self._lock:
            began, count = self._windows.get(text, (now, 0))
            suppressed = 0
            if now - began >= self._window_s:
                suppressed = max(0, count - self._burst)
                began, count = now, 0
            self._windows[text] = (began, count + 1)
        if count >= self._burst:
            raise structlog.DropEvent
        return {**fields, "suppressed": suppressed} if suppressed else fields


def get_logger(name: str, *, burst: int = 0, window_s: float = 60.0) -> Any:
    """A structlog logger on top of the standard logger `name`.

    Args:
        burst: how many events of one text are let through in `window_s` seconds; 0 = all.
    """
    limits = [RateLimit(burst, window_s)] if burst else []
    return structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            *limits,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
    )
