"""Device events, as a protocol: "all work queued before this point is done"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class DeviceEvent(Protocol):
    """Fires once. `kvactors.devices` has the implementations."""

    def fired(self) -> bool: ...

    def on_fire(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the event fires, at once if it already has; from any thread."""
        ...


class Devices(Protocol):
    def record(self) -> DeviceEvent:
        """An event that fires when the work queued so far on the current compute stream is done."""
        ...
