"""One native TransferEngine: set up, asked, and ended without holding up the process.

What was measured of Mooncake 0.3.13 over TCP on one machine, and what is done about it:

* After a call answered -1 the engine goes on sending what the call had queued, from the memory as it is by then: of 200 ranges
  to a frozen peer 196 arrived after it woke up with bytes written to the source after the call; likewise after one bad
  address among 500. Only the end of the engine stops it. Hence an engine that answered -1 is ended before anyone is told.
* Ending it takes up to 1.0 s with the interpreter lock held: its listener looks once a second whether it is to go. Hence
  its patience is shortened (`LISTEN_S`); then it takes 0.02 to 0.05 s.
* A call spins: it takes a core until it is answered. The interpreter lock is not held meanwhile. Calls to eight peers at the
  same time, each on an engine of its own, took on two cores two thirds of the time that one after the other took.
* Calls of several threads to one peer share a queue: two of 2000 ranges each fail both. 2048 ranges under way to one peer are
  the most, and those beyond 1024 fail if they do not get a place in the queue within a second.
* The source need not be registered with the engine that sends; the destination must be, within one region.
* Taking memory out of registration returns at once and does not stop a write into it: of 512 MiB 2 had arrived, and all did.
* It listens on two ports on all interfaces, whatever host it is given and whatever `MC_TCP_BIND_ADDRESS` says: whoever reaches
  them may read and write registered memory. Keep them inside a trusted network.
* It takes any host and any protocol: where it has not the protocol, or no device for it, it goes by TCP.
* It writes a line to stderr when it is set up ("Local segment descriptor not found"), which means nothing.

Environment variables that matter, read when an engine is made or first used: `MC_TRANSFER_TIMEOUT` (seconds, 30, at least 5) is
how long a call waits for a frozen peer, plus one nanosecond a byte; `MC_TCP_PROGRESS_TIMEOUT_SEC` ends it sooner, when nothing
moves for so long. `MC_TCP_LANES_PER_PEER` (4) is the number of connections; `MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER` (1024, not
less) and `MC_TCP_ADMISSION_TIMEOUT_MS` (1000) are the limits above. `MC_LOG_LEVEL` is set to ERROR where it is not set.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvactors.errors import ConfigError, StoreError
from kvactors.log import get_logger
from kvactors.stores.mooncake.client import INSTALL, LEAST_VERSION, installed_version, not_loaded

log = get_logger("kvactors.transport")

LISTEN_S = 0.05
"""How long ending an engine may take."""

OLDEST = (0, 3, 13)
"""Before it, 0.3.7.post1, 0.3.9, 0.3.10.post2 and 0.3.11.post1 end tests/disagg/transports/test_mooncake.py by a signal,
and with 0.3.12.post1 it fails and does not end in 200 s."""

FIRST_LISTEN_S = 1.1
"""An engine younger than this still listens with its own patience of a second."""


def transfer_engine_class() -> Any:
    """The native class. ConfigError when it is missing, cannot be loaded, or is of a version that crashes."""
    _refuse_old()
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # its other lines go to stderr, dozens an engine
    try:
        module = importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise ConfigError(f"Mooncake's TransferEngine is not installed; {INSTALL}") from error
    except ImportError as error:
        raise ConfigError(not_loaded("Mooncake's TransferEngine", error)) from error
    return module.TransferEngine


def _refuse_old() -> None:
    """ConfigError for a version that is known to be older than `OLDEST`; its class has the same methods as a newer one's."""
    name, version = installed_version() or ("", "")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers and numbers < OLDEST:
        raise ConfigError(
            f"{name} {version} is too old, its TransferEngine may crash the process; {LEAST_VERSION} or newer is "
            f"needed: {INSTALL}"
        )


class NativeEngine:
    """An engine that was set up. `end` it from the thread that calls `write`, or when no call is under way.

    Args:
        host: under which peers reach it; a name or an address of this machine.
        protocol: "tcp", "rdma" or another that the installed package has; see above for one that it has not.
        device: names of network devices, comma-separated; empty: the engine chooses.

    Attributes:
        port: where peers ask it for its memory.

    Raises:
        ConfigError: the package is missing, the host has no address, or the engine cannot be set up so.
    """

    def __init__(self, host: str, protocol: str, device: str) -> None:
        try:
            socket.getaddrinfo(host or None, 0)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"host {host!r} has no address: {error}; give one of this machine that peers reach") from error
        native = transfer_engine_class()()
        code = native.initialize(host, "P2PHANDSHAKE", protocol, device)
        if code != 0:
            raise ConfigError(
                f"TransferEngine cannot be set up on host {host!r} with protocol {protocol!r}, device {device!r}: code {code}; "
                f"give an address of this machine and a protocol that the package has ({INSTALL})"
            )
        self._native: Any = native
        self._made = time.monotonic()
        self.port = int(native.get_rpc_port())
        _shorten_patience(self.port)

    def register(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """Raises StoreError when the engine refuses."""
        code = self._native.batch_register_memory(list(addresses), list(sizes))
        if code != 0:
            raise StoreError(f"TransferEngine refuses to register {len(addresses)} region(s): code {code}; give merged ranges")

    def write(self, memory: str, src: list[int], dst: list[int], nbytes: list[int]) -> bool:
        """Blocks until all has arrived (True) or something went wrong (False: then `end` it, it may still be sending)."""
        return bool(self._native.batch_transfer_sync_write(memory, src, dst, nbytes) == 0)

    def end(self) -> None:
        """Stops it: it sends and receives nothing after this. Idempotent."""
        native, self._native = self._native, None
        if native is None:
            return
        time.sleep(max(0.0, self._made + FIRST_LISTEN_S - time.monotonic()))
        del native  # the last reference: the engine ends here, with the interpreter lock held


def _shorten_patience(port: int) -> None:
    """Of the listener on this port: how long it waits for a connection before it looks whether it is to end.

    By the file descriptor alone: a socket object of Python would change how the socket blocks if there is a default timeout.
    """
    listener = _listener(port)
    if listener is not None:
        timeval = struct.pack("ll", 0, int(LISTEN_S * 1e6))
        ctypes.CDLL(None).setsockopt(listener, socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval, len(timeval))


def _listener(port: int) -> int | None:
    """The file descriptor of this process that listens on the port; None where nobody says so."""
    sockets = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, *more = line.split()
                if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{more[5]}]")
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(f"/proc/self/fd/{name}") in sockets:
                    return int(name)
    return None
