"""Device events and clocks: the real ones, and manual ones for tests.

A device event says "all work queued before this point is done". On a CPU that is true as soon as it is asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvactors.core.events import DeviceEvent


class MonotonicClock:
    """The process's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that only moves when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class CpuEvent:
    """Fired from the start: CPU work is done when the call that did it returned."""

    __slots__ = ()

    def fired(self) -> bool:
        return True

    def on_fire(self, callback: Callable[[], None]) -> None:
        callback()


class ManualEvent:
    """Fires when a test says so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fired = False
        self._callbacks: list[Callable[[], None]] = []

    def fired(self) -> bool:
        return self._fired

    def on_fire(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._fired:
                self._callbacks.append(callback)
                return
        callback()

    def fire(self) -> None:
        with self._lock:
            self._fired = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


_CPU_EVENT = CpuEvent()


class CpuDevices:
    """Events of a CPU worker."""

    def record(self) -> DeviceEvent:
        return _CPU_EVENT
