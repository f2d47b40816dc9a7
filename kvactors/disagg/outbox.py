"""Messages on their way out of an actor: a task of their own sends them, as an actor waits for no peer that does not read."""

from __future__ import annotations

import asyncio

from kvactors.disagg.links import Link
from kvactors.disagg.wire import Message
from kvactors.errors import DisaggError, WireError
from kvactors.log import get_logger

log = get_logger("kvactors.disagg.outbox", burst=10)

LIMIT = 8192
"""Messages that may wait for one peer. One that reads nothing that long loses its link, and with it what it asked for."""


class Outbox:
    """Made with the link; ends with it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._queue: asyncio.Queue[Message] = asyncio.Queue(LIMIT)
        self._task = asyncio.ensure_future(self._run())
        self._begun = False
        self._end: asyncio.Task[None] | None = None

    def send(self, message: Message) -> None:
        """Queues a message. Messages of a link that has ended go nowhere: its end is told to the actor by whoever reads it."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.close()

    def close(self) -> None:
        """Ends the link, and what still waits."""
        self._task.cancel()
        if not self._begun and self._end is None:  # a task that is cancelled before it began never gets to its `finally`
            self._end = asyncio.ensure_future(self.link.close())

    async def flush(self, seconds: float) -> None:
        """Waits until all that was queued is on its way, at most so long."""
        done = asyncio.ensure_future(self._queue.join())
        await asyncio.wait({done, self._task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        done.cancel()

    async def _run(self) -> None:
        self._begun = True
        try:
            while True:
                message = await self._queue.get()
                try:
                    await self.link.send(message)
                except WireError as error:  # nobody else's fault: the others' link goes on
                    log.error("a message cannot be sent", peer=self.link.peer, reason=str(error))
                self._queue.task_done()
        except DisaggError:
            pass
        finally:
            await self.link.close()
