"""What the command line prints on: standard output and standard error, which may be gone, full, or know only ASCII.

Results go to stdout; progress, complaints and the library's log to stderr.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


class Stream:
    """A text stream that never raises: what it cannot write is dropped, and what it cannot encode is replaced.

    Attributes:
        lost: the error of the first write that failed; None while all is well.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self.lost: Exception | None = None

    @property
    def encoding(self) -> str:
        return getattr(self._file, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:
        return getattr(self._file, "errors", None) or "strict"

    def isatty(self) -> bool:
        return self._file is not None and not self._file.closed and self._file.isatty()

    def fileno(self) -> int:
        if self._file is None:
            raise io.UnsupportedOperation("fileno")
        return self._file.fileno()

    def write(self, text: str | bytes) -> int:
        if isinstance(text, bytes):  # click answers a shell that completes in bytes
            text = text.decode()
        if self._file is not None and self.lost is None:
            try:
                self._file.write(self._encodable(text))
            except (OSError, ValueError) as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if self._file is not None and self.lost is None:
            try:
                self._file.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def _encodable(self, text: str) -> str:
        encoding = self.encoding
        try:
            text.encode(encoding, self.errors)
        except UnicodeEncodeError:
            return text.encode(encoding, "replace").decode(encoding)
        return text

    def _lose(self, error: Exception) -> None:
        """Python flushes its streams once more at exit: what is left in them goes nowhere."""
        self.lost = error
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null, self.fileno())
            finally:
                os.close(null)

    @property
    def problem(self) -> str | None:
        """Why output is missing, unless its reader went away, as `head` does."""
        if self.lost is None or isinstance(self.lost, BrokenPipeError):
            return None
        return getattr(self.lost, "strerror", None) or str(self.lost)


@contextlib.contextmanager
def lasting_streams() -> Iterator[tuple[Stream, Stream]]:
    """Puts a `Stream` around standard output and standard error while it is entered."""
    before = sys.stdout, sys.stderr
    out, err = Stream(sys.stdout), Stream(sys.stderr)
    sys.stdout, sys.stderr = out, err
    try:
        yield out, err
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


class _ToStderr(logging.Handler):
    """Writes to whatever stderr is when something is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


_LOGGER = logging.getLogger("kvactors")


@contextlib.contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Sends the library's warnings to stderr while it is entered; see `log_from`."""
    handler, level = _ToStderr(), _LOGGER.level
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    _LOGGER.addHandler(handler)
    log_from(logging.WARNING)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        _LOGGER.setLevel(level)


def log_from(level: int) -> None:
    """Shows what is at least that important; everything with KVACTORS_RANGE_DEBUG=1."""
    _LOGGER.setLevel(logging.DEBUG if os.environ.get("KVACTORS_RANGE_DEBUG") == "1" else level)


def plain_console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console that prints texts as they are: no markup, emoji or highlighting, so that a name of a user's stays a name.

    As wide as the terminal; 120 columns into a file or a pipe. With NO_COLOR set, to whatever but the empty string, neither
    colours nor bold: see https://no-color.org.
    """
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    width = None if file is not None and file.isatty() else 120
    colours: dict[str, Any] = {"color_system": None} if os.environ.get("NO_COLOR") else {}
    return Console(stderr=stderr, width=width, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False, **colours)
