"""One range call of the embedded store, from its pinned objects to its answers: checks, then copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvactors.core.store import Addresses, Outcome, RangeBatch
from kvactors.errors import StoreError
from kvactors.stores.copying import copy_rows, copy_table
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
        self.rows: list[int] = []
        self.used: list[StoredObject] = []
        self.readings: list[Reading] = []

    def pin(self, row: int, one: StoredObject) -> None:
        one.in_flight += 1
        self.rows.append(row)
        self.used.append(one)

    def move(self, *, into_objects: bool) -> None:
        """Check the rows against their objects and the registered memory, copy the good ones and answer OK for them."""
        batch, used, n = self.batch, self.used, len(self.rows)
        sizes, offsets = batch.sizes, batch.offsets
        if n == 0 or int(sizes.min()) < 1 or int(offsets.min()) < 0:
            return
        addresses: Addresses = batch.addresses if n == len(self.answers) else batch.addresses[np.asarray(self.rows)]
        nbytes = np.fromiter([one.nbytes for one in used], np.int64, n)
        bases = np.fromiter([one.base for one in used], np.int64, n)
        good = self.regions.cover(addresses, sizes) & (offsets <= nbytes[:, None] - sizes).all(axis=1)
        whole = good
        pieced = [i for i, one in enumerate(used) if len(one.extents) > 1]
        if pieced:
            whole = good.copy()
            whole[pieced] = False
            for i in pieced:
                if good[i]:
                    _copy_pieces(used[i], addresses[i], sizes, offsets, into_objects)
        if whole.all():
            copy_table(bases, offsets, addresses, sizes, into_objects=into_objects)
        elif whole.any():
            copy_table(bases[whole], offsets, addresses[whole], sizes, into_objects=into_objects)
        for row, ok in zip(self.rows, good.tolist(), strict=True):
            if ok:
                self.answers[row] = Outcome.OK


def check_shapes(batch: RangeBatch) -> None:
    """StoreError unless the batch's arrays have the shapes and the type that `RangeBatch` names."""
    n, r = len(batch.keys), len(batch.sizes)
    arrays: tuple[npt.NDArray[Any], ...] = (batch.addresses, batch.sizes, batch.offsets)
    if batch.addresses.shape != (n, r) or batch.offsets.shape != (r,) or batch.sizes.shape != (r,):
        raise StoreError(
            f"a batch of {n} keys and {r} sizes needs addresses of shape ({n}, {r}) and offsets of shape ({r},), "
            f"not {batch.addresses.shape} and {batch.offsets.shape}"
        )
    if any(array.dtype != np.int64 for array in arrays):
        raise StoreError("addresses, sizes and offsets of a batch must be int64")


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
