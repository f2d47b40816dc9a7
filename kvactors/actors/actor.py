"""The base of all actors: a mailbox, a loop that handles one message at a time, and timers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kvactors.actors.mailbox import Mailbox
from kvactors.core.clock import Clock
from kvactors.core.observe import Observer, Span


class Actor(ABC):
    """Handles its messages one after another. An exception in a handler ends the actor; its supervisor takes over."""

    def __init__(self, name: str, clock: Clock, observer: Observer | None = None, mailbox_limit: int = 1024) -> None:
        self.name = name
        self.clock = clock
        self.mailbox: Mailbox[Any] = Mailbox(name, mailbox_limit)
        self._observer = observer
        self.current: Any = None
        """the message in hand; what was lost with it when the actor crashes"""
        self._timers: set[asyncio.TimerHandle] = set()
        self._pruned_at = 64

    @abstractmethod
    async def handle(self, message: Any) -> None: ...

    async def run(self) -> None:
        """Runs until cancelled, or until a handler raises."""
        mailbox = self.mailbox
        while True:
            self.current = message = await mailbox.receive()
            start = 0.0 if self._observer is None else self.clock.now()
            await self.handle(message)
            self.current = None
            if self._observer is not None:
                self._observer.span(Span(self.name, type(message).__name__, start, self.clock.now()))

    def later(self, delay_s: float, message: Any) -> asyncio.TimerHandle:
        """Posts a message to this actor after a delay on the loop's clock, unless the timer is cancelled."""

        def post() -> None:
            self._timers.discard(handle)
            self.mailbox.post(message)

        handle = asyncio.get_running_loop().call_later(delay_s, post)
        self._timers.add(handle)
        if len(self._timers) > 4 * self._pruned_at:
            self._timers = {t for t in self._timers if not t.cancelled()}
            self._pruned_at = max(64, len(self._timers))
        return handle

    def stop_timers(self) -> None:
        for handle in self._timers:
            handle.cancel()
        self._timers.clear()


Post = Callable[[Any], None]
"""Puts a message into some actor's mailbox; never blocks."""
