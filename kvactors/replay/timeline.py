"""Spans of a run, kept for the timeline file (Chrome trace events, which Perfetto opens too) and the page's charts."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvactors.core.observe import Span

MOST_SPANS = 500_000
_NANOSECONDS = 1e9
_PROCESS = 1


class SpanLog:
    """An observer that keeps the first `limit` spans. Takes spans from any thread (`list.append` is atomic)."""

    def __init__(self, limit: int = MOST_SPANS) -> None:
        self.spans: list[Span] = []
        self.dropped = 0
        self._limit = limit

    def span(self, span: Span) -> None:
        if len(self.spans) < self._limit:
            self.spans.append(span)
        else:
            self.dropped += 1


def track_order(track: str) -> tuple[int, str]:
    """The harness's step and compute tracks first, then actors and workers by name."""
    return {"harness": 0, "compute": 1}.get(track, 2), track


def trace_events(spans: Sequence[Span], dropped: int = 0) -> dict[str, Any]:
    """Chrome's trace event format: one thread per track, times in microseconds from the first span.

    Source: "Trace Event Format" (Chromium), complete events ("X") and metadata events ("M"). Spans of a track that
    overlap without nesting, as transfers in flight do, go to further rows of the track. Both ends are rounded to nanoseconds,
    and the length is their difference: spans that touch must not overlap in the file, or an importer drops one.
    """
    start = min((s.start_s for s in spans), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": _PROCESS, "tid": 0, "name": "process_name", "args": {"name": "kvactors"}}
    ]
    tid = _PROCESS  # the thread of that number would be its main one
    for track in sorted({s.track for s in spans}, key=track_order):
        rows: list[float] = []
        first = tid + 1
        for span in sorted((s for s in spans if s.track == track), key=lambda s: s.start_s):
            row = next((i for i, end in enumerate(rows) if end <= span.start_s), len(rows))
            if row == len(rows):
                rows.append(0.0)
            rows[row] = span.end_s
            begin, end = (round((at - start) * _NANOSECONDS) for at in (span.start_s, span.end_s))
            events.append(
                {
                    "ph": "X",
                    "pid": _PROCESS,
                    "tid": first + row,
                    "name": span.name,
                    "cat": track,
                    "ts": _microseconds(begin),
                    "dur": _microseconds(max(0, end - begin)),
                    "args": dict(span.args),
                }
            )
        for row in range(len(rows)):
            tid = first + row
            name = track if row == 0 else f"{track} ({row + 1})"
            events.append({"ph": "M", "pid": _PROCESS, "tid": tid, "name": "thread_name", "args": {"name": name}})
            events.append({"ph": "M", "pid": _PROCESS, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    return {"displayTimeUnit": "ms", "otherData": {"dropped_spans": dropped}, "traceEvents": events}


def _microseconds(ns: int) -> float:
    """Nanoseconds as microseconds that give the same again when a reader multiplies by 1000 and cuts off what is left."""
    value = ns / 1000
    return value if int(value * 1000) == ns else math.nextafter(value, math.inf)


def write_timeline(path: str | Path, log: SpanLog) -> None:
    Path(path).write_bytes(msgspec.json.encode(trace_events(log.spans, log.dropped), enc_hook=str))


def busiest_step(spans: Iterable[Span]) -> Span | None:
    """The step in which actors and workers did the most, for the layer chart; None without steps."""
    spans = list(spans)
    steps = [s for s in spans if s.track == "harness"]
    if not steps:
        return None
    starts = sorted(s.start_s for s in spans if track_order(s.track)[0] == 2)

    def inside(step: Span) -> int:
        return bisect_right(starts, step.end_s) - bisect_left(starts, step.start_s)

    return max(steps, key=inside)
