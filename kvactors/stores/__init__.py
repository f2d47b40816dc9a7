"""Stores: the embedded one, a real Mooncake pool, a wrapper that injects faults, and the sizes of their configuration."""

from __future__ import annotations

from typing import Any

from kvactors.core.store import Store
from kvactors.errors import ConfigError
from kvactors.stores.fault_plan import PRESETS, Fault, FaultPlan
from kvactors.stores.faulty import FaultyStore
from kvactors.stores.memory import MemoryStore
from kvactors.stores.mooncake import LocalMaster, MooncakeConfig, MooncakeStore
from kvactors.stores.pool import MemoryPool
from kvactors.stores.sizes import parse_size

__all__ = [
    "BACKENDS",
    "PRESETS",
    "Fault",
    "FaultPlan",
    "FaultyStore",
    "LocalMaster",
    "MemoryPool",
    "MemoryStore",
    "MooncakeConfig",
    "MooncakeStore",
    "open_store",
    "parse_size",
]

BACKENDS = ("memory", "mooncake")


def open_store(name: str, **options: Any) -> Store:
    """The store of a `backend` setting, made with the options of its class.

    ConfigError for a name that is not in `BACKENDS`, and for options that the store does not have; StoreUnreachableError when
    no master answers.
    """
    if name == "memory":
        try:
            return MemoryStore(**options)
        except TypeError as error:
            raise ConfigError(f"backend 'memory': {error}") from error
    if name == "mooncake":
        return MooncakeStore(**options)
    raise ConfigError(f"backend = {name!r}: not supported; use one of {', '.join(BACKENDS)}")
