"""A group's pieces, layer by layer, and how a layer's pieces of many blocks are cut into store calls.

A piece is an entry's payload, or a part of it where the entry is larger than one call may move. The pieces of a group, in
object order, tile its object exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvactors.core.config import EngineConfig
from kvactors.core.ids import StageLayer
from kvactors.core.layout import KVLayout
from kvactors.core.store import Addresses
from kvactors.errors import LayoutError

MAX_RANGES = 2000
"""Most ranges in one store call; more fragments than this fail on a TCP transport (measured)."""

SAFE_KEYS = 64
"""Keys in one store call where no number is given: what is in a call is lost together, and is moved by one worker."""

SMALL_CALL_BYTES = 1 << 20
"""Up to so many bytes a call may have more than `SAFE_KEYS` keys: moving them takes about as long as a call's fixed cost."""

Bases = Mapping[tuple[int, int, str], int]
"""(group id, physical layer, entry name) -> local address of block 0."""


class Cut(NamedTuple):
    """One store call: rows [row_lo, row_hi) of the keys, pieces [col_lo, col_hi) of the layer."""

    row_lo: int
    row_hi: int
    col_lo: int
    col_hi: int


@dataclass(frozen=True, slots=True, eq=False)
class CallShape:
    """Pieces [first, last) of a layer, which go in one call for each of at most `most_keys` keys; arrays as in `LayerRanges`.

    Shapes of a group that have the same strides, or sizes, share the array.
    """

    first: int
    last: int
    most_keys: int
    bases: Addresses
    strides: Addresses
    sizes: Addresses
    offsets: Addresses


@dataclass(frozen=True, slots=True, eq=False)
class LayerRanges:
    """The pieces of one group on one layer: arrays of shape (pieces,).

    Attributes:
        first_piece: number of the layer's first piece among all the group's pieces.
        bases: local address of each piece for block 0.
        strides: bytes between the pieces of two neighbouring local blocks.
        sizes, offsets: bytes, and place in the object.
        shapes: together, every piece once.
    """

    layer: StageLayer
    first_piece: int
    bases: Addresses
    strides: Addresses
    sizes: Addresses
    offsets: Addresses
    shapes: tuple[CallShape, ...]

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    def addresses(self, block_ids: Addresses, col_lo: int, col_hi: int) -> Addresses:
        """Local addresses of shape (blocks, pieces)."""
        return self.bases[col_lo:col_hi] + block_ids[:, None] * self.strides[col_lo:col_hi]

    def cuts(self, rows: int) -> list[Cut]:
        """Store calls that together move every piece of this layer for `rows` keys, each within the limits."""
        return [
            Cut(lo, min(lo + shape.most_keys, rows), shape.first, shape.last)
            for shape in self.shapes
            for lo in range(0, rows, shape.most_keys)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class GroupRanges:
    """All pieces of one group on this stage."""

    group_id: int
    object_bytes: int
    pieces: int
    layers: Mapping[int, LayerRanges]
    """stage layer -> its pieces, in layer order"""
    last_layer: int


def read_runs(ranges: GroupRanges, good_range_bytes: int) -> dict[int, int]:
    """Which layers are read together where short ranges are dear: stage layer -> the last layer of its run.

    The first layer is a run of its own, so that the compute can begin; each further run has at most twice the layers of the one
    before, and no more than make a good range. An object that is no longer than a good range is read at once.
    """
    if ranges.object_bytes <= good_range_bytes:
        return dict.fromkeys(ranges.layers, ranges.last_layer)
    runs: dict[int, int] = {}
    run: list[int] = []
    nbytes, most = 0, 1
    for layer, of_layer in ranges.layers.items():
        run.append(layer)
        nbytes += of_layer.nbytes
        if len(run) == most or nbytes >= good_range_bytes or layer == ranges.last_layer:
            runs.update(dict.fromkeys(run, layer))
            run, nbytes, most = [], 0, 2 * most
    return runs


def most_keys(nbytes_per_key: int, config: EngineConfig, good_range_bytes: int = 0) -> int:
    """How many keys one store call may have by `max_transfer_blocks`, if each has so many bytes in it; 0 = any number.

    Where no number is given, small calls have more keys than big ones, up to 1 MiB. Not where the store says that short ranges
    are dear (`good_range_bytes`): layers are joined there, and the most ranges of a call are better spent on layers.
    """
    if config.max_transfer_blocks is not None:
        return config.max_transfer_blocks
    return SAFE_KEYS if good_range_bytes else max(SAFE_KEYS, SMALL_CALL_BYTES // max(1, nbytes_per_key))


def whole_rows(ranges: GroupRanges, config: EngineConfig) -> int:
    """How many whole objects of a group fit into one store call; 0: not one does. For stores with dear short ranges."""
    limits = [MAX_RANGES // max(1, ranges.pieces)]
    if keys := most_keys(ranges.object_bytes, config, good_range_bytes=1):
        limits.append(keys)
    if config.max_transfer_bytes:
        limits.append(config.max_transfer_bytes // max(1, ranges.object_bytes))
    return min(limits)


def group_ranges(layout: KVLayout, group_id: int, bases: Bases, config: EngineConfig, good_range_bytes: int = 0) -> GroupRanges:
    """Lays the group's entries over local memory, for a store with these `good_range_bytes`.

    Raises:
        LayoutError: an entry of the group has no base address.
    """
    by_layer: dict[int, list[tuple[int, int, int, int]]] = {}
    for r in layout.ranges(group_id):
        where = (group_id, int(r.layer), r.entry.name)
        if where not in bases:
            raise LayoutError(
                f"group {group_id}, layer {r.layer}, entry {r.entry.name!r}: no base address; add {where} to bases"
            )
        pieces = by_layer.setdefault(layout.stage_layer(r.layer), [])
        most = config.max_transfer_bytes or r.entry.nbytes
        for start in range(0, r.entry.nbytes, most):
            size = min(most, r.entry.nbytes - start)
            pieces.append((bases[where] + start, r.entry.stride, size, r.offset + start))
    layers: dict[int, LayerRanges] = {}
    shared: dict[bytes, Addresses] = {}
    first = 0
    for layer, rows in by_layer.items():
        table = np.array(rows, dtype=np.int64)
        bases_of, strides, sizes, offsets = (np.ascontiguousarray(table[:, i]) for i in range(4))

        def share(column: Addresses) -> Addresses:
            return shared.setdefault(column.tobytes(), column)

        shapes = tuple(
            CallShape(lo, hi, most, bases_of[lo:hi], share(strides[lo:hi]), share(sizes[lo:hi]), share(offsets[lo:hi]))
            for lo, hi, most in _columns(sizes, config, good_range_bytes)
        )
        layers[layer] = LayerRanges(StageLayer(layer), first, bases_of, strides, sizes, offsets, shapes)
        first += len(rows)
    return GroupRanges(group_id, layout.object_bytes(group_id), first, layers, max(layers, default=-1))


def _columns(sizes: Addresses, config: EngineConfig, good_range_bytes: int) -> tuple[tuple[int, int, int], ...]:
    """Cuts a layer's pieces into runs that one key may send in one call, with the most keys such a call may hold."""
    limit = config.max_transfer_bytes
    out: list[tuple[int, int, int]] = []
    lo = 0
    while lo < len(sizes):
        hi, total = lo, 0
        while hi < len(sizes) and hi - lo < MAX_RANGES and (hi == lo or not limit or total + int(sizes[hi]) <= limit):
            total += int(sizes[hi])
            hi += 1
        most = MAX_RANGES // (hi - lo)
        if limit:
            most = min(most, max(1, limit // total))
        if keys := most_keys(total, config, good_range_bytes):
            most = min(most, keys)
        out.append((lo, hi, max(1, most)))
        lo = hi
    return tuple(out)
