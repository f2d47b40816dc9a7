"""Links between workers: messages both ways, in order, over one connection, whose end both sides notice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from kvactors.disagg.wire import Message


class Link(Protocol):
    """One end of a connection. `peer`: where the other end is, for messages to people."""

    peer: str

    async def send(self, message: Message) -> None:
        """Sends a message; messages arrive in order.

        Raises:
            LinkClosedError: the link has ended.
            WireError: the message is too large; the link goes on.
        """
        ...

    async def receive(self) -> Message:
        """The next message. What is malformed, too large or of another version is answered with a `Problem`, and the end.

        Raises:
            LinkClosedError: the link has ended; says why.
        """
        ...

    async def close(self, reason: str = "") -> None:
        """Ends the link; with a reason, the other end is told first. Idempotent."""
        ...


ROOM = 16
"""Messages of one link that may wait in an actor's mailbox. What else is said waits in the link: no peer fills a mailbox."""

Connect = Callable[[str], Awaitable[Link]]
"""Opens a link to a worker's address.

Raises:
    PeerGoneError: the connection is refused: no process listens there any more.
    PeerUnreachableError: no answer in time.
"""

Serve = Callable[[Link], Awaitable[None]]
"""Is given each link that a peer opened; the link ends when it returns or raises."""
