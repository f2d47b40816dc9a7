"""A store that may not be there yet: while nobody answers it is unreachable, and every probe of its health tries to open it.

So a program can start before its store does, and go on when the store comes: an engine's circuit probes by `health`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvactors.core.store import Health, Outcome, RangeBatch, Store
from kvactors.errors import StoreError, StoreUnreachableError
from kvactors.log import get_logger

log = get_logger("kvactors.stores")


class LateStore:
    """Implements `kvactors.core.store.Store` by what `opener` returns, from the first time that it does not raise.

    Args:
        opener: opens the store; `StoreUnreachableError` = not there yet, any other error is the caller's own.
        lease_s, put_safe_age_s, good_range_bytes, reads_whole_objects: the store's, which must be known before it is.
    """

    def __init__(
        self,
        opener: Callable[[], Store],
        *,
        name: str,
        lease_s: float,
        put_safe_age_s: float,
        good_range_bytes: int,
        reads_whole_objects: bool = False,
    ) -> None:
        self.name = name
        self.lease_s, self.put_safe_age_s, self.good_range_bytes = lease_s, put_safe_age_s, good_range_bytes
        self.reads_whole_objects = reads_whole_objects
        self._opener = opener
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._regions: dict[int, int] = {}
        self._closed = False

    def try_open(self) -> str:
        """Opens the store if it is there; what is wrong if it is not. Blocks for as long as the attempt takes."""
        with self._held():
            if self._store is None and not self._closed:
                try:
                    self._store = self._opened()
                except StoreUnreachableError as error:
                    return str(error)
        return "this store was closed" if self._closed else ""

    @contextmanager
    def _held(self) -> Iterator[None]:
        """With the lock; whoever closes meanwhile does not wait for it, so that is done here."""
        try:
            with self._lock:
                yield
        finally:
            if self._closed:
                self.close()

    def _opened(self) -> Store:
        store = self._opener()
        try:
            for address, nbytes in self._regions.items():
                store.register(address, nbytes)
        except BaseException:
            store.close()
            raise
        return store

    def _here(self) -> Store | None:
        if self._closed:
            raise StoreError("the store was closed; open another")
        return self._store

    def _reached(self) -> Store:
        store = self._here()
        if store is None:
            raise StoreUnreachableError("the store does not answer yet; it is tried again")
        return store

    def put_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        store = self._here()
        return [Outcome.UNREACHABLE] * len(keys) if store is None else store.put_open(keys, sizes)

    def put_ranges(self, batch: RangeBatch) -> list[Outcome]:
        store = self._here()
        return [Outcome.UNREACHABLE] * len(batch.keys) if store is None else store.put_ranges(batch)

    def put_commit(self, keys: Sequence[str]) -> list[Outcome]:
        store = self._here()
        return [Outcome.UNREACHABLE] * len(keys) if store is None else store.put_commit(keys)

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        store = self._here()
        return [Outcome.UNREACHABLE] * len(keys) if store is None else store.put_revoke(keys)

    def get_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        store = self._here()
        return [Outcome.UNREACHABLE] * len(keys) if store is None else store.get_open(keys, sizes)

    def get_ranges(self, batch: RangeBatch) -> list[Outcome]:
        store = self._here()
        return [Outcome.UNREACHABLE] * len(batch.keys) if store is None else store.get_ranges(batch)

    def get_close(self, keys: Sequence[str]) -> list[Outcome]:
        store = self._here()
        return [Outcome.UNREACHABLE] * len(keys) if store is None else store.get_close(keys)

    def readable(self, keys: Sequence[str]) -> list[bool]:
        return self._reached().readable(keys)

    def register(self, address: int, nbytes: int) -> None:
        with self._held():
            if self._store is not None:
                self._store.register(address, nbytes)
            self._regions[address] = nbytes

    def unregister(self, address: int) -> None:
        with self._held():
            if self._store is not None:
                self._store.unregister(address)
            self._regions.pop(address, None)

    def health(self) -> Health:
        """Never raises; tries to open the store if it is not open."""
        try:
            problem = self.try_open()
            return Health(False, problem) if problem else self._reached().health()
        except Exception as error:  # a wrong option cannot come right by waiting, but a probe must not raise
            return Health(False, repr(error))

    def stats(self) -> Mapping[str, Any]:
        return {} if self._store is None else self._store.stats()

    def close(self) -> None:
        """Closes what is open. Not waited for is an attempt to open, or a change of what is registered; that closes it at its
        end."""
        self._closed = True
        if not self._lock.acquire(blocking=False):
            return
        try:
            store, self._store = self._store, None
        finally:
            self._lock.release()
        if store is not None:
            store.close()
