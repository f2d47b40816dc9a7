"""The formats of recorded traces: which there are, which one a row is in, and what reads its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from kvactors.errors import ConfigError
from kvactors.replay.formats.hashed import BAILIAN_BLOCK_TOKENS, HashedRows
from kvactors.replay.formats.plain import CsvRows, JsonRows, is_csv_header
from kvactors.replay.formats.rows import MAX_HASH_ID, MOST_LINE_BYTES, TRACE_BLOCK_TOKENS, RowError, RowReader, TraceRequest

__all__ = [
    "FORMATS",
    "MAX_HASH_ID",
    "MOST_LINE_BYTES",
    "TRACE_BLOCK_TOKENS",
    "RowError",
    "RowReader",
    "TraceRequest",
    "guess",
    "is_utf16",
    "recognise",
    "rows_of",
]

_READERS: Mapping[str, Callable[[], RowReader]] = {
    "mooncake": lambda: HashedRows("mooncake", TRACE_BLOCK_TOKENS, "milliseconds", chained=True),
    "bailian": lambda: HashedRows("bailian", BAILIAN_BLOCK_TOKENS, "seconds", chained=False),
    "jsonl": JsonRows,
    "csv": CsvRows,
}

FORMATS = tuple(_READERS)
"""Mooncake's, Qwen-Bailian's, and plain lists of tokens or hashes as JSON lines or CSV."""


def rows_of(name: str) -> RowReader:
    """What reads the rows of a format, from the first one on.

    Raises:
        ConfigError: there is no such format.
    """
    if name not in _READERS:
        raise ConfigError(f"trace format {name!r}: unknown; use one of {', '.join(FORMATS)}")
    return _READERS[name]()


def recognise(line: bytes) -> str | None:
    """The format that a row is in; None where the row does not tell, so that the next one may."""
    if not line.lstrip().startswith(b"{"):
        return "csv" if is_csv_header(line) else None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    if "hash_ids" in row:
        return "bailian" if {"chat_id", "parent_chat_id", "turn"} & set(row) else "mooncake"
    return "jsonl" if {"tokens", "hashes"} & set(row) else None


def guess(line: bytes, path: str) -> str:
    """The format whose reader says what is wrong with a row that does not tell: what its author most likely meant."""
    name = path.lower().removesuffix(".gz")
    if line.lstrip()[:1] in (b"{", b"[") or name.endswith((".json", ".jsonl")):
        return "mooncake"
    return "csv" if name.endswith(".csv") or any(mark in line for mark in (b",", b";", b"\t")) else "mooncake"


def is_utf16(line: bytes) -> bool:
    """Whether the start of a file is text in UTF-16, as some spreadsheets write it: a mark, or every second byte zero."""
    return line.startswith((b"\xff\xfe", b"\xfe\xff")) or (len(line) >= 8 and not (any(line[:8:2]) and any(line[1:8:2])))
