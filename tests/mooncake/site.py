"""A master and its clients for one test of what breaks: everything is closed at the end, whatever is dead by then."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from kvactors.stores import LocalMaster, MooncakeStore
from tests.mooncake.owner_process import OtherClient
from tests.mooncake.sentinels import Sentinels

SEGMENT_BYTES = 64 << 20


def native_patience(monkeypatch: pytest.MonkeyPatch, rpc_s: int, transfer_s: int) -> None:
    """How long the native calls of clients made from now on wait for a frozen master and for a frozen peer; 30 s by default."""
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", str(rpc_s * 1000))
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", str(transfer_s))


class Site:
    """A context manager. Closing a client takes a second or two, so all are closed at the same time."""

    def __init__(self, **options: Any) -> None:
        self.master = LocalMaster(
            **{"lease_s": 1.0, "discard_timeout_s": 2, "release_timeout_s": 4, "client_ttl_s": 2, **options}
        )
        self._clients: list[MooncakeStore] = []
        self._others: list[OtherClient] = []

    def client(self, **options: Any) -> MooncakeStore:
        self._clients.append(MooncakeStore(**{**self.master.options(), "close_deadline_s": 10.0, **options}))
        return self._clients[-1]

    def owner(self) -> MooncakeStore:
        """A client that gives memory to the pool."""
        return self.client(global_segment_size=SEGMENT_BYTES)

    def other(self, **options: Any) -> OtherClient:
        """A client in a process of its own."""
        self._others.append(OtherClient(**{**self.master.options(), **options}))
        return self._others[-1]

    def other_owner(self) -> OtherClient:
        return self.other(global_segment_size=SEGMENT_BYTES)

    def sentinels(self, count: int = 200) -> Sentinels:
        """Objects of one more client, written."""
        made = Sentinels(self.client(staging_bytes=0), count)
        made.put_all()
        return made

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            stack.callback(self.master.close)
            for other in self._others:
                stack.callback(other.close)
            with ThreadPoolExecutor() as closers:
                list(closers.map(MooncakeStore.close, self._clients))
