"""Objects of another client, with bytes that can be told from all others: whoever overwrites a foreign object hits these."""

from __future__ import annotations

import hashlib
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvactors.core.store import Outcome, RangeBatch
from kvactors.stores import MooncakeStore

PUT_S = 20.0
_RETRY_S = 0.01
"""The master and its clients come back when they think of it, and tell nobody: nothing to await, so they are asked again."""


class Found(NamedTuple):
    """How many sentinels are right, not readable any more, and of wrong bytes."""

    right: int
    absent: int
    wrong: int


class Sentinels:
    """`count` objects of `nbytes` bytes, written through a client of their own."""

    def __init__(self, store: MooncakeStore, count: int = 200, nbytes: int = 4096) -> None:
        self.keys = [f"sentinel/{i}" for i in range(count)]
        self._store, self._nbytes = store, nbytes
        self._right = np.array([np.frombuffer(hashlib.shake_256(k.encode()).digest(nbytes), np.uint8) for k in self.keys])
        self._local = np.zeros_like(self._right)
        for array in (self._right, self._local):
            store.register(array.ctypes.data, array.nbytes)

    def put(self) -> int:
        """Writes those that are not there. Answers how many; 0 while the store takes none."""
        opened = self._store.put_open(self.keys, [self._nbytes] * len(self.keys))
        rows = [row for row, outcome in enumerate(opened) if outcome is Outcome.OK]
        if not rows:
            return 0
        keys = [self.keys[row] for row in rows]
        moved = self._store.put_ranges(self._batch(self._right, rows))
        good = [key for key, outcome in zip(keys, moved, strict=True) if outcome is Outcome.OK]
        committed = self._store.put_commit(good).count(Outcome.OK) if good else 0
        if len(good) < len(keys):
            self._store.put_revoke([key for key in keys if key not in good])
        return committed

    def put_all(self) -> None:
        """Writes all, as soon as the store takes them: after a master's restart its clients give their memory again when they
        think of it."""
        deadline = time.monotonic() + PUT_S
        written = 0
        while written < len(self.keys):
            written += self.put()
            if written < len(self.keys):
                assert time.monotonic() < deadline, f"{written} sentinels could be written"
                time.sleep(_RETRY_S)

    def wait_until_gone(self) -> None:
        """Until the master has dropped all of them. Reads of a dead owner's objects cost 2 s each before that."""
        deadline = time.monotonic() + PUT_S
        while any(self._store.readable(self.keys)):
            assert time.monotonic() < deadline, "the sentinels are still there"
            time.sleep(_RETRY_S)

    def check(self) -> Found:
        """Reads all of them."""
        self._local[:] = 0
        opened = self._store.get_open(self.keys, [self._nbytes] * len(self.keys))
        rows = [row for row, outcome in enumerate(opened) if outcome is Outcome.OK]
        read: list[Outcome] = []
        if rows:
            read = self._store.get_ranges(self._batch(self._local, rows))
            self._store.get_close([self.keys[row] for row in rows])
        got = [row for row, outcome in zip(rows, read, strict=True) if outcome is Outcome.OK]
        right = sum(bool((self._local[row] == self._right[row]).all()) for row in got)
        return Found(right, len(self.keys) - len(got), len(got) - right)

    def _batch(self, memory: npt.NDArray[np.uint8], rows: list[int]) -> RangeBatch:
        addresses = memory.ctypes.data + np.array(rows, np.int64)[:, None] * self._nbytes
        return RangeBatch([self.keys[r] for r in rows], addresses, np.array([self._nbytes]), np.array([0]))
