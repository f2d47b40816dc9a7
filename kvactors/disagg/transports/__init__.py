"""How bytes get from one worker's memory into another's."""

from __future__ import annotations

from typing import Protocol

from kvactors.disagg.descriptors import Descriptors
from kvactors.disagg.transports.writing import WriteCounts


class Transport(Protocol):
    """One worker's end. All methods but `write` may block for a moment; `write` is awaited on the loop of the sender.

    Attributes:
        memory: address of this worker's memory, as peers give it to `write`.
        counts: what was written, to read at any time.
    """

    memory: str
    counts: WriteCounts

    def register(self, address: int, nbytes: int) -> None:
        """Makes a range of this process's memory readable by `write` and writable by peers. Each byte is registered once.

        Call it before peers learn of `memory`. A descriptor lies within one range on each side. There is no way back but
        `close`: a write that has begun would not notice (measured), so it would be no protection.

        Raises:
            StoreError: the transport refuses it, it overlaps a range before, or the transport was closed.
        """
        ...

    async def write(self, memory: str, descriptors: Descriptors) -> None:
        """Copies from this process's memory into a peer's; all of it has arrived when this returns, and nothing lands later.

        It raises only when this side sends nothing more: the source is free again. What is on its way by then may still land,
        within `kvactors.disagg.receiver.GRACE_S` of the peer's being awake. Being cancelled does not change that: what cannot
        be broken off goes on to its end first; only then CancelledError is raised, whether all was written or not. Writes to
        one peer may follow one another; a peer that does not answer holds up no other. Nothing to write succeeds.

        The source must not change until this returns or raises: what failed may be sent twice within the call.

        Raises:
            TransferFailedError: it failed, or the transport was closed; part of it may have been written.
            UnregisteredMemoryError: a source is not registered; nothing was sent.
            TransferPlanError: the descriptors contradict themselves; nothing was sent.
        """
        ...

    async def forget(self, memory: str) -> None:
        """The peer is gone: gives back what is kept for it, after writes under way. Never raises, also for a strange peer."""
        ...

    def close(self) -> None:
        """Ends it; idempotent, from any thread. Nothing is written by peers through it after this returned.

        Nor is anything by it, unless a write is under way that cannot be broken off: it is waited for, for some seconds. So
        await or cancel writes first. A write that was still waiting fails.
        """
        ...
