"""The store that the configuration names: "memory" is one for the whole process, "mooncake" needs its configuration file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvactors.core.store import Outcome
from kvactors.errors import ConfigError
from kvactors.vllm import stores
from kvactors.vllm.settings import ConnectorSettings

MEMORY = ConnectorSettings.of({"backend": "memory", "memory_capacity": "1 MB"})


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No store of this process is open yet, and Mooncake is not configured."""
    monkeypatch.setattr(stores, "_shared", None)
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    yield
    if stores._shared is not None:
        stores._shared.close()


def test_a_workers_objects_are_found_by_the_schedulers_lookups() -> None:
    worker, scheduler = stores.worker_store(MEMORY)(), stores.lookup_store(MEMORY)()
    assert worker.put_open(["a"], [8]) == [Outcome.OK]
    assert scheduler.readable(["a"]) == [False]
    worker.put_commit(["a"])
    assert scheduler.readable(["a"]) == [True]


def test_objects_outlive_the_engine_that_stored_them() -> None:
    worker = stores.worker_store(MEMORY)()
    worker.put_open(["a"], [8])
    worker.put_commit(["a"])
    worker.close()
    assert stores.lookup_store(MEMORY)().readable(["a"]) == [True]


def test_the_first_who_asks_decides_the_capacity() -> None:
    stores.worker_store(MEMORY)()
    stores.worker_store(ConnectorSettings.of({"backend": "memory", "memory_capacity": "2 MB"}))()
    assert stores.shared_memory_store().pool.capacity == 1 << 20


@pytest.mark.parametrize("open_store", [stores.worker_store, stores.lookup_store])
def test_mooncake_without_its_configuration_is_no_outage_but_an_error(open_store: object) -> None:
    assert callable(open_store)
    with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH"):
        open_store(ConnectorSettings())
