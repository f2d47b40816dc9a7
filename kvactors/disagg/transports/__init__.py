"""How bytes get from one worker's memory into another's."""

from __future__ import annotations

from typing import Protocol

from kvactors.disagg.descriptors import Descriptors


class Transport(Protocol):
    """One worker's end. All methods but `write` may block for a moment; `write` is awaited on the loop of the sender.

    Attributes:
        memory: address of this worker's memory, as peers give it to `write`.
    """

    memory: str

    def register(self, address: int, nbytes: int) -> None:
        """Makes a range of this process's memory readable by `write` and writable by peers.

        Raises:
            StoreError: the transport refuses it.
        """
        ...

    async def write(self, memory: str, descriptors: Descriptors) -> None:
        """Copies from this process's memory into a peer's; all of it has arrived when this returns.

        It returns or raises only when this side sends nothing more. What is on its way by then may still land, within
        `kvactors.disagg.receiver.GRACE_S`. Being cancelled does not change that: the call goes on to its end first.

        Raises:
            TransferFailedError: it failed; part of it may have been written.
        """
        ...

    async def forget(self, memory: str) -> None:
        """The peer is gone: gives back what is kept for it."""
        ...

    def close(self) -> None:
        """Ends it; idempotent. Nothing is written by it, nor by peers through it, after this returned."""
        ...
