"""One range call of the embedded store, from its pinned objects to its answers: checks, then copies."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

import numpy as np

from kvactors.core.store import Addresses, Outcome, RangeBatch
from kvactors.stores.copying import HIGHEST, copy_rows, copy_table
from kvactors.stores.pool import StoredObject
from kvactors.stores.regions import Regions


class Reading:
    """A get session: which life of the key it reads, and until when."""

    __slots__ = ("found", "until")

    def __init__(self, found: StoredObject, until: float) -> None:
        self.found, self.until = found, until


class RangeCall:
    """A range call in flight: which of its rows have a session, and the objects it has pinned for them."""

    __slots__ = ("answers", "batch", "readings", "regions", "rows", "used")

    def __init__(self, batch: RangeBatch, regions: Regions) -> None:
        self.batch, self.regions = batch, regions
        self.answers = [Outcome.INVALID] * len(batch.keys)
        self.rows: Sequence[int] = ()
        self.used: list[StoredObject] = []
        self.readings: list[Reading] = []

    def pin(self, rows: Sequence[int], used: list[StoredObject]) -> None:
        """These rows will move, between local memory and these objects; the pool's lock is held."""
        for one in used:
            one.in_flight += 1
        self.rows, self.used = rows, used

    def move(self, *, into_objects: bool) -> None:
        """Check the rows against their objects and the registered memory, copy the good ones and answer OK for them."""
        batch, used, n = self.batch, self.used, len(self.rows)
        sizes, offsets = batch.sizes, batch.offsets
        sizes_list, offsets_list = sizes.tolist(), offsets.tolist()
        if n == 0 or min(sizes_list) < 1 or min(offsets_list) < 0:
            return
        reach = max(map(add, offsets_list, sizes_list))
        if reach > HIGHEST:  # also keeps the arithmetic on arrays from overflowing
            return
        addresses: Addresses = batch.addresses if n == len(self.answers) else batch.addresses[np.asarray(self.rows)]
        bases_list = [one.base for one in used]
        bases = np.fromiter(bases_list, np.int64, n)
        good = self.regions.cover(addresses, sizes)
        if min([one.nbytes for one in used]) < reach:
            good &= np.fromiter([one.nbytes >= reach for one in used], np.bool_, n)
        if good.all() and 0 not in bases_list:
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
            _copy_pieces(used[i], addresses[i], sizes, offsets, into_objects)
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
