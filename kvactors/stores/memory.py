"""The embedded default store: objects in this process's own memory, with the contract of a real Mooncake store.

Each `MemoryStore` is one client of a `MemoryPool`; `client()` gives another client of the same pool, with put and get sessions
and registered memory of its own. Metadata changes under the pool's one lock; bytes are copied outside it, with the objects
pinned, and near the rate of memcpy (`copying.py`).

Outcomes follow docs/design/store-contract.md. Where Mooncake would touch memory that is no longer the caller's, this store
answers instead: a superseded or removed object is pinned while a range is in flight, and refused afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kvactors.core.clock import Clock
from kvactors.core.store import Health, Outcome, RangeBatch
from kvactors.errors import ConfigError, StoreError
from kvactors.stores.arguments import check_shapes, paired
from kvactors.stores.pool import MemoryPool, PutSessions, State, StoredObject, Use
from kvactors.stores.ranges import RangeCall, Reading, ReadingUse, RecentUses
from kvactors.stores.regions import Regions

U = TypeVar("U", bound=Use)

_WAS_CLOSED = "the memory store was closed"


class MemoryStore:
    """A client of an embedded pool. Implements `kvactors.core.store.Store`; thread-safe.

    Args:
        capacity: bytes the pool may hold: int, text such as "1.5GB", or None for no limit.
        clock, lease_s, discard_timeout_s, release_timeout_s: see `MemoryPool`.
        pool: join this pool instead of making one; the other arguments must then be left out.
        pool_options: further arguments of `MemoryPool` (`watermark`, `reserve_bytes`, `slab_bytes`).

    A pool that the store made goes with its last client; one that was given stays with its owner.
    """

    name = "memory"

    def __init__(
        self,
        capacity: int | str | None = None,
        *,
        clock: Clock | None = None,
        lease_s: float = 10.0,
        discard_timeout_s: float = 30.0,
        release_timeout_s: float = 600.0,
        pool: MemoryPool | None = None,
        **pool_options: Any,
    ) -> None:
        if pool is None:
            pool = MemoryPool(
                capacity,
                clock=clock,
                lease_s=lease_s,
                discard_timeout_s=discard_timeout_s,
                release_timeout_s=release_timeout_s,
                **pool_options,
            )
            self._clients: list[MemoryStore] | None = []
        else:
            timeouts = (lease_s, discard_timeout_s, release_timeout_s)
            if capacity is not None or clock is not None or pool_options or timeouts != (10.0, 30.0, 600.0):
                raise ConfigError("MemoryStore(pool=…): capacity, clock and timeouts are the pool's; leave them out")
            self._clients = None
        self._join(pool)

    def _join(self, pool: MemoryPool) -> None:
        self.pool = pool
        self.lease_s = pool.lease_s
        self.put_safe_age_s = pool.discard_timeout_s / 2
        self._closed = False
        self._regions = Regions()
        self._puts: PutSessions = {}
        self._gets: dict[str, Reading] = {}
        self._calls: set[RangeCall[Any]] = set()
        self._put_uses: RecentUses[Use] = RecentUses()
        self._get_uses: RecentUses[ReadingUse] = RecentUses()
        self._closings = 0
        """Grows whenever a get session ends or is opened for another life of its key."""
        self._count = dict.fromkeys(("reads", "writes", "read_bytes", "written_bytes"), 0)
        if self._clients is not None:
            self._clients.append(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._puts)} puts and {len(self._gets)} gets open"
        return f"<MemoryStore {state}, on {self.pool!r}>"

    def client(self) -> MemoryStore:
        """Another client of the same pool: shared objects, its own sessions and registered memory."""
        with self.pool.changed:
            self._check_open()
            other = MemoryStore.__new__(MemoryStore)
            other._clients = self._clients
            other._join(self.pool)
            return other

    # Puts

    def put_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        """Begin to write objects of `sizes` bytes.

        OK; INVALID (size below 1, open in this client already, or larger than the whole capacity: `health` then names the
        key, since no retry can help); EXISTS (committed, being written by another client within the discard timeout, or
        opened earlier in this call); NO_SPACE for just the keys that do not fit. Room for exactly those, and a small
        watermark, has then been made by evicting least recently used objects, so that an immediate retry works
        unless leases, reads in flight or open puts hold the memory.
        """
        nbytes = paired(keys, sizes)
        pool = self.pool
        answers: list[Outcome] = []
        missing = 0
        opened: set[str] = set()
        with pool.changed:
            now = self._enter()
            for key, size in zip(keys, nbytes, strict=True):
                held = pool.find(key)
                if size < 1:
                    answer = Outcome.INVALID
                elif key in opened:
                    answer = Outcome.EXISTS
                elif key in self._puts:
                    answer = Outcome.INVALID
                elif held is not None and not pool.may_take_over(held, now):
                    answer = Outcome.EXISTS
                elif not pool.fits_ever(size):
                    pool.too_large = (key, size)
                    answer = Outcome.INVALID
                elif not pool.fits(size):
                    missing += size
                    answer = Outcome.NO_SPACE
                else:
                    try:
                        pool.open(key, size, self._puts, now)
                        opened.add(key)
                        answer = Outcome.OK
                    except (MemoryError, OSError):  # the machine has no more; eviction recycles what the pool has
                        missing += size
                        answer = Outcome.NO_SPACE
                answers.append(answer)
            if missing:
                pool.make_room(missing, now)
        return answers

    def put_ranges(self, batch: RangeBatch) -> list[Outcome]:
        """Copy local memory into objects being written.

        OK; NO_REPLICA (no ranges given); INVALID: no session or an ended one, also one that was superseded by another client
        or released, the key for the second time in this batch, a range of no bytes, outside the object, or outside
        registered memory. Nothing of an INVALID key is copied. Overwriting is allowed: the last write counts.
        """
        call = self._begin_put(batch)
        try:
            call.move(into_objects=True)
        finally:
            with self.pool.changed:
                self._end_call(call, "writes", "written_bytes")
        return call.answers

    def put_commit(self, keys: Sequence[str]) -> list[Outcome]:
        """Publish objects, after their ranges in flight have ended (waits without limit).

        OK, whatever was written: holes are committed too, as in Mooncake, so callers track coverage (I1). INVALID: no open
        session, or it was superseded by another client or released.
        """
        return self._end_puts(keys, commit=True)

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        """Drop objects being written, after their ranges in flight have ended (waits without limit).

        OK; INVALID: no open session; NOT_OWNER: another client took the key over (the session is gone, the memory stays
        pinned until the release timeout).
        """
        return self._end_puts(keys, commit=False)

    # Gets

    def get_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        """Begin to read committed objects for `lease_s` seconds; opening again renews.

        OK, NOT_FOUND, NOT_READY (being written), SIZE_MISMATCH (stored with another size; no session, no lease).
        """
        nbytes = paired(keys, sizes)
        pool = self.pool
        answers: list[Outcome] = []
        with pool.changed:
            now = self._enter()
            for key, size in zip(keys, nbytes, strict=True):
                found = pool.find(key)
                if found is None:
                    answers.append(Outcome.NOT_FOUND)
                elif found.state is not State.COMMITTED:
                    answers.append(Outcome.NOT_READY)
                else:
                    pool.touch(found, now)  # whatever its size: a master grants the lease, and a client compares
                    if found.nbytes != size:
                        answers.append(Outcome.SIZE_MISMATCH)
                        continue
                    reading = self._gets.get(key)
                    if reading is None or reading.found is not found:
                        self._closings += reading is not None
                        self._gets[key] = Reading(found, found.lease_until)
                    else:
                        reading.until = found.lease_until
                    answers.append(Outcome.OK)
        return answers

    def get_ranges(self, batch: RangeBatch) -> list[Outcome]:
        """Copy from objects into local memory; a key may be named more than once.

        OK, also for no ranges; INVALID: no session, a range of no bytes, outside the object, or outside registered
        memory; LEASE_EXPIRED: the session is older than its lease, before or after the copy (the bytes may have
        arrived but do not count; the session is gone); NOT_FOUND: the object was removed by force (the session is gone).
        """
        call = self._begin_get(batch)
        try:
            call.move(into_objects=False)
        finally:
            with self.pool.changed:
                self._judge_reads(call)
                self._end_call(call, "reads", "read_bytes")
        return call.answers

    def get_close(self, keys: Sequence[str]) -> list[Outcome]:
        """Drop the get sessions of these keys, for everyone in this client: it is not a refcount. Always OK."""
        with self.pool.changed:
            self._enter()
            for key in keys:
                self._gets.pop(key, None)
            self._closings += 1
            return [Outcome.OK] * len(keys)

    def readable(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are committed; grants those a lease, as `is_exist` does."""
        with self.pool.changed:
            now = self._enter()
            answers = []
            for key in keys:
                found = self.pool.find(key)
                here = found is not None and found.state is State.COMMITTED
                if here and found is not None:
                    self.pool.touch(found, now)
                answers.append(here)
            return answers

    # Keys

    def contains(self, key: str) -> bool:
        """Whether the key is committed; grants no lease and counts as no use."""
        with self.pool.changed:
            self._enter()
            found = self.pool.find(key)
            return found is not None and found.state is State.COMMITTED

    def remove(self, key: str, force: bool = False) -> Outcome:
        """Drop a committed object. OK, NOT_FOUND, NOT_READY (being written), LEASED (unless `force`)."""
        with self.pool.changed:
            now = self._enter()
            found = self.pool.find(key)
            if found is None:
                return Outcome.NOT_FOUND
            if found.state is not State.COMMITTED:
                return Outcome.NOT_READY
            if found.lease_until > now and not force:
                return Outcome.LEASED
            self.pool.remove(found)
            return Outcome.OK

    # Memory

    def register(self, address: int, nbytes: int) -> None:
        """Allow ranges in `nbytes` bytes of local memory from `address`. Regions may touch (ranges may then span them), but
        StoreError for one that overlaps another, also for the same one again, and for one that is empty or no user memory."""
        with self.pool.changed:
            self._enter()
            self._regions = self._regions.with_region(address, nbytes)

    def unregister(self, address: int) -> None:
        """Forget the region that starts there, after this client's earlier range calls have ended: its memory may then be
        freed. UnregisteredMemoryError when there is none."""
        with self.pool.changed:
            self._enter()
            self._regions = kept = self._regions.without_region(address)
            earlier = {call for call in self._calls if call.regions is not kept}
            while earlier & self._calls:
                self.pool.wait()

    # The store as a whole

    def health(self) -> Health:
        """Never raises. A key that was refused as larger than the capacity is named in `detail`; the store is healthy still."""
        if self._closed:
            return Health(False, f"{_WAS_CLOSED}; open another")
        large = self.pool.too_large
        if large is None:
            return Health(True)
        return Health(
            True, f"key {large[0]!r} of {large[1]} bytes was refused: larger than the capacity of {self.pool.capacity} bytes"
        )

    def stats(self) -> Mapping[str, Any]:
        """Pool: `objects` (committed), `bytes` (all held), `capacity_bytes`, `footprint_bytes`, `evictions`. This client:
        `open_puts`, `open_gets`, `reads` and `writes` (keys moved), `read_bytes`, `written_bytes`."""
        with self.pool.changed:
            self._enter()
            return {
                "objects": len(self.pool),
                "bytes": self.pool.used_bytes,
                "capacity_bytes": self.pool.capacity,
                "footprint_bytes": self.pool.arena.footprint_bytes,
                "evictions": self.pool.evictions,
                "open_puts": len(self._puts),
                "open_gets": len(self._gets),
                **self._count,
            }

    def close(self) -> None:
        """Leave the pool, after the range calls in flight have ended. Later calls raise StoreError; closing again only waits.

        Puts left open are those of a dead writer: their keys answer EXISTS to other clients until the discard timeout.
        """
        with self.pool.changed:
            if self._closed:
                while self._calls:  # the first to close waits for them too
                    self.pool.wait()
                return
            self._closed = True
            self.pool.changed.notify_all()
            while self._calls:
                self.pool.wait()
            self._puts, self._gets, self._regions = {}, {}, Regions()
            self._put_uses.clear()
            self._get_uses.clear()
            if self._clients is not None:
                self._clients.remove(self)
                if not self._clients:
                    self.pool.clear()

    # Inside

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{_WAS_CLOSED}; open another")

    def _enter(self) -> float:
        self._check_open()
        now = self.pool.clock.now()
        self.pool.reap(now)
        return now

    def _begin_put(self, batch: RangeBatch) -> RangeCall[Use]:
        check_shapes(batch)
        keys = batch.keys
        with self.pool.changed:
            self._enter()
            changes = self.pool.changes
            use = self._put_uses.find(keys, changes)
            rows: Sequence[int] = range(len(keys))
            if use is None:
                held, open_ = self._puts.get, State.OPEN  # reading a member of an enum is slow
                used = [one for one in map(held, keys) if one is not None and one.state is open_]
                again = len(set(keys)) < len(keys)
                if again or len(used) < len(keys):
                    named = [(row, held(key)) for row, key in enumerate(keys) if not again or key not in keys[:row]]
                    found = [(row, one) for row, one in named if one is not None and one.state is open_]
                    rows, used = [row for row, _ in found], [one for _, one in found]
                use = Use(used)
                if len(used) == len(keys):
                    self._put_uses.keep(keys, changes, use)
            return self._begin_call(batch, use, rows, Outcome.NO_REPLICA)

    def _begin_get(self, batch: RangeBatch) -> RangeCall[ReadingUse]:
        check_shapes(batch)
        keys = batch.keys
        with self.pool.changed:
            now = self._enter()
            changes = self.pool.changes + self._closings
            use = self._get_uses.find(keys, changes)
            rows: Sequence[int] = range(len(keys))
            ended: dict[int, Outcome] = {}
            if use is None or now >= use.until:
                held, committed = map(self._gets.get, keys), State.COMMITTED
                readings = [one for one in held if one is not None and now < one.until and one.found.state is committed]
                if len(readings) < len(keys):
                    rows, ended = self._split_unread(keys, now)
                use = ReadingUse(readings)
                if len(readings) == len(keys):
                    self._get_uses.keep(keys, changes, use)
            call = self._begin_call(batch, use, rows, Outcome.OK)
            for row, answer in ended.items():
                call.answers[row] = answer
            return call

    def _begin_call(self, batch: RangeBatch, use: U, rows: Sequence[int], without_ranges: Outcome) -> RangeCall[U]:
        """Pins what the call names; a call without ranges is answered at once, and moves nothing."""
        if len(batch.sizes) == 0:
            call = RangeCall(batch, self._regions, use, ())
            for row in rows:
                call.answers[row] = without_ranges
        else:
            call = RangeCall(batch, self._regions, use, rows)
        self.pool.begin_call(use)
        self._calls.add(call)
        return call

    def _split_unread(self, keys: Sequence[str], now: float) -> tuple[list[int], dict[int, Outcome]]:
        """The rows whose session may be read, and answers for those whose session has ended."""
        rows: list[int] = []
        answers: dict[int, Outcome] = {}
        for row, key in enumerate(keys):
            reading = self._gets.get(key)
            if reading is None:
                continue
            if now >= reading.until:
                answers[row] = Outcome.LEASE_EXPIRED
            elif reading.found.state is not State.COMMITTED:
                answers[row] = Outcome.NOT_FOUND
            else:
                rows.append(row)
        for row in answers:
            self._gets.pop(keys[row], None)
        self._closings += len(answers)
        return rows, answers

    def _judge_reads(self, call: RangeCall[ReadingUse]) -> None:
        """The lease once more, after the copy: late bytes are never reported OK."""
        now = self.pool.clock.now()
        if now < call.use.until:
            return
        for row, reading in zip(call.rows, call.use.readings, strict=bool(call.rows)):
            if now >= reading.until:
                if call.answers[row] is Outcome.OK:
                    call.answers[row] = Outcome.LEASE_EXPIRED
                key = call.batch.keys[row]
                if self._gets.get(key) is reading:
                    del self._gets[key]
                    self._closings += 1

    def _end_call(self, call: RangeCall[Any], count: str, count_bytes: str) -> None:
        moved = call.answers.count(Outcome.OK)
        self._count[count] += moved
        self._count[count_bytes] += moved * call.batch.nbytes_per_key
        self._calls.discard(call)
        self.pool.end_call(call.use)

    def _end_puts(self, keys: Sequence[str], *, commit: bool) -> list[Outcome]:
        different = list(dict.fromkeys(keys))
        if len(different) < len(keys):  # one end, which counts for each mention
            answer_of = dict(zip(different, self._end_puts(different, commit=commit), strict=True))
            return [answer_of[key] for key in keys]
        pool = self.pool
        with pool.changed:
            self._enter()
            answers = [Outcome.INVALID] * len(keys)
            ending: list[tuple[int, StoredObject]] = []
            for i, key in enumerate(keys):
                held = self._puts.get(key)
                if held is not None and held.state is State.OPEN:
                    pool.begin_end(held)
                    ending.append((i, held))
                elif held is not None and held.state is State.SUPERSEDED and not commit:
                    pool.end_session(held)
                    answers[i] = Outcome.NOT_OWNER
            try:
                while any(pool.busy(held) for _, held in ending):
                    pool.wait()
                    self._check_open()
            except BaseException:
                for _, held in ending:
                    if held.state is State.ENDING:
                        held.state = State.OPEN
                raise
            for i, held in ending:
                if held.state is State.ENDING:
                    if commit:
                        pool.commit(held)
                    else:
                        pool.remove(held)
                    answers[i] = Outcome.OK
                elif held.state is State.SUPERSEDED and not commit:
                    pool.end_session(held)
                    answers[i] = Outcome.NOT_OWNER
            return answers
