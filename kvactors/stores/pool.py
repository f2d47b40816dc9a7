"""The shared side of the embedded store: what Mooncake's master and its segments are to its clients.

A pool knows objects, their states, leases and memory; a client (`MemoryStore`) knows its own sessions. Everything here is
called with `pool.changed` (one lock and its condition) held and does metadata only: bytes are copied outside the lock, with the
objects pinned by a `Use`.

States of an object, and what moves it (docs/design/store-contract.md has the answers that clients get):

    OPEN        put_open                                        → ENDING, SUPERSEDED, REMOVED (release timeout)
    ENDING      put_commit or put_revoke waits for its ranges   → COMMITTED, SUPERSEDED, REMOVED (revoke, release timeout)
    SUPERSEDED  another client took the key after the discard
                timeout; the memory stays pinned                → REMOVED (release timeout)
    COMMITTED   readable                                        → REMOVED (evicted, removed)
    REMOVED     its memory is free, or will be when the last range in flight has ended

Timeouts count from the put's opening, and are looked at whenever a client calls: nothing runs in the background.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum

import numpy as np

from kvactors.core.clock import Clock
from kvactors.core.store import Addresses
from kvactors.errors import ConfigError
from kvactors.stores.arena import Arena, Extents
from kvactors.stores.sizes import parse_size


class State(Enum):
    OPEN = "open"
    ENDING = "ending"
    SUPERSEDED = "superseded"
    COMMITTED = "committed"
    REMOVED = "removed"


class StoredObject:
    """One life of a key: from `put_open` to the day its memory is free."""

    __slots__ = ("base", "extents", "key", "lease_until", "nbytes", "opened_at", "owner", "state", "touched")

    def __init__(self, key: str, nbytes: int, extents: Extents, owner: PutSessions, opened_at: float) -> None:
        self.key, self.nbytes, self.extents, self.owner, self.opened_at = key, nbytes, extents, owner, opened_at
        self.base = extents[0][0] if len(extents) == 1 else 0
        """Address of the first byte; 0 = the object is not in one piece."""
        self.state = State.OPEN
        self.lease_until = float("-inf")
        self.touched = 0

    def __repr__(self) -> str:
        return f"<StoredObject {self.key!r} {self.state.value} {self.nbytes} bytes>"


class Use:
    """Objects that a range call uses, and maybe further calls that name the same keys.

    Attributes:
        objects: in the order of the keys; a get may use one more than once.
        bases: int64 (n,), address of each object's first byte; 0 = not in one piece.
        whole: whether each is in one piece.
        least_bytes: size of the smallest.
        calls: under way now. While there is one, the memory of no object here is freed.
        orphaned: an object was removed meanwhile, and its memory goes with the last call.
    """

    __slots__ = ("_members", "bases", "calls", "least_bytes", "objects", "orphaned", "whole")

    def __init__(self, objects: list[StoredObject]) -> None:
        bases = [one.base for one in objects]
        self.objects = objects
        self.bases: Addresses = np.fromiter(bases, np.int64, len(bases))
        self.whole = 0 not in bases
        self.least_bytes = min([one.nbytes for one in objects], default=0)
        self.calls = 0
        self.orphaned = False
        self._members: frozenset[StoredObject] | None = None

    def __contains__(self, one: StoredObject) -> bool:
        if self._members is None:
            self._members = frozenset(self.objects)
        return one in self._members


PutSessions = dict[str, StoredObject]
"""The open puts of one client, by key. An object leaves it when its put ends in whatever way."""


class SystemClock:
    """Monotonic seconds of this process."""

    def now(self) -> float:
        return time.monotonic()


class MemoryPool:
    """Objects, capacity, leases and eviction, shared by the clients of one embedded store.

    Args:
        capacity: bytes that objects may take, uncommitted and pinned ones included; int, text ("16 MB"), or None = no limit.
        clock: source of time.
        lease_s: how long `get_open` and `readable` protect an object from eviction, and a get session may read.
        discard_timeout_s: age at which another client may take the key of an open put.
        release_timeout_s: age at which the memory of a put that never ended is freed.
        watermark: share of the capacity that an eviction frees beyond what was asked, so that evictions come in batches.
        reserve_bytes: memory mapped and touched at once rather than on demand.
        slab_bytes: largest step of growth, see `Arena`.
    """

    def __init__(
        self,
        capacity: int | str | None = None,
        *,
        clock: Clock | None = None,
        lease_s: float = 10.0,
        discard_timeout_s: float = 30.0,
        release_timeout_s: float = 600.0,
        watermark: float = 1 / 64,
        reserve_bytes: int = 0,
        slab_bytes: int = 16 << 20,
    ) -> None:
        for name, value in (("lease_s", lease_s), ("discard_timeout_s", discard_timeout_s)):
            if not value > 0:
                raise ConfigError(f"{name} = {value!r}: must be more than 0 seconds")
        if not release_timeout_s >= discard_timeout_s:
            raise ConfigError(
                f"release_timeout_s = {release_timeout_s!r}: must be at least discard_timeout_s = {discard_timeout_s!r}"
            )
        if not 0 <= watermark < 1:
            raise ConfigError(f"watermark = {watermark!r}: must be a share of the capacity, at least 0 and less than 1")
        self.capacity = None if capacity is None else parse_size(capacity, "capacity")
        self.clock: Clock = clock or SystemClock()
        self.lease_s, self.discard_timeout_s, self.release_timeout_s = lease_s, discard_timeout_s, release_timeout_s
        self.changed = threading.Condition(threading.Lock())
        self.waiters = 0
        """How many threads wait on `changed`: range calls notify only then."""
        self.arena = Arena(slab_bytes, reserve_bytes)
        self.used_bytes = 0
        """Bytes of all objects whose memory is not free yet."""
        self.evictions = 0
        self.too_large: tuple[str, int] | None = None
        """The last key that was refused because it can never fit, and its bytes."""
        self._watermark_bytes = int((self.capacity or 0) * watermark)
        self._objects: dict[str, StoredObject] = {}
        self._uncommitted: dict[StoredObject, None] = {}  # by age: open, ending and superseded ones
        # Committed objects, least recently touched first. Every touch grants the same lease, so the leased are also in the
        # order in which their leases end.
        self._plain: OrderedDict[str, StoredObject] = OrderedDict()
        self._leased: OrderedDict[str, StoredObject] = OrderedDict()
        self._touches = 0
        self._in_use: list[Use] = []
        """Those of the range calls under way."""
        self.changes = 0
        """Grows whenever an object stops being what its sessions were opened for."""

    def __repr__(self) -> str:
        limit = "no limit" if self.capacity is None else f"of {self.capacity}"
        return f"<MemoryPool {len(self._plain) + len(self._leased)} objects, {self.used_bytes} bytes {limit}>"

    def __len__(self) -> int:
        """Committed objects."""
        return len(self._plain) + len(self._leased)

    def find(self, key: str) -> StoredObject | None:
        """The key's present life: open, ending or committed."""
        return self._objects.get(key)

    def fits_ever(self, nbytes: int) -> bool:
        return self.capacity is None or nbytes <= self.capacity

    def fits(self, nbytes: int) -> bool:
        return self.capacity is None or self.used_bytes + nbytes <= self.capacity

    def may_take_over(self, held: StoredObject, now: float) -> bool:
        """Whether another client may open a key that is being written: its writer looks dead."""
        return held.state in (State.OPEN, State.ENDING) and now - held.opened_at >= self.discard_timeout_s

    def open(self, key: str, nbytes: int, owner: PutSessions, now: float) -> None:
        """Begin a life of a key; `fits` was asked before. An uncommitted one of another client is superseded."""
        made = StoredObject(key, nbytes, self.arena.allocate(nbytes), owner, now)
        held = self._objects.get(key)
        if held is not None:
            held.state = State.SUPERSEDED
            self.changes += 1
            self._wake()
        self._objects[key] = owner[key] = made
        self._uncommitted[made] = None
        self.used_bytes += nbytes

    def commit(self, made: StoredObject) -> None:
        """Make an object readable. It has no lease yet: it may be evicted at once, as in Mooncake."""
        made.state = State.COMMITTED
        self.end_session(made)
        del self._uncommitted[made]
        self._touches += 1
        made.touched = self._touches
        self._plain[made.key] = made

    def touch(self, found: StoredObject, now: float) -> None:
        """Grant or renew the lease of a committed object, and make it the most recently used."""
        self._touches += 1
        found.touched = self._touches
        found.lease_until = now + self.lease_s
        self._plain.pop(found.key, None)
        self._leased[found.key] = found
        self._leased.move_to_end(found.key)

    def remove(self, gone: StoredObject) -> None:
        """End a life of a key. The memory is free at once, or when the last range in flight has ended."""
        if self._objects.get(gone.key) is gone:
            del self._objects[gone.key]
        self.end_session(gone)
        self._uncommitted.pop(gone, None)
        if gone.state is State.COMMITTED:
            self._plain.pop(gone.key, None)
            self._leased.pop(gone.key, None)
        gone.state = State.REMOVED
        self.changes += 1
        users = [use for use in self._in_use if gone in use]
        for use in users:
            use.orphaned = True
        if not users:
            self._free(gone)
        self._wake()

    def end_session(self, held: StoredObject) -> None:
        """Take a put out of its client's open ones; a superseded object stays pinned."""
        if held.owner.get(held.key) is held:
            del held.owner[held.key]

    def begin_call(self, use: Use) -> None:
        """A range call begins: pins its objects."""
        if not use.calls:
            self._in_use.append(use)
        use.calls += 1

    def end_call(self, use: Use) -> None:
        """A range call returned: unpins, frees what was removed meanwhile, wakes who waits for it."""
        use.calls -= 1
        if not use.calls:
            self._in_use.remove(use)
            if use.orphaned:
                use.orphaned = False
                for one in dict.fromkeys(use.objects):
                    if one.state is State.REMOVED and not self.busy(one):
                        self._free(one)
        self._wake()

    def busy(self, one: StoredObject) -> bool:
        """Whether a range call uses the object's memory now."""
        return any(one in use for use in self._in_use)

    def begin_end(self, held: StoredObject) -> None:
        """A put's session ends, once its ranges in flight have: it takes no more."""
        held.state = State.ENDING
        self.changes += 1

    def reap(self, now: float) -> None:
        """Remove the puts whose release timeout has passed."""
        while self._uncommitted:
            oldest = next(iter(self._uncommitted))
            if now - oldest.opened_at < self.release_timeout_s:
                return
            self.remove(oldest)

    def make_room(self, nbytes: int, now: float) -> None:
        """Evict committed objects that are neither leased nor being read, least recently used first, until `nbytes` and a
        small watermark are free, or nothing is left to evict. If they fit the capacity, or there is none, it was the machine
        that had no more memory: `nbytes` are evicted then."""
        if self.capacity is not None and not self.fits(nbytes):
            nbytes = self.used_bytes - max(0, self.capacity - nbytes - self._watermark_bytes)
        for victim in list(self._evictable(now, nbytes)):
            self.remove(victim)
            self.evictions += 1

    def clear(self) -> None:
        """Forget every object and give the memory back; no range may be in flight."""
        for one in [*self._objects.values(), *self._uncommitted]:
            one.state = State.REMOVED
        self._objects.clear()
        self._uncommitted.clear()
        self._plain.clear()
        self._leased.clear()
        self.used_bytes = 0
        self.arena = Arena(self.arena.slab_bytes)

    def wait(self) -> None:
        """Wait for the next change (lock held, as everywhere here)."""
        self.waiters += 1
        try:
            self.changed.wait()
        finally:
            self.waiters -= 1

    def _evictable(self, now: float, nbytes: int) -> Iterator[StoredObject]:
        """The two lists merged by last touch, up to `nbytes` in all; the leased end where the first live lease begins."""
        plain, leased = iter(self._plain.values()), iter(self._leased.values())
        a, b = next(plain, None), next(leased, None)
        while nbytes > 0:
            if b is not None and b.lease_until > now:
                b = None
            if a is not None and (b is None or a.touched < b.touched):
                found, a = a, next(plain, None)
            elif b is not None:
                found, b = b, next(leased, None)
            else:
                return
            if not self.busy(found):
                nbytes -= found.nbytes
                yield found

    def _free(self, gone: StoredObject) -> None:
        self.used_bytes -= gone.nbytes
        self.arena.free(gone.extents)

    def _wake(self) -> None:
        if self.waiters:
            self.changed.notify_all()
