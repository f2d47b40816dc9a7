"""Bounded mailboxes. Downward sends wait for room; upward posts never block, because their slot was reserved before.

Measured: appending to a deque costs 0.1 µs, waking a sleeping loop 1 µs (uvloop) to 24 µs (asyncio). So a post appends, and
wakes the loop only if its reader sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import Generic, TypeVar

from kvactors.actors.loops import call_on
from kvactors.errors import MailboxOverflowError

M = TypeVar("M")


class Mailbox(Generic[M]):
    """One reader (an actor on the loop), any number of writers on any thread.

    Attributes:
        limit: messages that may wait, beside the replies whose slots were reserved; `send` waits for room, `post` beyond it
            is a bug and raises.
    """

    def __init__(self, name: str, limit: int = 1024) -> None:
        self.name = name
        self.limit = limit
        self.peak = 0
        self._queue: deque[M] = deque()
        self._reserved = 0
        self._sleeping = False
        self._reader: asyncio.Future[None] | None = None
        self._room: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Names the loop of the reader; called on it, before anything is posted."""
        self._loop = loop
        self._thread = threading.get_ident()

    def __len__(self) -> int:
        return len(self._queue)

    # -- writers -------------------------------------------------------------------------------------------------------

    def post(self, message: M) -> None:
        """Appends without waiting, from any thread: replies to a reserved slot, and a caller's own bounded messages."""
        if len(self._queue) >= self.limit + self._reserved:
            raise MailboxOverflowError(
                f"mailbox of {self.name}: more than {self.limit} messages wait, and {self._reserved} replies"
            )
        self._queue.append(message)
        if self._sleeping:
            self._sleeping = False
            if threading.get_ident() == self._thread:
                self._wake()
            elif self._loop is not None:
                call_on(self._loop, self._wake)

    async def send(self, message: M) -> None:
        """Appends when there is room; on the loop only."""
        while len(self._queue) - self._reserved >= self.limit:
            room = asyncio.get_running_loop().create_future()
            self._room.append(room)
            await room
        self.post(message)

    def reserve(self) -> None:
        """The reader reserves a slot for a reply that it is about to ask for."""
        self._reserved += 1

    def replied(self) -> None:
        """The reader took a reply out: its slot is free again."""
        self._reserved -= 1

    # -- the reader ----------------------------------------------------------------------------------------------------

    async def receive(self) -> M:
        """The next message, in the order of arrival."""
        while not self._queue:
            self._reader = asyncio.get_running_loop().create_future()
            self._sleeping = True
            if self._queue:  # arrived between the check and the flag
                self._sleeping = False
                break
            await self._reader
        self.peak = max(self.peak, len(self._queue))
        message = self._queue.popleft()
        while self._room and len(self._queue) - self._reserved < self.limit:
            room = self._room.popleft()
            if not room.done():
                room.set_result(None)
                break
        return message

    def take_all(self) -> list[M]:
        """Everything that waits, for whoever answers in the place of a reader that is gone; any thread."""
        taken: list[M] = []
        while self._queue:
            with contextlib.suppress(IndexError):
                taken.append(self._queue.popleft())
        return taken

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
