"""Fewer, bigger ranges: what of a batch can be sent as one range, directly or through a staging buffer.

A range of a Mooncake store over TCP costs some 30 microseconds and 0.3 more per KiB (`kvactors bench staging`), so two ranges
of 16 KiB take as long as one of 130. Neighbours in the object that are neighbours in local memory too are one range. Those that
are not are put next to each other in a staging buffer, where copying them costs less than the ranges it saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvactors.core.store import Addresses, RangeBatch
from kvactors.stores.copying import copy_table

STAGE_MOST_BYTES = 64 << 10
"""Ranges that are larger on average are not staged: copying them costs what it saves (measured)."""

GOOD_RANGE_BYTES = 256 << 10
"""From here on most of a range's time goes to its bytes."""

_ALIGN_BYTES = 64


def joined(batch: RangeBatch) -> RangeBatch:
    """The same bytes with as few ranges as can be: neighbours in the object that are neighbours in the memory of every key."""
    sizes, offsets, addresses = batch.sizes, batch.offsets, batch.addresses
    if len(sizes) < 2:
        return batch
    follows = offsets[1:] == offsets[:-1] + sizes[:-1]
    if follows.any():
        follows &= (addresses[:, 1:] == addresses[:, :-1] + sizes[:-1]).all(axis=0)
    if not follows.any():
        return batch
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    return RangeBatch(batch.keys, addresses[:, first], np.add.reduceat(sizes, first), offsets[first])


@dataclass(frozen=True, slots=True)
class Staging:
    """Which ranges of a batch go through a staging buffer, and how they lie in it.

    Attributes:
        columns: the staged ranges, shape (s,).
        places: where each lies in its key's row of the buffer, bytes.
        pitch: bytes of a row.
        sizes, offsets: what is sent: every range that is not staged, and one for each staged run, shape (r,).
        source: for each range sent, its column in the batch, or -1 for a staged run, shape (r,).
        runs: where each staged run begins in the row, in order, shape (number of -1 in `source`,).
    """

    columns: Addresses
    places: Addresses
    pitch: int
    sizes: Addresses
    offsets: Addresses
    source: Addresses
    runs: Addresses

    @classmethod
    def plan(cls, batch: RangeBatch) -> Staging | None:
        """None if nothing of the batch is worth staging."""
        sizes, offsets = batch.sizes.tolist(), batch.offsets.tolist()
        columns: list[int] = []
        places: list[int] = []
        sent: list[tuple[int, int, int]] = []  # size, offset, source
        runs: list[int] = []
        pitch = lo = 0
        breaks = [j + 1 for j, (a, b) in enumerate(pairwise(range(len(sizes)))) if offsets[b] != offsets[a] + sizes[a]]
        for hi in [*breaks, len(sizes)]:
            nbytes = sum(sizes[lo:hi])
            if hi - lo > 1 and nbytes <= STAGE_MOST_BYTES * (hi - lo):
                runs.append(pitch)
                sent.append((nbytes, offsets[lo], -1))
                columns.extend(range(lo, hi))
                places.extend(pitch + offsets[j] - offsets[lo] for j in range(lo, hi))
                pitch += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
            else:
                sent.extend((sizes[j], offsets[j], j) for j in range(lo, hi))
            lo = hi
        if not runs:
            return None
        table = np.array(sent, np.int64)
        return cls(
            np.array(columns, np.int64),
            np.array(places, np.int64),
            pitch,
            np.ascontiguousarray(table[:, 0]),
            np.ascontiguousarray(table[:, 1]),
            np.ascontiguousarray(table[:, 2]),
            np.array(runs, np.int64),
        )

    def sent(self, batch: RangeBatch, base: int) -> RangeBatch:
        """What goes to the store, with row i of the buffer at `base + i * pitch`."""
        n = len(batch.keys)
        addresses = np.empty((n, len(self.sizes)), np.int64)
        staged = self.source < 0
        addresses[:, ~staged] = batch.addresses[:, self.source[~staged]]
        addresses[:, staged] = self._rows(n, base)[:, None] + self.runs
        return RangeBatch(batch.keys, addresses, self.sizes, self.offsets)

    def gather(self, batch: RangeBatch, base: int) -> None:
        """Copies what is staged from local memory into the buffer."""
        self._copy(batch, base, slice(None), into_buffer=True)

    def scatter(self, batch: RangeBatch, base: int, rows: slice | Addresses) -> None:
        """Copies what is staged, of these rows, from the buffer to local memory."""
        self._copy(batch, base, rows, into_buffer=False)

    def _rows(self, n: int, base: int) -> Addresses:
        return base + np.arange(n, dtype=np.int64) * self.pitch

    def _copy(self, batch: RangeBatch, base: int, rows: slice | Addresses, *, into_buffer: bool) -> None:
        bases = self._rows(len(batch.keys), base)[rows]
        local = batch.addresses[rows][:, self.columns]
        copy_table(bases, self.places, local, batch.sizes[self.columns], into_objects=into_buffer)
