"""The store that a configuration names: one client for each worker, one for the scheduler's lookups."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvactors.core.store import Store
from kvactors.log import get_logger
from kvactors.stores.late import LateStore
from kvactors.stores.memory import MemoryStore
from kvactors.stores.mooncake.coalesce import GOOD_RANGE_BYTES
from kvactors.stores.mooncake.config import LEAST_SEGMENT_BYTES, MooncakeConfig
from kvactors.stores.mooncake.store import MooncakeStore
from kvactors.vllm.settings import ConnectorSettings

log = get_logger("kvactors.vllm.stores")

Opener = Callable[[], Store]

_lock = threading.Lock()
_shared: MemoryStore | None = None


def shared_memory_store(capacity: int | str | None = None) -> MemoryStore:
    """The embedded store of this process: every engine in it that asks for "memory" shares its objects.

    It lives as long as the process; the first who asks decides its capacity.
    """
    global _shared
    with _lock:
        if _shared is None:
            _shared = MemoryStore(1 << 30 if capacity is None else capacity)
        return _shared


def worker_store(settings: ConnectorSettings) -> Opener:
    """Opens a worker's client: it gives the pool the memory that Mooncake's configuration says."""
    if settings.backend == "memory":
        return lambda: shared_memory_store(settings.memory_capacity).client()
    config = _config(settings)
    return lambda: _mooncake(config)


def lookup_store(settings: ConnectorSettings) -> Opener:
    """Opens the scheduler's client: it gives no memory and moves nothing."""
    if settings.backend == "memory":
        return lambda: shared_memory_store(settings.memory_capacity).client()
    config = _config(settings, global_segment_size=0, local_buffer_size=LEAST_SEGMENT_BYTES, staging_bytes=0)
    return lambda: _mooncake(config)


def _config(settings: ConnectorSettings, **changes: object) -> MooncakeConfig:
    """From the file that MOONCAKE_CONFIG_PATH names.

    Raises:
        ConfigError: there is none, or it is wrong. That is no outage: it does not come right by waiting.
    """
    if settings.mooncake_protocol:
        changes["protocol"] = settings.mooncake_protocol
    return MooncakeConfig.from_environment(**changes)


def _mooncake(config: MooncakeConfig) -> Store:
    late = LateStore(
        lambda: MooncakeStore(config),
        name=MooncakeStore.name,
        lease_s=config.lease_s,
        put_safe_age_s=config.discard_timeout_s / 2,
        reads_whole_objects=config.read_whole_objects,
        good_range_bytes=GOOD_RANGE_BYTES if config.protocol == "tcp" and int(config.staging_bytes) else 0,
    )
    problem = late.try_open()
    if problem:
        log.error(
            "the Mooncake pool cannot be reached; serving goes on without it, and it is tried again",
            master=config.master_server_address,
            problem=problem,
        )
    return late
