"""A master that was restarted unseen: nothing is written through its old sessions, and nothing that was read counts."""

from __future__ import annotations

import pytest

from kvactors.core.store import Outcome, RangeBatch
from kvactors.stores.mooncake.canary import FRESH_S, PREFIX
from kvactors.stores.mooncake.sender import GET_RANGES, PUT_RANGES
from tests.stores.contract import one_range
from tests.stores.mooncake.fake_native import Bench

OK, NOT_FOUND, UNREACHABLE, NO_SPACE = Outcome.OK, Outcome.NOT_FOUND, Outcome.UNREACHABLE, Outcome.NO_SPACE
INVALID = Outcome.INVALID

RENEW_S = 15.0
"""half of the discard timeout"""


def canaries(bench: Bench) -> list[str]:
    return [key for key in bench.native.puts if key.startswith(PREFIX)]


def restart(bench: Bench) -> None:
    """The master comes back with nothing in it."""
    bench.native.puts.clear()
    bench.native.objects.clear()


def later(bench: Bench, wait_s: float = 2 * FRESH_S) -> None:
    bench.clock.advance(wait_s)


def batch(bench: Bench, key: str = "k", offset: int = 0) -> RangeBatch:
    return one_range(key, bench.buffer.address + offset, 8)


def writing(bench: Bench, key: str = "k") -> RangeBatch:
    assert bench.store.put_open([key], [8]) == [OK]
    return batch(bench, key)


def reading(bench: Bench, key: str = "k") -> RangeBatch:
    bench.put(key, b"right...")
    assert bench.store.get_open([key], [8]) == [OK]
    return batch(bench, key)


def test_a_key_that_another_client_is_writing_by_now_proves_nothing() -> None:
    bench = Bench()
    mine = writing(bench)
    restart(bench)
    bench.native.puts["k"] = bytearray(8)  # another client's, on the new master
    later(bench)
    assert bench.store.put_ranges(mine) == [NOT_FOUND]
    assert bench.native.made(PUT_RANGES) == []


def test_an_object_that_was_written_anew_at_its_place_proves_nothing_for_others() -> None:
    bench = Bench()
    mine = reading(bench)
    restart(bench)
    bench.put("k", b"another.")
    later(bench)
    assert bench.store.get_ranges(mine) == [NOT_FOUND]
    assert bench.store.get_ranges(mine) == [INVALID]


@pytest.mark.parametrize("code", [-900, -901])
def test_a_master_that_does_not_answer_voids_its_sessions_for_good(code: int) -> None:
    bench = Bench()
    put, get = writing(bench), reading(bench, "g")
    later(bench)
    bench.native.answers["batch_get_session_start"].append([code])
    assert bench.store.put_ranges(put) == [UNREACHABLE]
    assert bench.store.put_ranges(put) == [NOT_FOUND]
    assert bench.store.get_ranges(get) == [NOT_FOUND]
    assert bench.native.made(PUT_RANGES) == []


def test_while_the_master_is_known_it_is_not_asked_again() -> None:
    bench = Bench()
    mine = writing(bench)
    for _ in range(3):
        assert bench.store.put_ranges(mine) == [OK]
    assert bench.native.made("batch_get_session_start") == []
    later(bench)
    for _ in range(3):
        assert bench.store.put_ranges(mine) == [OK]
    assert bench.native.made("batch_get_session_start") == [(canaries(bench),)]


def test_sessions_that_are_opened_after_a_restart_are_good() -> None:
    bench = Bench()
    writing(bench)
    restart(bench)
    later(bench)
    mine = writing(bench, "fresh")
    later(bench)
    assert bench.store.put_ranges(mine) == [OK]
    assert bench.store.put_ranges(batch(bench)) == [NOT_FOUND]


def test_a_canary_is_renewed_before_a_master_would_discard_it() -> None:
    bench = Bench()
    mine = writing(bench)
    (first,) = canaries(bench)
    later(bench, RENEW_S)
    writing(bench, "l")
    (second,) = canaries(bench)
    assert second != first
    assert bench.store.put_ranges(mine) == [OK]


def test_a_restart_just_before_the_renewal_is_noticed() -> None:
    bench = Bench()
    mine = writing(bench)
    later(bench, RENEW_S)
    bench.native.before["batch_put_session_start"] = lambda: restart(bench)
    assert bench.store.put_open(["l"], [8]) == [OK]
    bench.native.before.clear()
    assert bench.store.put_ranges(mine) == [NOT_FOUND]


def test_without_space_for_a_canary_nothing_is_written() -> None:
    bench = Bench()
    bench.native.answers["batch_put_session_start"].append([-200])
    assert bench.store.put_open(["k"], [8]) == [NO_SPACE]
    assert bench.native.puts == {}
    assert bench.store.put_open(["k"], [8]) == [OK]


def test_without_space_for_a_canary_objects_are_looked_up_after_each_read() -> None:
    bench = Bench()
    bench.native.answers["batch_put_session_start"].append([-200])
    mine = reading(bench)
    assert bench.store.get_ranges(mine) == [OK]
    bench.native.objects.clear()
    bench.native.answers[GET_RANGES].append([8])
    assert bench.store.get_ranges(mine) == [NOT_FOUND]


def test_a_read_that_outlived_its_lease_leaves_the_session_that_replaced_it() -> None:
    bench = Bench(suspect_after_s=60.0)
    mine = reading(bench)

    def lapse() -> None:
        bench.native.before.clear()
        bench.clock.advance(bench.store.lease_s)
        assert bench.store.get_open(["k"], [8]) == [OK]

    bench.native.before[GET_RANGES] = lapse
    assert bench.store.get_ranges(mine) == [Outcome.LEASE_EXPIRED]
    assert bench.store.get_ranges(mine) == [OK]


def test_a_put_on_a_key_does_not_end_a_get_of_it() -> None:
    bench = Bench()
    mine = writing(bench)
    bench.native.puts.pop("k")
    get = reading(bench)
    later(bench)
    bench.store.put_ranges(mine)
    assert bench.store.get_ranges(get) == [OK]


def test_a_key_that_was_written_anew_is_readable_at_once() -> None:
    bench = Bench()
    get = reading(bench)
    bench.native.answers[GET_RANGES].append([-800])
    assert bench.store.get_ranges(get) == [Outcome.TRANSFER_FAILED]
    assert bench.store.readable(["k"]) == [False]
    assert bench.store.remove("k") is OK
    assert bench.store.put_ranges(writing(bench)) == [OK]
    assert bench.store.put_commit(["k"]) == [OK]
    assert bench.store.readable(["k"]) == [True]
