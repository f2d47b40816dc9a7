"""The timeline file against the trace event format, as strictly as Perfetto's importer takes it, and against the JSON report.

Perfetto's own parser is a binary that its Python package fetches when it is first used; a test does not fetch. So the rules
that its importer has for JSON stand here: what it would drop or count as an error fails.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from kvactors.cli import cli
from kvactors.core.observe import Span
from kvactors.replay.timeline import trace_events

TRACE = Path(__file__).parents[2] / "examples/sample_trace.jsonl"
RUNS = {
    "virtual": "--virtual --seed 7 --concurrency 4 --requests 60",
    "faults": "--virtual --seed 7 --concurrency 4 --requests 40 --layout qwen3.5-9b --scale 4096 --faults flaky-store",
    "live": "--requests 20",
}
FIELDS = {"X": {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"}, "M": {"ph", "pid", "tid", "name", "args"}}
METADATA = {"process_name": ("name", str), "thread_name": ("name", str), "thread_sort_index": ("sort_index", int)}


class Run(NamedTuple):
    timeline: dict[str, Any]
    report: dict[str, Any]


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("timeline")
    files = ["--timeline", str(folder / "t.json"), "--report", str(folder / "r.json")]
    result = CliRunner().invoke(cli, ["replay", str(TRACE), *RUNS[request.param].split(), *files])
    assert result.exit_code == 0, result.output
    return Run(*(json.loads((folder / name).read_text(), parse_constant=_no_constant) for name in ("t.json", "r.json")))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def complaints(timeline: dict[str, Any]) -> list[str]:
    """What an importer of trace events would refuse, drop or guess at; times are compared in whole nanoseconds, cut off."""
    out = []
    if not set(timeline) <= {"traceEvents", "displayTimeUnit", "otherData"} or timeline.get("displayTimeUnit") not in (
        "ms",
        "ns",
    ):
        out.append(f"the file's own fields: {sorted(timeline)}")
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    names: Counter[tuple[int, int]] = Counter()
    for event in timeline["traceEvents"]:
        if set(event) != FIELDS.get(event.get("ph")) or type(event["pid"]) is not int or type(event["tid"]) is not int:
            out.append(f"fields of {event}")
        elif event["ph"] == "X":
            times = event["ts"], event["dur"]
            if not all(type(t) in (int, float) and math.isfinite(t) and 0 <= t < 2**53 for t in times):
                out.append(f"times of {event}")
                continue
            if not (isinstance(event["name"], str) and event["name"] and isinstance(event["args"], dict)):
                out.append(f"name or args of {event}")
            start, length = (int(t * 1000) for t in times)
            rows[event["pid"], event["tid"]].append((start, start + length))
        else:
            key, kind = METADATA.get(event["name"], ("", object))
            if set(event["args"]) != {key} or not isinstance(event["args"][key], kind):
                out.append(f"metadata {event}")
            names[event["pid"], event["tid"]] += event["name"] == "thread_name"
    out += [f"row {row} has {names[row]} names" for row in rows if names[row] != 1]
    for row, spans in rows.items():
        open_ends: list[int] = []
        for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if open_ends and end > open_ends[-1]:
                out.append(f"row {row}: a span from {start} to {end} ns begins inside one that ends at {open_ends[-1]}")
            open_ends.append(end)
    return out


def test_the_file_keeps_the_format(run: Run) -> None:
    assert complaints(run.timeline) == []
    assert run.timeline["otherData"] == {"dropped_spans": 0}


def test_spans_and_report_count_the_same(run: Run) -> None:
    spans = [e for e in run.timeline["traceEvents"] if e["ph"] == "X"]
    done: Counter[str] = Counter()
    for span in spans:
        if span["cat"].startswith("worker"):
            done[span["name"]] += span["args"]["keys"] - span["args"].get("failed", 0)
    sessions = run.report["sessions"]
    assert sum(span["cat"] == "harness" for span in spans) == run.report["steps"]
    pairs = {
        "put open": "put_opened",
        "commit": "put_committed",
        "revoke": "put_revoked",
        "get open": "get_opened",
        "close": "get_closed",
    }
    assert {job: done[job] for job in pairs} == {job: sessions[name] for job, name in pairs.items()}
    if not run.report["failures"]["injected"]:
        moved = {job: sum(s["args"]["bytes"] for s in spans if s["name"] == job) for job in ("put ranges", "get ranges")}
        assert moved == {"put ranges": run.report["bytes"]["saved"], "get ranges": run.report["bytes"]["loaded"]}


def test_spans_that_touch_do_not_overlap_by_rounding() -> None:
    ends = [0.0, 0.4, 2.1, 3.55, 5.2, 7.77, 9.25]
    spans = [Span("worker 0", "put", a * 1e-9, b * 1e-9) for a, b in pairwise(ends)]
    assert complaints(trace_events(spans)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"ts": -1.0},
        {"dur": math.nan},
        {"name": ""},
        {"args": []},
        {"tid": "1"},
        {"tid": 9},
        {"extra": 1},
        {"ph": "B"},
        {"ts": 1.5, "dur": 1.0},
    ],
    ids=str,
)
def test_a_wrong_event_is_found(change: dict[str, Any]) -> None:
    made = trace_events([Span("compute", "layer 0", 0.0, 2e-6), Span("compute", "layer 1", 2e-6, 3e-6)])
    assert complaints(made) == []
    first = next(e for e in made["traceEvents"] if e["ph"] == "X")
    first.update(change)
    assert complaints(made)
