"""Rate limits of the library's logger."""

from __future__ import annotations

from typing import Any

import pytest
import structlog

from kvactors.log import RateLimit


class Times:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def told(limit: RateLimit, event: str) -> dict[str, Any] | None:
    try:
        return dict(limit(None, "warning", {"event": event, "request": "r"}))
    except structlog.DropEvent:
        return None


def test_a_burst_is_told_and_the_rest_is_counted() -> None:
    times = Times()
    limit = RateLimit(2, 60.0, times)
    assert [told(limit, "down") is not None for _ in range(5)] == [True, True, False, False, False]
    times.now = 61.0
    assert told(limit, "down") == {"event": "down", "request": "r", "suppressed": 3}
    assert told(limit, "down") == {"event": "down", "request": "r"}
    assert told(limit, "down") is None


def test_each_text_has_a_limit_of_its_own() -> None:
    limit = RateLimit(1, 60.0, Times())
    assert told(limit, "down") is not None
    assert told(limit, "up") is not None
    assert told(limit, "down") is None


@pytest.mark.parametrize("quiet_s", [60.0, 3600.0])
def test_a_quiet_time_leaves_nothing_to_say(quiet_s: float) -> None:
    times = Times()
    limit = RateLimit(2, 60.0, times)
    assert told(limit, "down") is not None
    times.now = quiet_s
    assert told(limit, "down") == {"event": "down", "request": "r"}
