"""The circuit breaker in front of a store: open while the store cannot be reached, closed again by a probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Circuit:
    """While open, saves are off, lookups miss and loads fail at once; serving goes on.

    Attributes:
        probe_interval_s: seconds until the first probe; doubled after each failed one, up to eight times that.
        on_close: called when it closes again.
    """

    probe_interval_s: float
    is_open: bool = False
    trips: int = 0
    on_close: Callable[[], None] | None = None
    _wait_s: float = 0.0

    def trip(self) -> bool:
        """The store did not answer. True if the circuit was closed until now, so that the caller starts probing."""
        if self.is_open:
            return False
        self.is_open = True
        self.trips += 1
        self._wait_s = self.probe_interval_s
        return True

    def next_probe_s(self) -> float:
        """Seconds to wait before the next probe."""
        wait = self._wait_s
        self._wait_s = min(2 * wait, 8 * self.probe_interval_s)
        return wait

    def probed(self, ok: bool) -> None:
        if ok and self.is_open:
            self.is_open = False
            if self.on_close is not None:
                self.on_close()

    @property
    def state(self) -> str:
        return "open" if self.is_open else "closed"
