"""Recorded request traces: Mooncake's JSON lines, plain or gzipped, checked line by line.

One request a line: `timestamp` (ms), `input_length` (tokens), `output_length` (tokens, ignored by the replay) and
`hash_ids`, one id per 512 prompt tokens; the last may cover fewer. An id stands for all tokens up to the end of its block
(the ids of such traces are chained), so equal ids mean equal prefixes. Source: the trace format of the Mooncake paper
(FAST '25), `mooncake_trace.jsonl`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from kvactors.errors import TraceError

TRACE_BLOCK_TOKENS = 512
"""Prompt tokens that one id of a trace covers."""

MAX_HASH_ID = 2**64 - 1

MOST_KEPT_BYTES = 1 << 30
"""A trace that can be read only once is kept in memory, up to this."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace.

    Attributes:
        line: its line in the file, from 1.
        timestamp_ms: arrival, milliseconds since the start of the trace.
        input_length: prompt tokens, at least 1.
        hash_ids: one 64-bit id per 512 prompt tokens; the last may be partial.
        output_length: tokens that were generated; not played.
    """

    line: int
    timestamp_ms: float
    input_length: int
    hash_ids: tuple[int, ...]
    output_length: int = 0


class _Row(msgspec.Struct, gc=False):
    timestamp: float
    input_length: int
    hash_ids: tuple[int, ...]
    output_length: int = 0


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a whole trace (or its first N requests) holds; `skipped` bad lines were left out. `checksum`: see `TraceReader`."""

    requests: int
    input_tokens: int
    max_input_length: int
    longest: tuple[int, ...]
    skipped: int
    checksum: int = 0


class TraceSource:
    """A trace that is read more than once: a file by its path; a pipe or another stream is kept in memory at its first use."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._kept: bytes | None = None

    def open(self) -> BinaryIO:
        """The file's bytes from the start.

        Raises:
            TraceError: it cannot be opened, or is a stream without an end in sight.
        """
        if self._kept is not None:
            return io.BytesIO(self._kept)
        try:
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


class TraceReader:
    """Iterates over the requests of a trace file without holding them.

    Args:
        source: a JSON-lines file; gzip is unpacked while reading; a byte order mark at its start is skipped.
        skip_bad: count and leave out lines that are wrong instead of raising.
        limit: stop after this many requests.
        expected: read the trace a second time: the checksum of the first time, which ended with request number `limit`.

    Attributes:
        checksum: of all lines up to the last request that was returned.

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
    ) -> None:
        self.source = source if isinstance(source, TraceSource) else TraceSource(source)
        self.path = self.source.path
        self.expected = expected
        self.checksum = 0
        self.skip_bad = skip_bad
        self.limit = limit
        self.skipped = 0
        self.first_bad: TraceError | None = None
        self._decoder = msgspec.json.Decoder(_Row)

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
        seen = number = checksum = 0
        if self.limit is not None and self.limit <= 0:
            return
        with contextlib.ExitStack() as stack:
            file = self._open(stack)
            try:
                for number, line in enumerate(file, 1):
                    checksum = zlib.crc32(line, checksum)
                    if number == 1:
                        line = line.removeprefix(_BYTE_ORDER_MARK)
                    if not line.strip():
                        continue
                    try:
                        request = self._parse(line, number)
                    except TraceError as bad:
                        if not self.skip_bad:
                            raise
                        self.skipped += 1
                        self.first_bad = self.first_bad or bad
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

    def _open(self, stack: contextlib.ExitStack) -> Iterable[bytes]:
        raw = stack.enter_context(self.source.open())
        try:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
        except OSError as error:
            raise TraceError(self.path, 1, "", f"cannot be read: {error.strerror or error}") from error
        return stack.enter_context(gzip.GzipFile(fileobj=raw)) if packed else raw

    def _parse(self, line: bytes, number: int) -> TraceRequest:
        try:
            row = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._diagnose(line, number, error) from None
        problem = _row_problem(row.timestamp, row.input_length, row.output_length, row.hash_ids)
        if problem:
            raise TraceError(self.path, number, *problem)
        return TraceRequest(number, row.timestamp, row.input_length, row.hash_ids, row.output_length)

    def _diagnose(self, line: bytes, number: int, error: Exception) -> TraceError:
        """Says in the trace's own words what the strict decoder refused."""
        try:
            row = json.loads(line)
        except RecursionError:
            return TraceError(self.path, number, "", "is nested too deeply")
        except ValueError:
            return TraceError(self.path, number, "", f"is not valid JSON: {error}")
        if not isinstance(row, dict):
            return TraceError(self.path, number, "", f"must be a JSON object, not {_shown(row)}")
        for name in ("timestamp", "input_length", "hash_ids"):
            if name not in row:
                return TraceError(self.path, number, name, "is missing")
        problem = _type_problem(row) or _row_problem(
            row["timestamp"], row["input_length"], row.get("output_length", 0), row["hash_ids"]
        )
        return TraceError(self.path, number, *(problem or ("", str(error))))


def scan_trace(source: str | Path | TraceSource, *, skip_bad: bool = False, limit: int | None = None) -> TraceSummary:
    """Reads and checks a whole trace (or its first `limit` requests) once, so that a run cannot stop in its middle.

    `longest` holds the input lengths of the 64 longest requests, longest first.

    Raises:
        TraceError: at the first bad line, unless `skip_bad`; also when there is no request at all.
    """
    reader = TraceReader(source, skip_bad=skip_bad, limit=limit)
    requests = tokens = 0
    longest: list[int] = []
    for request in reader:
        requests += 1
        tokens += request.input_length
        longest.append(request.input_length)
        if len(longest) >= 4096:
            longest = sorted(longest, reverse=True)[:64]
    longest = sorted(longest, reverse=True)[:64]
    return TraceSummary(requests, tokens, longest[0] if longest else 0, tuple(longest), reader.skipped, reader.checksum)


def _row_problem(timestamp: Any, input_length: Any, output_length: Any, hash_ids: Any) -> tuple[str, str] | None:
    """(field, problem) of a row whose types are right, or None."""
    if not _is_finite(timestamp):
        return "timestamp", f"{_shown(timestamp)} is not a finite number of milliseconds"
    if timestamp < 0:
        return "timestamp", f"{timestamp!r} is negative"
    if input_length < 1:
        return "input_length", f"{input_length} must be at least 1 token"
    if output_length < 0:
        return "output_length", f"{output_length} is negative"
    want = -(-input_length // TRACE_BLOCK_TOKENS)
    if len(hash_ids) != want:
        return "hash_ids", (
            f"has {len(hash_ids)} ids, but input_length {input_length} needs {want} "
            f"(one per {TRACE_BLOCK_TOKENS} tokens, the last may be partial)"
        )
    if min(hash_ids) < 0 or max(hash_ids) > MAX_HASH_ID:
        bad = next(i for i in hash_ids if not 0 <= i <= MAX_HASH_ID)
        return "hash_ids", f"id {bad} does not fit 64 bits (0 to 2^64 - 1)"
    return None


def _is_finite(number: float) -> bool:
    """False too for a whole number that no float can hold."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _type_problem(row: dict[str, Any]) -> tuple[str, str] | None:
    timestamp = row["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        return "timestamp", f"{_shown(timestamp)} is not a number of milliseconds"
    for name in ("input_length", "output_length"):
        value = row.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int):
            return name, f"{_shown(value)} is not a whole number of tokens"
    ids = row["hash_ids"]
    if not isinstance(ids, list):
        return "hash_ids", f"{_shown(ids)} is not a list of whole numbers"
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int):
            return "hash_ids", f"{_shown(value)} is not a whole number"
    return None


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "…"
