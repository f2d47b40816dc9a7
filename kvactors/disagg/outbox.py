"""Messages on their way out of an actor: a task of their own sends them, as an actor waits for no peer that does not read."""

from __future__ import annotations

import asyncio

from kvactors.disagg.links import Link
from kvactors.disagg.wire import Message
from kvactors.errors import DisaggError

LIMIT = 8192
"""Messages that may wait for one peer. One that reads nothing that long loses its link, and with it what it asked for."""


class Outbox:
    """Made with the link; ends with it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._queue: asyncio.Queue[Message] = asyncio.Queue(LIMIT)
        self._task = asyncio.ensure_future(self._run())

    def send(self, message: Message) -> None:
        """Queues a message. Messages of a link that has ended go nowhere: its end is told to the actor by whoever reads it."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.close()

    def close(self) -> None:
        """Ends the link, and what still waits."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            while True:
                await self.link.send(await self._queue.get())
        except DisaggError:
            pass
        finally:
            await self.link.close()
