"""Plain rows: a time, and the prompt as its tokens or as hashes of its blocks, as JSON lines or as CSV.

`time` (seconds) or `time_ms`; `tokens`, a list of token ids, or `hashes`, a list of whole numbers or texts, one for each block
of `block_tokens` tokens; `input_length` where the last hash covers fewer; `output_length`, if it is known. In CSV, the first
line names the columns, and the numbers of a list are separated by spaces. Hashes may stand for their own block or for the whole
prompt up to its end: both give the same.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from kvactors.replay.formats.chains import chained_ids, text_ids, token_blocks
from kvactors.replay.formats.rows import (
    MOST_BLOCK_TOKENS,
    MOST_COLUMNS,
    RowError,
    TraceRequest,
    check_count,
    check_ids,
    check_lengths,
    check_most,
    check_time,
    from_seconds,
    in_field,
    shown,
)

TOKEN_BLOCK_TOKENS = 16
"""Tokens are cut into blocks of so many; what two prompts share beyond a multiple of it is not seen."""

COLUMNS = ("time", "time_ms", "tokens", "hashes", "block_tokens", "input_length", "output_length")
LIKE = 0.85
"""A name that is so much like one of ours, by `difflib`, was meant to be it."""

MOST_DIGITS = 40
"""Of a number in CSV; 2^64 has 20."""

_TIMES = {"time": "seconds", "time_ms": "milliseconds"}
_PROMPTS = {"tokens", "hashes"}


class _Row(msgspec.Struct, gc=False):
    time: float | None = None
    time_ms: float | None = None
    tokens: tuple[int, ...] | None = None
    hashes: tuple[int | str, ...] | None = None
    block_tokens: int | None = None
    input_length: int | None = None
    output_length: int | msgspec.UnsetType = msgspec.UNSET


class _StrictRow(_Row, forbid_unknown_fields=True, gc=False):
    """A row without other fields: the usual one."""


class _PlainRows:
    name = ""

    def __init__(self) -> None:
        self.block_tokens = TOKEN_BLOCK_TOKENS
        self._first: tuple[int, bool] | None = None

    def _request(self, row: _Row, number: int) -> TraceRequest:
        time, time_ms = row.time, row.time_ms
        if (time is None) == (time_ms is None):
            raise RowError("time", "is missing (seconds; or time_ms)" if time is None else "give it or time_ms, not both")
        if time is not None:
            check_time("time", time, "seconds")
            time_ms = from_seconds(time)
        check_time("time_ms", time_ms or 0.0, "milliseconds")
        if (row.tokens is None) == (row.hashes is None):
            raise RowError("tokens", "is missing (or hashes)" if row.tokens is None else "give them or hashes, not both")
        length, block, ids = _prompt(row)
        if self._first is None:
            self._first, self.block_tokens = (block, row.tokens is not None), block
        if self._first != (block, row.tokens is not None):
            first = f"{'tokens' if self._first[1] else 'hashes'} in blocks of {self._first[0]}"
            raise RowError("block_tokens", f"{block} here, but the first row has {first}: all rows must be alike")
        known = row.output_length is not msgspec.UNSET
        return TraceRequest(number, time_ms or 0.0, length, ids, row.output_length or 0, block, known)


def _prompt(row: _Row) -> tuple[int, int, tuple[int, ...]]:
    """Length, tokens a block, ids."""
    output_length = row.output_length or 0
    if row.tokens is not None:
        check_lengths(len(row.tokens) if row.input_length is None else row.input_length, output_length)
        if row.input_length not in (None, len(row.tokens)):
            raise RowError("input_length", f"is {row.input_length}, but there are {len(row.tokens)} tokens")
        check_ids("tokens", row.tokens, "token")
        return len(row.tokens), TOKEN_BLOCK_TOKENS, chained_ids(token_blocks(row.tokens, TOKEN_BLOCK_TOKENS))
    hashes, block = row.hashes or (), row.block_tokens
    if block is None:
        raise RowError("block_tokens", "is missing: say how many tokens a hash covers")
    if block < 1:
        raise RowError("block_tokens", f"{shown(block)} must be at least 1 token")
    check_most("block_tokens", block, MOST_BLOCK_TOKENS, "a hash may cover")
    if row.input_length is None:
        length = len(hashes) * block
        check_lengths(length, output_length, "hashes" if hashes else "input_length")
    else:
        length = row.input_length
        check_lengths(length, output_length)
    check_count("hashes", len(hashes), length, block)
    return length, block, chained_ids(text_ids([str(h) for h in hashes]))


class JsonRows(_PlainRows):
    """Reads plain JSON lines; see `RowReader`."""

    name = "jsonl"

    def __init__(self) -> None:
        super().__init__()
        self._strict, self._decoder = msgspec.json.Decoder(_StrictRow), msgspec.json.Decoder(_Row)

    def parse(self, line: bytes, number: int) -> TraceRequest:
        try:
            row: _Row = self._strict.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # other fields, or none that can be read
            row = self._with_other_fields(line)
        return self._request(row, number)

    def _with_other_fields(self, line: bytes) -> _Row:
        try:
            row = self._decoder.decode(line)
        except msgspec.ValidationError as error:
            raise in_field(error) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _no_json(line, error) from None
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # names that are no UTF-8
            _refuse_misspelt(msgspec.json.decode(line, type=dict[str, msgspec.Raw]), "field")
        return row


def _no_json(line: bytes, error: Exception) -> RowError:
    try:
        json.loads(line)
    except RecursionError:
        return RowError("", "is nested too deeply")
    except ValueError:
        pass
    return RowError("", f"is not valid JSON: {error}")


class CsvRows(_PlainRows):
    """Reads CSV with a line of column names; see `RowReader`. Cells may stand in double quotes, and hold no commas."""

    name = "csv"

    def __init__(self) -> None:
        super().__init__()
        self._columns: list[str] | None = None
        self._explained = False

    def parse(self, line: bytes, number: int) -> TraceRequest | None:
        count, wanted = line.count(b",") + 1, self._columns
        if wanted is not None and count != len(wanted):
            raise RowError("", f"has {count} cells, but there are {len(wanted)} columns (lists go with spaces)")
        if count > MOST_COLUMNS:
            raise RowError("", f"has {count:,} columns, more than {MOST_COLUMNS:,}; leave out those that are not read")
        try:
            cells = _cells(line)
        except UnicodeDecodeError as error:
            raise RowError("", f"is not text in UTF-8: {error}") from None
        if wanted is None:
            explain, self._explained = not self._explained, True  # that takes its time, and the first bad line is shown
            self._columns = _header(cells, explain=explain)
            return None
        texts = {name: cell for name, cell in zip(wanted, cells, strict=True) if cell and name in COLUMNS}
        return self._request(_typed(texts), number)


def is_csv_header(line: bytes) -> bool:
    """Whether a line names columns of ours: a time and the prompt."""
    if line.count(b",") >= MOST_COLUMNS:
        return False
    try:
        return _names_columns(_cells(line))
    except UnicodeDecodeError:
        return False


def _names_columns(cells: Sequence[str]) -> bool:
    return not _PROMPTS.isdisjoint(cells) and not _TIMES.keys().isdisjoint(cells)


def _cells(line: bytes, separator: str = ",") -> list[str]:
    return [cell.strip().removeprefix('"').removesuffix('"').strip() for cell in line.decode().split(separator)]


def _header(cells: list[str], *, explain: bool) -> list[str]:
    if not _names_columns(cells):
        wanted = "time (or time_ms), tokens (or hashes)"
        raise RowError("", f"must name the columns: {wanted}{_hint(cells) if explain else ''}; known are {', '.join(COLUMNS)}")
    for name in COLUMNS:
        if cells.count(name) > 1:
            raise RowError(name, "is a column twice")
    _refuse_misspelt(cells, "column")
    return cells


def _refuse_misspelt(names: Collection[str], what: str) -> None:
    """Other names are left out; but an optional one of ours must not be because of its spelling, for nobody would see it."""
    optional = ("output_length",) if "tokens" in names else ("output_length", "input_length")
    for wanted in optional:
        if wanted not in names:
            for name in names:
                if name not in COLUMNS and _is_meant(name, wanted):
                    raise RowError(name, f"is no {what} that is read; did you mean {wanted}? If not, rename it, or take it out")


@functools.lru_cache(1024)
def _is_meant(name: str, wanted: str) -> bool:
    """`output_lenght` and `Output-Length` are meant to be `output_length`; `max_output_length` is something else."""
    plain = re.sub(r"[\s-]+", "_", name[:100].strip().lower())
    if plain != wanted and f"_{wanted}_" in f"_{plain}_":
        return False
    return difflib.SequenceMatcher(None, plain, wanted).ratio() >= LIKE


def _hint(cells: Sequence[str]) -> str:
    """What is probably wrong with a line that should name the columns."""
    from kvactors.textfiles import did_you_mean  # brings YAML, which a good trace can do without

    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if _names_columns(_cells(",".join(cells).encode(), separator)):
            return f"; put commas between them, not {name}"
    for cell in cells:
        if cell.lower().startswith("timestamp"):
            return f"; {shown(cell)} is not known; did you mean time (seconds) or time_ms (milliseconds)?"
        if cell not in COLUMNS and (meant := did_you_mean(cell, [name for name in COLUMNS if name not in cells])):
            return f"; {shown(cell)} is not known{meant}"
    return ""


def _typed(texts: Mapping[str, str]) -> _Row:
    row: dict[str, Any] = {}
    for name, text in texts.items():
        if name in _TIMES:
            row[name] = _number(name, text)
        elif name == "tokens":
            row[name] = tuple(_whole(name, word) for word in text.split())
        elif name == "hashes":
            row[name] = tuple(text.split())
        else:
            row[name] = _whole(name, text)
    return _Row(**row)


def _number(name: str, text: str) -> float:
    try:
        if "_" in text:  # Python's own way to write 1_000
            raise ValueError
        return float(text)
    except ValueError:
        raise RowError(name, f"{text[:40]!r} is not a number of {_TIMES[name]}") from None


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]+", text):
        raise RowError(name, f"{text[:40]!r} is not a whole number")
    if len(text) > MOST_DIGITS:
        raise RowError(name, f"{text[:20]}… has {len(text):,} digits, and no number of a trace more than {MOST_DIGITS}")
    return int(text)
