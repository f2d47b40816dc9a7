"""The listening socket: made so that nobody else can connect, in the place of a stale one, and taken away again.

A unix socket is bound under a private name, gets mode 0600, and only then its own name by a hard link, which never replaces
anything. A stale one (nobody listens) is removed first, under a lock on its directory, so that of several engines that start at
the same time one wins and the others are told.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvactors.errors import ConfigError
from kvactors.live.address import Address

BACKLOG = 512
"""Clients that may wait; to one more, a unix socket does not say that it has to."""

LOCK_S = 2.0
"""How long others may take to make a socket in the same directory."""


class Listener:
    """A socket that listens; `close` once.

    Raises:
        ConfigError: somebody listens there already, something else has the name, or the system refuses.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._place: tuple[int, int] | None = None
        try:
            self.socket = self._at_path(Path(address.path)) if address.path else self._at_port(address)
        except OSError as error:
            raise ConfigError(f"live view: {address}: {error.strerror or error}; choose another address") from error
        self.socket.setblocking(False)

    def close(self) -> None:
        """Stops listening, and removes the socket's file if it is still this one."""
        self.socket.close()
        if self._place is not None:
            with contextlib.suppress(OSError):
                if _place(self.address.path) == self._place:
                    os.unlink(self.address.path)

    @staticmethod
    def _at_port(address: Address) -> socket.socket:
        made = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address.host, address.port))
            made.listen(BACKLOG)
        except BaseException:
            made.close()
            raise
        return made

    def _at_path(self, path: Path) -> socket.socket:
        private = tempfile.mkdtemp(prefix=".kvactors-", dir=path.parent)  # mode 0700
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            inside = os.open(private, os.O_RDONLY | os.O_DIRECTORY)
            try:
                made.bind(f"/proc/self/fd/{inside}/s")  # whatever the length of the directory's name
            finally:
                os.close(inside)
            os.chmod(f"{private}/s", 0o600)
            made.listen(BACKLOG)
            with _locked(path.parent):
                _remove_stale(path)
                os.link(f"{private}/s", path)
            self._place = _place(str(path))
        except BaseException:
            made.close()
            raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(f"{private}/s")
            os.rmdir(private)
        return made


def _place(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the directory against other engines' starts. Another process may hold it: there is no event to wait for."""
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(held)


def _remove_stale(path: Path) -> None:
    """Removes a socket on which nobody listens.

    Raises:
        ConfigError: it is no socket, or somebody does.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"live view: {path}: exists and is no socket; choose another path, or remove it")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.closing(probe):
        probe.setblocking(False)  # a full backlog answers EAGAIN: somebody listens
        answer = probe.connect_ex(str(path))
    if answer != errno.ECONNREFUSED:
        why = os.strerror(answer) if answer else "it answers"
        raise ConfigError(f"live view: {path}: in use by another engine ({why}); give each its own path")
    path.unlink()
