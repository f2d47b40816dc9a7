"""Copies of many equal-sized ranges between raw addresses: few numpy calls, the GIL released for big ones.

One uint8 array stands for the whole user address space, so a range is a view by arithmetic alone and needs no ctypes call.
Which way is fastest was measured (2 cores, numpy 2.4, 64 rows, microseconds per call):

| rows                            | 256 B | 4 KiB | 16 KiB | 64 KiB |
|---------------------------------|-------|-------|--------|--------|
| one strided 2-D copy            |   1.4 |     4 |     17 |     73 |
| index gather and scatter        |   3.4 |    30 |     56 |      – |
| one row view at a time          |    10 |    17 |     35 |     95 |
| one slice at a time             |    16 |    23 |     42 |    103 |
| slices of the caller's arrays   |    16 |    24 |     51 |    110 |

Hence: runs in which both addresses advance by constant steps are one strided copy; what is left goes by index if it is
small and many, by row views up to 64 KiB, and by slices above.

Nothing here checks an address: callers pass only addresses that `Regions` or the arena vouch for.
"""

from __future__ import annotations

import ctypes
import platform
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvactors.core.store import Addresses

Bytes = npt.NDArray[np.uint8]

LOWEST = 4096
"""The first address that can be copied: page 0 is never mapped, and numpy refuses a null pointer."""

HIGHEST = 1 << (47 if platform.machine() in ("x86_64", "AMD64") else 48)
"""One past the last user address, unless a process asks for more with a hint to mmap; nothing of ours does."""

_SPACE: Bytes = np.frombuffer(cast(Any, (ctypes.c_ubyte * (HIGHEST - LOWEST)).from_address(LOWEST)), np.uint8)

_INDEX_MAX_BYTES = 2048
_INDEX_MIN_ROWS = 12
_INDEX_CHUNK_BYTES = 64 << 10
"""An index copy goes through a temporary; this much stays in the second-level cache and in malloc's own pages."""
_ROW_VIEW_MAX_BYTES = ((1 << 63) - 1) // HIGHEST
"""numpy refuses a view whose size overflows 63 bits, even if it overlaps itself: 65,535 B per row on x86."""
_ITEM_MAX_BYTES = 16 << 10
"""Rows up to this size are copied with the GIL held: to give it away while others wait costs a system call and a wake-up each
time, more than such a row takes. Larger ones are copied faster by two threads in turn."""
_GIL_BYTES = 1 << 20
"""So much is copied before the GIL is given away all the same, some 100 µs."""
_RUN_MIN_ROWS = 8
_RUN_MAX_BYTES = 64 << 10
"""Above this size a row costs so much more than its call that looking for runs does not pay."""


@lru_cache(maxsize=256)
def _row_views(size: int) -> Bytes:
    """Row i is the `size` bytes from address LOWEST + i: every address at once, overlapping."""
    return np.ndarray((HIGHEST - LOWEST - size, size), np.uint8, cast(Any, _SPACE), 0, (1, 1))


@lru_cache(maxsize=256)
def _row_items(size: int) -> npt.NDArray[np.void]:
    """`_row_views` with rows of one item, whose copy keeps the GIL: numpy gives it away from some 500 items on."""
    return np.ndarray((HIGHEST - LOWEST - size, 1), np.dtype((np.void, size)), cast(Any, _SPACE), 0, (1, size))


def view(address: int, nbytes: int) -> Bytes:
    """The bytes at an address, writable; valid as long as the memory behind it is mapped."""
    return _SPACE[address - LOWEST : address - LOWEST + nbytes]


def address_of(array: npt.NDArray[Any]) -> int:
    """Where an array's first element lies."""
    return int(array.ctypes.data)


def copy_rows(destination: Addresses, source: Addresses, size: int) -> None:
    """Copy `size` bytes from each source address to the destination address in the same place.

    Args:
        destination: int64 of shape (n,). Rows must not overlap each other, nor any source row.
        source: int64 of shape (n,). Rows may repeat and overlap (one object read into many blocks).
        size: bytes per row.
    """
    n = len(destination)
    if n == 0 or size <= 0:
        return
    to, of = destination - LOWEST, source - LOWEST
    if n < _RUN_MIN_ROWS or size > _RUN_MAX_BYTES:
        _copy_scattered(to, of, size)
        return
    to_steps, of_steps = to[1:] - to[:-1], of[1:] - of[:-1]
    breaks = np.flatnonzero((to_steps[1:] != to_steps[:-1]) | (of_steps[1:] != of_steps[:-1]))
    if len(breaks) == 0:
        _copy_strided(int(to[0]), int(of[0]), n, int(to_steps[0]), int(of_steps[0]), size)
        return
    if len(breaks) > (n - 2) // 2:
        _copy_scattered(to, of, size)
        return
    left = np.ones(n, bool)
    start = 0  # the first row that no run has taken
    first = 0  # the first step of the present stretch of equal steps; it leads from row `first` to `first + 1`
    for last in [*breaks.tolist(), n - 2]:
        begin, end = max(first, start), last + 2
        if end - begin >= _RUN_MIN_ROWS:
            _copy_strided(int(to[begin]), int(of[begin]), end - begin, int(to_steps[first]), int(of_steps[first]), size)
            left[begin:end] = False
            start = end
        first = last + 1
    if left.any():
        _copy_scattered(to[left], of[left], size)


def _copy_strided(to: int, of: int, rows: int, to_step: int, of_step: int, size: int) -> None:
    space = cast(Any, _SPACE)
    target = np.ndarray((rows, size), np.uint8, space, to, (to_step, 1))
    target[...] = np.ndarray((rows, size), np.uint8, space, of, (of_step, 1))


def _copy_scattered(to: Addresses, of: Addresses, size: int) -> None:
    if size <= _INDEX_MAX_BYTES and len(to) >= _INDEX_MIN_ROWS:
        rows = _row_views(size)
        step = _INDEX_CHUNK_BYTES // size
        for begin in range(0, len(to), step):
            rows[to[begin : begin + step]] = rows[of[begin : begin + step]]
    elif size <= _ROW_VIEW_MAX_BYTES:
        items, rows = _row_items(size), _row_views(size)
        step = _GIL_BYTES // size if size <= _ITEM_MAX_BYTES else 1
        to_list, of_list = to.tolist(), of.tolist()
        for begin in range(0, len(to_list), step):
            last = min(begin + step, len(to_list)) - 1
            for t, o in zip(to_list[begin:last], of_list[begin:last], strict=True):
                items[t] = items[o]
            rows[to_list[last]] = rows[of_list[last]]
    else:
        space = _SPACE
        for t, o in zip(to.tolist(), of.tolist(), strict=True):
            space[t : t + size] = space[o : o + size]


def copy_table(bases: Addresses, offsets: Addresses, addresses: Addresses, sizes: Addresses, *, into_objects: bool) -> None:
    """Move r ranges for each of n objects: row i, range j is `sizes[j]` bytes at object address `bases[i] + offsets[j]`.

    Args:
        bases: int64 (n,), address of each object's first byte.
        offsets: int64 (r,), bytes from there.
        addresses: int64 (n, r), the local side.
        sizes: int64 (r,), bytes.
        into_objects: True copies local memory into the objects (put), False the other way (get).
    """
    if addresses.size < _RUN_MIN_ROWS:
        _copy_few(bases, offsets, addresses, sizes, into_objects)
        return
    different = dict.fromkeys(sizes.tolist())
    for size in different:
        # Range by range, so that neighbouring objects or blocks make runs.
        if len(different) == 1:
            objects, local = bases + offsets[:, None], addresses.T
        else:
            columns = np.flatnonzero(sizes == size)
            objects, local = bases + offsets[columns, None], addresses.T[columns]
        if into_objects:
            copy_rows(objects.ravel(), local.ravel(), size)
        else:
            copy_rows(local.ravel(), objects.ravel(), size)


def _copy_few(bases: Addresses, offsets: Addresses, addresses: Addresses, sizes: Addresses, into_objects: bool) -> None:
    """`copy_table` range by range: for a few, this takes less than to make arrays of addresses."""
    shape = list(zip(offsets.tolist(), sizes.tolist(), strict=True))
    for base, row in zip(bases.tolist(), addresses.tolist(), strict=True):
        for address, (offset, size) in zip(row, shape, strict=True):
            stored, local = view(base + offset, size), view(address, size)
            if into_objects:
                stored[...] = local
            else:
                local[...] = stored
