"""A real master on 127.0.0.1 for each test module, with short timeouts, so that leases and discards really happen in a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvactors.errors import ConfigError
from kvactors.stores import LocalMaster, MooncakeStore
from kvactors.stores.mooncake.client import INSTALL, native_module
from kvactors.stores.mooncake.master import find_master

HERE = Path(__file__).parent

LEASE_S, DISCARD_S, RELEASE_S = 1.0, 2, 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    problem = _problem() if mine else ""
    for item in mine:
        item.add_marker(pytest.mark.mooncake)
        if problem:
            item.add_marker(pytest.mark.skip(reason=problem))


def _problem() -> str:
    """Why no Mooncake can be run here; empty if it can."""
    try:
        native_module()
    except ConfigError as error:
        return str(error)
    return "" if find_master() is not None else f"there is no mooncake_master here; {INSTALL}"


@pytest.fixture(scope="module")
def master() -> Iterator[LocalMaster]:
    with LocalMaster(lease_s=LEASE_S, discard_timeout_s=DISCARD_S, release_timeout_s=RELEASE_S) as master:
        yield master


Connect = Callable[..., MooncakeStore]
"""Makes a client of the module's master, with options of its own."""


@pytest.fixture(scope="module")
def connect(master: LocalMaster) -> Iterator[Connect]:
    """Closing a client takes a second or two, so those that a test does not close are shared or closed with the module."""
    made: list[MooncakeStore] = []

    def make(**options: Any) -> MooncakeStore:
        made.append(MooncakeStore(**{**master.options(), **options}))
        return made[-1]

    yield make
    with ThreadPoolExecutor() as closers:
        list(closers.map(MooncakeStore.close, made))


@pytest.fixture(scope="module")
def owner(connect: Connect) -> MooncakeStore:
    """The client whose memory is the pool."""
    return connect(global_segment_size=128 << 20)


@pytest.fixture(scope="module")
def reader(connect: Connect) -> MooncakeStore:
    """Another client, which gives no memory."""
    return connect()
