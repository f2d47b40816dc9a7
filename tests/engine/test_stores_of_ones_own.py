"""A store of one's own: what it lacks is said when the engine is made, not by every call."""

from __future__ import annotations

from typing import Any

import pytest

from kvactors.core.store import STORE_NEEDS, Store, require_store
from kvactors.engine import Engine
from kvactors.errors import ConfigError
from kvactors.stores import FaultyStore, MemoryStore


class Counting:
    """Someone's first try: the calls that pages tell of, and no attributes."""

    def put_open(self, keys: Any, sizes: Any) -> None: ...
    def get_open(self, keys: Any, sizes: Any) -> None: ...


def test_the_list_is_the_protocols() -> None:
    named = {n for n in vars(Store) if not n.startswith("_")} | set(Store.__annotations__)
    assert set(STORE_NEEDS) == named


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="store Counting lacks name, lease_s, put_safe_age_s, put_ranges, put_commit"):
        require_store(Counting())
    with pytest.raises(ConfigError, match="store Counting lacks"):
        Engine(None, Counting(), {})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [MemoryStore, FaultyStore])
def test_the_projects_own_have_all(kind: type) -> None:
    given = set(dir(kind)) | set(getattr(kind, "__annotations__", ()))
    calls = {name for name in STORE_NEEDS if name not in ("name", "lease_s", "put_safe_age_s")}
    assert calls <= given or hasattr(kind, "__getattr__")


class CountingStore:
    """As docs/design/store-contract.md has it."""

    def __init__(self, store: Any) -> None:
        self._store, self.reads = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_ranges(self, batch: Any) -> Any:
        self.reads += len(batch.keys)
        return self._store.get_ranges(batch)


def test_a_wrapper_is_a_store() -> None:
    require_store(CountingStore(MemoryStore()))
