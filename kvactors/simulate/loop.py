"""An asyncio loop on virtual time: nothing sleeps, and ready callbacks run in an order drawn from a seed.

Of the libraries for this, looptime drives a real selector and has no seeded order, and the others are not kept up; what is
needed is one method of the standard loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvactors.errors import EngineError

T = TypeVar("T")

MOST_CANCELLED = 4096
"""Cancelled timers that may lie in the heap; beyond it they are thrown out as soon as they are the most."""


class DeadlockError(EngineError):
    """Every task waits, and nothing is scheduled that could wake one (I9)."""


class RunawayError(EngineError):
    """More events, or more virtual seconds, than a run may take (I9)."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs ready callbacks one at a time; jumps to the next timer when none is ready.

    The names with an underscore are asyncio's own, which its type stubs leave out (hence each `attr-defined`): `_run_once` is
    what a loop consists of. `call_soon` takes any callable, which the stubs write with a variadic type (hence `override`).

    Args:
        rng: draws which ready callback runs next; None keeps the order of arrival.
        on_event: called after every callback.
        most_events, most_s: limits; beyond them the run is stuck in circles.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        on_event: Callable[[], None] | None = None,
        *,
        most_events: float = 200_000,
        most_s: float = 36_000.0,
    ) -> None:
        super().__init__()
        self.events = 0
        self._now = 0.0
        self._cancelled = 0
        self._rng, self._on_event = rng, on_event
        self.most_events, self.most_s = most_events, most_s

    def time(self) -> float:
        return self._now

    def now(self) -> float:
        """The loop is its own clock."""
        return self._now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)  # without the base class's checks: this runs for every event
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        return self.call_soon(callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Every wait has a deadline that is cancelled when the wait ends; a long run would drag them all along."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if not handle._scheduled:  # type: ignore[attr-defined]
            return
        self._cancelled += 1
        if self._cancelled > MOST_CANCELLED and 2 * self._cancelled > len(timers):
            timers[:] = [t for t in timers if not t.cancelled()]
            heapq.heapify(timers)
            self._cancelled = 0

    def _process_events(self, event_list: Any) -> None:
        """There is no selector."""

    def _write_to_self(self) -> None:
        """There is no other thread."""

    def let_go(self) -> None:
        """Cancels what is left of a run that was broken off, and lets it end, unobserved."""
        self._on_event, self.most_events, self.most_s = None, self.events + 20_000, self._now + 1e7
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            with contextlib.suppress(DeadlockError, RunawayError):
                self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not ready:
            if not timers:
                raise DeadlockError("every task waits for something that cannot happen")
            self._now = max(self._now, timers[0]._when)
        while timers and timers[0]._when <= self._now:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            if not handle._cancelled:
                ready.append(handle)
        rng, on_event = self._rng, self._on_event
        while ready and not self._stopping:  # type: ignore[attr-defined]
            if rng is not None and len(ready) > 1:
                ready.rotate(-int(rng.random() * len(ready)))
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()
                self.events += 1
                if on_event is not None:
                    on_event()
        if self.events > self.most_events or self._now > self.most_s:
            raise RunawayError(f"{self.events} events in {self._now:.0f} virtual seconds, and no end")


def run_virtual(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Runs a coroutine to its end on the loop, then closes the loop, whatever tasks are left."""
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main)
    finally:
        loop.let_go()
        asyncio.set_event_loop(None)
        loop.close()
