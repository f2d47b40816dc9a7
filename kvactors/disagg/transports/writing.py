"""What every transport's `write` does the same way: refuse what makes no sense, and not be cut short by a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvactors.core.store import Addresses
from kvactors.disagg.descriptors import Descriptors
from kvactors.errors import TransferPlanError, UnregisteredMemoryError
from kvactors.stores.regions import Regions

T = TypeVar("T")


@dataclass(slots=True)
class WriteCounts:
    """What one worker's end has written since it was made; anyone may read it at any time.

    Attributes:
        writes: `write` calls that ended well; empty ones count.
        failures: `write` calls that ended otherwise: failed, refused or cancelled.
        nbytes, descriptors: of the writes that ended well.
        seconds: spent in `write` by all of them, waiting for one's turn included.
        retries: parts of a write that were sent a second time, after a connection was lost.
    """

    writes: int = 0
    failures: int = 0
    nbytes: int = 0
    descriptors: int = 0
    seconds: float = 0.0
    retries: int = 0

    @contextmanager
    def counting(self, descriptors: Descriptors, now: Callable[[], float]) -> Iterator[None]:
        """Around one write."""
        began = now()
        try:
            yield
        except BaseException:
            self.failures += 1
            raise
        else:
            self.writes += 1
            self.descriptors += len(descriptors)
            self.nbytes += descriptors.total_bytes
        finally:
            self.seconds += now() - began


def require_writable(descriptors: Descriptors, regions: Regions) -> None:
    """Before anything is sent.

    Raises:
        TransferPlanError: the arrays are not of one length, or a size is below 1.
        UnregisteredMemoryError: a source is not in these regions.
    """
    src, dst, nbytes = descriptors.src, descriptors.dst, descriptors.nbytes
    if not len(src) == len(dst) == len(nbytes):
        raise TransferPlanError(f"{len(src)} sources, {len(dst)} destinations and {len(nbytes)} sizes: give one of each")
    if not len(src):
        return
    if int(nbytes.min()) < 1:
        raise TransferPlanError(f"a descriptor of {int(nbytes.min())} bytes: leave empty ones out")
    if (at := first_outside(src, nbytes, regions)) is not None:
        raise UnregisteredMemoryError(
            f"descriptor {at}: {int(nbytes[at])} bytes at {int(src[at]):#x} are not registered; register the memory first"
        )


def first_outside(addresses: Addresses, nbytes: Addresses, regions: Regions) -> int | None:
    """The first range that is not in registered memory."""
    if bool(regions.cover(addresses[None, :], nbytes)[0]):
        return None
    return next(i for i in range(len(nbytes)) if not regions.cover(addresses[i : i + 1, None], nbytes[i : i + 1])[0])


async def to_its_end(future: asyncio.Future[T], on_cancel: Callable[[], None] = lambda: None) -> T:
    """Awaits it to its end even if the caller is cancelled; then raises the cancellation.

    Args:
        on_cancel: called at each cancellation, to hurry the end.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is None:
        return future.result()
    if not future.cancelled():
        future.exception()  # seen
    raise cancelled
