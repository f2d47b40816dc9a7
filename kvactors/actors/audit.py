"""A store that watches how it is used, and notes every call that breaks an invariant.

It sees only what crosses the boundary to the store, so it proves things without trusting the engine's own books: it counts
bytes per key itself, and knows which calls are under way.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvactors.core.clock import Clock
from kvactors.core.config import EngineConfig
from kvactors.core.ranges import MAX_RANGES, most_keys
from kvactors.core.store import Health, Outcome, RangeBatch, Store


class _Put:
    __slots__ = ("life", "opened_at", "put", "sent", "size")

    def __init__(self, size: int, opened_at: float, life: int) -> None:
        self.size, self.opened_at, self.life = size, opened_at, life
        self.sent: set[int] = set()
        """offsets of ranges that were sent"""
        self.put: list[tuple[int, int]] = []
        """(begin, end) of ranges that arrived"""

    def hole(self) -> int | None:
        """The first byte that was not put; None: every byte was."""
        at = 0
        for begin, end in sorted(self.put):
            if begin > at:
                return at
            at = max(at, end)
        return at if at < self.size else None


class AuditedStore:
    """Delegates every call to `store`; `violations` lists what was wrong, `checked` counts what was looked at."""

    def __init__(self, store: Store, clock: Clock, config: EngineConfig) -> None:
        self.name, self.lease_s, self.put_safe_age_s = store.name, store.lease_s, store.put_safe_age_s
        self.good_range_bytes: int = getattr(store, "good_range_bytes", 0)
        self.reads_whole_objects: bool = getattr(store, "reads_whole_objects", False)
        self.violations: list[str] = []
        self.checked = 0
        self._store, self._clock, self._config = store, clock, config
        self._lock = threading.Lock()
        self._puts: dict[str, _Put] = {}
        self._gets: set[str] = set()
        self._writing: Counter[str] = Counter()
        self._reading: Counter[str] = Counter()
        self._calls = 0
        self._seen = threading.local()

    def begin(self, epoch: int) -> None:
        """The worker that is about to call knows the store as of this life of its master: what it then does is judged by it."""
        self._seen.epoch = epoch

    @property
    def _life(self) -> int:
        life: int = getattr(self._seen, "epoch", 0)
        return life

    def open_sessions(self) -> list[str]:
        with self._lock:
            return [f"put {k}" for k in self._puts] + [f"get {k}" for k in self._gets]

    def _check(self, invariant: str, holds: bool, what: str) -> None:
        self.checked += 1
        if not holds:
            self.violations.append(f"{invariant}: {what}")

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._lock:
            self._calls += 1
            limit = self._config.workers + 1 + self._config.max_lost_workers
            self._check("I7", self._calls <= limit, f"{self._calls} store calls at once; at most {limit} workers exist")
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1

    # -- puts --------------------------------------------------------------------------------------------------------

    def put_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        with self._lock:
            for key in keys:
                self._check("I10", key not in self._puts, f"put open of {key}, which this engine is writing already")
        opened_at, life = self._clock.now(), self._life
        with self._call():
            outcomes = self._store.put_open(keys, sizes)
        with self._lock:
            for key, size, outcome in zip(keys, sizes, outcomes, strict=False):
                if outcome is Outcome.OK:
                    self._puts[key] = _Put(size, opened_at, life)
        return outcomes

    def _check_limits(self, batch: RangeBatch) -> None:
        config, n = self._config, len(batch.keys)
        if keys := most_keys(batch.nbytes_per_key, config, self.good_range_bytes):
            self._check("I7", n <= keys, f"{n} keys in one call")
        self._check("I7", n * len(batch.sizes) <= MAX_RANGES, f"{n * len(batch.sizes)} ranges in one call")
        if config.max_transfer_bytes:
            nbytes = n * batch.nbytes_per_key
            self._check("I7", nbytes <= config.max_transfer_bytes, f"{nbytes} bytes in one call")

    def put_ranges(self, batch: RangeBatch) -> list[Outcome]:
        now, offsets = self._clock.now(), batch.offsets.tolist()
        ranges = list(zip(offsets, (batch.offsets + batch.sizes).tolist(), strict=True))
        with self._lock:
            self._check_limits(batch)
            for key in batch.keys:
                put = self._puts.get(key)
                self._check("I2", put is not None, f"range put of {key}, which has no open session")
                if put is not None:
                    self._check("I11", now - put.opened_at <= self.put_safe_age_s, f"range put of {key} on a session too old")
                    self._check("I11", put.life == self._life, f"range put of {key} after its master was lost")
                    twice = put.sent.intersection(offsets)
                    self._check("I1", not twice, f"offsets {sorted(twice)[:3]} of {key} are put twice")
                    put.sent.update(offsets)
            self._writing.update(batch.keys)
        try:
            with self._call():
                outcomes = self._store.put_ranges(batch)
        finally:
            with self._lock:
                _subtract(self._writing, batch.keys)
        with self._lock:
            for key, outcome in zip(batch.keys, outcomes, strict=False):
                put = self._puts.get(key)
                if put is not None and outcome is Outcome.OK:
                    put.put += ranges
        return outcomes

    def put_commit(self, keys: Sequence[str]) -> list[Outcome]:
        with self._lock:
            for key in keys:
                put = self._puts.get(key)
                self._check("I2", put is not None, f"commit of {key}, which has no open session")
                if put is not None:
                    hole = put.hole()
                    self._check("I1", hole is None, f"commit of {key}: byte {hole} of {put.size} was not put")
                    self._check("I11", put.life == self._life, f"commit of {key} after its master was lost")
                self._check("I1", not self._writing[key], f"commit of {key} with a range call under way")
        with self._call():
            outcomes = self._store.put_commit(keys)
        self._end(keys, outcomes, (Outcome.OK,))
        return outcomes

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        with self._lock:
            for key in keys:
                self._check("I2", not self._writing[key], f"revoke of {key} with a range call under way")
        with self._call():
            outcomes = self._store.put_revoke(keys)
        self._end(keys, outcomes, (Outcome.OK, Outcome.INVALID))  # INVALID: there is no such session
        return outcomes

    def _end(self, keys: Sequence[str], outcomes: Sequence[Outcome], ended: Sequence[Outcome]) -> None:
        with self._lock:
            for key, outcome in zip(keys, outcomes, strict=False):
                if outcome in ended:
                    self._puts.pop(key, None)

    # -- gets --------------------------------------------------------------------------------------------------------

    def get_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        with self._call():
            outcomes = self._store.get_open(keys, sizes)
        with self._lock:
            self._gets.update(k for k, o in zip(keys, outcomes, strict=False) if o is Outcome.OK)
        return outcomes

    def get_ranges(self, batch: RangeBatch) -> list[Outcome]:
        with self._lock:
            self._check_limits(batch)
            for key in batch.keys:
                self._check("I6", key in self._gets, f"range get of {key}, which has no open session")
            self._reading.update(batch.keys)
        try:
            with self._call():
                outcomes = self._store.get_ranges(batch)
        finally:
            with self._lock:
                _subtract(self._reading, batch.keys)
        return outcomes

    def get_close(self, keys: Sequence[str]) -> list[Outcome]:
        with self._lock:
            for key in keys:
                self._check("I6", key in self._gets, f"close of {key}, which has no open session")
                self._check("I6", not self._reading[key], f"close of {key} with a read under way")
        with self._call():
            outcomes = self._store.get_close(keys)
        with self._lock:
            if len(outcomes) == len(keys):  # a close that raised, or was not answered, may be tried again
                self._gets.difference_update(keys)
        return outcomes

    # -- the rest ----------------------------------------------------------------------------------------------------

    def readable(self, keys: Sequence[str]) -> list[bool]:
        with self._call():
            return self._store.readable(keys)

    def register(self, address: int, nbytes: int) -> None:
        self._store.register(address, nbytes)

    def unregister(self, address: int) -> None:
        self._store.unregister(address)

    def health(self) -> Health:
        return self._store.health()

    def stats(self) -> Mapping[str, Any]:
        return self._store.stats()

    def close(self) -> None:
        self._store.close()


def _subtract(counts: Counter[str], keys: Sequence[str]) -> None:
    """Takes one off each; a key at zero is forgotten, so that a long run does not remember every key."""
    for key in keys:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
