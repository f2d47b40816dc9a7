"""`MooncakeStore` over a fake client, for what a real one does not do when asked to: slow, wrong and missing answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvactors.core.store import Outcome, RangeBatch
from kvactors.errors import StoreError, StoreUnreachableError, UnregisteredMemoryError
from kvactors.stores.mooncake import client as clients
from kvactors.stores.mooncake.client import clients_left_open
from kvactors.stores.mooncake.coalesce import Staging
from kvactors.stores.mooncake.sender import GET_RANGES, PUT_RANGES
from kvactors.stores.mooncake.staging import SLOTS
from tests.stores.contract import Buffer, one_range, ranges
from tests.stores.memory_world import Background
from tests.stores.mooncake.fake_native import Bench, FakeNative, Gate

OK, INVALID, NOT_FOUND = Outcome.OK, Outcome.INVALID, Outcome.NOT_FOUND
LEASE_EXPIRED, TRANSFER_FAILED = Outcome.LEASE_EXPIRED, Outcome.TRANSFER_FAILED
UNREACHABLE, SIZE_MISMATCH = Outcome.UNREACHABLE, Outcome.SIZE_MISMATCH


def reading(bench: Bench, key: str = "k", nbytes: int = 8) -> RangeBatch:
    """An open get, and the batch that reads it."""
    bench.put(key, bytes(range(nbytes)))
    assert bench.store.get_open([key], [nbytes]) == [OK]
    return one_range(key, bench.buffer.address, nbytes)


def scattered(bench: Bench, keys: list[str], gap: int = 32) -> RangeBatch:
    """Four ranges of 16 bytes of each key, with gaps in local memory."""
    at = bench.buffer.address
    rows = [[at + 1024 * i + (16 + gap) * j for j in range(4)] for i in range(len(keys))]
    return ranges(keys, rows, [16] * 4, [0, 16, 32, 48])


# Leases


def test_a_lease_is_over_before_the_read() -> None:
    bench = Bench(lease_s=10.0)
    batch = reading(bench)
    bench.clock.advance(10.0)
    assert bench.store.get_ranges(batch) == [LEASE_EXPIRED]
    assert bench.native.made(GET_RANGES) == []
    assert bench.native.gets == set()
    assert bench.store.get_ranges(batch) == [INVALID]


def test_a_lease_that_ends_during_the_read_makes_its_bytes_worthless() -> None:
    bench = Bench(lease_s=10.0)
    batch = reading(bench)
    bench.native.before[GET_RANGES] = lambda: bench.clock.advance(10.0)
    assert bench.store.get_ranges(batch) == [LEASE_EXPIRED]
    assert bench.native.gets == set()
    assert bench.store.stats()["gets_open"] == 0


def test_a_staged_read_that_outlives_its_lease_leaves_local_memory_alone() -> None:
    bench = Bench(lease_s=10.0, staging_bytes=1 << 20)
    bench.put("k", b"x" * 64)
    bench.store.get_open(["k"], [64])
    bench.native.before[GET_RANGES] = lambda: bench.clock.advance(10.0)
    assert bench.store.get_ranges(scattered(bench, ["k"])) == [LEASE_EXPIRED]
    assert not bench.buffer.bytes.any()


def test_a_lease_counts_from_before_the_call_that_granted_it() -> None:
    bench = Bench(lease_s=10.0)
    bench.put("k", b"x" * 8)
    bench.native.before["batch_get_session_start"] = lambda: bench.clock.advance(4.0)
    assert bench.store.get_open(["k"], [8]) == [OK]
    bench.clock.advance(6.0)
    assert bench.store.get_ranges(one_range("k", bench.buffer.address, 8)) == [LEASE_EXPIRED]


def test_a_read_that_began_under_a_dead_lease_does_not_profit_from_a_new_one() -> None:
    bench = Bench(lease_s=10.0, suspect_after_s=60.0)
    batch = reading(bench)

    def reopen_late() -> None:
        bench.clock.advance(10.0)
        assert bench.store.get_open(["k"], [8]) == [OK]

    bench.native.before[GET_RANGES] = reopen_late
    assert bench.store.get_ranges(batch) == [LEASE_EXPIRED]


def test_a_masters_lease_that_is_shorter_than_configured_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(lease_s=10.0)
    for _ in range(2):
        batch = reading(bench)
        bench.native.answers[GET_RANGES] = [[-707]]
        assert bench.store.get_ranges(batch) == [LEASE_EXPIRED]
    assert bench.store.stats()["gets_open"] == 0
    assert caplog.text.count("lease_s = 10.0 is longer than the master's lease; lower it") == 1


# Answers that are no answers

ANSWERS: list[Any] = [None, [], [0, 0, 0], "ok", ["a", "b"], [None, None], (0, 0), [True, False], RuntimeError("native")]


@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
@pytest.mark.parametrize(
    "call",
    [
        "batch_put_session_start",
        PUT_RANGES,
        "batch_put_session_end",
        "batch_put_session_revoke",
        "batch_get_session_start",
        "batch_get_replica_desc",
        GET_RANGES,
        "batch_is_exist",
    ],
)
@pytest.mark.parametrize("staging", [0, 1 << 20])
def test_a_malformed_answer_raises_and_loses_nothing(call: str, answer: Any, staging: int) -> None:
    bench = Bench(staging_bytes=staging)
    store, native, keys = bench.store, bench.native, ["k", "l"]
    batch = scattered(bench, keys)
    calls: dict[str, Callable[[], object]] = {
        "batch_put_session_start": lambda: store.put_open(keys, [64, 64]),
        PUT_RANGES: lambda: store.put_ranges(batch),
        "batch_put_session_end": lambda: store.put_commit(keys),
        "batch_put_session_revoke": lambda: store.put_revoke(keys),
        "batch_get_session_start": lambda: store.get_open(keys, [64, 64]),
        "batch_get_replica_desc": lambda: store.get_open(keys, [64, 64]),
        GET_RANGES: lambda: store.get_ranges(batch),
        "batch_is_exist": lambda: store.readable(keys),
    }
    if call in (PUT_RANGES, "batch_put_session_end", "batch_put_session_revoke"):
        store.put_open(keys, [64, 64])
    elif "get" in call:
        for key in keys:
            bench.put(key, b"x" * 64)
        if call == GET_RANGES:
            store.get_open(keys, [64, 64])
    for _ in range(SLOTS + 1):  # a slot that is not given back is missed then
        native.answers[call] = [answer]
        with pytest.raises((StoreError, RuntimeError)):
            calls[call]()
    if call == GET_RANGES:
        assert store.get_ranges(batch) == [OK, OK]
        assert store.get_close(keys) == [OK, OK]
    else:
        assert native.gets == set()
    if call == PUT_RANGES:
        before = store.stats()["ranges_sent"]
        assert store.put_ranges(batch) == [OK, OK]
        assert store.stats()["ranges_sent"] - before == (2 if staging else 8)
    assert store.stats()["gets_open"] == 0
    store.unregister(bench.buffer.address)  # waits for calls under way: none is left
    store.close()
    assert native.made("close") == [()]


def test_a_short_transfer_is_a_failed_one() -> None:
    bench = Bench()
    batch = reading(bench)
    bench.native.answers[GET_RANGES] = [[7]]
    assert bench.store.get_ranges(batch) == [TRANSFER_FAILED]


# Opening gets


@pytest.mark.parametrize("health", [0, -1])
def test_an_object_without_a_replica_is_a_miss_and_leaves_no_session(health: int) -> None:
    bench = Bench()
    bench.put("k", b"x" * 8)
    bench.put("l", b"x" * 8)
    bench.native.answers["batch_get_replica_desc"] = [{"k": []}]
    bench.native.answers["health_check"] = [health]
    wanted = [NOT_FOUND] * 2 if health == 0 else [UNREACHABLE] * 2
    assert bench.store.get_open(["k", "l"], [8, 8]) == wanted
    assert bench.native.gets == set()
    assert bench.store.stats()["gets_open"] == 0


def test_a_get_that_raises_leaves_no_session() -> None:
    bench = Bench()
    bench.put("k", b"x" * 8)
    bench.native.answers["batch_get_replica_desc"] = [RuntimeError("native")]
    with pytest.raises(RuntimeError, match="native"):
        bench.store.get_open(["k"], [8])
    assert bench.native.gets == set()


def test_a_wrong_size_is_a_miss_that_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    for key in ("k", "l"):
        bench.put(key, b"x" * 8)
        assert bench.store.get_open([key], [9]) == [SIZE_MISMATCH]
    assert bench.native.gets == set()
    assert caplog.text.count("an object of 8 bytes, the layout has 9") == 1


def test_a_wrong_size_ends_no_session_of_a_right_one() -> None:
    bench = Bench()
    batch = reading(bench)
    assert bench.store.get_open(["k"], [9]) == [SIZE_MISMATCH]
    assert bench.store.get_ranges(batch) == [OK]
    bench.store.get_close(["k"])
    assert bench.native.gets == set()


def test_a_key_whose_read_failed_is_not_readable_for_a_while() -> None:
    bench = Bench(negative_s=30.0)
    batch = reading(bench)
    bench.native.answers[GET_RANGES] = [[-800]]
    assert bench.store.get_ranges(batch) == [TRANSFER_FAILED]
    bench.store.get_close(["k"])
    assert bench.store.readable(["k"]) == [False]
    assert bench.store.get_open(["k"], [8]) == [TRANSFER_FAILED]
    assert bench.native.gets == set()
    assert bench.store.stats()["negative"] == 1
    bench.clock.advance(30.0)
    assert bench.store.readable(["k"]) == [True]
    assert bench.store.get_open(["k"], [8]) == [OK]


def test_what_lies_on_a_segment_that_hangs_is_not_readable_even_before_the_read_returns() -> None:
    bench = Bench(suspect_after_s=5.0, lease_s=100.0)
    batch = reading(bench)
    bench.put("other", b"x" * 8)
    gate = Gate(bench.native, GET_RANGES)
    read = Background(bench.store.get_ranges, batch)
    gate.wait_for(1)
    assert bench.store.readable(["other"]) == [True]
    bench.clock.advance(5.1)
    assert bench.store.readable(["other"]) == [False]
    assert bench.store.get_open(["other"], [8]) == [TRANSFER_FAILED]
    gate.release.set()
    assert read.result() == [OK]
    assert bench.store.readable(["other"]) == [True]


# Lookups


class Newer(FakeNative):
    """A client that tells what is readable."""

    def batch_is_readable(self, keys: list[str]) -> list[int]:
        self.calls.append(("batch_is_readable", (keys,)))
        return [int(key in self.objects) for key in keys]


def test_prefers_batch_is_readable_where_the_client_has_it() -> None:
    for native, call in ((Newer(), "batch_is_readable"), (FakeNative(), "batch_is_exist")):
        bench = Bench(native)
        bench.put("k", b"x")
        assert bench.store.readable(["k", "none"]) == [True, False]
        assert native.made(call) == [(["k", "none"],)]


def test_only_a_plain_yes_is_readable() -> None:
    bench = Bench()
    bench.native.answers["batch_is_exist"] = [[1, 0, -600, 2]]
    assert bench.store.readable(["a", "b", "c", "d"]) == [True, False, False, False]


@pytest.mark.parametrize("code", [-900, -901])
def test_a_master_that_does_not_answer_is_not_taken_for_a_miss(code: int) -> None:
    bench = Bench()
    for name in ("batch_is_exist", "remove_by_regex"):
        bench.native.answers[name] = [[code, code] if name == "batch_is_exist" else code]
    with pytest.raises(StoreUnreachableError, match=r"127\.0\.0\.1:50051 does not answer"):
        bench.store.readable(["k", "l"])
    with pytest.raises(StoreUnreachableError, match=r"127\.0\.0\.1:50051 does not answer"):
        bench.store.remove_matching("x.*")
    bench.native.answers["batch_is_exist"] = [[code]]
    assert not bench.store.health().ok


def test_health_tells_a_client_that_is_not_connected() -> None:
    bench = Bench()
    assert bench.store.health().ok
    bench.native.answers["health_check"] = [-1]
    assert "not connected (-1)" in bench.store.health().detail
    bench.native.answers["batch_is_exist"] = [RuntimeError("native")]
    assert bench.store.health().detail == "native"


def test_a_pattern_is_matched_as_a_whole() -> None:
    bench = Bench()
    bench.store.remove_matching("a|b")
    assert bench.native.made("remove_by_regex") == [("^(?:a|b)$", False)]
    bench.native.answers["remove_by_regex"] = [-600]
    with pytest.raises(StoreError, match=r"remove_by_regex\('\('\) answered -600"):
        bench.store.remove_matching("(")


def test_calls_without_keys_do_not_reach_the_client() -> None:
    bench, empty = Bench(), ranges([], [], [8], [0])
    store = bench.store
    assert [store.put_open([], []), store.put_commit([]), store.put_revoke([]), store.get_open([], [])] == [[]] * 4
    assert [store.put_ranges(empty), store.get_ranges(empty), store.readable([])] == [[]] * 3
    assert bench.native.calls == []


# Memory


def test_unregister_waits_for_the_calls_that_may_touch_the_memory() -> None:
    bench = Bench()
    other = reading(bench, "other")
    bench.store.put_open(["k"], [8])
    gate = Gate(bench.native, PUT_RANGES)
    put = Background(bench.store.put_ranges, one_range("k", bench.buffer.address, 8))
    gate.wait_for(1)
    unregister = Background(bench.store.unregister, bench.buffer.address)
    while bench.store.get_ranges(other) != [INVALID]:  # new calls may not use it any more, at once
        pass
    assert unregister.is_alive()
    assert bench.native.made("unregister_buffer") == []
    gate.release.set()
    assert (put.result(), unregister.result()) == ([OK], None)
    assert bench.native.made("unregister_buffer") == [(bench.buffer.address,)]


def test_unregister_refuses_memory_that_a_call_may_touch_for_ever() -> None:
    bench = Bench(close_deadline_s=0.05)
    bench.store.put_open(["k"], [8])
    gate = Gate(bench.native, PUT_RANGES)
    put = Background(bench.store.put_ranges, one_range("k", bench.buffer.address, 8))
    gate.wait_for(1)
    with pytest.raises(StoreError, match="range calls do not return; never free or reuse this memory"):
        bench.store.unregister(bench.buffer.address)
    assert bench.native.made("unregister_buffer") == []
    gate.release.set()
    assert put.result() == [OK]


def test_unregister_waits_for_no_call_that_began_after_it() -> None:
    bench, more = Bench(), Buffer()
    other = reading(bench, "other")
    bench.store.register(more.address, more.nbytes)
    bench.store.put_open(["k"], [8])
    gate = Gate(bench.native, PUT_RANGES)
    early = Background(bench.store.put_ranges, one_range("k", bench.buffer.address, 8))
    gate.wait_for(1)
    unregister = Background(bench.store.unregister, bench.buffer.address)
    while bench.store.get_ranges(other) != [INVALID]:
        pass
    bench.native.before[PUT_RANGES] = later = Gate(bench.native, PUT_RANGES)
    late = Background(bench.store.put_ranges, one_range("k", more.address, 8))
    later.wait_for(1)
    gate.release.set()
    assert (early.result(), unregister.result()) == ([OK], None)
    assert late.is_alive()
    later.release.set()
    assert late.result() == [OK]


def test_memory_that_the_client_refuses_is_not_registered() -> None:
    bench, more = Bench(), Buffer()
    bench.native.answers["register_buffer"] = [-600]
    with pytest.raises(StoreError, match=r"cannot register .* the client answered -600"):
        bench.store.register(more.address, more.nbytes)
    with pytest.raises(UnregisteredMemoryError):
        bench.store.unregister(more.address)


def test_device_memory_is_not_staged() -> None:
    bench, device = Bench(staging_bytes=1 << 20), Buffer()
    bench.store.register(device.address, device.nbytes, host=False)
    keys = ["k"]
    bench.store.put_open(keys, [64])
    host = scattered(bench, keys)
    bench.store.put_ranges(host)
    assert bench.store.stats()["ranges_sent"] == 1
    bench.store.put_ranges(RangeBatch(keys, host.addresses - bench.buffer.address + device.address, host.sizes, host.offsets))
    assert bench.store.stats()["ranges_sent"] == 1 + 4
    bench.store.unregister(device.address)
    bench.store.put_ranges(host)
    assert bench.store.stats()["ranges_sent"] == 1 + 4 + 1


@pytest.mark.parametrize("protocol", ["rdma", "ascend"])
def test_other_transports_stage_nothing(protocol: str) -> None:
    bench = Bench(protocol=protocol, staging_bytes=1 << 20)
    bench.store.put_open(["k"], [64])
    bench.store.put_ranges(scattered(bench, ["k"]))
    assert bench.store.stats()["ranges_sent"] == 4
    assert bench.store.good_range_bytes == 0


# Staging


def test_a_call_that_finds_no_slot_goes_on_without() -> None:
    bench = Bench(staging_bytes=1 << 20)
    keys = [f"k{i}" for i in range(SLOTS + 2)]
    bench.store.put_open(keys, [64] * len(keys))
    bench.buffer.bytes[:] = 7
    gate = Gate(bench.native, PUT_RANGES)
    puts = [Background(bench.store.put_ranges, scattered(bench, [key])) for key in keys]
    gate.wait_for(len(keys))
    gate.release.set()
    assert [put.result() for put in puts] == [[OK]] * len(keys)
    stats = bench.store.stats()
    assert stats["ranges_sent"] == SLOTS + 2 * 4
    assert stats["staged_bytes"] == SLOTS * 64
    assert all(bench.native.puts[key] == b"\7" * 64 for key in keys)


def test_a_batch_larger_than_a_slot_goes_in_parts() -> None:
    bench = Bench(staging_bytes=SLOTS * 4096)
    keys = [f"k{i}" for i in range(100)]
    bench.store.register((more := Buffer(1 << 17)).address, more.nbytes)
    bench.buffer = more
    bench.store.put_open(keys, [100] * 100)
    bench.store.put_ranges(
        ranges(keys, [[more.address + 1024 * i, more.address + 1024 * i + 500] for i in range(100)], [50, 50], [0, 50])
    )
    rows = 4096 // 128
    assert [len(made[0]) for made in bench.native.made(PUT_RANGES)] == [rows, rows, rows, 100 - 3 * rows]


def test_a_row_larger_than_a_slot_is_not_staged() -> None:
    bench = Bench(staging_bytes=SLOTS * 4096)
    at = bench.buffer.address
    bench.store.put_open(["k"], [8000])
    bench.store.put_ranges(ranges(["k"], [[at, at + 5000]], [4000, 4000], [0, 4000]))
    assert (bench.store.stats()["ranges_sent"], bench.store.stats()["staged_bytes"]) == (2, 0)


def test_bad_rows_are_not_gathered_and_do_not_keep_the_good_ones_back() -> None:
    bench = Bench(staging_bytes=1 << 20)
    keys = ["good", "bad", "good too", "good"]
    bench.store.put_open(keys[:3], [64] * 3)
    batch = scattered(bench, keys)
    batch.addresses[1, 3] = Buffer(64).address
    assert bench.store.put_ranges(batch) == [OK, INVALID, OK, INVALID]
    assert [made[0] for made in bench.native.made(PUT_RANGES)] == [["good", "good too"]]


def test_a_staged_read_that_fails_for_some_keys_delivers_the_others_and_nothing_else() -> None:
    bench = Bench(staging_bytes=1 << 20)
    keys = ["k", "gone", "l", "gone too", "m"]
    for i, key in enumerate(keys):
        bench.put(key, bytes([i + 1]) * 64)
    assert bench.store.get_open(keys, [64] * 5) == [OK] * 5
    batch = scattered(bench, keys)
    bench.native.before[GET_RANGES] = lambda: bench.native.gets.difference_update({"gone", "gone too"})
    assert bench.store.get_ranges(batch) == [OK, INVALID, OK, INVALID, OK]
    wanted = Buffer(bench.buffer.nbytes).bytes
    for row in (0, 2, 4):
        for address in (batch.addresses[row] - bench.buffer.address).tolist():
            wanted[address : address + 16] = row + 1
    assert (bench.buffer.bytes == wanted).all()


def test_staging_memory_that_the_client_refuses_is_an_error() -> None:
    native = FakeNative()
    native.answers["register_buffer"] = [-600]
    with pytest.raises(StoreError, match=r"staging buffer of .* cannot be registered \(-600\)"):
        Bench(native, staging_bytes=1 << 20)


# Closing


def test_every_call_after_close_raises_and_reaches_no_client() -> None:
    bench = Bench()
    store, batch = bench.store, one_range("k", bench.buffer.address, 8)
    store.close()
    store.close()
    bench.native.calls.clear()
    calls: list[Callable[[], object]] = [
        lambda: store.put_open(["k"], [8]),
        lambda: store.put_ranges(batch),
        lambda: store.put_commit(["k"]),
        lambda: store.put_revoke(["k"]),
        lambda: store.get_open(["k"], [8]),
        lambda: store.get_ranges(batch),
        lambda: store.get_close(["k"]),
        lambda: store.readable(["k"]),
        lambda: store.remove("k"),
        lambda: store.remove_matching("k"),
        lambda: store.register(1 << 20, 8),
        lambda: store.unregister(bench.buffer.address),
        lambda: store.stats(),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="was closed"):
            call()
    assert not store.health().ok
    assert "closed" in repr(store)
    assert bench.native.calls == []


@pytest.mark.parametrize("call", ["put_open", "put_commit", "put_revoke", "get_open", "readable"])
def test_a_closed_store_says_so_even_to_a_call_without_keys(call: str) -> None:
    bench = Bench()
    bench.store.close()
    with pytest.raises(StoreError, match="was closed"):
        getattr(bench.store, call)([], *([[]] if call.endswith("open") else []))


def test_close_does_not_hang_on_a_call_that_never_returns() -> None:
    bench = Bench(close_deadline_s=0.05)
    batch = reading(bench)
    gate = Gate(bench.native, GET_RANGES)
    read = Background(bench.store.get_ranges, batch)
    gate.wait_for(1)
    for _ in range(2):
        with pytest.raises(StoreError, match="do not return"):
            bench.store.close()
    assert bench.native.made("close") == []
    gate.release.set()
    read.join(30)
    assert not read.is_alive()


def test_a_call_that_close_overtakes_reads_no_local_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner may free that once close has returned."""
    bench = Bench(staging_bytes=1 << 20)
    bench.store.put_open(["k"], [64])
    lock, closed = bench.store._lock, list[bool]()

    class ClosesFirst:
        def __enter__(self) -> None:
            if not closed:
                closed.append(True)
                bench.store.close()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    monkeypatch.setattr(bench.store, "_lock", ClosesFirst())
    monkeypatch.setattr(Staging, "gather", lambda *_: pytest.fail("read after close"))
    with pytest.raises(StoreError, match="was closed"):
        bench.store.put_ranges(scattered(bench, ["k"]))
    assert closed


def test_a_late_read_delivers_nothing_after_close() -> None:
    bench = Bench(close_deadline_s=0.05, staging_bytes=1 << 20)
    bench.put("k", bytes(range(64)))
    bench.store.get_open(["k"], [64])
    gate = Gate(bench.native, GET_RANGES)
    read = Background(bench.store.get_ranges, scattered(bench, ["k"]))
    gate.wait_for(1)
    with pytest.raises(StoreError, match="do not return"):
        bench.store.close()
    bench.buffer.bytes[:] = 0xAA  # somebody uses the memory again, against all advice
    gate.release.set()
    assert "nothing was delivered" in str(read.result())
    assert (bench.buffer.bytes == 0xAA).all()


def test_memory_that_could_not_be_given_up_is_given_up_once_its_calls_have_returned() -> None:
    bench = Bench(close_deadline_s=0.05)
    batch = reading(bench)
    gate = Gate(bench.native, GET_RANGES)
    read = Background(bench.store.get_ranges, batch)
    gate.wait_for(1)
    for _ in range(2):
        with pytest.raises(StoreError, match="do not return"):
            bench.store.unregister(bench.buffer.address)
    gate.release.set()
    read.result()
    bench.store.unregister(bench.buffer.address)
    assert bench.native.memory == set()
    bench.store.register(bench.buffer.address, bench.buffer.nbytes)


@pytest.mark.parametrize(
    ("keys", "sizes", "says"),
    [
        ("abc", [1, 1, 1], r"^keys is the text 'abc'; give a list of texts$"),
        ([5], [1], r"^item 0 of keys is the number 5; give a list of texts$"),
        (["k", None], [1, 1], r"^item 1 of keys is None; give a list of texts$"),
        (["k"], [1.5], r"^sizes: 'float' .*; give a whole number of bytes for each key$"),
        (["k"], [None], r"^sizes: 'NoneType' .*; give a whole number of bytes for each key$"),
        (["k"], ["1"], r"^sizes: 'str' .*; give a whole number of bytes for each key$"),
    ],
)
def test_keys_and_sizes_of_another_kind_are_refused(keys: Any, sizes: Any, says: str) -> None:
    bench = Bench()
    for call in (bench.store.put_open, bench.store.get_open):
        with pytest.raises(StoreError, match=says):
            call(keys, sizes)
    assert bench.native.calls == []


def test_a_batch_of_lists_is_refused() -> None:
    bench = Bench()
    batch: Any = RangeBatch(["k"], [[bench.buffer.address]], [8], [0])  # type: ignore[arg-type]  # that is what is wrong
    for call in (bench.store.put_ranges, bench.store.get_ranges):
        with pytest.raises(StoreError, match="numpy arrays"):
            call(batch)


def test_a_client_that_does_not_close_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "LEAST_CLOSE_S", 0.05)
    bench = Bench(close_deadline_s=0.05)
    gate = Gate(bench.native, "close")
    before = clients_left_open()
    closing = Background(bench.store.close)
    gate.wait_for(1)
    closing.result()
    assert clients_left_open() == before + 1
    gate.release.set()


def test_a_client_of_a_frozen_master_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "LEAST_CLOSE_S", 0.05)
    bench = Bench(close_deadline_s=0.05)
    bench.native.answers["batch_is_exist"].append([-901])
    before = clients_left_open()
    bench.store.close()
    assert bench.native.made("close") == []
    assert clients_left_open() == before + 1


def test_a_client_of_a_dead_master_is_closed() -> None:
    bench = Bench()
    bench.native.answers["batch_is_exist"].append([-900])
    bench.store.close()
    assert bench.native.made("close") == [()]


def test_closing_does_not_wait_again_for_calls_that_unregister_has_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(close_deadline_s=0.05)
    gate = Gate(bench.native, GET_RANGES)
    read = Background(bench.store.get_ranges, reading(bench))
    gate.wait_for(1)
    with pytest.raises(StoreError, match="do not return"):
        bench.store.unregister(bench.buffer.address)
    waits: list[float] = []
    real = bench.store._moved.wait_for

    def wait_for(holds: Callable[[], bool], wait_s: float) -> bool:
        waits.append(wait_s)
        return real(holds, wait_s)

    monkeypatch.setattr(bench.store._moved, "wait_for", wait_for)
    with pytest.raises(StoreError, match="do not return"):
        bench.store.close()
    assert waits == [0.0]
    gate.release.set()
    read.result()
