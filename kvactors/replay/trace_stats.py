"""What a trace holds, and what a cache could make of it: `kvactors trace stats`.

A request shares with those before it as many complete blocks, from its first token on, as one of them had too. With unlimited
capacity and a boundary of b tokens, it can be served the greatest multiple of b in what it shares, and never its last token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvactors.replay.trace import TraceReader, TraceSource
from kvactors.replay.trace_blocks import BATCH_BLOCKS, BlockTable

SCHEMA = 1
LEAST_BOUNDARY, MOST_BOUNDARY = 16, 8192
LEAST_DURATION_S = 1e-9
"""There is no rate where a trace takes less."""

MOST_POINTS = 200
"""Points of a curve over time."""

USES = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 64), (65, 256), (257, 1024), (1025, None))
"""How often a block comes, in ranges: from, to."""

Numbers = npt.NDArray[np.int64]


class Lengths(msgspec.Struct, kw_only=True):
    """Tokens: of all requests together, and the least length that the named part of all requests does not exceed."""

    total: int
    min: int
    median: int
    p90: int
    p99: int
    max: int


class Uses(msgspec.Struct, kw_only=True, rename={"low": "from", "high": "to"}):
    """How many different blocks come `low` to `high` times; `high` None = or more."""

    low: int
    high: int | None
    blocks: int


class BlocksPart(msgspec.Struct, kw_only=True):
    """Complete blocks: all, different ones, those that come more than once, and how often the most frequent one comes."""

    complete: int
    unique: int
    reused: int
    most_uses: int
    uses: list[Uses]


class SharedPart(msgspec.Struct, kw_only=True):
    """Tokens at the start of a prompt, in complete blocks, that an earlier request had too; `requests`: those with any."""

    requests: int
    tokens: Lengths


class Ceiling(msgspec.Struct, kw_only=True):
    boundary_tokens: int
    hit_tokens: int
    hit_ratio: float


class Point(msgspec.Struct, kw_only=True):
    """Up to a time: requests, tokens of different blocks, and tokens of blocks that had come and were to come again."""

    at_s: float
    requests: int
    unique_tokens: int
    live_tokens: int


class WorkingSet(msgspec.Struct, kw_only=True):
    """`unique_tokens`: what a cache holds in the end that drops nothing. `peak_live_tokens`: the least that is enough for the
    ceiling, if one knows what will come again."""

    unique_tokens: int
    peak_live_tokens: int
    points: list[Point]


class TracePart(msgspec.Struct, kw_only=True):
    path: str
    format: str
    block_tokens: int
    skipped: int


class TraceStats(msgspec.Struct, kw_only=True):
    """Everything that `kvactors trace stats` says. The names are stable: other programs read them. See docs/traces.md."""

    schema: int = SCHEMA
    trace: TracePart
    requests: int
    duration_s: float
    requests_per_s: float | None
    input_tokens: Lengths
    output_tokens: Lengths
    blocks: BlocksPart
    shared: SharedPart
    ceiling: list[Ceiling]
    working_set: WorkingSet

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def trace_stats(
    source: str | Path | TraceSource,
    *,
    format: str | None = None,
    skip_bad: bool = False,
    limit: int | None = None,
    batch_blocks: int = BATCH_BLOCKS,
) -> TraceStats:
    """Reads a trace once.

    Memory: 40 bytes a request, and 20 bytes for each different block, some three times that while a batch is merged.

    Raises:
        TraceError: see `TraceReader`.
    """
    reader = TraceReader(source, format=format, skip_bad=skip_bad, limit=limit)
    table = BlockTable(batch_blocks)
    times, inputs, outputs, complete = array("d"), array("q"), array("q"), array("q")
    for request in reader:
        count = request.input_length // request.block_tokens
        times.append(request.timestamp_ms)
        inputs.append(request.input_length)
        outputs.append(request.output_length)
        complete.append(count)
        table.add(request.hash_ids[:count])
    unit = reader.block_tokens
    shared = table.shared() * unit
    lengths = np.frombuffer(inputs, np.int64)
    at_ms = np.frombuffer(times, np.float64)
    duration_s = float(at_ms.max() - at_ms.min()) / 1000.0
    path = str(reader.path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return TraceStats(
        trace=TracePart(path=path, format=reader.format, block_tokens=unit, skipped=reader.skipped),
        requests=len(lengths),
        duration_s=duration_s,
        requests_per_s=len(lengths) / duration_s if duration_s >= LEAST_DURATION_S else None,
        input_tokens=_lengths(lengths),
        output_tokens=_lengths(np.frombuffer(outputs, np.int64)),
        blocks=_blocks(table, sum(complete)),
        shared=SharedPart(requests=int(np.count_nonzero(shared)), tokens=_lengths(shared)),
        ceiling=[_ceiling(shared, lengths, b) for b in boundaries(unit)],
        working_set=_working_set(table, at_ms, unit),
    )


def boundaries(unit: int) -> list[int]:
    """Boundary sizes that a trace with blocks of `unit` tokens can tell about: 16, 32, … 8192, as far as they are multiples;
    for other blocks, the block doubled again and again."""
    known = [b for b in _doubled(LEAST_BOUNDARY) if b % unit == 0]
    return known or _doubled(unit) or [unit]


def _doubled(start: int) -> list[int]:
    sizes = []
    while start <= MOST_BOUNDARY:
        sizes.append(start)
        start *= 2
    return sizes


def _lengths(values: Numbers) -> Lengths:
    ordered = np.sort(values)

    def rank(percent: int) -> int:
        return int(ordered[-(-percent * len(ordered) // 100) - 1])

    return Lengths(
        total=int(ordered.sum()), min=int(ordered[0]), median=rank(50), p90=rank(90), p99=rank(99), max=int(ordered[-1])
    )


def _blocks(table: BlockTable, complete: int) -> BlocksPart:
    uses = table.uses
    ranges = [
        Uses(low=low, high=high, blocks=int(np.count_nonzero((uses >= low) & (uses <= (high or 2**32 - 1)))))
        for low, high in USES
    ]
    return BlocksPart(
        complete=complete,
        unique=len(uses),
        reused=int(np.count_nonzero(uses > 1)),
        most_uses=int(uses.max(initial=0)),
        uses=ranges,
    )


def _ceiling(shared: Numbers, lengths: Numbers, boundary: int) -> Ceiling:
    hit = int((np.minimum(shared, lengths - 1) // boundary * boundary).sum())
    return Ceiling(boundary_tokens=boundary, hit_tokens=hit, hit_ratio=hit / int(lengths.sum()))


def _working_set(table: BlockTable, at_ms: npt.NDArray[np.float64], unit: int) -> WorkingSet:
    requests = len(at_ms)
    came = np.cumsum(np.bincount(table.first, minlength=requests)) * unit
    live = came - np.cumsum(np.bincount(table.last, minlength=requests)) * unit
    since_ms = np.maximum.accumulate(at_ms - at_ms.min())
    points = [
        Point(at_s=float(since_ms[i]) / 1000.0, requests=i + 1, unique_tokens=int(came[i]), live_tokens=int(live[i]))
        for i in _spread(requests)
    ]
    return WorkingSet(unique_tokens=int(came[-1]), peak_live_tokens=int(live.max()), points=points)


def _spread(count: int) -> Sequence[int]:
    """Up to `MOST_POINTS` numbers below count, evenly, with the first and the last one."""
    if count <= MOST_POINTS:
        return range(count)
    return sorted({round(i * (count - 1) / (MOST_POINTS - 1)) for i in range(MOST_POINTS)})
