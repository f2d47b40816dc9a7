"""Several workers in one process, for tests and simulations: a transport whose every misfortune is arranged.

It has no thread and reads no clock but the running loop's, so it runs on virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvactors.core.store import Addresses
from kvactors.disagg.descriptors import Descriptors
from kvactors.disagg.transports.writing import WriteCounts, first_outside, require_writable, to_its_end
from kvactors.errors import ConfigError, StoreError, TransferFailedError
from kvactors.stores.copying import Bytes, copy_rows, view
from kvactors.stores.regions import Regions


@dataclass(frozen=True, slots=True)
class Fault:
    """A write that fails.

    Attributes:
        landed: how many of its descriptors have arrived when the error is raised.
        late: whether the others are on their way: they land at `Network.deliver_late`, as the source is when the write fails.
    """

    landed: int = 0
    late: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """One write, as those see it who decide what becomes of it.

    Attributes:
        number: of all writes over the network, from 1.
        source, target: `memory` of the two workers.
    """

    number: int
    source: str
    target: str
    descriptors: Descriptors


@dataclass(frozen=True, slots=True, eq=False)
class LateBytes:
    """On their way after the write has failed."""

    write: Write
    parts: tuple[tuple[int, Bytes], ...]
    """destination, and what lands there"""


class Network:
    """Connects the workers of one process.

    Args:
        decide: asked once for each write, when it begins; a fault makes it fail.
        seconds: how long a write takes, on the running loop's clock. Half of its descriptors arrive before, half after.

    Attributes:
        writes: how many have begun.
        under_way: those that have begun and not ended.
        late: what `deliver_late` would deliver.
    """

    def __init__(
        self,
        decide: Callable[[Write], Fault | None] = lambda _: None,
        seconds: Callable[[Write], float] = lambda _: 0.0,
    ) -> None:
        self.writes = 0
        self.under_way: list[Write] = []
        self.late: list[LateBytes] = []
        self._decide, self._seconds = decide, seconds
        self._ends: dict[str, InProcessTransport] = {}
        self._faults: dict[int, Fault] = {}
        self._held: set[str | None] = set()
        self._changed: list[asyncio.Future[None]] = []

    # -- what tests arrange --------------------------------------------------------------------------------------------

    def fail(self, nth: int, fault: Fault | None = None) -> None:
        """Makes the n-th write from now on fail, 1 being the next that begins."""
        if nth < 1:
            raise ConfigError(f"nth = {nth}: the next write is 1")
        self._faults[self.writes + nth] = fault or Fault()

    def hold(self, memory: str | None = None) -> None:
        """Writes into this memory, or all, stand still before any byte has arrived, until `release`."""
        self._held.add(memory)

    def release(self, memory: str | None = None) -> None:
        """Ends `hold` of the same memory. Idempotent."""
        self._held.discard(memory)
        self._wake()

    async def until_under_way(self, count: int = 1) -> None:
        """Waits until so many writes have begun and not ended."""
        while len(self.under_way) < count:
            await self._change()

    def kill(self, memory: str) -> None:
        """The worker is gone: writes into it fail, those under way too, and nothing of it writes any more."""
        self._ends[memory].dead = "was killed"
        self._wake()

    def deliver_late(self) -> int:
        """Lands what failed writes left on its way, unless its destination is gone; answers how many descriptors."""
        landed = 0
        late, self.late = self.late, []
        for bytes_ in late:
            end = self._ends[bytes_.write.target]
            for address, data in bytes_.parts:
                if not end.dead and end.covers(np.array([address]), np.array([len(data)])):
                    view(address, len(data))[...] = data
                    landed += 1
        return landed

    # -- what the transports ask ---------------------------------------------------------------------------------------

    def join(self, end: InProcessTransport, memory: str | None) -> str:
        """Gives a worker's end its name."""
        name = memory if memory is not None else f"worker-{len(self._ends)}"
        if name in self._ends:
            raise ConfigError(f"two workers are named {name!r}; give each a name of its own")
        self._ends[name] = end
        return name

    def left(self) -> None:
        """An end was closed."""
        self._wake()

    async def carry(self, source: str, target: str, descriptors: Descriptors) -> None:
        """One write, to its end. Raises TransferFailedError."""
        self.writes += 1
        write = Write(self.writes, source, target, descriptors)
        fault = self._faults.pop(write.number, None) or self._decide(write)
        self.under_way.append(write)
        self._wake()
        try:
            await asyncio.sleep(0)
            self._require_both(write)
            while self._held & {None, target}:
                await self._change()
                self._require_both(write)
            self._require_registered(write)
            if fault is not None:
                self._fail(write, fault)
            half = len(descriptors) // 2 if (seconds := self._seconds(write)) > 0 else 0
            _copy(descriptors, slice(0, half))
            if seconds > 0:
                await asyncio.sleep(seconds)
                self._require_both(write)
            _copy(descriptors, slice(half, None))
        finally:
            self.under_way.remove(write)
            self._wake()

    def _require_both(self, write: Write) -> None:
        for name in (write.source, write.target):
            if name not in self._ends:
                raise TransferFailedError(f"write {write.number}: nobody is at {name!r}; ask the peer where its memory is")
            if dead := self._ends[name].dead:
                raise TransferFailedError(f"write {write.number} from {write.source} to {write.target}: {name} {dead}")

    def _require_registered(self, write: Write) -> None:
        what = write.descriptors
        if (at := self._ends[write.target].first_outside(what.dst, what.nbytes)) is not None:
            raise TransferFailedError(
                f"write {write.number}, descriptor {at}: {int(what.nbytes[at])} bytes at {int(what.dst[at]):#x} are not "
                f"registered by {write.target}; register the memory there first"
            )

    def _fail(self, write: Write, fault: Fault) -> None:
        what = write.descriptors
        _copy(what, slice(0, fault.landed))
        if fault.late:
            rest = zip(*(a[fault.landed :].tolist() for a in (what.src, what.dst, what.nbytes)), strict=True)
            self.late.append(LateBytes(write, tuple((dst, view(src, n).copy()) for src, dst, n in rest)))
        raise TransferFailedError(
            f"write {write.number} from {write.source} to {write.target} failed, as arranged, after {fault.landed} of "
            f"{len(what)} descriptors"
        )

    async def _change(self) -> None:
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed.append(changed)
        await changed

    def _wake(self) -> None:
        waiting, self._changed = self._changed, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)


class InProcessTransport:
    """A `Transport` over a `Network`.

    Args:
        memory: its name; None: `worker-0`, `worker-1`, … in order of making.

    Attributes:
        counts: what was written.
        dead: why it neither writes nor is written to any more; empty while it does.

    Raises:
        ConfigError: the name is taken.
    """

    def __init__(self, network: Network, memory: str | None = None) -> None:
        self.counts = WriteCounts()
        self.dead = ""
        self._network, self._regions = network, Regions()
        self.memory = network.join(self, memory)

    def register(self, address: int, nbytes: int) -> None:
        """See `Transport.register`. StoreError for a range that overlaps one before, or after `close`."""
        if self.dead:
            raise StoreError(f"register: {self.memory} {self.dead}; make another transport")
        self._regions = self._regions.with_region(address, nbytes)

    async def write(self, memory: str, descriptors: Descriptors) -> None:
        """See `Transport.write`. A write that is held goes on waiting when it is cancelled, as a native call would."""
        with self.counts.counting(descriptors, asyncio.get_running_loop().time):
            require_writable(descriptors, self._regions)
            if len(descriptors):
                await to_its_end(asyncio.ensure_future(self._network.carry(self.memory, memory, descriptors)))

    async def forget(self, memory: str) -> None:
        """Nothing is kept for a peer."""

    def close(self) -> None:
        """See `Transport.close`. Writes under way fail."""
        if not self.dead:
            self.dead = "was closed"
            self._network.left()

    def covers(self, addresses: Addresses, nbytes: Addresses) -> bool:
        """Whether all these ranges are registered here."""
        return self.first_outside(addresses, nbytes) is None

    def first_outside(self, addresses: Addresses, nbytes: Addresses) -> int | None:
        return first_outside(addresses, nbytes, self._regions)


def _copy(what: Descriptors, part: slice) -> None:
    src, dst, nbytes = what.src[part], what.dst[part], what.nbytes[part]
    for size in dict.fromkeys(nbytes.tolist()):
        of_size = nbytes == size
        copy_rows(dst[of_size], src[of_size], size)
