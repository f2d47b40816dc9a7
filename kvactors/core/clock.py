"""The source of time, as a protocol: everything that needs "now" is given one."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic scale with an arbitrary origin."""
        ...
