"""A store that is not there yet: unreachable, until a probe of its health finds it; then it is as if it had always been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvactors.core.store import Outcome, RangeBatch, Store
from kvactors.errors import ConfigError, StoreError, StoreUnreachableError
from kvactors.stores.late import LateStore
from kvactors.stores.memory import MemoryStore


class Door:
    """Opens a memory store once `there`; raises `problem` until then."""

    def __init__(self) -> None:
        self.there = False
        self.problem: Exception = StoreUnreachableError("no master at 127.0.0.1:1")
        self.tries = 0
        self.opened: list[MemoryStore] = []

    def __call__(self) -> Store:
        self.tries += 1
        if not self.there:
            raise self.problem
        self.opened.append(MemoryStore())
        return self.opened[-1]


@pytest.fixture
def door() -> Iterator[Door]:
    found = Door()
    yield found
    for store in found.opened:
        store.close()


def late(door: Callable[[], Store]) -> LateStore:
    return LateStore(door, name="late", lease_s=10.0, put_safe_age_s=15.0, good_range_bytes=4096)


def batch(array: np.ndarray[Any, Any], *keys: str) -> RangeBatch:
    def numbers(*values: int) -> Any:
        return np.array(values, np.int64)

    addresses = np.full((len(keys), 1), array.ctypes.data, np.int64)
    return RangeBatch(keys, addresses, numbers(array.nbytes), numbers(0))


def calls(store: LateStore, *keys: str) -> dict[str, Callable[[], list[Outcome]]]:
    """Every call that answers with an outcome for each key."""
    array = np.zeros(8, np.uint8)
    sizes = [8] * len(keys)
    return {
        "put_open": lambda: store.put_open(keys, sizes),
        "put_ranges": lambda: store.put_ranges(batch(array, *keys)),
        "put_commit": lambda: store.put_commit(keys),
        "put_revoke": lambda: store.put_revoke(keys),
        "get_open": lambda: store.get_open(keys, sizes),
        "get_ranges": lambda: store.get_ranges(batch(array, *keys)),
        "get_close": lambda: store.get_close(keys),
    }


NAMES = tuple(calls(late(Door())))


# -- before ------------------------------------------------------------------------------------------------------------


def test_it_is_a_store_whose_limits_are_known_before_it_is_there(door: Door) -> None:
    store = late(door)
    assert isinstance(store, Store)
    assert (store.name, store.lease_s, store.put_safe_age_s, store.good_range_bytes) == ("late", 10.0, 15.0, 4096)
    assert store.stats() == {}


@pytest.mark.parametrize("name", NAMES)
def test_before_it_is_there_every_key_is_unreachable(door: Door, name: str) -> None:
    assert calls(late(door), "a", "b", "c")[name]() == [Outcome.UNREACHABLE] * 3
    assert door.tries == 0


@pytest.mark.parametrize("name", NAMES)
def test_also_where_there_are_no_keys(door: Door, name: str) -> None:
    assert calls(late(door))[name]() == []


def test_before_it_is_there_a_lookup_cannot_be_made(door: Door) -> None:
    with pytest.raises(StoreUnreachableError, match="does not answer yet"):
        late(door).readable(["a"])


def test_its_health_says_why_it_is_not_there(door: Door) -> None:
    health = late(door).health()
    assert (health.ok, health.detail) == (False, "no master at 127.0.0.1:1")


# -- opening -----------------------------------------------------------------------------------------------------------


def test_a_probe_of_its_health_opens_it(door: Door) -> None:
    store = late(door)
    assert not store.health().ok
    door.there = True
    assert store.health().ok
    assert store.put_open(["a"], [8]) == [Outcome.OK]


def test_it_is_opened_once(door: Door) -> None:
    store = late(door)
    door.there = True
    for _ in range(3):
        assert store.health().ok
        assert store.try_open() == ""
    assert len(door.opened) == 1


def test_try_open_says_what_is_wrong(door: Door) -> None:
    assert late(door).try_open() == "no master at 127.0.0.1:1"


@pytest.mark.parametrize("problem", [ConfigError("protocol = 'tpc': unknown"), OSError("no such device")])
def test_an_error_that_waiting_does_not_mend_is_the_callers_and_not_the_probes(door: Door, problem: Exception) -> None:
    door.problem = problem
    store = late(door)
    with pytest.raises(type(problem)):
        store.try_open()
    health = store.health()
    assert not health.ok
    assert str(problem) in health.detail


def test_memory_that_was_registered_before_is_known_to_the_store(door: Door) -> None:
    array = np.arange(8, dtype=np.uint8)
    store = late(door)
    store.register(array.ctypes.data, array.nbytes)
    door.there = True
    assert store.health().ok
    assert store.put_open(["a"], [8]) == [Outcome.OK]
    assert store.put_ranges(batch(array, "a")) == [Outcome.OK]
    assert store.put_commit(["a"]) == [Outcome.OK]
    assert store.readable(["a", "b"]) == [True, False]
    array[:] = 0
    assert store.get_open(["a"], [8]) == [Outcome.OK]
    assert store.get_ranges(batch(array, "a")) == [Outcome.OK]
    assert array.tolist() == list(range(8))


def test_memory_that_was_given_back_before_is_not(door: Door) -> None:
    array = np.zeros(8, np.uint8)
    store = late(door)
    store.register(array.ctypes.data, array.nbytes)
    store.unregister(array.ctypes.data)
    door.there = True
    assert store.health().ok
    store.put_open(["a"], [8])
    assert store.put_ranges(batch(array, "a")) == [Outcome.INVALID]


def test_memory_that_is_registered_later_goes_to_the_store_at_once(door: Door) -> None:
    array = np.zeros(8, np.uint8)
    door.there = True
    store = late(door)
    assert store.health().ok
    store.register(array.ctypes.data, array.nbytes)
    store.put_open(["a"], [8])
    assert store.put_ranges(batch(array, "a")) == [Outcome.OK]
    store.unregister(array.ctypes.data)
    assert store.put_ranges(batch(array, "a")) == [Outcome.INVALID]


class Unwilling(MemoryStore):
    """Takes no memory."""

    closes = 0

    def register(self, address: int, nbytes: int) -> None:
        raise StoreError(f"{nbytes} bytes at {address:#x} cannot be pinned")

    def close(self) -> None:
        type(self).closes += 1
        super().close()


def test_a_client_that_does_not_take_the_memory_is_closed() -> None:
    Unwilling.closes = 0
    store = late(Unwilling)
    store.register(4096, 8)
    assert "cannot be pinned" in store.health().detail
    assert Unwilling.closes == 1


# -- after -------------------------------------------------------------------------------------------------------------


def test_closing_closes_the_store_and_is_the_end(door: Door) -> None:
    door.there = True
    store = late(door)
    assert store.health().ok
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        door.opened[0].put_open(["a"], [8])
    assert len(door.opened) == 1
    assert (store.health().ok, store.health().detail) == (False, "this store was closed")
    assert store.stats() == {}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("there", [False, True])
def test_a_closed_store_takes_no_calls_and_is_never_opened_again(door: Door, name: str, there: bool) -> None:
    store = late(door)
    door.there = there
    store.health()
    store.close()
    tries = door.tries
    with pytest.raises(StoreError, match="closed"):
        calls(store, "a")[name]()
    store.health()
    assert door.tries == tries


def test_a_closed_store_answers_no_lookup(door: Door) -> None:
    store = late(door)
    store.close()
    with pytest.raises(StoreError, match="was closed"):
        store.readable(["a"])


def test_a_store_that_is_closed_while_memory_is_given_up_is_closed_by_that(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may wait for calls on that memory, and holds what a close would need."""
    door.there = True
    store, array = late(door), np.zeros(8, np.uint8)
    store.try_open()
    store.register(array.ctypes.data, array.nbytes)
    (inner,) = door.opened
    unregister = inner.unregister

    def closed_meanwhile(address: int) -> None:
        store.close()
        unregister(address)

    monkeypatch.setattr(inner, "unregister", closed_meanwhile)
    store.unregister(array.ctypes.data)
    with pytest.raises(StoreError, match="was closed"):
        inner.put_open(["k"], [8])
