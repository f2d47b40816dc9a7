"""The contract suite on a real Mooncake: time really passes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvactors.stores import MooncakeStore
from tests.mooncake.conftest import DISCARD_S, Connect
from tests.stores.contract import Buffer, StoreContract, World


@pytest.fixture
def world(request: pytest.FixtureRequest, connect: Connect, owner: MooncakeStore, reader: MooncakeStore) -> Iterator[World]:
    buffer = Buffer()
    b = connect() if "close" in request.node.name else reader
    for store in (owner, b):
        store.register(buffer.address, buffer.nbytes)
    yield World(owner, b, buffer, _wait, float(DISCARD_S), unique=f"{request.node.name}/")
    owner.unregister(buffer.address)
    if b is reader:
        b.unregister(buffer.address)


def _wait(wait_s: float) -> None:
    """Another process's timeouts cannot be set forward; this is the one thing that waits for them."""
    threading.Event().wait(wait_s)


class TestMooncakeStore(StoreContract):
    pass
