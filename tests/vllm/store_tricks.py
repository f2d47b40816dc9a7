"""What a test does to the embedded store of its process, behind the connector's back."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvactors.core.store import Outcome, RangeBatch
from kvactors.stores import MemoryStore

FLIPPED = 0x55
"""In every second byte: of numbers of two or four bytes that changes the mantissa alone, so nothing becomes infinite."""


class StoreTricks:
    def __init__(self) -> None:
        super().__init__()
        self._open = threading.Event()
        self._open.set()
        self._real: dict[str, Callable[..., Any]] = {}

    def corrupt(self) -> int:
        """Flips bits in every object: how many objects there are."""
        pool = _pool()
        with pool.changed:
            objects = list(pool._objects.values())
            for held in objects:
                for address, nbytes in held.extents:
                    content = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
                    content[::2] ^= FLIPPED
        return len(objects)

    def forget(self) -> None:
        """An empty store, as at first."""
        pool = _pool()
        with pool.changed:
            keys = list(pool._objects)
        for key in keys:
            _store().remove(key, force=True)

    def objects(self) -> int:
        return len(_pool())

    def hold_reads(self, calls: int, wait_s: float | None = None) -> None:
        """So many reads of objects do not return before `release`, or before so many seconds have passed."""
        self._open.clear()
        left, real, opened = [calls], MemoryStore.get_ranges, self._open
        lock = threading.Lock()

        def held(store: MemoryStore, batch: RangeBatch) -> list[Outcome]:
            with lock:
                left[0] -= 1
                holds = left[0] >= 0
            if holds:
                opened.wait(wait_s)
            return real(store, batch)

        self._replace("get_ranges", held)

    def lose_reads(self, times: int) -> None:
        """The next reads find nothing of what a lookup has just seen."""
        left, real = [times], MemoryStore.get_open

        def losing(store: MemoryStore, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
            if left[0]:
                left[0] -= 1
                for key in keys:
                    store.remove(key, force=True)
            return real(store, keys, sizes)

        self._replace("get_open", losing)

    def release(self) -> None:
        """The store is as it should be again."""
        self._open.set()
        for name, real in self._real.items():
            setattr(MemoryStore, name, real)
        self._real.clear()

    def _replace(self, name: str, trick: Callable[..., Any]) -> None:
        self._real.setdefault(name, getattr(MemoryStore, name))
        setattr(MemoryStore, name, trick)


def _store() -> MemoryStore:
    from kvactors.vllm.stores import shared_memory_store

    return shared_memory_store()


def _pool() -> Any:
    return _store().pool
