"""What `MooncakeStore` adds to the contract, on a real master: fewer ranges with the same bytes, placement, leases, space."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from kvactors.core.store import Outcome, RangeBatch
from kvactors.errors import StoreError, StoreUnreachableError
from kvactors.stores import LocalMaster, MooncakeStore
from kvactors.stores.mooncake.staging import SLOTS
from tests.mooncake.conftest import LEASE_S, Connect
from tests.stores.contract import Buffer, one_range, ranges

OK, NO_SPACE, SIZE_MISMATCH, LEASE_EXPIRED = Outcome.OK, Outcome.NO_SPACE, Outcome.SIZE_MISMATCH, Outcome.LEASE_EXPIRED

SMALL_SLOT = 4096
numbers = itertools.count()


@pytest.fixture(scope="module")
def buffer() -> Buffer:
    return Buffer(1 << 20)


@pytest.fixture(scope="module")
def plain(connect: Connect, owner: MooncakeStore, buffer: Buffer) -> MooncakeStore:
    """Sends every range as it is, but for neighbours."""
    return registered(connect(staging_bytes=0), owner, buffer)


@pytest.fixture(scope="module")
def staged(connect: Connect, owner: MooncakeStore, buffer: Buffer) -> MooncakeStore:
    return registered(connect(), owner, buffer)


@pytest.fixture(scope="module")
def cramped(connect: Connect, owner: MooncakeStore, buffer: Buffer) -> MooncakeStore:
    """Has staging slots of one page: most batches go in parts, some not at all."""
    return registered(connect(staging_bytes=SLOTS * SMALL_SLOT), owner, buffer)


def registered(store: MooncakeStore, owner: MooncakeStore, buffer: Buffer) -> MooncakeStore:
    del owner  # is asked for so that there is memory in the pool
    store.register(buffer.address, buffer.nbytes)
    return store


def fresh(count: int) -> list[str]:
    example = next(numbers)
    return [f"store/{example}/{i}" for i in range(count)]


# The same bytes


@dataclass
class Blocks:
    """Objects of some entries, and where the entries lie in local memory: entry j of block i at `addresses[i, j]`."""

    sizes: list[int]
    addresses: npt.NDArray[np.int64]
    """from the buffer's start"""
    columns: list[int]
    """the order in which a call names the entries"""

    def batch(self, keys: Sequence[str], base: int) -> RangeBatch:
        sizes = np.array(self.sizes, np.int64)
        offsets = np.cumsum([0, *self.sizes[:-1]]).astype(np.int64)
        at = np.ascontiguousarray(self.addresses[:, self.columns] + base)
        return RangeBatch(keys, at, sizes[self.columns], offsets[self.columns])

    def touched(self, nbytes: int) -> npt.NDArray[np.bool_]:
        """Which bytes of the buffer belong to an entry."""
        mask = np.zeros(nbytes, np.bool_)
        for row in self.addresses.tolist():
            for address, size in zip(row, self.sizes, strict=True):
                mask[address : address + size] = True
        return mask


@st.composite
def blocks(draw: st.DrawFn) -> Blocks:
    """As caches lie in memory: each entry has a region of its own, with a stride, or those of a block lie behind each other."""
    sizes = draw(st.lists(st.sampled_from([1, 8, 63, 64, 100, 700, 3000]), min_size=1, max_size=8))
    count = draw(st.integers(1, 9))
    padding = draw(st.sampled_from([0, 0, 32, 5]))
    order = draw(st.permutations(range(count)))
    if draw(st.booleans()):
        starts = np.cumsum([0, *((size + padding) * count for size in sizes[:-1])])
        addresses = starts[None, :] + np.array(order)[:, None] * (np.array(sizes) + padding)[None, :]
    else:
        starts = np.cumsum([0, *(size + padding for size in sizes[:-1])])
        addresses = starts[None, :] + np.array(order)[:, None] * (sum(sizes) + padding * len(sizes))
    columns = list(range(len(sizes)))
    return Blocks(sizes, addresses.astype(np.int64), draw(st.just(columns) | st.permutations(columns)))


@settings(max_examples=60)
@given(blocks=blocks(), writer=st.integers(0, 2), seed=st.integers(0, 99))
def test_every_way_of_sending_moves_the_same_bytes_and_no_others(
    plain: MooncakeStore, staged: MooncakeStore, cramped: MooncakeStore, buffer: Buffer, blocks: Blocks, writer: int, seed: int
) -> None:
    clients = (plain, staged, cramped)
    keys, nbytes = fresh(len(blocks.addresses)), sum(blocks.sizes)
    batch = blocks.batch(keys, buffer.address)
    buffer.bytes[:] = np.random.default_rng(seed).integers(1, 256, buffer.nbytes, np.uint8)
    written = buffer.bytes.copy()
    assert clients[writer].put_open(keys, [nbytes] * len(keys)) == [OK] * len(keys)
    assert clients[writer].put_ranges(batch) == [OK] * len(keys)
    assert (buffer.bytes == written).all()
    assert clients[writer].put_commit(keys) == [OK] * len(keys)
    touched = blocks.touched(buffer.nbytes)
    for reader in clients:
        buffer.bytes[:] = 0
        assert reader.get_open(keys, [nbytes] * len(keys)) == [OK] * len(keys)
        assert reader.get_ranges(batch) == [OK] * len(keys)
        assert reader.get_close(keys) == [OK] * len(keys)
        assert (buffer.bytes[touched] == written[touched]).all()
        assert not buffer.bytes[~touched].any()
    for key in keys:
        assert plain.remove(key, force=True) is OK


def test_threads_that_use_up_the_slots_move_the_same_bytes(staged: MooncakeStore, buffer: Buffer) -> None:
    """More threads than slots; those that find none go on without."""
    threads, rounds, entry = 2 * SLOTS, 15, 256
    start = threading.Barrier(threads)

    def work(number: int) -> None:
        mine = slice(number * (1 << 16), (number + 1) * (1 << 16))
        local = buffer.bytes[mine]
        start.wait(30)
        for turn in range(rounds):
            keys = fresh(4)
            at = buffer.address + mine.start + np.arange(4)[:, None] * 4096 + np.arange(8)[None, :] * (entry + 32)
            batch = ranges(keys, at.tolist(), [entry] * 8, list(range(0, 8 * entry, entry)))
            local[:] = number * rounds + turn + 1
            assert staged.put_open(keys, [8 * entry] * 4) == [OK] * 4
            assert staged.put_ranges(batch) == [OK] * 4
            assert staged.put_commit(keys) == [OK] * 4
            local[:] = 0
            assert staged.get_open(keys, [8 * entry] * 4) == [OK] * 4
            assert staged.get_ranges(batch) == [OK] * 4
            assert staged.get_close(keys) == [OK] * 4
            assert (local == number * rounds + turn + 1).sum() == 4 * 8 * entry

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, number) for number in range(threads)]:
            done.result(60)
    assert staged.stats()["gets_open"] == 0


# Fewer ranges


@pytest.mark.parametrize(("padding", "staging", "sent"), [(0, False, 1), (0, True, 1), (32, False, 16), (32, True, 1)], ids=str)
def test_neighbours_on_both_sides_are_one_range(
    plain: MooncakeStore,
    staged: MooncakeStore,
    buffer: Buffer,
    monkeypatch: pytest.MonkeyPatch,
    padding: int,
    staging: bool,
    sent: int,
) -> None:
    """Sixteen neighbours in the object. Without padding they are neighbours in memory too."""
    store, (key,) = staged if staging else plain, fresh(1)
    monkeypatch.setattr(store, "reads_whole_objects", False)
    at = [[buffer.address + i * (1024 + padding) for i in range(16)]]
    batch = ranges([key], at, [1024] * 16, list(range(0, 16 * 1024, 1024)))
    before = store.stats()
    assert store.put_open([key], [16 * 1024]) == [OK]
    assert store.put_ranges(batch) == [OK]
    assert store.put_commit([key]) == [OK]
    assert store.get_open([key], [16 * 1024]) == [OK]
    assert store.get_ranges(batch) == [OK]
    assert store.get_close([key]) == [OK]
    after = store.stats()
    assert after["ranges"] - before["ranges"] == 2 * 16
    assert after["ranges_sent"] - before["ranges_sent"] == 2 * sent
    assert after["staged_bytes"] - before["staged_bytes"] == (2 * 16 * 1024 if staging and padding else 0)


@pytest.mark.parametrize("padding", [0, 32])
def test_ranges_that_make_up_whole_objects_are_read_as_such(plain: MooncakeStore, buffer: Buffer, padding: int) -> None:
    keys = fresh(2)
    at = [[buffer.address + 65536 * row + i * (1024 + padding) for i in range(16)] for row in range(2)]
    batch = ranges(keys, at, [1024] * 16, list(range(0, 16 * 1024, 1024)))
    assert plain.put_open(keys, [16 * 1024] * 2) == [OK, OK]
    for row in range(2):
        for i in range(16):
            buffer.fill(65536 * row + i * (1024 + padding), bytes([16 * row + i + 1]) * 1024)
    assert plain.put_ranges(batch) == [OK, OK]
    assert plain.put_commit(keys) == [OK, OK]
    buffer.fill(0, bytes(131072))
    assert plain.get_open(keys, [16 * 1024] * 2) == [OK, OK]
    before = plain.stats()
    assert plain.get_ranges(batch) == [OK, OK]
    for row in range(2):
        for i in range(16):
            assert buffer.read(65536 * row + i * (1024 + padding), 1024) == bytes([16 * row + i + 1]) * 1024
            assert not padding or buffer.read(65536 * row + i * (1024 + padding) + 1024, padding) == bytes(padding)
    assert plain.stats()["whole_objects"] - before["whole_objects"] == 2
    half = ranges(keys, [row[:8] for row in at], [1024] * 8, list(range(0, 8 * 1024, 1024)))
    twice = ranges(keys[:1] * 2, at, [1024] * 16, list(range(0, 16 * 1024, 1024)))
    backwards = ranges(keys, at, [1024] * 16, list(range(0, 16 * 1024, 1024))[::-1])
    for other in (half, twice, backwards):
        before = plain.stats()
        assert plain.get_ranges(other) == [OK, OK]
        assert plain.stats()["whole_objects"] == before["whole_objects"]
    plain.get_close(keys)


# Sizes


def test_an_object_of_another_size_is_a_miss_that_is_reported_once(
    plain: MooncakeStore, buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    keys = fresh(2)
    plain.put_open(keys, [77, 77])
    plain.put_commit(keys)
    for key in keys:
        assert plain.get_open([key], [78]) == [SIZE_MISMATCH]
        assert plain.get_ranges(one_range(key, buffer.address, 8)) == [Outcome.INVALID]
    assert plain.stats()["gets_open"] == 0
    assert caplog.text.count("an object of 77 bytes, the layout has 78") == 1


# Placement


def test_objects_go_to_the_segment_that_is_preferred(connect: Connect, owner: MooncakeStore) -> None:
    homes = []
    for store in (owner, connect(global_segment_size=16 << 20)):
        writer, keys = connect(preferred_segments=[store._client._native.get_hostname()]), fresh(8)
        assert writer.put_open(keys, [4096] * 8) == [OK] * 8
        assert writer.put_commit(keys) == [OK] * 8
        found = writer._client.replicas(keys)
        homes.append({segment for key in keys for segment in found[key].segments})
    assert [len(home) for home in homes] == [1, 1]
    assert homes[0] != homes[1]


def test_a_pinned_object_and_one_with_two_replicas_are_read_like_others(
    connect: Connect, owner: MooncakeStore, reader: MooncakeStore, buffer: Buffer
) -> None:
    del owner
    writer, (key,) = connect(replica_num=2, with_hard_pin=True, prefer_alloc_in_same_node=True), fresh(1)
    for store in (writer, reader):
        store.register(buffer.address, buffer.nbytes)
    assert writer.put_open([key], [8]) == [OK]
    assert writer.put_ranges(one_range(key, buffer.fill(0, b"replicas"), 8)) == [OK]
    assert writer.put_commit([key]) == [OK]
    assert reader.get_open([key], [8]) == [OK]
    assert reader.get_ranges(one_range(key, buffer.address + 100, 8)) == [OK]
    assert buffer.read(100, 8) == b"replicas"
    reader.unregister(buffer.address)


# Leases


def test_a_lease_that_is_shorter_on_the_master_is_noticed(
    connect: Connect, owner: MooncakeStore, buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    store, (key,) = registered(connect(lease_s=60.0, read_whole_objects=False), owner, buffer), fresh(1)
    store.put_open([key], [8])
    store.put_commit([key])
    assert store.get_open([key], [8]) == [OK]
    threading.Event().wait(LEASE_S * 1.2)  # the master's lease; nothing tells when it is over
    assert store.get_ranges(one_range(key, buffer.address, 8)) == [LEASE_EXPIRED]
    assert store.stats()["gets_open"] == 0
    assert "lease_s = 60.0 is longer than the master's lease" in caplog.text


# Patterns


def test_a_pattern_removes_only_what_it_matches_as_a_whole(plain: MooncakeStore) -> None:
    keys = ["m1", "m2", "xm1", "m1x"]
    plain.put_open(keys, [8] * 4)
    plain.put_commit(keys)
    assert plain.remove_matching("m1|m2") == 2
    assert plain.readable(keys) == [False, False, True, True]
    with pytest.raises(StoreError):
        plain.remove_matching("(")


# Space


@pytest.fixture
def small() -> Iterator[MooncakeStore]:
    """A pool of 16 MiB."""
    with LocalMaster(lease_s=0.2) as master:
        store = MooncakeStore(**master.options(), global_segment_size=16 << 20)
        yield store
        store.close()


def test_what_does_not_fit_is_refused_alone_and_fits_after_eviction(small: MooncakeStore) -> None:
    many, more = fresh(20), fresh(1)
    opened = small.put_open(many, [1 << 20] * 20)
    fit = [key for key, answer in zip(many, opened, strict=True) if answer is OK]
    assert set(opened) == {OK, NO_SPACE}
    assert 8 <= len(fit) <= 16
    assert small.put_open(more, [32 << 20]) == [NO_SPACE]  # for ever, which Mooncake does not tell
    assert small.put_commit(fit) == [OK] * len(fit)
    for _ in range(500):  # eviction runs in the background, and tells nobody
        if small.put_open(more, [1 << 20]) == [OK]:
            break
        threading.Event().wait(0.01)
    else:
        pytest.fail("nothing was evicted")
    assert small.readable(fit).count(True) < len(fit)


# The master


def test_a_master_that_is_not_there_is_reported_in_seconds() -> None:
    with LocalMaster() as master:
        options = master.options()
    with pytest.raises(StoreUnreachableError, match=f"is a master running at {options['master_server_address']}"):
        MooncakeStore(**options)
