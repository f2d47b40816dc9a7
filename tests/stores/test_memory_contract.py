from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvactors.stores import FaultyStore, MemoryStore
from tests.stores.contract import Buffer, StoreContract, World
from tests.stores.memory_world import ManualClock


@pytest.fixture(params=["plain", "through FaultyStore"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    clock, buffer = ManualClock(), Buffer()
    a = MemoryStore(1 << 20, clock=clock)
    b = a.client()
    for client in (a, b):
        client.register(buffer.address, buffer.nbytes)
    wrapped = request.param != "plain"
    yield World(FaultyStore(a) if wrapped else a, FaultyStore(b) if wrapped else b, buffer, clock.advance, 30.0)
    a.pool.arena.check()
    a.close()
    b.close()


class TestMemoryStore(StoreContract):
    pass
