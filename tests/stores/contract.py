"""The contract suite: what every store must answer. A test module gives `StoreContract` a `world` fixture and runs it whole.

Rules: docs/design/store-contract.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from kvactors.core.store import Outcome, RangeBatch, Store
from kvactors.errors import StoreError, UnregisteredMemoryError

OK, EXISTS, NO_SPACE, INVALID = Outcome.OK, Outcome.EXISTS, Outcome.NO_SPACE, Outcome.INVALID
NOT_FOUND, NOT_READY, NO_REPLICA = Outcome.NOT_FOUND, Outcome.NOT_READY, Outcome.NO_REPLICA
LEASE_EXPIRED, SIZE_MISMATCH = Outcome.LEASE_EXPIRED, Outcome.SIZE_MISMATCH


class Buffer:
    """Memory of the caller, to be registered."""

    def __init__(self, nbytes: int = 1 << 16) -> None:
        self.bytes = np.zeros(nbytes, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.nbytes = nbytes

    def fill(self, offset: int, values: bytes) -> int:
        """Write bytes; returns their address."""
        self.bytes[offset : offset + len(values)] = np.frombuffer(values, np.uint8)
        return self.address + offset

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.bytes[offset : offset + nbytes].tobytes()


@dataclass
class World:
    """Two clients of one store, a buffer registered with both, and a way to let time pass.

    Attributes:
        advance: lets so many seconds pass for the store (a manual clock, or a real wait on a store with short timeouts).
        discard_s: discard timeout of the store, seconds.
    """

    a: Store
    b: Store
    buffer: Buffer
    advance: Callable[[float], None]
    discard_s: float
    unique: str = ""

    def key(self, name: str) -> str:
        return f"{self.unique}{name}"

    def put(self, name: str, payload: bytes, client: Store | None = None) -> str:
        """Write and commit an object; returns its key."""
        store, key = client or self.a, self.key(name)
        assert store.put_open([key], [len(payload)]) == [OK]
        assert store.put_ranges(one_range(key, self.buffer.fill(0, payload), len(payload))) == [OK]
        assert store.put_commit([key]) == [OK]
        return key

    def get(self, key: str, nbytes: int, client: Store | None = None) -> bytes:
        """Open, read whole, close."""
        store = client or self.a
        assert store.get_open([key], [nbytes]) == [OK]
        at = self.buffer.nbytes - nbytes
        self.buffer.bytes[at:] = 0
        assert store.get_ranges(one_range(key, self.buffer.address + at, nbytes)) == [OK]
        assert store.get_close([key]) == [OK]
        return self.buffer.read(at, nbytes)


def ranges(keys: Sequence[str], addresses: Sequence[Sequence[int]], sizes: Sequence[int], offsets: Sequence[int]) -> RangeBatch:
    shaped = np.array(addresses, np.int64).reshape(len(keys), len(sizes))
    return RangeBatch(keys, shaped, np.array(sizes, np.int64), np.array(offsets, np.int64))


def one_range(key: str, address: int, nbytes: int, offset: int = 0) -> RangeBatch:
    return ranges([key], [[address]], [nbytes], [offset])


class StoreContract:
    """Every rule of the contract that two clients and a clock can show."""

    # Opening puts

    def test_opens_a_fresh_key(self, world: World) -> None:
        assert world.a.put_open([world.key("k")], [64]) == [OK]

    def test_refuses_an_empty_object(self, world: World) -> None:
        assert world.a.put_open([world.key("k")], [0]) == [INVALID]

    def test_refuses_a_key_that_this_client_has_open(self, world: World) -> None:
        key = world.key("k")
        world.a.put_open([key], [64])
        assert world.a.put_open([key], [64]) == [INVALID]

    def test_reports_a_key_that_another_client_has_open_as_existing(self, world: World) -> None:
        key = world.key("k")
        world.a.put_open([key], [64])
        assert world.b.put_open([key], [64]) == [EXISTS]

    def test_reports_a_committed_key_as_existing_to_everyone(self, world: World) -> None:
        key = world.put("k", b"x" * 64)
        assert world.a.put_open([key], [64]) == [EXISTS]
        assert world.b.put_open([key], [64]) == [EXISTS]

    def test_opens_a_key_that_a_call_names_twice_only_once(self, world: World) -> None:
        key = world.key("k")
        assert world.a.put_open([key, key], [64, 64]) == [OK, EXISTS]

    def test_answers_each_key_of_a_call_by_itself(self, world: World) -> None:
        known, fresh, empty = world.put("known", b"x" * 16), world.key("fresh"), world.key("empty")
        assert world.a.put_open([fresh, known, empty], [16, 16, 0]) == [OK, EXISTS, INVALID]

    def test_refuses_an_empty_object_before_it_looks_at_the_key(self, world: World) -> None:
        key = world.key("k")
        assert world.a.put_open([key, key], [16, 0]) == [OK, INVALID]

    def test_refuses_a_call_with_a_size_too_few(self, world: World) -> None:
        with pytest.raises(StoreError):
            world.a.put_open([world.key("k"), world.key("l")], [16])

    # Writing ranges

    def test_stores_ranges_at_their_offsets(self, world: World) -> None:
        key = world.key("k")
        world.a.put_open([key], [8])
        late, early = world.buffer.fill(0, b"wxyz"), world.buffer.fill(100, b"abcd")
        assert world.a.put_ranges(ranges([key], [[late, early]], [4, 4], [4, 0])) == [OK]
        world.a.put_commit([key])
        assert world.get(key, 8) == b"abcdwxyz"

    def test_refuses_a_range_outside_the_object_for_that_key_only(self, world: World) -> None:
        small, large = world.key("small"), world.key("large")
        world.a.put_open([small, large], [16, 32])
        at = world.buffer.fill(0, b"s" * 64)
        assert world.a.put_ranges(ranges([small, large], [[at], [at]], [16], [16])) == [INVALID, OK]
        assert world.a.put_ranges(ranges([small, large], [[at], [at]], [17], [0])) == [INVALID, OK]

    def test_refuses_a_range_without_a_session(self, world: World) -> None:
        assert world.a.put_ranges(one_range(world.key("k"), world.buffer.address, 8)) == [INVALID]

    def test_sessions_belong_to_their_client(self, world: World) -> None:
        key = world.key("k")
        world.a.put_open([key], [8])
        assert world.b.put_ranges(one_range(key, world.buffer.address, 8)) == [INVALID]
        assert world.b.put_commit([key]) == [INVALID]
        assert world.b.put_revoke([key]) == [INVALID]
        assert world.a.put_commit([key]) == [OK]

    @pytest.mark.parametrize("end", ["put_commit", "put_revoke"])
    def test_refuses_a_range_on_an_ended_session(self, world: World, end: str) -> None:
        key = world.key("k")
        world.a.put_open([key], [8])
        assert getattr(world.a, end)([key]) == [OK]
        assert world.a.put_ranges(one_range(key, world.buffer.address, 8)) == [INVALID]

    def test_reports_a_key_without_ranges(self, world: World) -> None:
        key = world.key("k")
        world.a.put_open([key], [8])
        assert world.a.put_ranges(ranges([key], [[]], [], [])) == [NO_REPLICA]

    def test_refuses_memory_that_is_not_registered(self, world: World) -> None:
        key, outside = world.key("k"), Buffer(64)
        world.a.put_open([key], [8])
        assert world.a.put_ranges(one_range(key, outside.address, 8)) == [INVALID]
        last = world.buffer.address + world.buffer.nbytes
        assert world.a.put_ranges(one_range(key, last - 7, 8)) == [INVALID]
        assert world.a.put_ranges(one_range(key, last - 8, 8)) == [OK]

    # Ending puts

    def test_ends_a_put_once(self, world: World) -> None:
        key = world.key("k")
        world.a.put_open([key], [8])
        assert [world.a.put_commit([key]), world.a.put_commit([key]), world.a.put_revoke([key])] == [[OK], [INVALID], [INVALID]]

    @pytest.mark.parametrize("end", ["put_commit", "put_revoke"])
    def test_the_end_of_a_put_counts_for_every_mention_of_its_key(self, world: World, end: str) -> None:
        key, none = world.key("k"), world.key("none")
        world.a.put_open([key], [8])
        assert getattr(world.a, end)([key, none, key]) == [OK, INVALID, OK]
        assert getattr(world.a, end)([key]) == [INVALID]

    def test_commits_holes_without_a_word(self, world: World) -> None:
        key = world.key("k")
        world.a.put_open([key], [8])
        assert world.a.put_commit([key]) == [OK]
        assert world.a.readable([key]) == [True]

    def test_commits_after_a_failed_range(self, world: World) -> None:
        key = world.key("k")
        world.a.put_open([key], [8])
        assert world.a.put_ranges(one_range(key, world.buffer.address, 9)) == [INVALID]
        assert world.a.put_commit([key]) == [OK]

    def test_a_revoked_key_is_gone_and_may_be_put_again(self, world: World) -> None:
        key = world.key("k")
        world.a.put_open([key], [8])
        assert world.a.put_revoke([key]) == [OK]
        assert world.a.put_revoke([key]) == [INVALID]
        assert world.a.get_open([key], [8]) == [NOT_FOUND]
        assert world.get(world.put("k", b"12345678", world.b), 8) == b"12345678"

    def test_cannot_end_what_was_never_opened(self, world: World) -> None:
        assert world.a.put_commit([world.key("k")]) == [INVALID]
        assert world.a.put_revoke([world.key("k")]) == [INVALID]

    # Reading

    def test_reads_what_another_client_wrote(self, world: World) -> None:
        assert world.get(world.put("k", b"hello..."), 8, world.b) == b"hello..."

    def test_get_open_says_why_not(self, world: World) -> None:
        writing, stored = world.key("writing"), world.put("stored", b"x" * 8)
        world.a.put_open([writing], [8])
        for client in (world.a, world.b):
            assert client.get_open([world.key("none"), writing, stored], [8, 8, 8]) == [NOT_FOUND, NOT_READY, OK]

    def test_get_open_compares_sizes(self, world: World) -> None:
        key = world.put("k", b"x" * 8)
        assert world.b.get_open([key], [9]) == [SIZE_MISMATCH]
        assert world.b.get_ranges(one_range(key, world.buffer.address, 8)) == [INVALID]

    def test_a_wrong_size_ends_no_session_of_a_right_one(self, world: World) -> None:
        key = world.put("k", b"x" * 8)
        assert world.a.get_open([key, key, key], [9, 8, 9]) == [SIZE_MISMATCH, OK, SIZE_MISMATCH]
        assert world.a.get_open([key], [9]) == [SIZE_MISMATCH]
        assert world.a.get_ranges(one_range(key, world.buffer.address, 8)) == [OK]

    def test_a_read_of_no_ranges_is_done_at_once(self, world: World) -> None:
        key = world.put("k", b"x" * 8)
        batch = ranges([key], [[]], [], [])
        assert world.a.get_ranges(batch) == [INVALID]
        world.a.get_open([key], [8])
        assert world.a.get_ranges(batch) == [OK]

    def test_reads_ranges_from_their_offsets_into_many_blocks(self, world: World) -> None:
        key = world.put("k", b"abcdwxyz")
        at = world.buffer.address
        world.a.get_open([key], [8])
        batch = ranges([key, key], [[at + 200, at + 300], [at + 400, at + 500]], [4, 2], [4, 1])
        assert world.a.get_ranges(batch) == [OK, OK]
        assert [world.buffer.read(i, 4)[:n] for i, n in ((200, 4), (300, 2), (400, 4), (500, 2))] == [b"wxyz", b"bc"] * 2

    def test_refuses_to_read_without_a_session(self, world: World) -> None:
        key = world.put("k", b"x" * 8)
        assert world.a.get_ranges(one_range(key, world.buffer.address, 8)) == [INVALID]

    def test_refuses_to_read_past_the_object(self, world: World) -> None:
        key = world.put("k", b"x" * 8)
        world.a.get_open([key], [8])
        assert world.a.get_ranges(one_range(key, world.buffer.address, 8, offset=1)) == [INVALID]
        assert world.a.get_ranges(one_range(key, world.buffer.address, 8)) == [OK]

    def test_refuses_to_write_to_memory_that_is_not_registered(self, world: World) -> None:
        key, outside = world.put("k", b"x" * 8), Buffer(64)
        world.a.get_open([key], [8])
        assert world.a.get_ranges(one_range(key, outside.address, 8)) == [INVALID]
        assert not outside.bytes.any()

    def test_one_close_ends_the_session_for_everyone_in_the_client(self, world: World) -> None:
        key = world.put("k", b"x" * 8)
        batch = one_range(key, world.buffer.address, 8)
        assert [world.a.get_open([key], [8]), world.a.get_open([key], [8]), world.b.get_open([key], [8])] == [[OK]] * 3
        assert world.a.get_close([key]) == [OK]
        assert world.a.get_ranges(batch) == [INVALID]
        assert world.b.get_ranges(batch) == [OK]

    def test_closing_what_is_not_open_is_fine(self, world: World) -> None:
        assert world.a.get_close([world.key("none")]) == [OK]

    def test_readable_tells_committed_keys(self, world: World) -> None:
        writing, stored = world.key("writing"), world.put("stored", b"x" * 8)
        world.a.put_open([writing], [8])
        assert world.b.readable([stored, writing, world.key("none")]) == [True, False, False]

    # Time

    def test_a_lease_ends_once_with_expired_then_with_no_session(self, world: World) -> None:
        key = world.put("k", b"x" * 8)
        batch = one_range(key, world.buffer.address, 8)
        world.a.get_open([key], [8])
        world.advance(world.a.lease_s)
        assert [world.a.get_ranges(batch), world.a.get_ranges(batch)] == [[LEASE_EXPIRED], [INVALID]]

    def test_opening_again_renews_the_lease(self, world: World) -> None:
        key = world.put("k", b"x" * 8)
        batch = one_range(key, world.buffer.address, 8)
        world.a.get_open([key], [8])
        world.advance(world.a.lease_s * 0.7)
        assert world.a.get_open([key], [8]) == [OK]
        world.advance(world.a.lease_s * 0.7)
        assert world.a.get_ranges(batch) == [OK]

    def test_a_dead_writers_key_may_be_taken_after_the_discard_timeout(self, world: World) -> None:
        key = world.key("k")
        world.a.put_open([key], [8])
        world.advance(world.discard_s * 0.5)
        assert world.b.put_open([key], [8]) == [EXISTS]
        world.advance(world.discard_s * 0.6)
        assert world.b.put_open([key], [8]) == [OK]
        assert world.b.put_ranges(one_range(key, world.buffer.fill(0, b"new.data"), 8)) == [OK]
        assert world.b.put_commit([key]) == [OK]
        assert world.get(key, 8) == b"new.data"

    def test_a_put_is_safe_for_less_than_the_discard_timeout(self, world: World) -> None:
        assert 0 < world.a.put_safe_age_s <= world.discard_s * 0.75

    # The store as a whole

    def test_is_a_store(self, world: World) -> None:
        assert isinstance(world.a, Store)
        assert world.a.health().ok

    def test_refuses_to_register_memory_twice(self, world: World) -> None:
        with pytest.raises(StoreError):
            world.a.register(world.buffer.address, world.buffer.nbytes)

    def test_unregisters_only_what_was_registered(self, world: World) -> None:
        key = world.key("k")
        with pytest.raises(UnregisteredMemoryError):
            world.a.unregister(world.buffer.address + 64)
        world.a.put_open([key], [8])
        world.a.unregister(world.buffer.address)
        assert world.a.put_ranges(one_range(key, world.buffer.address, 8)) == [INVALID]
        world.a.register(world.buffer.address, world.buffer.nbytes)
        assert world.a.put_ranges(one_range(key, world.buffer.address, 8)) == [OK]

    def test_calls_after_close_raise(self, world: World) -> None:
        key, batch = world.put("k", b"x" * 8), one_range(world.key("k"), world.buffer.address, 8)
        world.b.close()
        world.b.close()
        calls: list[Callable[[], object]] = [
            lambda: world.b.put_open([key], [8]),
            lambda: world.b.put_ranges(batch),
            lambda: world.b.put_commit([key]),
            lambda: world.b.put_revoke([key]),
            lambda: world.b.get_open([key], [8]),
            lambda: world.b.get_ranges(batch),
            lambda: world.b.get_close([key]),
            lambda: world.b.readable([key]),
            lambda: world.b.register(world.buffer.address, 8),
            lambda: world.b.unregister(world.buffer.address),
            lambda: world.b.stats(),
        ]
        for call in calls:
            with pytest.raises(StoreError):
                call()
        assert not world.b.health().ok
        assert world.get(key, 8) == b"x" * 8
