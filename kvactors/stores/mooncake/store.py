"""`MooncakeStore`: the store contract over a real Mooncake pool.

What the native client leaves open is closed here: calls and answers are guarded, memory is checked to be registered, sizes are
compared when a get is opened, leases are checked before and after a read, ranges are joined or staged, keys that cannot be read
are not tried again at once, and a master that was restarted unseen is found out. What a session needs beyond that is the
engine's, for every store alike: coverage, the age of puts, one writer per key, dropping all sessions with a lost master.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvactors.core.clock import Clock
from kvactors.core.store import Health, Outcome, RangeBatch
from kvactors.errors import ConfigError, StoreError, StoreUnreachableError
from kvactors.log import get_logger
from kvactors.stores.arguments import check_shapes, paired
from kvactors.stores.mooncake.canary import Canary
from kvactors.stores.mooncake.client import NOWHERE, PROBE_KEY, Client
from kvactors.stores.mooncake.codes import UNREACHABLE, outcome_of
from kvactors.stores.mooncake.config import MooncakeConfig
from kvactors.stores.mooncake.host_memory import host_memory
from kvactors.stores.mooncake.listening import listens
from kvactors.stores.mooncake.sender import GET_WHOLE, Sender
from kvactors.stores.mooncake.sessions import Reading, Sessions
from kvactors.stores.mooncake.suspects import Segments, Suspects
from kvactors.stores.pool import SystemClock
from kvactors.stores.regions import Regions

log = get_logger("kvactors.mooncake")

Act = Callable[[RangeBatch, list[Outcome], list[int], Regions | None], None]

_SESSION_OVER = (Outcome.LEASE_EXPIRED, Outcome.NOT_FOUND, Outcome.UNREACHABLE)

_MOST_SIZE = (1 << 63) - 1


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
        self._leaving: set[int] = set()
        """regions that no new call uses, and that the client still holds"""
        self._closing = False
        self._canary = Canary(self._client, self._clock, self.put_safe_age_s)
        self._sessions = Sessions(self._client, self._canary, config.lease_s)
        self._suspects = Suspects(config.suspect_after_s, config.negative_s)
        self._regions = self._host = Regions()
        self._sender = Sender(self._client, config.protocol, int(config.staging_bytes))
        self.good_range_bytes = self._sender.good_range_bytes
        self.reads_whole_objects = config.read_whole_objects and self._client.has(GET_WHOLE)
        self._count: Counter[str] = Counter()
        self._told: set[str] = set()
        self._ours: dict[str, bool] = {}
        """segment -> whether it is this process's"""

    def __repr__(self) -> str:
        state = "closed" if self._client.closed else f"{self._sessions.gets_open} gets open"
        return f"<MooncakeStore {state}, at {self.config.master_server_address}>"

    # Puts

    def put_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        """Reserves objects of `sizes` bytes.

        OK, INVALID (size below 1, open in this client), EXISTS, NO_SPACE for just the keys that do not fit (eviction then runs;
        also for one that can never fit), UNREACHABLE.
        """
        nbytes = paired(keys, sizes)
        self._check_open()
        good = [i for i, size in enumerate(nbytes) if 0 < size <= _MOST_SIZE]
        answers = [Outcome.INVALID] * len(keys)
        if not good:
            return answers
        try:
            life = self._canary.life()
        except StoreUnreachableError:
            return [Outcome.UNREACHABLE] * len(keys)
        replication = () if self._client.replication is None else (self._client.replication,)
        asked = [keys[i] for i in good]
        codes = self._client.ask("batch_put_session_start", asked, [nbytes[i] for i in good], *replication)
        for i, code in zip(good, codes, strict=True):
            answers[i] = outcome_of(code)
        opened = [i for i in good if answers[i] is Outcome.OK]
        if life is not None:
            self._sessions.begin_puts((keys[i] for i in opened), life)
        elif opened:  # no space for a canary: nothing may be written
            self._client.ask("batch_put_session_revoke", [keys[i] for i in opened])
            for i in opened:
                answers[i] = Outcome.NO_SPACE
        return answers

    def put_ranges(self, batch: RangeBatch) -> list[Outcome]:
        """Writes ranges.

        OK; NO_REPLICA (no ranges given); INVALID (no session, a range of no bytes or outside the object or registered memory,
        the key for the second time); TRANSFER_FAILED; NOT_FOUND, UNREACHABLE (of a session that a restarted master forgot).
        """
        return self._move(batch, self._write, "writes", "written_bytes")

    def put_commit(self, keys: Sequence[str]) -> list[Outcome]:
        """Publishes objects, whatever was written. OK, INVALID, NOT_OWNER (taken over by another client), NOT_FOUND,
        UNREACHABLE."""
        answers = self._end_puts("batch_put_session_end", keys)
        self._suspects.written(key for key, answer in zip(keys, answers, strict=True) if answer is Outcome.OK)
        return answers

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        """Drops objects being written. OK, INVALID, NOT_OWNER, NOT_FOUND, UNREACHABLE."""
        return self._end_puts("batch_put_session_revoke", keys)

    # Gets

    def get_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        """Begins to read committed objects for `lease_s` seconds; opening again renews.

        OK, NOT_FOUND, NOT_READY, SIZE_MISMATCH (in the log once per size), TRANSFER_FAILED (see `suspects.py`),
        UNREACHABLE. Only OK leaves a session, or renews it.
        """
        nbytes = paired(keys, sizes)
        self._check_open()
        try:
            life, since = self._canary.life() if keys else None, self._clock.now()
        except StoreUnreachableError:
            return [Outcome.UNREACHABLE] * len(keys)
        answers = self._outcomes("batch_get_session_start", keys)
        opened = list(dict.fromkeys(key for key, answer in zip(keys, answers, strict=True) if answer is Outcome.OK))
        if not opened:
            return answers
        try:
            found = self._client.replicas(opened)
        except BaseException:
            self._sessions.end_gets(opened)
            raise
        if not found and not self.health().ok:
            self._sessions.end_gets(opened)
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
                self._tell_once(f"an object of {placed.nbytes} bytes, the layout has {size}: it counts as a miss", key)
            elif self._suspects.key(key, since) or self._suspects.holds(placed.segments, since):
                answers[i] = Outcome.TRANSFER_FAILED
                with self._lock:
                    self._count["negative"] += 1
            else:
                self._sessions.begin_get(key, since, placed, life)
                continue
            refused.append(key)
        self._sessions.end_refused(refused, found)
        return answers

    def get_ranges(self, batch: RangeBatch) -> list[Outcome]:
        """Reads ranges.

        OK, also for no ranges; INVALID (no session, a range of no bytes or outside the object or registered memory);
        LEASE_EXPIRED (before or after the read; the session is dropped); TRANSFER_FAILED; NOT_FOUND (removed or moved
        meanwhile; the session is dropped); UNREACHABLE. Bytes of a key that is not OK may have been written.
        """
        return self._move(batch, self._read, "reads", "read_bytes")

    def get_close(self, keys: Sequence[str]) -> list[Outcome]:
        """Ends the sessions of this client, for everyone in it. OK, also where there is none."""
        return [outcome_of(self._sessions.end_gets(keys))] * len(keys)

    def readable(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are committed, and not known to be unreadable. StoreUnreachableError when the master does not answer."""
        call = "batch_is_readable" if self._client.has("batch_is_readable") else "batch_is_exist"
        self._check_open()
        codes = self._client.ask(call, keys) if keys else []
        if any(code in UNREACHABLE for code in codes):
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
        if count in UNREACHABLE:
            raise StoreUnreachableError(f"the master at {self.config.master_server_address} does not answer")
        if count < 0:
            raise StoreError(f"remove_by_regex({pattern!r}) answered {count}")
        return count

    # Memory

    def register(self, address: int, nbytes: int, *, host: bool | None = None) -> None:
        """Allows ranges in `nbytes` bytes of local memory from `address`. Device memory is not staged; `host` says whether the
        CPU can read and write the region, None = find out.

        StoreError for a region that overlaps another, is empty or no user memory, or that the client refuses.
        """
        self._check_open()
        with self._lock:
            regions = self._regions.with_region(address, nbytes)
            code = self._client.tell("register_buffer", int(address), int(nbytes))
            if code != 0:
                raise StoreError(f"cannot register {nbytes} bytes at {address:#x}: the client answered {code}")
            if not (host_memory(address, nbytes) if host is None else host):
                self._regions = regions
            elif self._host is self._regions:
                self._regions = self._host = regions
            else:
                self._regions, self._host = regions, self._host.with_region(address, nbytes)

    def unregister(self, address: int) -> None:
        """Forgets the region that starts there, after range calls under way have ended: its memory may then be freed.

        UnregisteredMemoryError when there is none. StoreError when the calls do not end within `close_deadline_s`: they
        may then still touch the memory; unregister it again once they have returned.
        """
        with self._moved:
            if address not in self._leaving:
                all_host = self._host is self._regions
                self._regions = kept = self._regions.without_region(address)
                if all_host:
                    self._host = kept
                elif address in self._host:
                    self._host = self._host.without_region(address)
                self._leaving.add(address)
            earlier = set(self._moves)
            if not self._moved.wait_for(lambda: not earlier & self._moves, self.config.close_deadline_s):
                raise StoreError(f"unregister({address:#x}): range calls do not return; never free or reuse this memory")
            code = self._client.tell("unregister_buffer", int(address))
            if code != 0:
                raise StoreError(f"cannot unregister {address:#x}: the client answered {code}")
            self._leaving.discard(address)

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

        `ranges` asked for, `ranges_sent` after joining and staging, `staged_bytes`, `whole_objects` that were read without
        ranges, bytes read and written, `negative`: gets refused because a read of the key or its segment failed before.
        """
        self._check_open()
        names = ("reads", "writes", "read_bytes", "written_bytes", "ranges", "ranges_sent")
        more = ("staged_bytes", "whole_objects", "negative")
        count = self._sender.counted()
        with self._lock:
            count.update(self._count)
        return {name: count[name] for name in (*names, *more)} | {"gets_open": self._sessions.gets_open}

    def close(self) -> None:
        """Leaves the pool, after calls under way. Memory that this client gave to the pool goes, with the objects in it.

        StoreError when calls do not end within `close_deadline_s`: the store is closed then, but a call may still touch
        registered memory, which must never be freed or used again.
        """
        with self._moved:
            self._closing = True
            stuck = bool(self._leaving)  # `unregister` has waited for the calls already
            at_rest = self._moved.wait_for(lambda: not self._moves, 0.0 if stuck else self.config.close_deadline_s)
        self._sender.close()
        self._client.close(None if at_rest else 0.0)
        if not at_rest:
            raise StoreError("closed with range calls that do not return; never free or reuse memory that was registered")

    # Inside

    def _check_open(self) -> None:
        if self._closing or self._client.closed:
            raise StoreError("the Mooncake store was closed; open another")

    def _outcomes(self, call: str, keys: Sequence[str]) -> list[Outcome]:
        self._check_open()
        return [outcome_of(code) for code in self._client.ask(call, keys)] if keys else []

    def _end_puts(self, call: str, keys: Sequence[str]) -> list[Outcome]:
        self._sessions.end_puts(keys)
        return self._outcomes(call, keys)

    def _tell_once(self, what: str, key: str) -> None:
        with self._lock:
            told = what in self._told
            self._told.add(what)
        if not told:
            log.warning(what, key=key)

    def _move(self, batch: RangeBatch, act: Act, count: str, count_bytes: str) -> list[Outcome]:
        """Checks a batch's rows, moves the good ones, and counts."""
        check_shapes(batch)
        answers = [Outcome.INVALID] * len(batch.keys)
        call_under_way = object()
        with self._lock:
            self._check_open()  # together with the next lines: who closes waits for every call that came before
            regions = self._regions
            host = None if self._host is regions else self._host
            self._moves.add(call_under_way)
        try:
            act(batch, answers, self._good_rows(batch, regions), host)
        finally:
            moved = answers.count(Outcome.OK)
            with self._moved:
                self._moves.discard(call_under_way)
                self._count[count] += moved
                self._count[count_bytes] += moved * batch.nbytes_per_key
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

    def _write(self, batch: RangeBatch, answers: list[Outcome], rows: list[int], host: Regions | None) -> None:
        gone = self._sessions.lost_puts(batch.keys[row] for row in rows)
        for row in rows:
            answers[row] = gone.get(batch.keys[row], Outcome.INVALID)
        self._sender.put(batch, answers, [row for row in rows if batch.keys[row] not in gone], host)

    def _read(self, batch: RangeBatch, answers: list[Outcome], rows: list[int], host: Regions | None) -> None:
        keys, sessions, now = batch.keys, self._sessions, self._clock.now()
        held = sessions.readings(keys, rows)
        expired = {row: held.pop(row) for row in list(held) if not sessions.alive(held[row], now)}
        for row in expired:
            answers[row] = Outcome.LEASE_EXPIRED
        sessions.end_readings(keys, expired)
        if not held:
            return
        read = self._suspects.begin((reading.placed.segments for reading in held.values()), now)
        failed: list[tuple[str, Segments]] = []
        try:
            judge = partial(self._judge, keys, answers, held)
            if self._reads_whole(batch, held):
                self._sender.get_whole(batch, answers, list(held), judge)
            else:
                self._sender.get(batch, answers, list(held), host, judge)
            failed = [(keys[row], r.placed.segments) for row, r in held.items() if answers[row] is Outcome.TRANSFER_FAILED]
        finally:
            self._suspects.end(read, failed, self._clock.now())
        sessions.end_readings(keys, {row: r for row, r in held.items() if answers[row] in _SESSION_OVER})

    def _reads_whole(self, batch: RangeBatch, held: Mapping[int, Reading]) -> bool:
        """Whether every row is a whole object, in order, in memory that this process gave to the pool, and none is read twice.

        From another process the call for objects is no faster, and while it waits it spins: a peer that froze would cost a core
        for each read.
        """
        if not self.reads_whole_objects or len({batch.keys[row] for row in held}) < len(held) or not len(batch.sizes):
            return False
        ends = np.cumsum(batch.sizes)
        in_order = batch.offsets[0] == 0 and bool((batch.offsets[1:] == ends[:-1]).all())
        whole = in_order and all(reading.placed.nbytes == ends[-1] for reading in held.values())
        return whole and all(self._is_ours(segment) for reading in held.values() for segment in reading.placed.segments)

    def _is_ours(self, segment: str) -> bool:
        """Whether a segment ("host:port") belongs to this process: the one that listens there moves its bytes."""
        known = self._ours.get(segment)
        if known is None:
            host, _, port = segment.rpartition(":")
            here = host == self.config.local_hostname and port.isdigit()
            known = self._ours[segment] = here and listens(os.getpid(), int(port))
        return known

    def _judge(self, keys: Sequence[str], answers: list[Outcome], held: Mapping[int, Reading]) -> None:
        """The lease once more, after the read, and the master's life: the bytes may be another object's."""
        sessions, now = self._sessions, self._clock.now()
        lost = sessions.lost_reads(keys, {row: r for row, r in held.items() if answers[row] is Outcome.OK})
        for row, reading in held.items():
            if answers[row] is Outcome.OK:
                answers[row] = lost.get(row, Outcome.OK if sessions.alive(reading, now) else Outcome.LEASE_EXPIRED)
            elif answers[row] is Outcome.LEASE_EXPIRED and sessions.alive(reading, now):
                self._tell_once(f"lease_s = {self.lease_s} is longer than the master's lease; lower it", keys[row])
