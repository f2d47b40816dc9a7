"""Store calls of one layer, made from what stays the same on all layers of a step.

The rows of a step (blocks to save, destinations to load) are cut into parts once. A layer then costs one addition of arrays
for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvactors.core.ranges import LayerRanges
from kvactors.core.store import Addresses, RangeBatch

Rows = npt.NDArray[np.intp]
"""Ascending numbers of rows."""


class Part:
    """Rows that one call moves, on whatever layer.

    Attributes:
        rows: their numbers.
        where: the same as an index into an array of all rows: a slice where they follow on each other.
        keys, block_ids: of each row. The keys are one tuple for all layers, by which a store may know them again.
        oldest_s: when the oldest of their sessions was opened.
        epoch: the earliest life of the store's master under which one of them was opened.
    """

    __slots__ = ("_moved", "_strides", "block_ids", "epoch", "keys", "oldest_s", "rows", "where")

    def __init__(self, rows: Rows, keys: Sequence[str], block_ids: Addresses) -> None:
        first, end = int(rows[0]), int(rows[-1]) + 1
        dense = end - first == len(rows)
        self.rows = rows
        self.where: slice | Rows = slice(first, end) if dense else rows
        self.keys = tuple(keys[first:end]) if dense else tuple([keys[i] for i in rows.tolist()])
        self.block_ids = block_ids[self.where]
        self.oldest_s = 0.0
        self.epoch = -1
        self._strides: Addresses | None = None
        self._moved = self.block_ids[:, None]

    def moved(self, strides: Addresses) -> Addresses:
        """Bytes from block 0 to each row's block, of shape (rows, pieces). Layers share their strides where they can, and so
        the last answer is kept."""
        if self._strides is not strides:
            self._strides, self._moved = strides, self.block_ids[:, None] * strides
        return self._moved


class RangeCall:
    """One store call to be made: `batch` moves the pieces [first_piece, last_piece) of a part's rows."""

    __slots__ = ("batch", "first_piece", "last_piece", "layer", "part")

    def __init__(self, layer: int, batch: RangeBatch, part: Part, first_piece: int, last_piece: int) -> None:
        self.layer, self.batch, self.part = layer, batch, part
        self.first_piece, self.last_piece = first_piece, last_piece

    @property
    def rows(self) -> Rows:
        return self.part.rows

    @property
    def block_ids(self) -> Addresses:
        """The local block of each row."""
        return self.part.block_ids


class RowPlan:
    """The rows that move on every layer, until one of them drops out.

    Args:
        rows: which of `keys` and `block_ids`; ascending.
        note_age: sets a new part's `oldest_s` and `epoch`.
        most_rows: keys in one call; 0 = as many as its limits allow.
    """

    def __init__(
        self,
        rows: Rows,
        keys: Sequence[str],
        block_ids: Addresses,
        note_age: Callable[[Part], None],
        most_rows: int = 0,
    ) -> None:
        self.rows = rows
        self._keys, self._block_ids, self._note_age = keys, block_ids, note_age
        step = most_rows or max(1, len(rows))
        self._sections = [rows[lo : lo + step] for lo in range(0, len(rows), step)]
        self._parts: dict[int, list[list[Part]]] = {}

    def calls(self, of_layer: LayerRanges) -> list[RangeCall]:
        """The store calls that move one layer's pieces of all rows, each within the limits."""
        layer, first = int(of_layer.layer), of_layer.first_piece
        calls: list[RangeCall] = []
        for section in range(len(self._sections)):
            for shape in of_layer.shapes:
                lo, hi = first + shape.first, first + shape.last
                for part in self._cut(shape.most_keys)[section]:
                    addresses = part.moved(shape.strides) + shape.bases
                    batch = RangeBatch(part.keys, addresses, shape.sizes, shape.offsets)
                    calls.append(RangeCall(layer, batch, part, lo, hi))
        return calls

    def _cut(self, most: int) -> list[list[Part]]:
        """Parts of at most so many rows, by section."""
        known = self._parts.get(most)
        if known is None:
            known = self._parts[most] = [
                [self._part(rows[lo : lo + most]) for lo in range(0, len(rows), most)] for rows in self._sections
            ]
        return known

    def _part(self, rows: Rows) -> Part:
        part = Part(rows, self._keys, self._block_ids)
        self._note_age(part)
        return part
