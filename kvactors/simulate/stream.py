"""A simulated compute stream: work runs in order, some of it late, and events fire when all work before them is done."""

from __future__ import annotations

from collections.abc import Callable

from kvactors.devices import CpuEvent, ManualEvent
from kvactors.simulate.loop import VirtualLoop


class Stream:
    """The device of one rank; also the engine's `Devices`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._free_at = 0.0

    def submit(self, work: Callable[[], None], delay_s: float = 0.0) -> None:
        """Queues work that takes `delay_s`; it runs at once if the stream is idle and it takes no time."""
        now = self._loop.time()
        if delay_s <= 0 and self._free_at <= now:
            work()
            return
        self._free_at = max(self._free_at, now) + max(delay_s, 1e-7)
        self._loop.call_at(self._free_at, work)

    def record(self) -> CpuEvent | ManualEvent:
        """An event that fires when all work queued so far is done."""
        if self._free_at <= self._loop.time():
            return CpuEvent()
        event = ManualEvent()
        self.submit(event.fire)
        return event
