"""Recorded request traces, plain or gzipped, checked line by line: see `kvactors.replay.formats` for what is in a line.

Whatever the format, a request has one id for so many prompt tokens; the last may cover fewer. An id stands for all tokens up to
the end of its block, so equal ids mean equal prefixes.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from kvactors.errors import TraceError
from kvactors.replay.formats import (
    MOST_LINE_BYTES,
    TRACE_BLOCK_TOKENS,
    RowError,
    RowReader,
    TraceRequest,
    guess,
    is_utf16,
    recognise,
    rows_of,
)

__all__ = ["TRACE_BLOCK_TOKENS", "TraceReader", "TraceRequest", "TraceSource", "TraceSummary", "scan_trace"]

MOST_KEPT_BYTES = 1 << 30
"""A trace that can be read only once is kept in memory, up to this."""

STANDARD_INPUT = "-"
"""The path of a trace that comes on standard input."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PIECE_BYTES = 1 << 20
_TOO_LONG = f"is longer than {MOST_LINE_BYTES >> 20} MiB, the most that a line may have: is a line break missing?"


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a whole trace (or its first N requests) holds; `skipped` bad lines were left out.

    Attributes:
        longest: input lengths of the 64 longest requests, longest first.
        checksum, format, block_tokens: see `TraceReader`.
    """

    requests: int
    input_tokens: int
    max_input_length: int
    longest: tuple[int, ...]
    skipped: int
    checksum: int = 0
    format: str = "mooncake"
    block_tokens: int = TRACE_BLOCK_TOKENS


class TraceSource:
    """A trace that is read more than once: a file by its path; a pipe or another stream is kept in memory at its first use.

    Attributes:
        path: what errors call it.
    """

    def __init__(self, path: str | Path) -> None:
        self._from_stdin = str(path) == STANDARD_INPUT
        self.path = "standard input" if self._from_stdin else str(path)
        self._kept: bytes | None = None

    def open(self) -> BinaryIO:
        """The file's bytes from the start.

        Raises:
            TraceError: it cannot be opened, or is a stream without an end in sight.
        """
        if self._kept is not None:
            return io.BytesIO(self._kept)
        try:
            if self._from_stdin:
                kept = self._standard_input().read(MOST_KEPT_BYTES + 1)
            else:
                file = open(self.path, "rb")  # noqa: SIM115 (whoever asked closes it)
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return file
                with file:
                    kept = file.read(MOST_KEPT_BYTES + 1)
        except OSError as error:
            raise TraceError(self.path, 1, "", f"cannot be opened: {error.strerror or error}") from error
        if len(kept) > MOST_KEPT_BYTES:
            size = f"{MOST_KEPT_BYTES >> 30} GiB"
            raise TraceError(self.path, 1, "", f"can be read only once and is larger than {size}: write it to a file")
        self._kept = kept
        return io.BytesIO(kept)

    def _standard_input(self) -> BinaryIO:
        if sys.stdin is None or sys.stdin.closed:
            raise TraceError(self.path, 1, "", "is closed; give the name of a file")
        return sys.stdin.buffer


class TraceReader:
    """Iterates over the requests of a trace file without holding them.

    Args:
        source: a file; gzip is unpacked while reading; a byte order mark at its start is skipped.
        skip_bad: count and leave out lines that are wrong instead of raising.
        limit: stop after this many requests.
        expected: read the trace a second time: the checksum of the first time, which ended with request number `limit`.
        format: one of `FORMATS`; None: by the first row that tells.

    Attributes:
        checksum: of all lines up to the last request that was returned.
        format: the one that was found; Mooncake's until then.
        block_tokens: prompt tokens that an id covers.

    Raises (while iterating):
        TraceError: names file, line and field; with `expected`, also when the trace is another one by now.
    """

    def __init__(
        self,
        source: str | Path | TraceSource,
        *,
        skip_bad: bool = False,
        limit: int | None = None,
        expected: int | None = None,
        format: str | None = None,
    ) -> None:
        self.source = source if isinstance(source, TraceSource) else TraceSource(source)
        self.path = self.source.path
        self.expected = expected
        self.checksum = 0
        self.skip_bad = skip_bad
        self.limit = limit
        self.skipped = 0
        self.first_bad: TraceError | None = None
        self._given = format
        self._rows: RowReader = rows_of(format or "mooncake")

    @property
    def format(self) -> str:
        return self._rows.name

    @property
    def block_tokens(self) -> int:
        return self._rows.block_tokens

    def __iter__(self) -> Iterator[TraceRequest]:
        if self.expected is None:
            yield from self._requests()
            return
        last = 0
        try:
            for request in self._requests():
                last = request.line
                yield request
        except TraceError as error:  # the first reading found nothing wrong
            raise TraceError(
                self.path, error.line, error.field, f"was changed while it was replayed: {error.problem}"
            ) from None
        if self.checksum != self.expected:
            raise TraceError(self.path, last, "", "was changed while it was replayed")

    def _requests(self) -> Iterator[TraceRequest]:
        self.skipped, self.first_bad, self.checksum = 0, None, 0
        self._rows = rows_of(self._given or "mooncake")
        seen = number = checksum = 0
        known = self._given is not None
        if self.limit is not None and self.limit <= 0:
            return
        with contextlib.ExitStack() as stack:
            file = self._open(stack)
            try:
                while line := file.readline(MOST_LINE_BYTES + 1):
                    number += 1
                    checksum = zlib.crc32(line, checksum)
                    if number == 1:
                        line = self._start(line)
                    if not line.strip() and len(line) <= MOST_LINE_BYTES:
                        continue
                    try:
                        if len(line) > MOST_LINE_BYTES:
                            checksum = _pass_over(file, line, checksum)
                            raise RowError("", _TOO_LONG)
                        known = known or self._recognise(line)
                        request = self._rows.parse(line, number)
                    except RowError as error:
                        bad = TraceError(self.path, number, error.field, error.problem)
                        if not self.skip_bad:
                            raise bad from None
                        self.skipped += 1
                        self.first_bad = self.first_bad or bad
                        continue
                    if request is None:  # a header
                        continue
                    self.checksum = checksum
                    yield request
                    seen += 1
                    if seen == self.limit:
                        return
            except (OSError, EOFError, zlib.error) as error:
                raise TraceError(self.path, number + 1, "", f"cannot be read: {error}") from error
        if seen == 0:
            if self.first_bad is not None:
                raise TraceError(
                    self.path,
                    self.first_bad.line,
                    self.first_bad.field,
                    f"{self.first_bad.problem}; all {self.skipped} lines of the trace are bad",
                )
            raise TraceError(self.path, 1, "", "the trace is empty: it holds no request")

    def _start(self, line: bytes) -> bytes:
        """The first line, without a byte order mark."""
        if is_utf16(line):
            raise TraceError(self.path, 1, "", "is text in UTF-16: save the file as UTF-8 (iconv -f UTF-16 -t UTF-8)")
        return line.removeprefix(_BYTE_ORDER_MARK)

    def _recognise(self, line: bytes) -> bool:
        """Takes the reader for the format of a row, or else for the format that it was probably meant to be in."""
        found = recognise(line)
        name = found or guess(line, self.path)
        if found is not None or name != self._rows.name:
            self._rows = rows_of(name)
        return found is not None

    def _open(self, stack: contextlib.ExitStack) -> BinaryIO:
        raw = stack.enter_context(self.source.open())
        try:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
        except OSError as error:
            raise TraceError(self.path, 1, "", f"cannot be read: {error.strerror or error}") from error
        return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=raw))) if packed else raw


def _pass_over(file: BinaryIO, line: bytes, checksum: int) -> int:
    """Reads on to the end of a line, piece by piece."""
    while line and not line.endswith(b"\n"):
        line = file.readline(_PIECE_BYTES)
        checksum = zlib.crc32(line, checksum)
    return checksum


def scan_trace(
    source: str | Path | TraceSource, *, skip_bad: bool = False, limit: int | None = None, format: str | None = None
) -> TraceSummary:
    """Reads and checks a whole trace (or its first `limit` requests) once, so that a run cannot stop in its middle.

    Raises:
        TraceError: at the first bad line, unless `skip_bad`; also when there is no request at all.
    """
    reader = TraceReader(source, skip_bad=skip_bad, limit=limit, format=format)
    requests = tokens = 0
    longest: list[int] = []
    for request in reader:
        requests += 1
        tokens += request.input_length
        longest.append(request.input_length)
        if len(longest) >= 4096:
            longest = sorted(longest, reverse=True)[:64]
    longest = sorted(longest, reverse=True)[:64]
    return TraceSummary(
        requests,
        tokens,
        longest[0] if longest else 0,
        tuple(longest),
        reader.skipped,
        reader.checksum,
        reader.format,
        reader.block_tokens,
    )
