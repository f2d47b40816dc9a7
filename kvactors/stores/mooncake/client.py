"""The native Mooncake client, guarded: no call before set-up or after close, and no answer of the wrong shape gets through.

A native client that was not set up, or was closed, may crash the process; and what it answers then may be a short list.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, NamedTuple

from kvactors.core.answers import came, shown
from kvactors.errors import ConfigError, StoreError, StoreUnreachableError
from kvactors.log import get_logger
from kvactors.stores.mooncake.codes import RPC_TIMEOUT
from kvactors.stores.mooncake.config import MooncakeConfig

log = get_logger("kvactors.mooncake")

DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
"""Packages that have the client."""

LIBRARIES = {
    "ibverbs": "libibverbs1",
    "numa": "libnuma1",
    "curl": "libcurl4",
    "nl-3": "libnl-3-200",
    "nl-route-3": "libnl-route-3-200",
}
"""Shared libraries that the client loads, and the Debian packages that have them."""

PROBE_KEY = "kvactors-probe"
"""A key that nobody writes; asking for it takes the master and nothing else."""

SESSION_CALLS = (
    "batch_put_session_start",
    "batch_put_from_multi_buffer_ranges",
    "batch_put_session_end",
    "batch_put_session_revoke",
    "batch_get_session_start",
    "batch_get_into_multi_buffer_ranges",
    "batch_get_session_end",
)

LEAST_VERSION = "0.3.13.post1"
"""The first that has the session calls and loads without the CUDA runtime, which 0.3.13 links; pyproject.toml says the same."""

INSTALL = "pip install 'kvactors[mooncake]'"
"""How to get the client and the master; `kvactors doctor` says the same."""

LEAST_CLOSE_S = 5.0
"""A healthy client closes in one to two seconds."""

_left_open: list[Any] = []
"""clients whose calls did not return: never destroyed, because such a call may still use them"""


def installed_version() -> tuple[str, str] | None:
    """The distribution that has the client, and its version."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def native_module() -> Any:
    """The client's module. ConfigError when it is missing, cannot be loaded, or is older than the session calls."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # its other lines go to stderr, dozens a client
    try:
        module = importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise ConfigError(f"the Mooncake client is not installed; {INSTALL}") from error
    except ImportError as error:
        raise ConfigError(not_loaded("the Mooncake client", error)) from error
    check_sessions(module)
    return module


def not_loaded(what: str, error: ImportError) -> str:
    """Why a module of Mooncake cannot be loaded, and what helps: system libraries, or a package that wants no CUDA."""
    if "libcuda" in str(error):
        name, version = installed_version() or ("mooncake", "of unknown version")
        return (
            f"{what} cannot be loaded: {name} {version} needs the CUDA runtime ({error}); mooncake-transfer-engine-non-cuda "
            f"{LEAST_VERSION} or newer does not: {INSTALL}"
        )
    return f"{what} cannot be loaded: {error}; try: apt-get install {' '.join(LIBRARIES.values())}"


def check_sessions(module: Any) -> None:
    """ConfigError unless the client has the session calls, which came with 0.3.13."""
    missing = [call for call in SESSION_CALLS if not hasattr(module.MooncakeDistributedStore, call)]
    if missing:
        name, version = installed_version() or ("mooncake", "of unknown version")
        raise ConfigError(f"{name} {version} is too old, it has no {missing[0]}; {LEAST_VERSION} or newer is needed: {INSTALL}")


class Placed(NamedTuple):
    """Where a committed object lies: its bytes, the segments that hold it, and the addresses in them."""

    nbytes: int
    segments: frozenset[str]
    places: frozenset[tuple[str, int]]


NOWHERE = Placed(-1, frozenset(), frozenset())


def clients_left_open() -> int:
    """How many clients of this process have calls that do not return. With any, end the process by `os._exit`: destroying a
    client under its calls would crash it."""
    return len(_left_open)


class Client:
    """A native client that was set up. Calls may come from any thread; `close` waits for them.

    Args:
        native: a native client that was set up already (tests); None = make one and set it up.

    Raises:
        ConfigError: see `native_module`.
        StoreUnreachableError: the master does not answer, or refuses this client.
    """

    def __init__(self, config: MooncakeConfig, native: Any = None) -> None:
        self._close_deadline_s = config.close_deadline_s
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False
        self.replication: Any = None
        if native is None:
            module = native_module()
            native = _set_up(module, config)
            self.replication = _replication(module, config)
        self._native = native

    @contextmanager
    def _call(self, name: str) -> Iterator[Any]:
        with self._changed:
            if self._closed:
                raise StoreError(f"{name}: the Mooncake client was closed; open another store")
            self._under_way += 1
        try:
            yield getattr(self._native, name)
        finally:
            with self._changed:
                self._under_way -= 1
                if not self._under_way:
                    self._changed.notify_all()

    def has(self, name: str) -> bool:
        return hasattr(self._native, name)

    def ask(self, name: str, keys: Sequence[str], *arguments: Any) -> list[int]:
        """A call that answers one whole number per key. StoreError for an answer of another shape."""
        keys = list(keys)
        with self._call(name) as call:
            answer = call(keys, *arguments)
        if not isinstance(answer, list) or len(answer) != len(keys) or not all(type(a) is int for a in answer):
            raise StoreError(f"{name} answered {came(answer, len(keys), {int})}; expected one whole number each")
        return answer

    def tell(self, name: str, *arguments: Any) -> int:
        """A call that answers one whole number for everything."""
        with self._call(name) as call:
            answer = call(*arguments)
        if type(answer) is not int:
            raise StoreError(f"{name} answered {shown(answer)}; expected a whole number")
        return answer

    def replicas(self, keys: Sequence[str]) -> dict[str, Placed]:
        """Where each committed object lies; a key that is not there is left out.

        The answer is empty too when the master does not answer: the call has no way to say so.
        """
        with self._call("batch_get_replica_desc") as call:
            answer = call(list(keys))
        if not isinstance(answer, dict):
            raise StoreError(f"batch_get_replica_desc answered {shown(answer)}; expected a mapping")
        found: dict[str, Placed] = {}
        for key, replicas in answer.items():
            where = [r.get_memory_descriptor().buffer_descriptor for r in replicas if r.is_memory_replica()]
            if where:
                places = frozenset((str(d.transport_endpoint), int(d.buffer_address)) for d in where)
                found[key] = Placed(int(where[0].size), frozenset(segment for segment, _ in places), places)
        return found

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, wait_s: float | None = None) -> None:
        """Lets calls under way end, then closes. A client whose calls, or whose close, do not end in time is left open for
        good: closing it under them would crash the process.

        Args:
            wait_s: how long to wait for calls, and for the close; None = `close_deadline_s`.
        """
        wait_s = self._close_deadline_s if wait_s is None else wait_s
        with self._changed:
            if self._closed:
                return
            self._closed = True
            idle = self._changed.wait_for(lambda: not self._under_way, wait_s)
        native = self._native
        _left_open.append(native)
        if idle:
            closed = threading.Event()
            threading.Thread(target=_close, args=(native, closed), name="kvactors mooncake close", daemon=True).start()
            idle = closed.wait(max(wait_s, LEAST_CLOSE_S))
        if idle:
            _left_open.remove(native)
        else:
            log.warning("a Mooncake client is left open: calls on it do not return", calls=self._under_way)


def _close(native: Any, closed: threading.Event) -> None:
    """Closes a client if its master answers, or is gone. The native close holds the interpreter's lock until the master
    answered it, a minute and more where that is frozen; so it is asked first by a call that does not."""
    if native.batch_is_exist([PROBE_KEY])[0] != RPC_TIMEOUT:
        native.close()
        closed.set()


def _set_up(module: Any, config: MooncakeConfig) -> Any:
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")  # else a missing master is reported after 90 s
    native = module.MooncakeDistributedStore()
    try:
        code = _call_set_up(native, config)
    except MemoryError as error:
        raise ConfigError(
            f"this machine has no memory for local_buffer_size = {config.buffer_bytes} and global_segment_size = "
            f"{config.segment_bytes}"
        ) from error
    if code != 0:
        raise StoreUnreachableError(
            f"no Mooncake client could be set up ({code}): is a master running at {config.master_server_address}? If so: does "
            f"this Mooncake know the protocol {config.protocol}, and has the machine {config.segment_bytes} bytes to give to "
            f"the pool and {config.buffer_bytes} for a buffer?"
        )
    return native


def _call_set_up(native: Any, config: MooncakeConfig) -> int:
    code: int = native.setup(
        {
            "local_hostname": config.local_hostname,
            "metadata_server": config.metadata_server,
            "global_segment_size": str(config.segment_bytes),
            "local_buffer_size": str(config.buffer_bytes),
            "protocol": config.protocol,
            "rdma_devices": config.device_name,
            "master_server_addr": config.master_server_address,
            "tenant_id": config.tenant_id,
        }
    )
    return code


def _replication(module: Any, config: MooncakeConfig) -> Any:
    wanted = module.ReplicateConfig()
    wanted.replica_num = config.replica_num
    wanted.preferred_segments = list(config.preferred_segments)
    wanted.prefer_alloc_in_same_node = config.prefer_alloc_in_same_node
    wanted.with_hard_pin = config.with_hard_pin
    return wanted
