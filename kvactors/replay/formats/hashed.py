"""Rows with `hash_ids`: Mooncake's, and those of the Qwen-Bailian traces.

Mooncake (FAST '25, `mooncake_trace.jsonl`): `timestamp` in milliseconds, `input_length`, `output_length`, and one id per 512
prompt tokens. An id stands for all tokens up to the end of its block (the ids are chained), so it is used as it is.

Qwen-Bailian (USENIX ATC '25, github.com/alibaba-edu/qwen-bailian-usagetraces-anon): `timestamp` in seconds, the same lengths,
one id per 16 prompt tokens, and `chat_id`, `parent_chat_id`, `type` and `turn`, which the replay does not use. The dataset says
that the tokens of each block are hashed, so an id may stand for its own block only; it is combined with those before it.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvactors.replay.formats.chains import chained_ids
from kvactors.replay.formats.rows import (
    RowError,
    TraceRequest,
    check_count,
    check_ids,
    check_lengths,
    check_time,
    from_seconds,
    in_field,
    shown,
)

BAILIAN_BLOCK_TOKENS = 16


class _Row(msgspec.Struct, gc=False):
    timestamp: float
    input_length: int
    hash_ids: tuple[int, ...]
    output_length: int | msgspec.UnsetType = msgspec.UNSET


class HashedRows:
    """Reads rows with `hash_ids`; see `RowReader`.

    Args:
        unit: of the timestamps: "milliseconds" or "seconds".
        chained: an id stands for all tokens up to the end of its block, not for its own block only.
    """

    def __init__(self, name: str, block_tokens: int, unit: str, *, chained: bool) -> None:
        self.name, self.block_tokens = name, block_tokens
        self._unit, self._chained = unit, chained
        self._decoder = msgspec.json.Decoder(_Row)

    def parse(self, line: bytes, number: int) -> TraceRequest:
        try:
            row = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._diagnose(line, error) from None
        known = row.output_length is not msgspec.UNSET
        output_length = row.output_length or 0
        self._check(row.timestamp, row.input_length, output_length, row.hash_ids)
        ids = row.hash_ids if self._chained else chained_ids(row.hash_ids)
        arrival_ms = from_seconds(row.timestamp) if self._unit == "seconds" else row.timestamp
        return TraceRequest(number, arrival_ms, row.input_length, ids, output_length, self.block_tokens, known)

    def _check(self, timestamp: Any, input_length: Any, output_length: Any, hash_ids: Any) -> None:
        check_time("timestamp", timestamp, self._unit)
        check_lengths(input_length, output_length)
        check_count("hash_ids", len(hash_ids), input_length, self.block_tokens)
        check_ids("hash_ids", hash_ids)

    def _diagnose(self, line: bytes, error: Exception) -> RowError:
        """Says in the trace's own words what the strict decoder refused."""
        try:
            row = json.loads(line)
        except RecursionError:
            return RowError("", "is nested too deeply")
        except ValueError:  # json refuses whole numbers of thousands of digits
            if isinstance(error, msgspec.ValidationError):
                return in_field(error)
            return RowError("", f"is not valid JSON: {error}")
        if not isinstance(row, dict):
            return RowError("", f"must be a JSON object, not {shown(row)}")
        for name in ("timestamp", "input_length", "hash_ids"):
            if name not in row:
                return RowError(name, "is missing")
        problem = self._type_problem(row)
        if problem is not None:
            return RowError(*problem)
        try:
            self._check(row["timestamp"], row["input_length"], row.get("output_length", 0), row["hash_ids"])
        except RowError as found:
            return found
        return RowError("", str(error))

    def _type_problem(self, row: dict[str, Any]) -> tuple[str, str] | None:
        timestamp = row["timestamp"]
        if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
            return "timestamp", f"{shown(timestamp)} is not a number of {self._unit}"
        for name in ("input_length", "output_length"):
            value = row.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int):
                return name, f"{shown(value)} is not a whole number of tokens"
        ids = row["hash_ids"]
        if not isinstance(ids, list):
            return "hash_ids", f"{shown(ids)} is not a list of whole numbers"
        for value in ids:
            if isinstance(value, bool) or not isinstance(value, int):
                return "hash_ids", f"{shown(value)} is not a whole number"
        return None
