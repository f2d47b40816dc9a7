"""`MooncakeStore`: the store contract over a real Mooncake pool.

What the native client leaves open is closed here: calls and answers are guarded, memory is checked to be registered, sizes are
compared when a get is opened, leases are checked before and after a read, ranges are joined or staged, and keys that cannot be
read are not tried again at once. What a session needs beyond that (coverage, the age of puts, one writer per key, lost masters)
is the engine's, for every store alike.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvactors.core.clock import Clock
from kvactors.core.store import Health, Outcome, RangeBatch
from kvactors.errors import ConfigError, StoreError, StoreUnreachableError
from kvactors.log import get_logger
from kvactors.stores.mooncake.client import NOWHERE, Client, Placed
from kvactors.stores.mooncake.coalesce import GOOD_RANGE_BYTES, Staging, joined
from kvactors.stores.mooncake.codes import OK, REPLICA_NOT_READY, RPC_FAIL, RPC_TIMEOUT, outcome_of, range_outcome
from kvactors.stores.mooncake.config import MooncakeConfig
from kvactors.stores.mooncake.staging import StagingBuffers
from kvactors.stores.mooncake.suspects import Segments, Suspects
from kvactors.stores.pool import SystemClock
from kvactors.stores.ranges import check_shapes
from kvactors.stores.regions import Regions

log = get_logger("kvactors.mooncake")

PUT_RANGES, GET_RANGES = "batch_put_from_multi_buffer_ranges", "batch_get_into_multi_buffer_ranges"
PROBE_KEY = "kvactors-probe"
"""A key that nobody writes; asking for it takes the master and nothing else."""

FRESH_S = 0.02
"""What the master said of an object holds for so long. Ranges go to an object's memory without the master. One that was
restarted knows no object any more, and gives the memory to others once it is up and has it back, which takes longer than this;
so before a put to an older session, and after a read through one, the master is asked whether it still knows the object."""

_UNREACHABLE = (RPC_FAIL, RPC_TIMEOUT)
_MOST_SIZE = (1 << 63) - 1


class _Reading:
    """A get session of this client: since when its lease runs, where the object lies, and when it was known to lie there."""

    __slots__ = ("known", "placed", "since")

    def __init__(self, since: float, placed: Placed) -> None:
        self.since, self.known, self.placed = since, since, placed


class MooncakeStore:
    """A client of a Mooncake pool. Implements `kvactors.core.store.Store`; thread-safe.

    Args:
        config: where the pool is; None = from the options, or else from the file that MOONCAKE_CONFIG_PATH names.
        clock: source of time.
        client: a guarded client that was set up already (tests).
        options: fields of `MooncakeConfig`, which go before those of the file; not together with `config`.

    Raises:
        ConfigError: an option is wrong; the client is missing, cannot be loaded or is older than 0.3.13.
        StoreUnreachableError: no master answers there.
    """

    name = "mooncake"

    def __init__(
        self, config: MooncakeConfig | None = None, *, clock: Clock | None = None, client: Client | None = None, **options: Any
    ) -> None:
        if config is not None and options:
            raise ConfigError(f"MooncakeStore(config=…): {', '.join(options)} are part of the config; give one or the other")
        self.config = config = MooncakeConfig.from_environment(**options) if config is None else config
        self.lease_s = config.lease_s
        self.put_safe_age_s = config.discard_timeout_s / 2
        self._clock: Clock = clock or SystemClock()
        self._client = Client(config) if client is None else client
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._moves: set[object] = set()
        """range calls under way"""
        self._readings: dict[str, _Reading] = {}
        self._puts: dict[str, float] = {}
        """open puts, and when the master last knew each"""
        self._suspects = Suspects(config.suspect_after_s, config.negative_s)
        self._regions = self._host = Regions()
        self._staging = self._make_staging()
        self.good_range_bytes = GOOD_RANGE_BYTES if self._staging is not None else 0
        self._count: Counter[str] = Counter()
        self._told: set[str] = set()

    def _make_staging(self) -> StagingBuffers | None:
        """Measured over TCP; other transports move small ranges well, or from memory that cannot be copied like this."""
        if self.config.protocol != "tcp":
            return None
        staging = StagingBuffers(int(self.config.staging_bytes))
        if not staging.slot_bytes:
            return None
        code = self._client.tell("register_buffer", staging.address, staging.nbytes)
        if code != 0:
            raise StoreError(f"the staging buffer of {staging.nbytes} bytes cannot be registered ({code})")
        return staging

    def __repr__(self) -> str:
        state = "closed" if self._client.closed else f"{len(self._readings)} gets open"
        return f"<MooncakeStore {state}, at {self.config.master_server_address}>"

    # Puts

    def put_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        """Reserves objects of `sizes` bytes.

        OK, INVALID (size below 1, open in this client), EXISTS, NO_SPACE for just the keys that do not fit (eviction then runs;
        also for one that can never fit), UNREACHABLE.
        """
        nbytes, now = _paired(keys, sizes), self._clock.now()
        self._check_open()
        good = [i for i, size in enumerate(nbytes) if 0 < size <= _MOST_SIZE]
        answers = [Outcome.INVALID] * len(keys)
        if good:
            replication = () if self._client.replication is None else (self._client.replication,)
            asked = [keys[i] for i in good]
            for i, code in zip(
                good, self._ask("batch_put_session_start", asked, [nbytes[i] for i in good], *replication), strict=True
            ):
                answers[i] = outcome_of(code)
            with self._lock:
                self._puts.update((keys[i], now) for i in good if answers[i] is Outcome.OK)
        return answers

    def put_ranges(self, batch: RangeBatch) -> list[Outcome]:
        """Writes ranges.

        OK; NO_REPLICA (no ranges given); INVALID (no session, a range of no bytes or outside the object or registered memory,
        the key for the second time); TRANSFER_FAILED; NOT_FOUND, UNREACHABLE (of a session that is older than `FRESH_S`).
        """
        return self._move(batch, PUT_RANGES)

    def put_commit(self, keys: Sequence[str]) -> list[Outcome]:
        """Publishes objects, whatever was written. OK, INVALID, NOT_OWNER (taken over by another client), NOT_FOUND,
        UNREACHABLE."""
        return self._end_puts("batch_put_session_end", keys)

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        """Drops objects being written. OK, INVALID, NOT_OWNER, NOT_FOUND, UNREACHABLE."""
        return self._end_puts("batch_put_session_revoke", keys)

    # Gets

    def get_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        """Begins to read committed objects for `lease_s` seconds; opening again renews.

        OK, NOT_FOUND, NOT_READY, SIZE_MISMATCH (in the log once per size), TRANSFER_FAILED (see `suspects.py`),
        UNREACHABLE. Only OK leaves a session, or renews it.
        """
        nbytes, since = _paired(keys, sizes), self._clock.now()
        answers = self._outcomes("batch_get_session_start", keys)
        opened = list(dict.fromkeys(key for key, answer in zip(keys, answers, strict=True) if answer is Outcome.OK))
        if not opened:
            return answers
        try:
            found = self._client.replicas(opened)
        except BaseException:
            self._end_gets(opened)
            raise
        if not found and not self.health().ok:
            self._end_gets(opened)
            return [Outcome.UNREACHABLE if answer is Outcome.OK else answer for answer in answers]
        refused: list[str] = []
        for i, (key, size, answer) in enumerate(zip(keys, nbytes, answers, strict=True)):
            if answer is not Outcome.OK:
                continue
            placed = found.get(key, NOWHERE)
            if placed is NOWHERE:
                answers[i] = Outcome.NOT_FOUND
            elif placed.nbytes != size:
                answers[i] = Outcome.SIZE_MISMATCH
                self._tell_once(f"stored with {placed.nbytes} bytes, the layout has {size}", key)
            elif self._suspects.key(key, since) or self._suspects.holds(placed.segments, since):
                answers[i] = Outcome.TRANSFER_FAILED
                self._count["negative"] += 1
            else:
                self._note_reading(key, since, placed)
                continue
            refused.append(key)
        with self._lock:  # who asks with a wrong size must not end the session of another who asked with the right one
            over = [
                key
                for key in refused
                if (reading := self._readings.get(key)) is None or reading.placed.nbytes != found.get(key, NOWHERE).nbytes
            ]
        if over:
            self._end_gets(over)
        return answers

    def get_ranges(self, batch: RangeBatch) -> list[Outcome]:
        """Reads ranges.

        OK, also for no ranges; INVALID (no session, a range of no bytes or outside the object or registered memory);
        LEASE_EXPIRED (before or after the read; the session is dropped); TRANSFER_FAILED; NOT_FOUND (removed or moved
        meanwhile; the session is dropped) and UNREACHABLE, of a session that is older than `FRESH_S`. Bytes of a key that is
        not OK may have been written.
        """
        return self._move(batch, GET_RANGES)

    def get_close(self, keys: Sequence[str]) -> list[Outcome]:
        """Ends the sessions of this client, for everyone in it. OK, also where there is none."""
        with self._lock:
            for key in keys:
                self._readings.pop(key, None)
        code = self._client.tell("batch_get_session_end", list(keys))
        return [outcome_of(code)] * len(keys)

    def readable(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are committed, and not known to be unreadable. StoreUnreachableError when the master does not answer."""
        call = "batch_is_readable" if self._client.has("batch_is_readable") else "batch_is_exist"
        self._check_open()
        codes = self._client.ask(call, keys) if keys else []
        if any(code in _UNREACHABLE for code in codes):
            raise StoreUnreachableError(f"{call}: the master at {self.config.master_server_address} does not answer")
        now, suspects = self._clock.now(), self._suspects
        answers = [code == 1 and not suspects.key(key, now) for key, code in zip(keys, codes, strict=True)]
        if suspects.any(now) and any(answers):
            where = self._client.replicas([key for key, ok in zip(keys, answers, strict=True) if ok])
            answers = [
                ok and not suspects.holds(where.get(key, NOWHERE).segments, now) for key, ok in zip(keys, answers, strict=True)
            ]
        return answers

    # Objects

    def remove(self, key: str, force: bool = False) -> Outcome:
        """Drops a committed object. OK, NOT_FOUND, NOT_READY, LEASED (unless `force`), UNREACHABLE."""
        return outcome_of(self._client.tell("remove", key, force))

    def remove_matching(self, pattern: str) -> int:
        """Drops the unleased objects whose whole key matches a regular expression; returns how many.

        Raises:
            StoreError: the store refused the pattern. StoreUnreachableError: the master does not answer.
        """
        count = self._client.tell("remove_by_regex", f"^(?:{pattern})$", False)
        if count in _UNREACHABLE:
            raise StoreUnreachableError(f"the master at {self.config.master_server_address} does not answer")
        if count < 0:
            raise StoreError(f"remove_by_regex({pattern!r}) answered {count}")
        return count

    # Memory

    def register(self, address: int, nbytes: int, *, host: bool = True) -> None:
        """Allows ranges in `nbytes` bytes of local memory from `address`; `host=False` for device memory, which is not staged.

        StoreError for a region that overlaps another, is empty or no user memory, or that the client refuses.
        """
        with self._lock:
            regions = self._regions.with_region(address, nbytes)
            code = self._client.tell("register_buffer", int(address), int(nbytes))
            if code != 0:
                raise StoreError(f"cannot register {nbytes} bytes at {address:#x}: the client answered {code}")
            if not host:
                self._regions = regions
            elif self._host is self._regions:
                self._regions = self._host = regions
            else:
                self._regions, self._host = regions, self._host.with_region(address, nbytes)

    def unregister(self, address: int) -> None:
        """Forgets the region that starts there, after range calls under way have ended: its memory may then be freed.

        UnregisteredMemoryError when there is none. StoreError when the calls do not end within `close_deadline_s`: they
        may then still touch the memory.
        """
        with self._moved:
            all_host = self._host is self._regions
            self._regions = kept = self._regions.without_region(address)
            if all_host:
                self._host = kept
            elif address in self._host:
                self._host = self._host.without_region(address)
            earlier = set(self._moves)
            if not self._moved.wait_for(lambda: not earlier & self._moves, self.config.close_deadline_s):
                raise StoreError(f"unregister({address:#x}): range calls do not return; never free or reuse this memory")
            code = self._client.tell("unregister_buffer", int(address))
        if code != 0:
            raise StoreError(f"cannot unregister {address:#x}: the client answered {code}")

    # The store as a whole

    def health(self) -> Health:
        """Asks the master. Never raises."""
        try:
            code = self._client.ask("batch_is_exist", [PROBE_KEY])[0]
            if code < 0:
                return Health(False, f"the master at {self.config.master_server_address} does not answer ({code})")
            code = self._client.tell("health_check")
        except Exception as error:
            return Health(False, str(error))
        return Health(code == 0, "" if code == 0 else f"the client is not connected ({code}); it reconnects by itself")

    def stats(self) -> Mapping[str, Any]:
        """Counters since the start. StoreError after `close`.

        `ranges` asked for, `ranges_sent` after joining and staging, `staged_bytes`, bytes read and written, `negative`: gets
        refused because a read of the key or its segment failed before.
        """
        self._check_open()
        names = ("reads", "writes", "read_bytes", "written_bytes", "ranges", "ranges_sent", "staged_bytes", "negative")
        with self._lock:
            return {name: self._count[name] for name in names} | {"gets_open": len(self._readings)}

    def close(self) -> None:
        """Leaves the pool, after calls under way. Memory that this client gave to the pool goes, with the objects in it."""
        self._client.close()

    # Inside

    def _check_open(self) -> None:
        if self._client.closed:
            raise StoreError("the Mooncake store was closed; open another")

    def _ask(self, call: str, keys: Sequence[str], *arguments: Any) -> list[int]:
        return self._client.ask(call, keys, *arguments)

    def _outcomes(self, call: str, keys: Sequence[str]) -> list[Outcome]:
        self._check_open()
        return [outcome_of(code) for code in self._ask(call, keys)] if keys else []

    def _end_puts(self, call: str, keys: Sequence[str]) -> list[Outcome]:
        with self._lock:
            for key in keys:
                self._puts.pop(key, None)
        return self._outcomes(call, keys)

    def _unknown_puts(self, keys: Sequence[str]) -> dict[str, Outcome]:
        """Which of these open puts the master does not know any more. The oldest stands for all: a master that still knows it
        was not restarted since."""
        now = self._clock.now()
        with self._lock:
            old = sorted((known, key) for key in set(keys) if now > (known := self._puts.get(key, now)) + FRESH_S)
        if not old:
            return {}
        asked = [key for _, key in old]
        gone = self._not_being_written(asked[:1]) and self._not_being_written(asked)
        with self._lock:
            self._puts.update((key, now) for key in asked if key in self._puts and key not in gone)
        return gone

    def _not_being_written(self, keys: Sequence[str]) -> dict[str, Outcome]:
        codes = self._ask("batch_get_session_start", keys)
        read = [key for key, code in zip(keys, codes, strict=True) if code == OK and key not in self._readings]
        if read:  # another client took the key over and has committed it
            self._end_gets(read)
        told = zip(keys, codes, strict=True)
        return {key: Outcome.INVALID if code == OK else outcome_of(code) for key, code in told if code != REPLICA_NOT_READY}

    def _note_reading(self, key: str, since: float, placed: Placed) -> None:
        """Renews a session that is alive; a read that began under one that is not, or at another place, must not profit from
        the new one."""
        with self._lock:
            reading = self._readings.get(key)
            if reading is None or since >= reading.since + self.lease_s or reading.placed != placed:
                self._readings[key] = _Reading(since, placed)
            else:
                reading.since, reading.known = max(since, reading.since), max(since, reading.known)

    def _end_gets(self, keys: Sequence[str]) -> None:
        self.get_close(list(dict.fromkeys(keys)))

    def _tell_once(self, what: str, key: str) -> None:
        with self._lock:
            told = what in self._told
            self._told.add(what)
        if not told:
            log.warning("an object has another size than its layout; it counts as a miss", key=key, problem=what)

    def _move(self, batch: RangeBatch, call: str) -> list[Outcome]:
        check_shapes(batch)
        self._check_open()
        answers = [Outcome.INVALID] * len(batch.keys)
        call_under_way = object()
        with self._lock:
            regions, host = self._regions, self._host
            self._moves.add(call_under_way)
        try:
            if call == PUT_RANGES:
                rows = self._good_rows(batch, regions)
                gone = self._unknown_puts([batch.keys[row] for row in rows])
                for row in rows:
                    answers[row] = gone.get(batch.keys[row], Outcome.INVALID)
                self._send(batch, call, answers, [row for row in rows if batch.keys[row] not in gone], host)
            else:
                self._read(batch, answers, self._good_rows(batch, regions), host)
        finally:
            moved = answers.count(Outcome.OK)
            with self._moved:
                self._moves.discard(call_under_way)
                self._count["writes" if call == PUT_RANGES else "reads"] += moved
                self._count["written_bytes" if call == PUT_RANGES else "read_bytes"] += moved * batch.nbytes_per_key
                self._count["ranges"] += len(batch.keys) * len(batch.sizes)
                self._moved.notify_all()
        return answers

    def _good_rows(self, batch: RangeBatch, regions: Regions) -> list[int]:
        """Rows whose ranges may be sent: the client itself checks no address, and takes ranges of no bytes for done."""
        n = len(batch.keys)
        if len(batch.sizes) == 0:
            return list(range(n))
        if n == 0 or int(batch.sizes.min()) < 1 or int(batch.offsets.min()) < 0:
            return []
        good = regions.cover(batch.addresses, batch.sizes)
        return list(range(n)) if good.all() else np.flatnonzero(good).tolist()

    def _read(self, batch: RangeBatch, answers: list[Outcome], rows: list[int], host: Regions) -> None:
        now = self._clock.now()
        held: dict[int, _Reading] = {}
        expired: list[str] = []
        with self._lock:
            for row in rows:
                reading = self._readings.get(batch.keys[row])
                if reading is None:
                    continue
                if now >= reading.since + self.lease_s:
                    answers[row] = Outcome.LEASE_EXPIRED
                    expired.append(batch.keys[row])
                else:
                    held[row] = reading
        if expired:
            self._end_gets(expired)
        if not held:
            return
        read = self._suspects.begin((r.placed.segments for r in held.values()), now)
        failed: list[tuple[str, Segments]] = []
        try:
            self._send(batch, GET_RANGES, answers, list(held), host, lambda: self._judge(batch, answers, held))
            failed = [
                (batch.keys[row], r.placed.segments) for row, r in held.items() if answers[row] is Outcome.TRANSFER_FAILED
            ]
        finally:
            self._suspects.end(read, failed, self._clock.now())
        late = [batch.keys[row] for row in held if answers[row] in (Outcome.LEASE_EXPIRED, Outcome.NOT_FOUND)]
        if late:
            self._end_gets(late)

    def _judge(self, batch: RangeBatch, answers: list[Outcome], held: Mapping[int, _Reading]) -> None:
        """The lease once more, after the read, and whether the object still lies there: its bytes may be another object's."""
        now = self._clock.now()
        moved = self._moved_away({batch.keys[row]: r for row, r in held.items() if answers[row] is Outcome.OK}, now)
        for row, reading in held.items():
            if answers[row] is Outcome.OK and now >= reading.since + self.lease_s:
                answers[row] = Outcome.LEASE_EXPIRED
            elif answers[row] is Outcome.LEASE_EXPIRED and now < reading.since + self.lease_s:
                self._tell_once(f"lease_s = {self.lease_s} is longer than the master's lease; lower it", batch.keys[row])
            elif answers[row] is Outcome.OK:
                answers[row] = moved.get(batch.keys[row], Outcome.OK)

    def _moved_away(self, read: Mapping[str, _Reading], now: float) -> dict[str, Outcome]:
        """Which of these objects do not lie any more where they were read. As with puts, the oldest stands for all."""
        old = sorted((r.known, key) for key, r in read.items() if now > r.known + FRESH_S)
        if not old:
            return {}
        asked = [key for _, key in old]
        gone = self._not_in_place(asked[:1], read) and self._not_in_place(asked, read)
        for key in asked:
            if key not in gone:
                read[key].known = max(now, read[key].known)
        return gone

    def _not_in_place(self, keys: Sequence[str], read: Mapping[str, _Reading]) -> dict[str, Outcome]:
        found = self._client.replicas(keys)
        answer = Outcome.NOT_FOUND if found or self.health().ok else Outcome.UNREACHABLE
        return {key: answer for key in keys if found.get(key, NOWHERE).places != read[key].placed.places}

    def _send(
        self,
        batch: RangeBatch,
        call: str,
        answers: list[Outcome],
        rows: list[int],
        host: Regions,
        judge: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the native calls for `rows` and fills in their answers; `judge` corrects them before anything is scattered."""
        if call == PUT_RANGES and len(set(batch.keys)) < len(batch.keys):
            rows = [row for row in rows if batch.keys[row] not in batch.keys[:row]]
        if not rows:
            return
        part = batch if len(rows) == len(batch.keys) else _part(batch, np.array(rows, np.intp))
        whole = joined(part)
        plan = None if self._staging is None or not self._may_stage(whole, host) else Staging.plan(whole)
        slot = None if plan is None or self._staging is None or plan.pitch > self._staging.slot_bytes else self._staging.take()
        if plan is None or slot is None:
            self._send_direct(whole, call, answers, rows)
            judge()
            return
        assert self._staging is not None
        try:
            most = self._staging.slot_bytes // plan.pitch
            for lo in range(0, len(rows), most):
                chunk, chunk_rows = _part(whole, slice(lo, lo + most)), rows[lo : lo + most]
                if call == PUT_RANGES:
                    plan.gather(chunk, slot)
                self._send_direct(plan.sent(chunk, slot), call, answers, chunk_rows)
                judge()
                if call == GET_RANGES:
                    good = [i for i, row in enumerate(chunk_rows) if answers[row] is Outcome.OK]
                    plan.scatter(chunk, slot, slice(None) if len(good) == len(chunk_rows) else np.array(good, np.int64))
                with self._lock:
                    self._count["staged_bytes"] += plan.pitch * len(chunk_rows)
        finally:
            self._staging.give_back(slot)

    def _may_stage(self, batch: RangeBatch, host: Regions) -> bool:
        return len(batch.sizes) > 1 and (host is self._regions or bool(host.cover(batch.addresses, batch.sizes).all()))

    def _send_direct(self, batch: RangeBatch, call: str, answers: list[Outcome], rows: Sequence[int]) -> None:
        n, nbytes = len(batch.keys), batch.nbytes_per_key
        sizes, offsets = batch.sizes.tolist(), batch.offsets.tolist()
        codes = self._ask(call, batch.keys, batch.addresses.tolist(), [sizes] * n, [offsets] * n)
        for row, code in zip(rows, codes, strict=True):
            answers[row] = range_outcome(code, nbytes)
        with self._lock:
            self._count["ranges_sent"] += n * len(sizes)


def _part(batch: RangeBatch, rows: slice | npt.NDArray[np.intp]) -> RangeBatch:
    keys = batch.keys[rows] if isinstance(rows, slice) else [batch.keys[row] for row in rows.tolist()]
    return RangeBatch(keys, batch.addresses[rows], batch.sizes, batch.offsets)


def _paired(keys: Sequence[str], sizes: Sequence[int]) -> list[int]:
    nbytes = [int(size) for size in sizes]
    if len(nbytes) != len(keys):
        raise StoreError(f"{len(keys)} keys but {len(nbytes)} sizes; give one size per key")
    return nbytes
