"""One range call of the embedded store, from its pinned objects to its answers: checks, then copies."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import Generic, TypeVar

import numpy as np

from kvactors.core.store import Addresses, Outcome, RangeBatch
from kvactors.stores.copying import HIGHEST, copy_rows, copy_table
from kvactors.stores.pool import StoredObject, Use
from kvactors.stores.regions import Regions


class Reading:
    """A get session: which life of the key it reads, and until when."""

    __slots__ = ("found", "until")

    def __init__(self, found: StoredObject, until: float) -> None:
        self.found, self.until = found, until


class ReadingUse(Use):
    """The objects of get sessions; `until`: when the first of their leases ends, as far as that was known when they were found.
    A lease may have been renewed since."""

    __slots__ = ("readings", "until")

    def __init__(self, readings: list[Reading]) -> None:
        super().__init__([reading.found for reading in readings])
        self.readings = readings
        self.until = min([reading.until for reading in readings], default=float("inf"))


U = TypeVar("U", bound=Use)


class RecentUses(Generic[U]):
    """What the keys of the last calls were found to stand for: a tuple of keys that comes again costs nothing for each key.

    Only for tuples, which cannot change, and known by identity. `changes`: a number that grows whenever a use may have become
    wrong.
    """

    MOST = 64

    def __init__(self) -> None:
        self._uses: dict[int, tuple[tuple[str, ...], int, U]] = {}

    def find(self, keys: Sequence[str], changes: int) -> U | None:
        known = self._uses.get(id(keys))
        return known[2] if known is not None and known[0] is keys and known[1] == changes else None

    def keep(self, keys: Sequence[str], changes: int, use: U) -> None:
        if type(keys) is tuple:
            self._uses.pop(id(keys), None)
            if len(self._uses) >= self.MOST:
                del self._uses[next(iter(self._uses))]
            self._uses[id(keys)] = keys, changes, use

    def clear(self) -> None:
        self._uses.clear()


class RangeCall(Generic[U]):
    """A range call in flight.

    Attributes:
        answers: one for each key.
        rows: which keys have a session; they use the objects of `use`, in this order.
    """

    __slots__ = ("answers", "batch", "regions", "rows", "use")

    def __init__(self, batch: RangeBatch, regions: Regions, use: U, rows: Sequence[int]) -> None:
        self.batch, self.regions, self.use, self.rows = batch, regions, use, rows
        self.answers = [Outcome.INVALID] * len(batch.keys)

    def move(self, *, into_objects: bool) -> None:
        """Check the rows against their objects and the registered memory, copy the good ones and answer OK for them."""
        batch, use, n = self.batch, self.use, len(self.rows)
        sizes, offsets = batch.sizes, batch.offsets
        sizes_list, offsets_list = sizes.tolist(), offsets.tolist()
        if n == 0 or min(sizes_list) < 1 or min(offsets_list) < 0:
            return
        reach = max(map(add, offsets_list, sizes_list))
        if reach > HIGHEST:  # also keeps the arithmetic on arrays from overflowing
            return
        addresses: Addresses = batch.addresses if n == len(self.answers) else batch.addresses[np.asarray(self.rows)]
        bases = use.bases
        good = self.regions.cover(addresses, sizes)
        if use.least_bytes < reach:
            good &= np.fromiter([one.nbytes >= reach for one in use.objects], np.bool_, n)
        if use.whole and good.all():
            copy_table(bases, offsets, addresses, sizes, into_objects=into_objects)
            ok = Outcome.OK  # reading a member of an enum is slow
            if n == len(self.answers):
                self.answers = [ok] * n
                return
            for row in self.rows:
                self.answers[row] = ok
            return
        whole = good & (bases != 0)
        if whole.any():
            copy_table(bases[whole], offsets, addresses[whole], sizes, into_objects=into_objects)
        for i in np.flatnonzero(good & (bases == 0)).tolist():
            _copy_pieces(use.objects[i], addresses[i], sizes, offsets, into_objects)
        for i in np.flatnonzero(good).tolist():
            self.answers[self.rows[i]] = Outcome.OK


def _copy_pieces(one: StoredObject, addresses: Addresses, sizes: Addresses, offsets: Addresses, into: bool) -> None:
    """Ranges of an object that lies over several extents (the arena was fragmented)."""
    for address, size, offset in zip(addresses.tolist(), sizes.tolist(), offsets.tolist(), strict=True):
        begin = 0
        for start, nbytes in one.extents:
            low, high = max(offset, begin), min(offset + size, begin + nbytes)
            if low < high:
                local = np.array([address + low - offset], np.int64)
                stored = np.array([start + low - begin], np.int64)
                copy_rows(stored if into else local, local if into else stored, high - low)
            begin += nbytes
