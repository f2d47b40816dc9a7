"""Memory for stored objects: slabs that are touched once and then recycled, so that a steady state meets no fresh page.

The first touch of a page costs some twenty times a copy of it (measured: 0.35 against 8.5 GB/s), hence nothing is ever given
back to the system before the arena itself goes. What bounds the footprint instead:

* freed extents coalesce with both neighbours at once (boundary tags: two dictionaries, O(1)), a request takes an extent of
  its exact size if there is one (the usual case: a group's objects are all alike), else the smallest that fits, split;
* when fragmentation leaves no single extent, the object is laid over several, rather than growing past the bound.

So footprint <= max(reserve, 1.125 x peak of live bytes + one slab), always, with live bytes counted in whole `ALIGNMENT` units.
Not thread-safe: the pool's lock guards it.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, insort
from contextlib import suppress
from itertools import pairwise

import numpy as np

from kvactors.stores.copying import address_of

ALIGNMENT = 64
"""Extents start and end on cache lines, so that neighbours never share one."""

_PAGE = 4096
_HUGE_PAGE = 2 << 20

Extents = tuple[tuple[int, int], ...]
"""(address, bytes) pieces of one object in order; nearly always a single one."""


class Arena:
    """Hands out extents of pre-touched memory.

    Args:
        slab_bytes: the largest step by which the arena grows (an object larger than that gets a slab of its own size). The
            first slabs are smaller, each as large as all before it, so that a small pool stays small.
        reserve_bytes: mapped and touched at once.
    """

    def __init__(self, slab_bytes: int = 16 << 20, reserve_bytes: int = 0) -> None:
        self.slab_bytes = max(_PAGE, _up(slab_bytes, _PAGE))
        self.footprint_bytes = 0
        """Mapped and touched."""
        self.live_bytes = 0
        """Handed out, in whole units of `ALIGNMENT`."""
        self.peak_bytes = 0
        """The most that `live_bytes` has been."""
        self._slabs: list[mmap.mmap] = []
        self._size_at: dict[int, int] = {}  # free extent: start -> bytes
        self._start_to: dict[int, int] = {}  # free extent: end -> start
        self._starts: dict[int, dict[int, None]] = {}  # bytes -> starts of free extents of that size, oldest first
        self._sizes: list[int] = []  # the keys of _starts, sorted
        self._live: dict[int, int] = {}  # start -> bytes
        self._reserved = _up(max(0, reserve_bytes), _PAGE)
        if self._reserved:
            self._grow(self._reserved)

    def __repr__(self) -> str:
        return (
            f"<Arena live={self.live_bytes} footprint={self.footprint_bytes} slabs={len(self._slabs)} "
            f"free_extents={len(self._size_at)}>"
        )

    def allocate(self, nbytes: int) -> Extents:
        """Memory for `nbytes` (> 0) bytes. The pieces' bytes sum to `nbytes`; each starts on an `ALIGNMENT` boundary.

        Raises MemoryError or OSError when the system gives no more memory; the arena is then as before.
        """
        want = _up(nbytes, ALIGNMENT)
        peak = max(self.peak_bytes, self.live_bytes + want)
        start = self._take_fit(want)
        if start is None:
            step = max(want, min(self.slab_bytes, max(self.footprint_bytes, 16 * _PAGE)))
            step = _up(step, _PAGE)
            if self.footprint_bytes + step <= peak + peak // 8 + self.slab_bytes:
                self._grow(step)
                start = self._take_fit(want)
        if start is not None:
            self._hand_out(start, want, peak)
            return ((start, nbytes),)
        return self._allocate_scattered(nbytes, want, peak)

    def free(self, extents: Extents) -> None:
        """Take back what `allocate` returned. KeyError for anything else, also for freeing twice."""
        for start, _ in extents:
            if start not in self._live:
                raise KeyError(f"address {start:#x} is not a live extent of this arena")
        for start, _ in extents:
            size = self._live.pop(start)
            self.live_bytes -= size
            self._add_free(start, size)

    def check(self) -> None:
        """AssertionError unless the books balance (for tests)."""
        assert sum(self._size_at.values()) + self.live_bytes == self.footprint_bytes
        assert sum(self._live.values()) == self.live_bytes
        assert self._sizes == sorted(self._starts)
        spans = sorted([*self._size_at.items(), *self._live.items()])
        for (start, size), (following, _) in pairwise(spans):
            assert start + size <= following, "extents overlap"
        for start, size in self._size_at.items():
            assert self._start_to[start + size] == start
            assert start in self._starts[size]
            assert start + size not in self._size_at, "free neighbours were not coalesced"
        assert self.footprint_bytes <= max(self._reserved, self.peak_bytes + self.peak_bytes // 8 + self.slab_bytes)

    def _allocate_scattered(self, nbytes: int, want: int, peak: int) -> Extents:
        missing = want - (self.footprint_bytes - self.live_bytes)
        if missing > 0:
            self._grow(_up(missing, _PAGE))
        pieces: list[tuple[int, int]] = []
        left, payload = want, nbytes
        while left:
            size = self._sizes[-1]
            start = next(reversed(self._starts[size]))
            part = min(size, left)
            self._take(start, part)
            self._hand_out(start, part, peak)
            pieces.append((start, min(part, payload)))
            left -= part
            payload -= min(part, payload)
        return tuple(pieces)

    def _take_fit(self, want: int) -> int | None:
        at = bisect_left(self._sizes, want)
        if at == len(self._sizes):
            return None
        start = next(reversed(self._starts[self._sizes[at]]))
        self._take(start, want)
        return start

    def _take(self, start: int, want: int) -> None:
        size = self._size_at[start]
        left = size - want
        at = bisect_left(self._sizes, size)
        if left and len(self._starts[size]) == 1 and (self._sizes[at - 1] if at else 0) < left:
            # The usual case, one large extent that gets smaller: it keeps its place among the sizes.
            del self._size_at[start], self._starts[size]
            self._size_at[start + want] = self._sizes[at] = left
            self._start_to[start + size] = start + want
            self._starts[left] = {start + want: None}
            return
        self._remove_free(start, size)
        if left:
            self._insert_free(start + want, left)

    def _hand_out(self, start: int, size: int, peak: int) -> None:
        self._live[start] = size
        self.live_bytes += size
        self.peak_bytes = peak

    def _add_free(self, start: int, size: int) -> None:
        before = self._start_to.get(start)
        if before is not None:
            self._remove_free(before, start - before)
            start, size = before, size + start - before
        after = self._size_at.get(start + size)
        if after is not None:
            self._remove_free(start + size, after)
            size += after
        self._insert_free(start, size)

    def _insert_free(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_to[start + size] = start
        starts = self._starts.get(size)
        if starts is None:
            starts = self._starts[size] = {}
            insort(self._sizes, size)
        starts[start] = None

    def _remove_free(self, start: int, size: int) -> None:
        del self._size_at[start]
        del self._start_to[start + size]
        starts = self._starts[size]
        del starts[start]
        if not starts:
            del self._starts[size]
            del self._sizes[bisect_left(self._sizes, size)]

    def _grow(self, nbytes: int) -> None:
        slab = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without transparent huge pages
                slab.madvise(mmap.MADV_HUGEPAGE)
        pages = np.frombuffer(slab, np.uint8)
        pages[::_PAGE] = 0
        self._slabs.append(slab)
        self.footprint_bytes += nbytes
        self._add_free(address_of(pages), nbytes)


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
