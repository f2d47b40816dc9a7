"""Latches and gates: how a compute thread (or a task) waits for the engine without polling.

State is set before a latch opens, and a latch opens once. The thread that finishes the work opens it, so the event loop is
not on the way between a transfer worker and the compute thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from kvactors.actors.loops import call_on


class Latch:
    """Opens once, from any thread."""

    __slots__ = ("_lock", "_open", "_waiters")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = False
        self._waiters: list[Callable[[], object]] = []

    @property
    def is_open(self) -> bool:
        return self._open

    def open(self) -> None:
        with self._lock:
            self._open = True
            waiters, self._waiters = self._waiters, []
        for wake in waiters:
            wake()

    def on_open(self, wake: Callable[[], object]) -> None:
        """Calls `wake` once when the latch opens, at once if it is open."""
        with self._lock:
            if not self._open:
                self._waiters.append(wake)
                return
        wake()

    def wait(self, timeout_s: float) -> bool:
        """Blocks the thread until the latch is open; False if the timeout passed first."""
        if self._open:
            return True
        parked = threading.Lock()
        parked.acquire()
        self.on_open(parked.release)
        return parked.acquire(timeout=timeout_s)

    async def wait_async(self, timeout_s: float) -> bool:
        """Suspends the task until the latch is open; False if the timeout passed first."""
        if self._open:
            return True
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()

        def answer(opened: bool) -> None:
            if not future.done():
                future.set_result(opened)

        self.on_open(lambda: call_on(loop, answer, True))
        timer = loop.call_later(timeout_s, answer, False)
        try:
            return await future
        finally:
            timer.cancel()


class SaveGate:
    """Counts unfinished save tasks. Added on the compute thread, taken off by the worker that finishes the task, so that
    the check in `checkpoint` is a plain read."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pending = 0
        self.peak = 0
        self._lock = threading.Lock()
        self._dead = False
        self._waiters: list[Latch] = []

    def add(self) -> None:
        with self._lock:
            self.pending += 1
            self.peak = max(self.peak, self.pending)

    def done(self) -> None:
        with self._lock:
            self.pending -= 1
            if self.pending > self.limit or not self._waiters:
                return
            waiters, self._waiters = self._waiters, []
        for latch in waiters:
            latch.open()

    def blocked(self) -> Latch | None:
        """None while at most `limit` tasks are unfinished, else a latch that opens when that holds again."""
        if self.pending <= self.limit or self._dead:
            return None
        with self._lock:
            if self.pending <= self.limit or self._dead:
                return None
            latch = Latch()
            self._waiters.append(latch)
            return latch

    def release_all(self) -> None:
        """Lets every waiter go, for good: the engine is dead."""
        with self._lock:
            self._dead = True
            waiters, self._waiters = self._waiters, []
        for latch in waiters:
            latch.open()
