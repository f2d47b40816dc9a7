"""Files that are written line by line while a run goes on: the event log, and the stories."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from typing import BinaryIO

_HELD = (errno.EWOULDBLOCK, errno.EACCES)
"""What locking a file may answer if somebody else holds the lock; anything else: the file system has no locks."""


class LogFile:
    """A file whose failure is told at once (`on_lost`) but does not end the run.

    It is opened, and so emptied, at its first line: a run that is refused leaves what is there. No path: it writes nothing.

    Attributes:
        lost: it failed, and takes no more lines.
    """

    def __init__(self, path: str | None, on_lost: Callable[[OSError], None]) -> None:
        self.lost = False
        self._path, self._on_lost = path, on_lost
        self._file: BinaryIO | None = None

    def write(self, line: bytes) -> None:
        if self._path is None or self.lost:
            return
        try:
            if self._file is None:
                self._file = open(self._path, "wb", opener=_open_at_once)  # noqa: SIM115 (`close` does, at the end of the run)
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        file, self._file, self._path = self._file, None, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if not self.lost:
            self.lost = True
            self._on_lost(error)


def _open_at_once(path: str, flags: int) -> int:
    """Opens without waiting for somebody to read a pipe, which could be forever. A file is for this run alone, and is emptied.

    Raises:
        OSError: says why; also where nobody reads a pipe, and where another run writes a file.
    """
    try:
        descriptor = os.open(path, (flags & ~os.O_TRUNC) | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "nobody reads this pipe") from error
        raise
    try:
        os.set_blocking(descriptor, True)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            _lock(descriptor)
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise OSError(errno.EWOULDBLOCK, "it is locked; is another run writing it?") from error
