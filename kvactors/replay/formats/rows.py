"""A row of a trace, whatever its format, and what formats share to read one."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal, Overflow
from typing import Protocol

import msgspec

TRACE_BLOCK_TOKENS = 512
"""Prompt tokens that one id of a Mooncake trace covers."""

MAX_HASH_ID = 2**64 - 1

# How large the numbers of a row may be, whatever the format. No recorded trace comes near: what is beyond is a mistake (a unit,
# a column, a missing comma), and what is made of a row (an id for every 512 tokens, a hash for every 16) would take the
# machine's memory.

MOST_TOKENS = 1 << 24
"""Of a prompt, and of an answer: some 16.8 million."""

MOST_BLOCK_TOKENS = 1 << 20
"""Tokens that a hash covers."""

MOST_MS = 10**15
"""Milliseconds since a trace's start, or since 1970: some 31,700 years. Up to there a float holds every whole one exactly."""

MOST_LINE_BYTES = 1 << 26
"""64 MiB: room for a prompt of some eight million tokens, as numbers."""

MOST_COLUMNS = 1024
"""Of a CSV file, used or not."""


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace.

    Attributes:
        line: its line in the file, from 1.
        timestamp_ms: arrival, milliseconds since the start of the trace.
        input_length: prompt tokens, at least 1.
        hash_ids: one 64-bit id per `block_tokens` prompt tokens; the last may be partial. Equal ids mean equal prefixes.
        output_length: tokens that were generated; not played.
        block_tokens: prompt tokens that an id covers, the same in all rows of a trace.
        output_known: the row has an `output_length`; otherwise 0 stands for it.
    """

    line: int
    timestamp_ms: float
    input_length: int
    hash_ids: tuple[int, ...]
    output_length: int = 0
    block_tokens: int = TRACE_BLOCK_TOKENS
    output_known: bool = True


class RowError(Exception):
    """A row is wrong; the reader says in which line of which file."""

    def __init__(self, field: str, problem: str) -> None:
        self.field, self.problem = field, problem
        super().__init__(f"{field}: {problem}")


class RowReader(Protocol):
    """Reads the rows of one trace in one format, in order.

    Attributes:
        name: the format's.
        block_tokens: prompt tokens that an id covers; known after the first good row.
    """

    name: str
    block_tokens: int

    def parse(self, line: bytes, number: int) -> TraceRequest | None:
        """The request of a line; None for a header.

        Raises:
            RowError: the line is wrong.
        """
        ...


def from_seconds(seconds: float) -> float:
    """Milliseconds: the nearest float to a thousand times the number as it is written, so that 1.005 s are 1005 ms."""
    if not is_finite(seconds):
        return seconds
    try:
        return float(Decimal(repr(seconds)).scaleb(3))
    except Overflow:
        return math.inf


def is_finite(number: float) -> bool:
    """False too for a whole number that no float can hold."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def check_time(field: str, time: float, unit: str) -> None:
    if not is_finite(time) or (unit == "seconds" and not is_finite(from_seconds(time))):
        raise RowError(field, f"{shown(time)} is not a finite number of {unit}")
    if time < 0:
        raise RowError(field, f"{shown(time)} is negative")
    most = MOST_MS // 1000 if unit == "seconds" else MOST_MS
    if time > most:
        raise RowError(
            field, f"{shown(time)} is more than {most:.0e} {unit}, the most that a time may be; is it in another unit?"
        )


def check_lengths(input_length: int, output_length: int, field: str = "input_length") -> None:
    """`field`: what the length of the prompt comes from."""
    if input_length < 1:
        raise RowError(field, f"{shown(input_length)} must be at least 1 token")
    if output_length < 0:
        raise RowError("output_length", f"{shown(output_length)} is negative")
    for name, length in ((field, input_length), ("output_length", output_length)):
        check_most(name, length, MOST_TOKENS, "a request may have")


def check_most(field: str, tokens: int, most: int, what: str) -> None:
    if tokens > most:
        raise RowError(
            field,
            f"{shown(tokens)} tokens are more than the {most:,} that {what}; correct the row, or leave it out (--skip-bad)",
        )


def check_count(field: str, count: int, input_length: int, block_tokens: int) -> None:
    """There must be one id for each block of the prompt."""
    want = -(-input_length // block_tokens)
    if count != want:
        hint = ""
        if block_tokens == TRACE_BLOCK_TOKENS and count == -(-input_length // 16):
            hint = "; this is right for 16 tokens an id: give --format bailian"
        raise RowError(
            field,
            f"has {count} ids, but input_length {input_length} needs {want} "
            f"(one per {block_tokens} tokens, the last may be partial){hint}",
        )


def check_ids(field: str, ids: tuple[int, ...], what: str = "id") -> None:
    if min(ids) < 0 or max(ids) > MAX_HASH_ID:
        bad = next(i for i in ids if not 0 <= i <= MAX_HASH_ID)
        raise RowError(field, f"{what} {shown(bad)} does not fit 64 bits (0 to 2^64 - 1)")


def shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "…"


def in_field(error: msgspec.ValidationError) -> RowError:
    """Valid JSON with the wrong kind of value somewhere, in the decoder's own words."""
    problem, _, where = str(error).partition(" - at `$")
    name = re.match(r"\.(\w+)", where)
    return RowError(name[1] if name else "", problem[:1].lower() + problem[1:])
