"""A tuple of keys that comes again is known to the memory store only as long as its sessions are what they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvactors.core.store import Outcome
from kvactors.stores import MemoryStore
from tests.stores.contract import Buffer, ranges

KEYS = ("a", "b")
N = 16


def opened(read: bool) -> tuple[MemoryStore, Callable[[], list[Outcome]]]:
    """A store, and the same range call of both keys again and again: OK so far."""
    store, buffer = MemoryStore(), Buffer()
    store.register(buffer.address, buffer.nbytes)
    batch = ranges(KEYS, [[buffer.address], [buffer.address + N]], [N], [0])
    assert batch.keys is KEYS
    assert store.put_open(KEYS, [N, N]) == [Outcome.OK] * 2
    call = lambda: store.get_ranges(batch) if read else store.put_ranges(batch)  # noqa: E731 (buffer lives with it)
    call.buffer = buffer  # type: ignore[attr-defined]  # so long as the call may be made
    if read:
        assert store.put_ranges(batch) == store.put_commit(KEYS) == store.get_open(KEYS, [N, N]) == [Outcome.OK] * 2
    assert call() == call() == [Outcome.OK] * 2
    return store, call


@pytest.mark.parametrize("end", [MemoryStore.put_commit, MemoryStore.put_revoke])
def test_a_put_that_ended_takes_no_more(end: Callable[[MemoryStore, list[str]], object]) -> None:
    store, put = opened(read=False)
    end(store, ["b"])
    assert put() == [Outcome.OK, Outcome.INVALID]


def test_a_get_that_was_closed_is_read_no_more() -> None:
    store, get = opened(read=True)
    store.get_close(["a"])
    assert get() == [Outcome.INVALID, Outcome.OK]


def test_an_object_that_was_removed_is_read_no_more() -> None:
    store, get = opened(read=True)
    store.remove("b", force=True)
    assert get() == [Outcome.OK, Outcome.NOT_FOUND]
