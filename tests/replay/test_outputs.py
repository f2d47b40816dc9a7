"""The report's stable names, the page and the timeline."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from kvactors.core.observe import Span
from kvactors.core.stats import EngineStats, GroupStats, SessionStats
from kvactors.layouts import FAMILIES
from kvactors.replay import tally as tally_module
from kvactors.replay.html import render_page
from kvactors.replay.no_hits import why_no_hits
from kvactors.replay.report import NoHitsPart, Report, TracePart, build_report
from kvactors.replay.store_events import store_events
from kvactors.replay.summary import print_summary
from kvactors.replay.tally import MOST_EVENTS, MOST_SAMPLES, Sample, Tally
from kvactors.replay.timeline import SpanLog, busiest_step, trace_events

NAMES = {
    "trace": {"path", "requests"},
    "layout": {"name", "digest", "groups"},
    "requests": {"total", "completed", "failed"},
    "tokens": {"input", "hit", "computed", "hit_ratio"},
    "bytes": {"saved", "loaded", "verified", "mismatched"},
    "sessions": {
        "put_opened",
        "put_committed",
        "put_revoked",
        "put_poisoned",
        "put_abandoned",
        "get_opened",
        "get_closed",
        "get_expired",
        "open_at_end",
    },
    "invariants": {"checked", "violations"},
    "time": {"wall_s", "compute_s", "exposed_load_s", "exposed_save_s"},
    "failures": {"injected", "load_failed", "recomputed_tokens"},
}


def report(
    path: str = "t.jsonl",
    violations: tuple[str, ...] = (),
    tally: Tally | None = None,
    stats: EngineStats | None = None,
    **counts: int,
) -> Report:
    tally = tally or Tally.of([0, 1, 2])
    tally.requests = tally.completed = 2
    tally.input_tokens = 2000
    if not tally.events:
        tally.event("<b>r1</b> failed & left")
    for name, value in counts.items():
        setattr(tally, name, value)
    saved = EngineStats(groups={0: GroupStats(saved=3, bytes_saved=48)}, sessions=SessionStats(put_opened=3, put_committed=3))
    return build_report(
        trace=TracePart(path=path, requests=2),
        layout=FAMILIES["seed-example"].build(),
        boundary_tokens=1024,
        hash_tokens=512,
        store="memory",
        clock="live",
        seed=0,
        tally=tally,
        stats=stats or saved,
        violations=list(violations),
        checked=7,
        wall_s=1.5,
        injected=0,
        preemptions=0,
        interrupted=False,
    )


def test_stable_names() -> None:
    data = json.loads(report().to_json())
    assert data["schema"] == 1
    assert data["seed"] == 0
    assert (data["store"], data["clock"]) == ("memory", "live")
    for part, names in NAMES.items():
        assert names <= set(data[part]), part
    assert set(data["blocks"]) == {"0", "1", "2"}
    assert set(data["blocks"]["0"]) == {"looked_up", "hit", "saved", "loaded", "skipped_existing", "skipped_no_space"}


def test_what_makes_a_run_broken() -> None:
    assert not report().broken
    assert report(violations=("I2",)).broken
    assert report(mismatched_bytes=1).broken
    assert report(failed=1, completed=1).broken
    assert report(completed=1).broken


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_is_self_contained_and_escapes_everything() -> None:
    samples = [Sample(i * 0.1, i, i * 1000, i * 300, (i, i, i), i * 10, i * 20, 1, 0) for i in range(20)]
    spans = [Span("harness", "step 1", 0, 1), Span("compute", "<i>layer</i>", 0.1, 0.2), Span("worker 0", "get", 0.1, 0.4)]
    page = render_page(report("/tmp/<script>alert(1)</script>.jsonl", load_failed=2), samples, spans)
    parser = _Tags()
    parser.feed(page)
    names = {tag for tag, _ in parser.tags}
    assert "svg" in names
    assert not names & {"script", "link", "img", "iframe"}
    assert not any(key in attrs for _, attrs in parser.tags for key in ("src", "href", "onload"))
    assert not re.search(r"https?://|url\(|@import", page)
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;r1&lt;/b&gt; failed &amp; left" in page
    assert "&lt;i&gt;layer&lt;/i&gt;" in page
    assert not re.search(r"<b>r1|<i>layer", page)
    assert "prefers-color-scheme:dark" in page
    assert "width=device-width" in page


def test_the_page_says_what_is_broken() -> None:
    page = render_page(report(violations=("I2: <k> is open",), mismatched_bytes=3, failed=1), [], [])
    assert '<p class="verdict bad">Broken: I2: &lt;k&gt; is open; 3 loaded bytes were wrong; 1 requests failed</p>' in page
    assert "Broken: not all requests were done" in render_page(report(completed=1), [], [])
    assert "Broken" not in render_page(report(), [], [])


@pytest.mark.parametrize(
    ("hit", "interrupted", "failures", "tone", "says"),
    [
        (500, False, {}, "good", "All requests done, every loaded byte right, no invariant broken.</p>"),
        (500, True, {}, "plain", "Interrupted and drained"),
        (0, False, {}, "plain", "No hits: every prompt is shorter"),
        (0, False, {"load_failed": 3}, "warn", "No hits: "),
        (500, False, {"load_failed": 3}, "warn", "Loads failed for 3 requests, which were computed again.</p>"),
        (500, False, {"outages": 1}, "warn", "All requests done"),
        (500, True, {"lost_calls": 1}, "warn", "Interrupted and drained"),
    ],
)
def test_the_verdict_looks_like_what_happened(
    hit: int, interrupted: bool, failures: dict[str, int], tone: str, says: str
) -> None:
    found = report(hit_tokens=hit)
    found.interrupted = interrupted
    for name, number in failures.items():
        setattr(found.failures, name, number)
    page = render_page(found, [], [])
    (verdict,) = re.findall(r'<p class="verdict [a-z]+">.*?</p>', page)
    assert verdict.startswith(f'<p class="verdict {tone}">')
    assert says in verdict
    assert tone == "plain" or f".{tone}{{color:var(--{tone})}}" in page


def test_the_page_names_the_busiest_step_and_its_requests() -> None:
    args = {"requests": 10, "step": 2, "ids": "r1,<r2>", "more": 8}
    spans = [Span("harness", "step 1", 0, 1, {}), Span("harness", "step 2", 1, 2, args), Span("worker 0", "get", 1.1, 1.2)]
    assert '<p class="faint">Step 2: requests r1, &lt;r2&gt; and 8 more</p>' in render_page(report(), [], spans)


def test_the_page_of_a_run_without_data_still_renders() -> None:
    page = render_page(report(), [], [])
    assert "There is no data to draw." in page
    assert "No hits" in page


def test_timeline_has_a_track_per_actor_and_overlapping_spans_get_rows() -> None:
    log = SpanLog(limit=4)
    for span in (
        Span("worker 0", "put", 5.0, 5.5, {"keys": 3}),
        Span("worker 0", "put", 5.2, 5.8),
        Span("compute", "layer 0", 5.0, 5.1),
        Span("group 1", "prepare", 5.0, 5.01),
        Span("group 1", "dropped", 6, 7),
    ):
        log.span(span)
    data = trace_events(log.spans, log.dropped)
    threads = {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert threads == {"compute", "group 1", "worker 0", "worker 0 (2)"}
    spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 4
    assert data["otherData"]["dropped_spans"] == 1
    first = next(e for e in spans if e["args"].get("keys") == 3)
    assert (first["ts"], first["dur"]) == (0.0, 500_000.0)
    json.dumps(data)


def test_busiest_step() -> None:
    spans = [Span("harness", "1", 0, 1), Span("harness", "2", 1, 2), Span("w", "a", 1.1, 1.2), Span("w", "b", 1.3, 1.4)]
    assert busiest_step(spans) is spans[1]
    assert busiest_step([]) is None


def test_samples_thin_out() -> None:
    tally = Tally.of([0])
    for i in range(10_000):
        if tally.wants_sample():
            tally.sample(Sample(float(i), i, 0, 0, (0,), 0, 0, 0, 0))
    assert 100 < len(tally.samples) <= MOST_SAMPLES + 1
    assert tally._every > 1
    gaps = [b.at_s - a.at_s for a, b in pairwise(tally.samples)]
    assert min(gaps) > 0
    assert max(gaps) <= 2 * min(gaps)
    assert tally.samples[0].at_s == 0
    assert tally.samples[-1].at_s >= 10_000 - max(gaps)


def test_only_the_first_events_are_kept_and_the_others_counted() -> None:
    tally = Tally.of([0])
    for i in range(MOST_EVENTS + 5):
        tally.event(str(i))
    assert tally.events == [str(i) for i in range(MOST_EVENTS)]
    assert tally.events_dropped == 5


def test_why_no_hits() -> None:
    assert "shorter than one boundary" in why_no_hits(report(), 1024)
    tally_report = report()
    tally_report.blocks["0"].looked_up = 4
    assert "share a prefix" in why_no_hits(tally_report, 1024)
    tally_report.interrupted = True
    assert why_no_hits(tally_report, 1024) == "the run was interrupted before a load was over"
    tally_report.blocks["0"].saved = 0
    assert "nothing was saved" in why_no_hits(tally_report, 1024)


@pytest.mark.parametrize(
    ("known", "store", "want"),
    [
        (
            {"shared_prefix": False, "evictions": 0, "faults": {"latency": 9}},
            "memory",
            "no two prompts share a prefix of 1024 tokens",
        ),
        (
            {"shared_prefix": False, "evictions": 8, "faults": {"evict": 9}},
            "memory",
            "no two prompts share a prefix of 1024 tokens",
        ),
        (
            {"shared_prefix": False},
            "mooncake",
            "no two prompts share a prefix of 1024 tokens, and earlier runs left none of them in the store",
        ),
        (
            {"shared_prefix": True, "evictions": 1234, "faults": {"latency": 9}},
            "memory",
            "prompts share a prefix of 1024 tokens, but the store evicted it before it was asked for (evictions: 1,234)",
        ),
        (
            {"shared_prefix": True, "evictions": 0, "faults": {"outcome": 3, "evict": 9, "latency": 1}},
            "memory",
            "prompts share a prefix of 1024 tokens, but the faults that were injected hid it (evict: 9, outcome: 3)",
        ),
        (
            {"shared_prefix": True, "evictions": 0, "together": True},
            "memory",
            "prompts share a prefix of 1024 tokens, but the requests that share it were in play at the same time",
        ),
        (
            {"shared_prefix": True, "evictions": 0, "retention": True},
            "memory",
            "prompts share a prefix of 1024 tokens, but --retention did not keep it",
        ),
        (
            {"shared_prefix": True, "evictions": 0},
            "memory",
            "prompts share a prefix of 1024 tokens, but the store did not have it when it was asked",
        ),
        (
            {"shared_prefix": True, "evictions": None, "faults": {"kill": 1}},
            "mooncake",
            "prompts share a prefix of 1024 tokens, but the store evicted it before it was asked for or the faults that were "
            "injected hid it (kill: 1)",
        ),
        (
            {"shared_prefix": None, "evictions": 0},
            "memory",
            "most likely no two prompts share a prefix of 1024 tokens",
        ),
        (
            {"shared_prefix": None, "evictions": 3},
            "memory",
            "no two prompts share a prefix of 1024 tokens, or the store evicted it before it was asked for (evictions: 3)",
        ),
    ],
)
def test_no_hits_by_what_is_known(known: dict[str, Any], store: str, want: str) -> None:
    found = report()
    found.blocks["0"].looked_up, found.store, found.no_hits = 4, store, NoHitsPart(**known)
    assert why_no_hits(found, 1024) == want


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        ([("a", True), ("b", True)], False),
        ([("a", True), ("a", False)], False),  # the second ends with its first boundary: its last token is computed anyway
        ([("a", False), ("b", True), ("a", True)], True),
        ([("a", True), ("a", True), ("c", True)], True),
        ([("a", True), ("b", True), ("c", True)], None),  # more than are remembered
        ([("a", True), ("b", True), ("b", True), ("c", True)], True),
    ],
)
def test_whether_prompts_begin_alike(
    prompts: list[tuple[str, bool]], shared: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally_module, "MOST_PREFIXES", 2)
    tally = Tally.of([0])
    for prefix, may_hit in prompts:
        tally.note_prefix(prefix.encode(), may_hit=may_hit)
    assert tally.shared is shared


def test_a_lost_store_is_one_event_with_counts() -> None:
    lost = EngineStats(sessions=SessionStats(put_opened=900, put_abandoned=700), lost_workers=2, circuit="open")
    assert store_events(lost, 1) == [
        "the store was lost (outages: 1, calls that did not return in time: 2, put sessions abandoned: 700); "
        "it was still left alone at the end"
    ]
    assert store_events(EngineStats(), 3) == ["the store was lost (outages: 3)"]
    assert store_events(EngineStats(), 0) == []


def test_blocks_without_space_are_an_event_and_a_row() -> None:
    full = EngineStats(groups={0: GroupStats(skipped_no_space=3), 1: GroupStats(skipped_no_space=1004, paused_no_space=1000)})
    assert store_events(full, 0) == [
        "the store had no space for 1,007 blocks, 1,000 of them without asking because it stayed full"
    ]
    found = report()
    found.blocks["1"].skipped_no_space = 1007
    shown = io.StringIO()
    print_summary(found, Console(file=shown, width=120), 1024)
    assert re.search(r"no space .* 1,007 blocks", shown.getvalue())


@pytest.mark.parametrize("width", [30, 40, 80])
def test_a_narrow_summary_cuts_nothing(width: int) -> None:
    found = report(input_tokens=123_456_789)
    found.blocks["0"].looked_up = found.blocks["0"].hit = 987_654_321
    found.layout.name = "a_layout_whose_name_is_longer_than_a_terminal_of_forty_cells"
    shown = io.StringIO()
    print_summary(found, Console(file=shown, width=width), 1024)
    text = "".join(shown.getvalue().split()).replace("│", "")
    assert "…" not in text
    assert found.layout.name in text


def test_why_nothing_was_saved_for_want_of_space() -> None:
    found = report()
    found.blocks["0"].looked_up, found.blocks["0"].saved, found.blocks["0"].skipped_no_space = 4, 0, 9
    assert "too little capacity" in why_no_hits(found, 1024)
    found.store = "mooncake"
    assert "nobody gives memory to the pool (global_segment_size is 0" in why_no_hits(found, 1024)
    found.blocks["0"].saved = 1
    assert "global_segment_size" not in why_no_hits(found, 1024)


def test_what_the_store_did_comes_before_all_other_events() -> None:
    tally = Tally.of([0, 1, 2])
    for i in range(MOST_EVENTS + 5):
        tally.event(str(i))
    events = report(tally=tally, stats=EngineStats(sessions=SessionStats(put_opened=2, put_abandoned=2))).events
    assert events[0] == "the store was lost (put sessions abandoned: 2)"
    assert events[1:3] == ["0", "1"]


@pytest.mark.parametrize(
    ("saved", "sessions", "failures", "want"),
    [
        (0, {"put_abandoned": 2}, {"lost_calls": 3}, "nothing was saved: the store did not answer in time (calls that did not"),
        (
            1,
            {"put_opened": 6, "put_revoked": 5, "revoked_by": {"stale session": 4, "other": 1}},
            {},
            "only 1 blocks were saved: 5 of 6 put sessions were revoked (stale session: 4, other: 1); the store is too slow",
        ),
        (0, {"put_opened": 2, "put_revoked": 2, "revoked_by": {"other": 2}}, {}, "2 of 2 put sessions were revoked (other: 2)"),
        (0, {"put_refused": 4}, {}, "nothing was saved: the store refused to begin any of 4 saves"),
        (2, {"put_abandoned": 7}, {"outages": 1, "lost_calls": 1}, "the store was lost; 2 objects had been saved by then"),
        (0, {}, {"outages": 2}, "nothing was saved: the store could not be reached (outages: 2)"),
        (3, {}, {"lookup_errors": 2}, "the store did not answer: lookups that failed: 2"),
        (3, {}, {"load_failed": 5}, "loads failed for 5 requests"),
    ],
)
def test_why_no_hits_where_the_store_failed(saved: int, sessions: dict[str, Any], failures: dict[str, int], want: str) -> None:
    found = report()
    found.blocks["0"].looked_up, found.blocks["0"].saved = 4, saved
    for name, value in sessions.items():
        setattr(found.sessions, name, value)
    for name, number in failures.items():
        setattr(found.failures, name, number)
    assert want in why_no_hits(found, 1024)
