"""A simulated Mooncake store with its traps: it knows what is right, but behaves as badly as the real one.

Commit verifies nothing. Sessions of a client outlive the master: their writes "succeed" and land in whatever lies there now.
A read past its lease may return another object's bytes and say OK. One close drops a get session for everyone in the client.
Source: the measured behaviour of a real store (docs/design/store-contract.md).

Unlike the real one it judges: each commit is compared with the truth, each write on a stale session is noted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvactors.core.store import Health, Outcome, RangeBatch
from kvactors.errors import StoreUnreachableError
from kvactors.simulate.truth import content

Now = Callable[[], float]
T = TypeVar("T")

DISCARD_S = 30.0
RELEASE_S = 600.0


@dataclass(slots=True)
class _Object:
    address: int
    size: int
    client: int
    begun_at: float
    committed: bool = False
    lease_until: float = 0.0
    read_until: float = 0.0
    used_at: float = 0.0


@dataclass(slots=True)
class _Session:
    address: int
    size: int
    epoch: int
    until: float = 0.0


@dataclass(slots=True)
class Mishap:
    """What goes wrong with one call: outcomes of keys that are not carried out, an answer one key short, an answer lost."""

    outcomes: Mapping[str, Outcome]
    short: bool = False
    lost_answer: BaseException | None = None
    """raised after the call was carried out"""

    def answered(self, keys: Sequence[str], answers: list[T], touched: set[str]) -> list[T]:
        """What the caller gets of the answers."""
        if self.short or self.lost_answer is not None:
            touched.update(keys)
        if self.lost_answer is not None:
            raise self.lost_answer
        return answers[:-1] if self.short else answers


class SimulatedPool:
    """The master and the memory that all clients share.

    Attributes:
        memory: local memory of all engines, and the pool's: addresses are offsets into it.
        violations: what the pool saw that must never happen.
        touched: keys for which some answer was not OK, or that were evicted: loads of them may fail.
    """

    def __init__(self, memory: bytearray, base: int, capacity: int, now: Now, rng: random.Random, lease_s: float) -> None:
        self.memory, self.now, self.rng = memory, now, rng
        self.lease_s = lease_s
        self.alive = True
        self.life = 0
        self.objects: dict[str, _Object] = {}
        self.violations: list[str] = []
        self.touched: set[str] = set()
        self.damaged: set[str] = set()
        """keys overwritten by a session whose loss no client could know of: the master died and came back between two calls"""
        self.full_until = -math.inf
        """nothing fits before that, and nothing is evicted for it"""
        self.sloppy_leases = False
        """reads past the lease return whatever lies there, as success"""
        self._free: dict[int, list[int]] = {}
        self._top, self._limit = base, base + capacity

    def allocate(self, size: int) -> int | None:
        free = self._free.get(size)
        if free:
            return free.pop(self.rng.randrange(len(free)))
        if self._top + size > self._limit:
            return None
        self._top += size
        return self._top - size

    def drop(self, key: str) -> None:
        o = self.objects.pop(key)
        self._free.setdefault(o.size, []).append(o.address)
        self.touched.add(key)

    def evict(self, count: int) -> int:
        """Drops the least recently used committed objects without a lease."""
        now = self.now()
        idle = [k for k, o in self.objects.items() if o.committed and o.lease_until <= now]
        idle.sort(key=lambda k: self.objects[k].used_at)
        for key in idle[:count]:
            self.drop(key)
        return min(count, len(idle))

    def evict_any(self) -> None:
        """Drops one committed object that nobody reads, although a lookup may have seen it."""
        now = self.now()
        unread = [k for k, o in self.objects.items() if o.committed and o.read_until <= now]
        if unread:
            self.drop(unread[self.rng.randrange(len(unread))])

    def kill(self) -> None:
        self.alive = False

    def restart(self) -> None:
        """A master without memory: every object is gone, their addresses are free; clients know nothing of it."""
        self.alive = True
        self.life += 1
        for key in list(self.objects):
            self.drop(key)

    def discard_expired(self, key: str, client: int) -> None:
        """A put that was begun long ago gives way to another client; after the release timeout its memory is free."""
        o = self.objects.get(key)
        if o is None or o.committed:
            return
        age = self.now() - o.begun_at
        if age > RELEASE_S or (age > DISCARD_S and o.client != client):
            self.drop(key)


class SimulatedStore:
    """One client of the pool; implements `kvactors.core.store.Store`."""

    name = "simulated"
    put_safe_age_s = DISCARD_S / 2

    def __init__(
        self,
        pool: SimulatedPool,
        client: int,
        trouble: Callable[[str, Sequence[str]], Mishap],
        good_range_bytes: int = 0,
    ) -> None:
        self.pool, self.client = pool, client
        self.epoch: Callable[[], int] = lambda: 0
        """how many losses the client's engine knows of"""
        self.lease_s = pool.lease_s
        self.good_range_bytes = good_range_bytes
        self.reads_whole_objects = client % 2 == 1
        self._trouble = trouble
        self._puts: dict[str, _Session] = {}
        self._gets: dict[str, _Session] = {}

    def _answer(self, call: str, keys: Sequence[str], one: Callable[[str, int], Outcome]) -> list[Outcome]:
        """One outcome per key, less what the trouble of this call says, which may also raise."""
        wrong = self._trouble(call, keys)
        if not self.pool.alive:
            return [Outcome.UNREACHABLE] * len(keys)
        out = []
        for row, key in enumerate(keys):
            outcome = wrong.outcomes.get(key)
            if outcome is None:
                outcome = one(key, row)
            if outcome is not Outcome.OK:
                self.pool.touched.add(key)
            out.append(outcome)
        return wrong.answered(keys, out, self.pool.touched)

    def put_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        pool = self.pool

        def one(key: str, row: int) -> Outcome:
            if key in self._puts:
                return Outcome.INVALID
            pool.discard_expired(key, self.client)
            if key in pool.objects:
                return Outcome.EXISTS
            if pool.now() < pool.full_until:
                return Outcome.NO_SPACE
            address = pool.allocate(sizes[row])
            if address is None:
                pool.evict(4)
                return Outcome.NO_SPACE
            pool.objects[key] = _Object(address, sizes[row], self.client, pool.now())
            self._puts[key] = _Session(address, sizes[row], self.epoch())
            return Outcome.OK

        return self._answer("put_open", keys, one)

    def put_ranges(self, batch: RangeBatch) -> list[Outcome]:
        pool, memory, ranges = self.pool, self.pool.memory, _ranges(batch)

        def one(key: str, row: int) -> Outcome:
            s = self._puts.get(key)
            if s is None:
                return Outcome.INVALID
            o = pool.objects.get(key)
            if o is None or o.address != s.address or o.committed:
                if self.epoch() > s.epoch:
                    pool.violations.append(f"I11: a range of {key} was written on a session that the engine knew was lost")
                pool.damaged.update(k for k, other in pool.objects.items() if other.address == s.address)
            for address, size, offset in ranges(row):
                if offset + size > s.size:
                    return Outcome.INVALID
                at = s.address + offset
                memory[at : at + size] = memory[address : address + size]
            return Outcome.OK

        return self._answer("put_ranges", batch.keys, one)

    def put_commit(self, keys: Sequence[str]) -> list[Outcome]:
        pool = self.pool

        def one(key: str, _: int) -> Outcome:
            s = self._puts.pop(key, None)
            if s is None:
                return Outcome.INVALID
            o = pool.objects.get(key)
            if o is None or o.address != s.address:
                return Outcome.NOT_FOUND
            if key not in pool.damaged and bytes(pool.memory[s.address : s.address + s.size]) != content(key, s.size):
                pool.violations.append(f"I1: {key} was committed with wrong bytes")
            o.committed, o.used_at = True, pool.now()
            return Outcome.OK

        return self._answer("put_commit", keys, one)

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        pool = self.pool

        def one(key: str, _: int) -> Outcome:
            s = self._puts.pop(key, None)
            if s is None:
                return Outcome.INVALID
            o = pool.objects.get(key)
            if o is None or o.address != s.address:
                return Outcome.NOT_FOUND
            touched = key in pool.touched
            pool.drop(key)
            if not touched:
                pool.touched.discard(key)
            return Outcome.OK

        return self._answer("put_revoke", keys, one)

    def get_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        pool = self.pool

        def one(key: str, row: int) -> Outcome:
            o = pool.objects.get(key)
            if o is None:
                return Outcome.NOT_FOUND
            if not o.committed:
                return Outcome.NOT_READY
            if o.size != sizes[row]:
                return Outcome.SIZE_MISMATCH
            o.used_at = pool.now()
            o.lease_until = max(o.lease_until, pool.now() + pool.lease_s)
            o.read_until = max(o.read_until, o.lease_until)
            self._gets[key] = _Session(o.address, o.size, self.epoch(), o.lease_until)
            return Outcome.OK

        return self._answer("get_open", keys, one)

    def get_ranges(self, batch: RangeBatch) -> list[Outcome]:
        pool, memory, ranges = self.pool, self.pool.memory, _ranges(batch)

        def one(key: str, row: int) -> Outcome:
            s = self._gets.get(key)
            if s is None:
                return Outcome.INVALID
            if self.epoch() > s.epoch:
                pool.violations.append(f"I11: a range of {key} was read on a session that the engine knew was lost")
            if pool.now() > s.until and not pool.sloppy_leases:
                del self._gets[key]
                return Outcome.LEASE_EXPIRED
            late = pool.now() > s.until
            for address, size, offset in ranges(row):
                at = s.address + offset
                memory[address : address + size] = b"\xaa" * size if late else memory[at : at + size]
            return Outcome.OK

        return self._answer("get_ranges", batch.keys, one)

    def get_close(self, keys: Sequence[str]) -> list[Outcome]:
        def one(key: str, _: int) -> Outcome:
            self._gets.pop(key, None)
            return Outcome.OK

        return self._answer("get_close", keys, one)

    def readable(self, keys: Sequence[str]) -> list[bool]:
        wrong = self._trouble("readable", keys)
        if not self.pool.alive:
            raise StoreUnreachableError("the simulated master is dead")
        now = self.pool.now()
        out = []
        for key in keys:
            o = self.pool.objects.get(key)
            if o is not None and o.committed:
                o.lease_until = max(o.lease_until, now + self.pool.lease_s)
            out.append(o is not None and o.committed)
        return wrong.answered(keys if wrong.lost_answer else (), out, self.pool.touched)

    def open_sessions(self) -> list[str]:
        return [f"put {k}" for k in self._puts] + [f"get {k}" for k in self._gets]

    def register(self, address: int, nbytes: int) -> None:
        """All simulated memory is registered."""

    def unregister(self, address: int) -> None:
        """All simulated memory is registered."""

    def health(self) -> Health:
        return Health(self.pool.alive, "" if self.pool.alive else "the simulated master is dead")

    def stats(self) -> Mapping[str, Any]:
        return {"objects": len(self.pool.objects)}

    def close(self) -> None:
        """Nothing to close."""


def _ranges(batch: RangeBatch) -> Callable[[int], Iterator[tuple[int, int, int]]]:
    """The ranges of a row (of a key): local address, bytes, offset in the object."""
    addresses, sizes, offsets = batch.addresses.tolist(), batch.sizes.tolist(), batch.offsets.tolist()
    return lambda row: zip(addresses[row], sizes, offsets, strict=True)
