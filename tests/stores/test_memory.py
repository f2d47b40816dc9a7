from __future__ import annotations

import random
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvactors.core.store import Outcome
from kvactors.errors import ConfigError, StoreError
from kvactors.stores import MemoryPool, MemoryStore, open_store
from kvactors.stores.pool import PutSessions, Use
from tests.stores.contract import Buffer, one_range, ranges
from tests.stores.memory_world import Background, CopyGate, ManualClock

OK, EXISTS, NO_SPACE, INVALID = Outcome.OK, Outcome.EXISTS, Outcome.NO_SPACE, Outcome.INVALID
NOT_FOUND, NOT_OWNER, LEASED, LEASE_EXPIRED = Outcome.NOT_FOUND, Outcome.NOT_OWNER, Outcome.LEASED, Outcome.LEASE_EXPIRED


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def buffer() -> Buffer:
    return Buffer()


def make(clock: ManualClock, buffer: Buffer, capacity: int | None = None, **options: float) -> MemoryStore:
    store = MemoryStore(capacity, clock=clock, **options)
    store.register(buffer.address, buffer.nbytes)
    return store


def join(store: MemoryStore, buffer: Buffer) -> MemoryStore:
    other = store.client()
    other.register(buffer.address, buffer.nbytes)
    return other


def commit(store: MemoryStore, *keys: str, nbytes: int = 100) -> None:
    assert store.put_open(keys, [nbytes] * len(keys)) == [OK] * len(keys)
    assert store.put_commit(keys) == [OK] * len(keys)


# Capacity and eviction


def test_a_full_pool_makes_room_for_just_the_keys_that_did_not_fit(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer, 1000, watermark=0.0)
    commit(store, *"abcdefghi")
    assert store.put_open(["x", "y", "z"], [100, 100, 100]) == [OK, NO_SPACE, NO_SPACE]
    assert store.put_open(["y", "z"], [100, 100]) == [OK, OK]
    assert [key for key in "abcdefghi" if store.contains(key)] == list("cdefghi")
    assert store.stats()["evictions"] == 2
    assert store.stats()["bytes"] == 1000


def test_a_smaller_key_may_fit_where_a_larger_did_not(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer, 1000)
    commit(store, "a", nbytes=850)
    assert store.put_open(["big", "small"], [200, 100]) == [NO_SPACE, OK]


def test_eviction_frees_a_watermark_more(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer, 1000, watermark=0.25)
    commit(store, *"abcdefghij")
    assert store.put_open(["x"], [100]) == [NO_SPACE]
    assert store.stats()["objects"] == 6  # 100 for the key, 250 of watermark, in whole objects


def test_what_was_read_last_is_evicted_last(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer, 300, watermark=0.0)
    commit(store, *"abc")
    store.get_open(["a"], [100])
    store.readable(["b"])
    clock.advance(store.lease_s)
    for new, gone in (("x", "c"), ("y", "a"), ("z", "b")):
        assert store.put_open([new], [100]) == [NO_SPACE]
        assert not store.contains(gone)
        commit(store, new)


def test_of_two_leased_objects_the_one_renewed_last_is_evicted_last(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer, 200, watermark=0.0)
    commit(store, *"ab")
    store.readable(["a", "b"])
    store.readable(["a"])
    clock.advance(store.lease_s)
    for new, gone in (("x", "b"), ("y", "a")):
        assert store.put_open([new], [100]) == [NO_SPACE]
        assert not store.contains(gone)
        commit(store, new)


@pytest.mark.parametrize("capacity", [None, 10_000])
@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_a_machine_without_memory_evicts_although_the_capacity_has_room(
    clock: ManualClock, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, capacity: int | None, error: type[Exception]
) -> None:
    store = make(clock, buffer, capacity)
    commit(store, *"abc")

    def allocate(_: int) -> None:
        raise error

    with monkeypatch.context() as full:
        full.setattr(store.pool.arena, "allocate", allocate)
        assert store.put_open(["x"], [150]) == [NO_SPACE]
    assert [key for key in "abc" if store.contains(key)] == ["c"]
    assert store.put_open(["x"], [150]) == [OK]


def test_leases_protect_and_a_fresh_commit_has_none(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer, 300, watermark=0.0)
    commit(store, *"abc")
    assert store.readable(["a", "b"]) == [True, True]
    assert store.put_open(["x"], [300]) == [NO_SPACE]
    assert [store.contains(key) for key in "abc"] == [True, True, False]
    assert store.put_open(["x"], [300]) == [NO_SPACE]
    clock.advance(store.lease_s)
    assert store.put_open(["x"], [300]) == [NO_SPACE]
    assert store.put_open(["x"], [300]) == [OK]


def test_open_puts_are_never_evicted(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer, 300)
    store.put_open(["a"], [300])
    assert [store.put_open(["b"], [100]) for _ in range(3)] == [[NO_SPACE]] * 3
    store.put_revoke(["a"])
    assert store.put_open(["b"], [100]) == [OK]


def test_a_key_that_can_never_fit_is_invalid_and_named_by_health(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer, 300)
    commit(store, "a")
    assert store.put_open(["huge", "b"], [301, 100]) == [INVALID, OK]
    assert store.contains("a"), "nothing is evicted for it"
    assert store.health().ok
    assert "'huge' of 301 bytes" in store.health().detail
    assert "300 bytes" in store.health().detail


def test_capacity_may_be_text() -> None:
    assert MemoryStore("16 MB").stats()["capacity_bytes"] == 16 << 20


# Removal


def test_remove_respects_leases_unless_forced(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer)
    commit(store, "a")
    store.put_open(["open"], [10])
    assert store.remove("none") is NOT_FOUND
    assert store.remove("open", force=True) is Outcome.NOT_READY
    store.get_open(["a"], [100])
    assert store.remove("a") is LEASED
    assert store.remove("a", force=True) is OK
    batch = one_range("a", buffer.address, 100)
    assert [store.get_ranges(batch), store.get_ranges(batch)] == [[NOT_FOUND], [INVALID]]


def test_contains_grants_no_lease(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer)
    commit(store, "a")
    assert store.contains("a")
    assert store.remove("a") is OK


def test_a_session_never_reads_the_keys_next_life(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer)
    commit(store, "a")
    store.get_open(["a"], [100])
    store.remove("a", force=True)
    commit(store, "a")
    assert store.get_ranges(one_range("a", buffer.address, 100)) == [NOT_FOUND]
    assert store.get_open(["a"], [100]) == [OK]
    assert store.get_ranges(one_range("a", buffer.address, 100)) == [OK]


# Dead writers


def test_a_superseded_writer_touches_nothing_and_its_memory_is_pinned(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer, 1000)
    other = join(store, buffer)
    store.put_open(["k"], [400])
    clock.advance(30)
    assert other.put_open(["k"], [400]) == [OK]
    assert store.stats()["bytes"] == 800
    assert other.put_ranges(one_range("k", buffer.fill(0, b"n" * 400), 400)) == [OK]
    assert store.put_ranges(one_range("k", buffer.fill(500, b"o" * 400), 400)) == [INVALID]
    assert store.put_commit(["k"]) == [INVALID]
    assert store.put_open(["k"], [400]) == [INVALID], "this client has it open still"
    assert store.put_revoke(["k"]) == [NOT_OWNER]
    assert store.put_revoke(["k"]) == [INVALID]
    assert store.put_open(["k"], [400]) == [EXISTS]
    assert other.put_commit(["k"]) == [OK]
    other.get_open(["k"], [400])
    other.get_ranges(one_range("k", buffer.address + 2000, 400))
    assert buffer.read(2000, 400) == b"n" * 400
    clock.advance(569.9)
    assert store.stats()["bytes"] == 800
    clock.advance(0.2)
    assert store.stats()["bytes"] == 400


def test_a_put_that_nobody_ends_is_released(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer, 1000)
    store.put_open(["k"], [400])
    clock.advance(599)
    assert store.put_ranges(one_range("k", buffer.address, 400)) == [OK]
    clock.advance(1)
    assert store.put_ranges(one_range("k", buffer.address, 400)) == [INVALID]
    assert [store.put_commit(["k"]), store.put_revoke(["k"])] == [[INVALID], [INVALID]]
    assert store.stats()["bytes"] == 0
    assert store.put_open(["k"], [400]) == [OK]


def test_taking_over_needs_room_of_its_own(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer, 1000)
    other = join(store, buffer)
    store.put_open(["k"], [600])
    clock.advance(30)
    assert other.put_open(["k"], [600]) == [NO_SPACE]
    assert store.put_ranges(one_range("k", buffer.address, 600)) == [OK], "nobody took it over"


def test_a_closed_client_is_a_dead_writer(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer)
    other = join(store, buffer)
    other.put_open(["k"], [100])
    other.close()
    assert store.put_open(["k"], [100]) == [EXISTS]
    clock.advance(30)
    assert store.put_open(["k"], [100]) == [OK]


# Ranges in flight


@pytest.mark.parametrize("end", ["put_commit", "put_revoke"])
def test_ending_a_put_waits_for_its_ranges(
    clock: ManualClock, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    store = make(clock, buffer)
    store.put_open(["k", "other"], [100, 100])
    gate = CopyGate(monkeypatch)
    buffer.fill(0, b"d" * 100)
    writer = Background(store.put_ranges, one_range("k", buffer.address, 100))
    assert gate.arrived.wait(30)
    assert store.put_commit(["other"]) == [OK], "another key does not wait"
    waiting = WaitSpy(store, monkeypatch)
    ender = Background(getattr(store, end), ["k"])
    assert waiting.began.wait(30)
    assert ender.is_alive()
    assert store.put_ranges(one_range("k", buffer.address, 100)) == [INVALID], "no range joins an ending put"
    assert store.put_commit(["k"]) == [INVALID]
    assert not store.contains("k")
    gate.release.set()
    assert writer.result() == [OK]
    assert ender.result() == [OK]
    assert store.contains("k") is (end == "put_commit")


class WaitSpy:
    """Tells when a thread begins to wait for a change of the pool."""

    def __init__(self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = threading.Event()
        real = store.pool.wait

        def wait() -> None:
            self.began.set()
            real()

        monkeypatch.setattr(store.pool, "wait", wait)


def test_whoever_closes_second_waits_for_calls_in_flight_too(
    clock: ManualClock, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(clock, buffer)
    store.put_open(["k"], [100])
    gate, spy = CopyGate(monkeypatch), WaitSpy(store, monkeypatch)
    writer = Background(store.put_ranges, one_range("k", buffer.address, 100))
    assert gate.arrived.wait(30)
    closes = []
    for _ in range(2):
        spy.began.clear()
        closes.append(Background(store.close))
        assert spy.began.wait(5)
    gate.release.set()
    assert writer.result() == [OK]
    assert [close.result() for close in closes] == [None, None]


def test_a_read_in_flight_pins_its_object(clock: ManualClock, buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(clock, buffer, 100)
    store.put_open(["k"], [100])
    store.put_ranges(one_range("k", buffer.fill(0, b"d" * 100), 100))
    store.put_commit(["k"])
    store.get_open(["k"], [100])
    gate = CopyGate(monkeypatch)
    reader = Background(store.get_ranges, one_range("k", buffer.address + 1000, 100))
    assert gate.arrived.wait(30)
    clock.advance(store.lease_s - 1)
    assert store.remove("k", force=True) is OK
    assert store.stats()["bytes"] == 100
    assert store.put_open(["new"], [100]) == [NO_SPACE], "its memory is not free yet"
    gate.release.set()
    assert reader.result() == [OK]
    assert buffer.read(1000, 100) == b"d" * 100
    assert store.put_open(["new"], [100]) == [OK]


def test_what_is_being_read_is_not_evicted_even_past_its_lease(
    clock: ManualClock, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(clock, buffer, 200, watermark=0.0)
    commit(store, "read", "other")
    store.get_open(["read"], [100])
    gate = CopyGate(monkeypatch)
    reader = Background(store.get_ranges, one_range("read", buffer.address, 100))
    assert gate.arrived.wait(30)
    clock.advance(store.lease_s)
    assert store.put_open(["new"], [200]) == [NO_SPACE]
    assert (store.contains("read"), store.contains("other")) == (True, False)
    gate.release.set()
    assert reader.result() == [LEASE_EXPIRED]
    assert store.put_open(["new"], [200]) == [NO_SPACE]
    assert store.put_open(["new"], [200]) == [OK]


def test_bytes_that_arrive_after_the_lease_do_not_count(
    clock: ManualClock, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(clock, buffer)
    commit(store, "k", "renewed")
    store.get_open(["k", "renewed"], [100, 100])
    gate = CopyGate(monkeypatch)
    batch = ranges(["k", "renewed"], [[buffer.address], [buffer.address + 100]], [100], [0])
    reader = Background(store.get_ranges, batch)
    assert gate.arrived.wait(30)
    clock.advance(store.lease_s / 2)
    assert store.get_open(["renewed"], [100]) == [OK]
    assert store.readable(["k"]) == [True], "protects the object, does not renew the session"
    clock.advance(store.lease_s / 2)
    gate.release.set()
    assert reader.result() == [LEASE_EXPIRED, OK]
    assert store.get_ranges(batch) == [INVALID, OK]
    assert store.stats()["reads"] == 2


def test_a_put_released_under_a_range_keeps_its_memory_until_the_range_ends(
    clock: ManualClock, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(clock, buffer, 100)
    store.put_open(["k"], [100])
    gate = CopyGate(monkeypatch)
    writer = Background(store.put_ranges, one_range("k", buffer.address, 100))
    assert gate.arrived.wait(30)
    waiting = WaitSpy(store, monkeypatch)
    ender = Background(store.put_commit, ["k"])
    assert waiting.began.wait(30)
    clock.advance(600)
    assert store.put_open(["new"], [100]) == [NO_SPACE]
    gate.release.set()
    writer.result()
    assert ender.result() == [INVALID]
    assert store.put_open(["new"], [100]) == [OK]


@pytest.mark.parametrize("call", ["unregister", "close"])
def test_memory_is_let_go_only_after_the_ranges_that_use_it(
    clock: ManualClock, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = make(clock, buffer)
    store.put_open(["k"], [100])
    gate = CopyGate(monkeypatch)
    writer = Background(store.put_ranges, one_range("k", buffer.address, 100))
    assert gate.arrived.wait(30)
    waiting = WaitSpy(store, monkeypatch)
    ender = Background(store.unregister, buffer.address) if call == "unregister" else Background(store.close)
    assert waiting.began.wait(30)
    assert ender.is_alive()
    gate.release.set()
    assert writer.result() == [OK]
    assert ender.result() is None


def test_close_wakes_a_commit_that_waits(clock: ManualClock, buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(clock, buffer)
    store.put_open(["k"], [100])
    gate = CopyGate(monkeypatch)
    writer = Background(store.put_ranges, one_range("k", buffer.address, 100))
    assert gate.arrived.wait(30)
    waiting = WaitSpy(store, monkeypatch)
    committer = Background(store.put_commit, ["k"])
    assert waiting.began.wait(30)
    closer = Background(store.close)
    assert isinstance(committer.result(), StoreError)
    gate.release.set()
    assert writer.result() == [OK]
    assert closer.result() is None


# Batches


@pytest.mark.parametrize(
    ("keys", "answers"),
    [
        ("kk", [OK, INVALID]),
        ("kl", [OK, OK]),
        ("xkl", [INVALID, OK, OK]),
        ("kxl", [OK, INVALID, OK]),
        ("xklkx", [INVALID, OK, OK, INVALID, INVALID]),
        ("kdl", [OK, INVALID, OK]),
    ],
)
def test_a_put_moves_each_open_key_once(clock: ManualClock, buffer: Buffer, keys: str, answers: list[Outcome]) -> None:
    store = make(clock, buffer)
    commit(store, "d")
    store.put_open(["k", "l"], [100, 100])
    at = [[buffer.address + 8 * row] for row in range(len(keys))]
    assert store.put_ranges(ranges(list(keys), at, [8], [0])) == answers
    assert store.stats()["writes"] == answers.count(OK)
    assert store.put_commit(["k", "l"]) == [OK, OK], "nothing is pinned any more"


def test_a_get_answers_each_row_by_its_own_session(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer, lease_s=10.0)
    commit(store, *"abc")
    store.get_open(["a"], [100])
    clock.advance(6.0)
    store.get_open(["b", "c"], [100, 100])
    clock.advance(6.0)
    assert store.remove("c", force=True) is OK
    keys = ["b", "x", "a", "b", "c", "a"]
    at = [[buffer.address + 8 * row] for row in range(len(keys))]
    answers = [OK, INVALID, LEASE_EXPIRED, OK, NOT_FOUND, LEASE_EXPIRED]
    assert store.get_ranges(ranges(keys, at, [8], [0])) == answers
    assert store.get_ranges(ranges(keys, at, [8], [0])) == [OK, INVALID, INVALID, OK, INVALID, INVALID]


@pytest.mark.parametrize(("size", "offset"), [(0, 0), (-1, 0), (8, -1), (8, 93), (1 << 62, 0), (8, (1 << 63) - 1)])
def test_odd_ranges_are_invalid(clock: ManualClock, buffer: Buffer, size: int, offset: int) -> None:
    store = make(clock, buffer)
    store.put_open(["k"], [100])
    assert store.put_ranges(one_range("k", buffer.address, size, offset)) == [INVALID]


def test_batches_of_the_wrong_shape_are_refused_as_a_whole(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer)
    batch = ranges(["a", "b"], [[1], [2]], [8], [0])
    for wrong in (
        {"addresses": batch.addresses[:1]},
        {"offsets": np.array([0, 8])},
        {"sizes": np.array([8], np.int32)},
    ):
        broken = type(batch)(**{name: wrong.get(name, getattr(batch, name)) for name in batch.__dataclass_fields__})
        with pytest.raises(StoreError):
            store.put_ranges(broken)


def test_objects_in_pieces_read_back_whole(clock: ManualClock) -> None:
    buffer = Buffer(1 << 20)
    store = MemoryStore(clock=clock, slab_bytes=1 << 16, reserve_bytes=1 << 20)
    store.register(buffer.address, buffer.nbytes)
    small = [f"s{i}" for i in range(256)]
    commit(store, *small, nbytes=4096)
    for key in small[::2]:
        store.remove(key)
    rng = random.Random(1)
    payload = rng.randbytes(1 << 18)
    store.put_open(["large", "plain"], [len(payload), 64])
    held = store.pool.find("large")
    assert held is not None
    assert len(held.extents) > 1
    at = buffer.fill(0, payload)
    cuts = [0, 5, 4096, 10_000, 200_000, len(payload)]
    for begin, end in pairwise(cuts):
        assert store.put_ranges(one_range("large", at + begin, end - begin, begin)) == [OK]
    both = ranges(["large", "plain"], [[at], [at]], [64], [0])
    assert store.put_ranges(both) == [OK, OK]
    store.put_commit(["large", "plain"])
    store.get_open(["large"], [len(payload)])
    assert store.get_ranges(one_range("large", at + (1 << 19), len(payload))) == [OK]
    assert buffer.read(1 << 19, len(payload)) == payload


# Pools and construction


def test_a_given_pool_outlives_its_clients(clock: ManualClock) -> None:
    pool = MemoryPool(clock=clock)
    first = MemoryStore(pool=pool)
    commit(first, "k")
    first.close()
    assert MemoryStore(pool=pool).contains("k")


@pytest.mark.parametrize(
    ("keys", "sizes", "said"),
    [
        ("ab", [1, 1], "keys is the text 'ab'; give a list of texts"),
        (["a", 7], [1, 1], "item 1 of keys is the number 7; give a list of texts"),
        (["a"], [1.5], "sizes: 'float' object cannot be interpreted as an integer; give a whole number of bytes for each key"),
        (["a"], 1, "sizes: 'int' object is not iterable; give a whole number of bytes for each key"),
        (["a"], [1, 2], "1 keys but 2 sizes; give one size per key"),
    ],
)
def test_keys_and_sizes_that_do_not_fit_are_refused_as_they_are_given(
    clock: ManualClock, buffer: Buffer, keys: Any, sizes: Any, said: str
) -> None:
    with pytest.raises(StoreError) as refused:
        make(clock, buffer).put_open(keys, sizes)
    assert str(refused.value) == said


def test_a_pool_of_its_own_goes_with_the_last_client(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer)
    other = join(store, buffer)
    commit(store, "k")
    store.close()
    assert other.contains("k")
    other.close()
    assert store.pool.arena.footprint_bytes == 0
    with pytest.raises(StoreError):
        store.client()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"capacity": "lots"}, "capacity"),
        ({"capacity": -1}, "capacity"),
        ({"lease_s": 0}, "lease_s"),
        ({"discard_timeout_s": -1}, "discard_timeout_s"),
        ({"release_timeout_s": 29}, "release_timeout_s"),
        ({"watermark": 1}, "watermark"),
        ({"pool": MemoryPool(), "capacity": 5}, "pool"),
        ({"pool": MemoryPool(), "lease_s": 5}, "pool"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        open_store("memory", **options)


def test_backends_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    assert open_store("memory", capacity="1 MB").name == "memory"
    with pytest.raises(ConfigError, match="master_server_address is missing"):
        open_store("mooncake")
    with pytest.raises(ConfigError, match="'redis'"):
        open_store("redis")


def test_repr_tells_the_state(clock: ManualClock, buffer: Buffer) -> None:
    store = make(clock, buffer, 1000)
    store.put_open(["k"], [100])
    assert repr(store) == "<MemoryStore 1 puts and 0 gets open, on <MemoryPool 0 objects, 100 bytes of 1000>>"
    store.close()
    assert "closed" in repr(store)


# Many threads


def test_many_threads_never_see_another_objects_bytes() -> None:
    """Writers, readers and evictions at once in a pool that is too small: an OK read has exactly its key's bytes."""
    clock, threads, nbytes = ManualClock(), 6, 3000
    root = MemoryStore(20 * nbytes, clock=clock)
    problems: list[str] = []
    reads = [0] * threads

    def work(number: int) -> None:
        rng, buffer = random.Random(number), Buffer(2 * nbytes)
        store = root.client()
        store.register(buffer.address, buffer.nbytes)
        for _ in range(250):
            name = rng.randrange(40)
            key, payload = f"k{name}", bytes([name + 1]) * nbytes
            if store.put_open([key], [nbytes]) == [OK]:
                store.put_ranges(one_range(key, buffer.fill(0, payload), nbytes))
                (store.put_commit if rng.random() < 0.8 else store.put_revoke)([key])
            name = rng.randrange(40)
            key = f"k{name}"
            if store.get_open([key], [nbytes]) == [OK]:
                if rng.random() < 0.2:
                    store.remove(key, force=True)
                if store.get_ranges(one_range(key, buffer.address + nbytes, nbytes)) == [OK]:
                    reads[number] += 1
                    if buffer.read(nbytes, nbytes) != bytes([name + 1]) * nbytes:
                        problems.append(key)
                store.get_close([key])
            if rng.random() < 0.05:
                clock.advance(3)
        store.close()

    workers = [Background(work, number) for number in range(threads)]
    assert [worker.result() for worker in workers] == [None] * threads
    assert problems == []
    assert sum(reads) > 100
    root.pool.arena.check()
    clock.advance(600)
    stats = root.stats()
    assert stats["bytes"] == stats["objects"] * nbytes <= 20 * nbytes


def test_what_two_calls_use_is_freed_once_with_the_last() -> None:
    """The calls name different keys beside it, so that each has pinned it by itself."""
    pool = MemoryPool(capacity=1 << 16)
    sessions: PutSessions = {}
    made = []
    for key in ("both", "other"):
        pool.open(key, 64, sessions, 0.0)
        made.append(sessions[key])
        pool.commit(made[-1])
    uses = Use(made[:1]), Use(made)
    for use in uses:
        pool.begin_call(use)
    pool.remove(made[0])
    held = []
    for use in uses:
        pool.end_call(use)
        held.append(pool.used_bytes)
    assert held == [128, 64]
