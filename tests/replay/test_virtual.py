"""Replays on virtual time: the same engine and the same bytes, repeatable to the byte, and a model of a machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from kvactors.layouts import FAMILIES
from kvactors.replay.live import run_live
from kvactors.replay.no_hits import why_no_hits
from kvactors.replay.plan import ReplayOptions, VirtualOptions, plan_replay
from kvactors.replay.report import Report
from kvactors.replay.run import Watchers
from kvactors.replay.timeline import SpanLog
from kvactors.replay.virtual import run_on_virtual_time
from kvactors.stores import PRESETS, FaultPlan

SAMPLE = Path(__file__).parents[2] / "examples" / "sample_trace.jsonl"
OPTIONS = ReplayOptions(str(SAMPLE), FAMILIES["seed-example"].build(), requests=60, virtual=VirtualOptions())


def run(**change: Any) -> Report:
    return run_on_virtual_time(plan_replay(replace(OPTIONS, **change))).report


def test_it_counts_what_a_live_run_counts() -> None:
    virtual, live = run(), run_live(plan_replay(replace(OPTIONS, virtual=None))).report
    assert (virtual.clock, live.clock) == ("virtual", "live")
    for part in ("requests", "tokens", "blocks", "bytes", "sessions", "failures", "steps"):
        assert getattr(virtual, part) == getattr(live, part), part
    assert live.event_log_sha256 is None


@pytest.mark.parametrize("preset", [None, *PRESETS])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_same_seed_gives_the_same_bytes(preset: str | None, concurrency: int) -> None:
    plan = None if preset is None else FaultPlan.preset(preset)
    change: dict[str, Any] = {"faults": plan, "concurrency": concurrency, "capacity": 3000, "seed": 3}
    logs = [BytesIO(), BytesIO()]
    reports = [run_on_virtual_time(plan_replay(replace(OPTIONS, **change)), event_log=log).report.to_json() for log in logs]
    assert reports[0] == reports[1]
    assert logs[0].getvalue() == logs[1].getvalue()
    report = json.loads(reports[0])
    assert (report["requests"]["completed"], report["bytes"]["mismatched"]) == (60, 0)
    assert report["invariants"]["violations"] == []
    assert bool(report["failures"]["injected"]) == (preset is not None)
    assert run(**{**change, "seed": 4}).event_log_sha256 != report["event_log_sha256"]


@pytest.mark.parametrize(
    ("firsts", "change", "want"),
    [
        ((1, 2, 3), {"faults": FaultPlan.preset("slow-store")}, "no two prompts share a prefix of 1024 tokens"),
        ((1, 2, 3, 1), {"capacity": 100}, "but the store evicted it before it was asked for (evictions: "),
        ((1, 2, 3, 1), {"concurrency": 4}, "but the requests that share it were in play at the same time"),
        (
            (1, 2, 3, 1),
            {"faults": FaultPlan.from_mapping({"faults": [{"what": "outcome", "call": "readable", "outcome": "not_found"}]})},
            "but the faults that were injected hid it (outcome: ",
        ),
    ],
)
def test_why_nothing_was_hit(firsts: tuple[int, ...], change: dict[str, Any], want: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 2100, "output_length": 1, "hash_ids": [10 * i + j for j in range(5)]} for i in firsts
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = run(trace=str(trace), **change)
    assert (report.requests.completed, report.tokens.hit) == (len(firsts), 0)
    assert want in why_no_hits(report, report.layout.boundary_tokens)
    assert run().no_hits is None, "where something was hit"


def test_a_timeline_can_be_joined_with_requests() -> None:
    """Every call of a step is in that step's time, and the step names its requests."""
    log = SpanLog()
    run_on_virtual_time(plan_replay(replace(OPTIONS, concurrency=9, local_blocks=200)), Watchers(observers=[log]))
    steps = {span.args["step"]: span for span in log.spans if span.track == "harness"}
    calls = [span for span in log.spans if span.name in ("get open", "get ranges", "put ranges")]
    assert {span.name for span in calls} == {"get open", "get ranges", "put ranges"}
    for span in calls:
        assert steps[span.args["step"]].start_s <= span.start_s < span.end_s <= steps[span.args["step"]].end_s
    for step in steps.values():
        ids = step.args["ids"].split(",")
        assert len(ids) + step.args.get("more", 0) == step.args["requests"]
        assert len(ids) <= 8
    assert any("more" in step.args for step in steps.values())
    assert {name for step in steps.values() for name in step.args["ids"].split(",")} <= {f"r{line}" for line in range(1, 61)}


def test_other_processes_and_hash_seeds_give_the_same_bytes(tmp_path: Path) -> None:
    """Also of the files that the command writes."""
    found = []
    for hash_seed in ("0", "4242"):
        files = [tmp_path / f"{name}{hash_seed}" for name in ("report", "log", "timeline")]
        words = ["--report", files[0], "--event-log", files[1], "--timeline", files[2], "--faults", "flaky-store"]
        subprocess.run(
            [
                sys.executable,
                "-m",
                "kvactors",
                "replay",
                SAMPLE,
                "--virtual",
                "--concurrency",
                "3",
                "--capacity",
                "5KB",
                *words,
            ],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
        )
        found.append([file.read_bytes() for file in files])
    assert found[0] == found[1]
    import hashlib

    assert json.loads(found[0][0])["event_log_sha256"] == hashlib.sha256(found[0][1]).hexdigest()


def test_every_layer_of_every_step_takes_the_layer_time() -> None:
    report = run(virtual=VirtualOptions(bandwidth=1 << 60, latency_s=0.0, layer_time_s=0.25))
    assert report.time.compute_s == pytest.approx(report.steps * 4 * 0.25)
    assert report.time.wall_s == pytest.approx(report.time.compute_s)


def test_latency_and_bandwidth_are_what_calls_take() -> None:
    fast = run(virtual=VirtualOptions(layer_time_s=0.0, latency_s=0.001)).time.wall_s
    slow = run(virtual=VirtualOptions(layer_time_s=0.0, latency_s=0.01)).time.wall_s
    assert slow == pytest.approx(10 * fast, rel=0.1)
    thin = run(virtual=VirtualOptions(layer_time_s=0.0, latency_s=0.0, bandwidth=1000))
    moved_s = (thin.bytes.saved + thin.bytes.loaded) / 1000
    assert moved_s / 3 < thin.time.wall_s < moved_s * 0.6, "up to three calls at a time"


def call_times(**change: Any) -> list[float]:
    spans = SpanLog()
    run_on_virtual_time(plan_replay(replace(OPTIONS, **change)), Watchers(observers=(spans,)))
    return [s.end_s - s.start_s for s in spans.spans if s.track.startswith("worker") and "bytes" in s.args]


def test_a_call_takes_the_latency_a_tenth_more_or_less() -> None:
    times = call_times(virtual=VirtualOptions(latency_s=0.01, bandwidth=1 << 60))
    assert len(times) > 100
    assert 0.009 <= min(times) < 0.0095
    assert 0.0105 < max(times) <= 0.011


def test_latency_faults_pass_on_virtual_time() -> None:
    plain, slow = run(), run(faults=FaultPlan.preset("slow-store"))
    assert slow.failures.injected > 100
    slept_s = slow.failures.injected * (0.002 * 10 + 0.05) / 11  # each tenth call is delayed a second time
    assert plain.time.wall_s + 1 < slow.time.wall_s < plain.time.wall_s + slept_s
    times = call_times(faults=FaultPlan.preset("slow-store"))
    assert 0.002 < min(times) < 0.003
    assert 0.052 < max(times) < 0.053


def test_arrivals_by_timestamps_are_on_the_same_clock() -> None:
    last = max(json.loads(line)["timestamp"] for line in SAMPLE.read_text().splitlines()[:60]) / 1000
    report = run(speed=2.0)
    assert report.requests.completed == 60
    assert last / 2 <= report.time.wall_s < last / 2 + 1
