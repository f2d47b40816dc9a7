"""The contract between the engine and a store: sessions and ranges, typed outcomes.

A put session is opened for a key with the object's size, written range by range, then committed or revoked. A get session
is opened for a committed key (which takes a lease), read range by range, and closed. The states and their answers follow
a real Mooncake store (docs/design/store-contract.md); `kvactors.stores` has the implementations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvactors.errors import ConfigError

Addresses = npt.NDArray[np.int64]


class Outcome(Enum):
    """What a store call answered for one key."""

    OK = "ok"
    EXISTS = "exists"
    """put_open: the key is committed, or open in another client, or appeared earlier in the same call."""
    NO_SPACE = "no space"
    """put_open: the pool is full; eviction was started, a retry may work."""
    INVALID = "invalid"
    """No session, a session that ended, size 0, a range outside the object, an address that is not registered."""
    NOT_FOUND = "not found"
    NOT_READY = "not ready"
    """get_open: the key is being written."""
    NOT_OWNER = "not owner"
    """put_revoke: the key is unusable in this client; poisoned."""
    NO_REPLICA = "no replica"
    LEASED = "leased"
    LEASE_EXPIRED = "lease expired"
    TRANSFER_FAILED = "transfer failed"
    SIZE_MISMATCH = "size mismatch"
    """get_open: the stored object's size differs from the layout's. No session was opened."""
    UNREACHABLE = "unreachable"
    """The master did not answer. Every open session of this client is void (I11)."""

    # The rest never comes from a store; the engine answers for a store that could not.
    STALE = "stale session"
    """The session is older than the store's safe age, or older than a lost master; the call was not made."""
    CANCELLED = "cancelled"
    """The call was not made: its step was aborted, or its key had already failed."""
    NOT_STARTED = "not started"
    """No worker was free before the deadline; the call was not made."""
    CALL_FAILED = "call failed"
    """The store call raised, or answered what it may not; see `core/answers.py`, which also says which and what."""
    LOST = "call lost"
    """The call did not return before its deadline; it may still touch memory."""
    EVENT_LOST = "event lost"
    """The device event that guards the call did not fire before its deadline; the call was not made."""

    @property
    def ok(self) -> bool:
        return self is Outcome.OK


@dataclass(slots=True, eq=False)
class RangeBatch:
    """Ranges of many objects that share one shape: row i moves `len(sizes)` ranges between memory and object `keys[i]`.

    Attributes:
        keys: n object keys; a get may name a key more than once (fan-out), a put may not.
        addresses: int64 of shape (n, r), local addresses in bytes.
        sizes: int64 of shape (r,), bytes of each range.
        offsets: int64 of shape (r,), offset of each range inside the object, bytes.
    """

    keys: Sequence[str]
    addresses: Addresses
    sizes: Addresses
    offsets: Addresses

    @property
    def nbytes_per_key(self) -> int:
        return sum(self.sizes.tolist())  # faster than numpy's for a few


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a store answers; `detail` says what is wrong and what to do."""

    ok: bool
    detail: str = ""


@runtime_checkable
class Store(Protocol):
    """Blocking and thread-safe; called by the transfer workers. Every list answer has one outcome per key, in order.

    A range outcome is OK only if every byte of every range of that key was moved. Implementations never raise for one
    key's trouble; they raise `StoreError` when the call as a whole cannot be made.

    A store may also have `good_range_bytes: int`, which the engine reads once: how long a range must be for its fixed cost not
    to matter. Layers that wait are then joined up to that length in one call (`core/riders.py`). Without it, or with 0, ranges
    of any size are as good, and nothing is joined. And it may have `reads_whole_objects: bool`: whether ranges that make up a
    whole object are read faster in one call; loads outside steps are made so then. Both are no part of the protocol: stores
    without them stay stores.
    """

    name: str
    """For people and messages; not empty."""
    lease_s: float
    """How long a get session may be read after `get_open` (or its renewal by another `get_open`), seconds."""
    put_safe_age_s: float
    """No range may be written on a put session older than this (well below the store's discard timeout), seconds.
    Both are more than 0; infinity where nothing expires."""

    def put_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]: ...
    def put_ranges(self, batch: RangeBatch) -> list[Outcome]: ...
    def put_commit(self, keys: Sequence[str]) -> list[Outcome]: ...
    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]: ...
    def get_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]: ...
    def get_ranges(self, batch: RangeBatch) -> list[Outcome]: ...
    def get_close(self, keys: Sequence[str]) -> list[Outcome]: ...
    def readable(self, keys: Sequence[str]) -> list[bool]: ...
    def register(self, address: int, nbytes: int) -> None: ...
    def unregister(self, address: int) -> None: ...
    def health(self) -> Health: ...
    def stats(self) -> Mapping[str, Any]: ...
    def close(self) -> None: ...


STORE_CALLS = (
    "put_open",
    "put_ranges",
    "put_commit",
    "put_revoke",
    "get_open",
    "get_ranges",
    "get_close",
    "readable",
    "register",
    "unregister",
    "health",
    "stats",
    "close",
)

STORE_NEEDS = ("name", "lease_s", "put_safe_age_s", *STORE_CALLS)
"""Everything that `Store` names: what a store of one's own has to have."""


def require_store(store: object) -> None:
    """Refuses an object that is no store before anything is asked of it; every call would fail, and nothing be saved.

    Raises:
        ConfigError: names what it lacks, or what of it cannot be called; or it is a class.
    """
    if isinstance(store, type):
        raise ConfigError(f"store {store.__name__} is a class; give an instance of it, as {store.__name__}(...) makes one")
    if lacking := [name for name in STORE_NEEDS if not hasattr(store, name)]:
        raise ConfigError(
            f"store {type(store).__name__} lacks {', '.join(lacking)}; see the calls and attributes of a store in docs"
        )
    if uncalled := [name for name in STORE_CALLS if not callable(getattr(store, name))]:
        raise ConfigError(f"store {type(store).__name__}: {', '.join(uncalled)} cannot be called; it must be a method")
