"""A Mooncake master of one's own on this machine, for replays, self-tests and tests. It listens on 127.0.0.1 only."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from kvactors.core.config import seconds
from kvactors.errors import ConfigError, StoreError, StoreUnreachableError
from kvactors.stores.mooncake.client import INSTALL
from kvactors.stores.mooncake.config import MooncakeConfig
from kvactors.stores.mooncake.listening import listens

HOST = "127.0.0.1"
TRIES = 5
"""A port that was free may be taken by another program before the master has it."""
START_S = 20.0
STOP_S = 5.0
_LOOK_S = 0.02
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def find_master() -> Path | None:
    """The master's program: beside the client's module, or on the PATH."""
    found = importlib.util.find_spec("mooncake")
    places = [Path(place) for place in (found.submodule_search_locations or ())] if found is not None else []
    for place in (*places, Path(sys.executable).parent):
        if (place / "mooncake_master").is_file():
            return place / "mooncake_master"
    named = shutil.which("mooncake_master")
    return None if named is None else Path(named)


class LocalMaster:
    """A master process, started by the constructor. A context manager; `close` ends it, also a frozen one.

    Started by the main thread, it ends with this program even if that is killed.

    Args:
        lease_s: how long a read is protected from eviction, seconds.
        discard_timeout_s: after it another client may take the key of a put that was never ended; whole seconds.
        release_timeout_s: after it the memory of such a put is free again; whole seconds, more than the former.
        client_ttl_s: after it a client that does not answer counts as dead, and its segment's objects as gone.
        flags: further command-line flags of the master.

    Raises:
        ConfigError: the program is not installed.
        StoreUnreachableError: it does not start; with the last lines that it wrote.
    """

    def __init__(
        self,
        *,
        lease_s: float = 10.0,
        discard_timeout_s: int = 30,
        release_timeout_s: int = 600,
        client_ttl_s: int = 10,
        flags: tuple[str, ...] = (),
    ) -> None:
        if not seconds(lease_s):
            raise ConfigError(f"lease_s = {lease_s!r}: must be a number of seconds, more than 0")
        given: object = flags
        if not isinstance(given, list | tuple):
            raise ConfigError(f"flags = {flags!r}: must be a list of texts")
        program = find_master()
        if program is None:
            raise ConfigError(f"there is no mooncake_master here; {INSTALL}")
        self.lease_s, self.discard_timeout_s = lease_s, discard_timeout_s
        self._command = [
            str(program),
            f"-rpc_address={HOST}",
            f"-metrics_host={HOST}",
            "-rpc_thread_num=2",
            "-enable_metric_reporting=false",
            f"-default_kv_lease_ttl={round(lease_s * 1000)}",
            f"-put_start_discard_timeout_sec={discard_timeout_s}",
            f"-put_start_release_timeout_sec={release_timeout_s}",
            f"-client_ttl={client_ttl_s}",
            *flags,
        ]
        self._log = tempfile.TemporaryFile(prefix="kvactors-master-")  # noqa: SIM115 (closed with the master)
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        for attempt in range(TRIES):
            self.port = _free_port()
            try:
                self.start()
                break
            except StoreUnreachableError:
                if attempt == TRIES - 1:
                    self._log.close()
                    raise
            except BaseException:  # Ctrl-C while it starts
                self.kill()
                self._log.close()
                raise

    @property
    def address(self) -> str:
        """host:port, for `master_server_address`."""
        return f"{HOST}:{self.port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def config(self, **options: Any) -> MooncakeConfig:
        """How a client finds this master; `options` are further ones. The file of another pool has no say in it."""
        return MooncakeConfig.from_options({**self.options(), **options})

    def options(self) -> dict[str, Any]:
        """The options of a `MooncakeStore` that belong to this master."""
        return {
            "master_server_address": self.address,
            "lease_s": self.lease_s,
            "discard_timeout_s": float(self.discard_timeout_s),
        }

    def start(self) -> None:
        """Starts the process again on the same port, after `kill`: with nothing in it, as after a crash.

        Raises:
            StoreError: it runs already, or was closed.
        """
        if self._log.closed or (self._process is not None and self._process.poll() is None):
            raise StoreError(f"the master on {self.address} {'was closed' if self._log.closed else 'runs already'}")
        # A session of its own: Ctrl-C in a terminal is for the program that uses the master, which still has to drain.
        command = [*self._command, f"-rpc_port={self.port}", f"-metrics_port={_free_port()}"]
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent if threading.current_thread() is threading.main_thread() else None,
        )
        deadline = time.monotonic() + START_S
        while not listens(self.process.pid, self.port):
            if self._ended_within(_LOOK_S) or time.monotonic() > deadline:
                self.kill()
                raise StoreUnreachableError(f"mooncake_master did not start on {self.address}: {self._last_lines()}")

    def kill(self) -> None:
        """Ends the process at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Ends the process; everything in the pool is forgotten. Closing again does nothing."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            if not self._ended_within(STOP_S):
                self.kill()
        self._log.close()

    def __enter__(self) -> LocalMaster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ended_within(self, wait_s: float) -> bool:
        try:
            self.process.wait(wait_s)
            return True
        except subprocess.TimeoutExpired:
            return False

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        return " / ".join(lines[-3:]) or "it wrote nothing"


def _die_with_parent() -> None:
    """Runs in the child: it is ended when the thread that started it is gone, however that came about."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port
