"""The command line: exit codes, one clear line for every bad input, the files it writes, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvactors import __version__, doctor, stores
from kvactors.cli import cli
from kvactors.core.store import Outcome
from kvactors.errors import StoreError
from kvactors.layouts import FAMILIES

EXAMPLES = Path(__file__).parent.parent / "examples"
SAMPLE = EXAMPLES / "sample_trace.jsonl"


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def trace(tmp_path: Path, *rows: dict[str, Any] | str) -> str:
    path = tmp_path / "t.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def row(tokens: int = 1200, ids: tuple[int, ...] = (1, 2, 3), **change: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": list(ids), **change}


def layout(tmp_path: Path, **group: Any) -> str:
    base = {"kind": "full", "block_tokens": 16, "layers": [0], "entries": [{"name": "k", "bytes": 8}], **group}
    path = tmp_path / "layout.yaml"
    path.write_text(json.dumps({"name": "m", "groups": [base]}))
    return str(path)


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in lines[0]


def test_replay_prints_a_summary_and_writes_its_files(tmp_path: Path) -> None:
    out = {name: str(tmp_path / name) for name in ("r.json", "p.html", "t.json")}
    result = run(
        "replay",
        str(SAMPLE),
        "--requests",
        "40",
        "--report",
        out["r.json"],
        "--html",
        out["p.html"],
        "--timeline",
        out["t.json"],
    )
    assert result.exit_code == 0, result.output
    assert "40 of 40" in result.stdout
    rate = re.search(r"0 failed, ([\d,]+) requests/s", result.stdout)
    assert rate is not None
    assert int(rate[1].replace(",", "")) > 0
    assert "MiB/s" in result.stdout or "KiB/s" in result.stdout
    report = json.loads(Path(out["r.json"]).read_text())
    assert report["requests"] == {"total": 40, "completed": 40, "failed": 0}
    assert report["trace"]["path"] == str(SAMPLE)
    assert report["sessions"]["open_at_end"] == 0
    page = Path(out["p.html"]).read_text()
    assert "<svg" in page
    tracks = {
        e["args"]["name"] for e in json.loads(Path(out["t.json"]).read_text())["traceEvents"] if e["name"] == "thread_name"
    }
    assert {"harness", "compute"} < tracks


def test_replay_twice_gives_the_same_report_but_for_times(tmp_path: Path) -> None:
    reports = []
    for name in ("a", "b"):
        file = tmp_path / name
        assert run("replay", str(SAMPLE), "--requests", "60", "--report", str(file)).exit_code == 0
        data = json.loads(file.read_text())
        del data["time"], data["invariants"]
        reports.append(data)
    assert reports[0] == reports[1]


def test_the_sample_is_what_its_script_makes() -> None:
    made = subprocess.run(
        [sys.executable, EXAMPLES / "make_sample_trace.py"], capture_output=True, text=True, check=True
    ).stdout
    assert made == SAMPLE.read_text()


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        (row(20), (":2: hash_ids",)),
        ('{"timestamp": NaN, "input_length": 20, "hash_ids": [1]}', (":2: timestamp",)),
        ({"input_length": 20, "hash_ids": [1]}, (":2: timestamp", "missing")),
        (row(-5), (":2: input_length",)),
        ("{", (":2:", "JSON")),
    ],
)
def test_a_bad_trace_line(tmp_path: Path, bad: dict[str, Any] | str, parts: tuple[str, ...]) -> None:
    path = trace(tmp_path, row(), bad, row())
    refused(run("replay", path), path, *parts)
    report = tmp_path / "r.json"
    result = run("replay", path, "--skip-bad", "--report", str(report))
    assert result.exit_code == 0, result.output
    assert "1 bad trace lines" in result.stderr
    data = json.loads(report.read_text())
    assert (data["requests"]["completed"], data["trace"]["skipped"]) == (2, 1)


def test_an_empty_trace(tmp_path: Path) -> None:
    refused(run("replay", trace(tmp_path)), "empty")
    refused(run("replay", trace(tmp_path, "{"), "--skip-bad"), "JSON")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"entries": [{"name": "k", "bytes": 64, "stride": 32}]}, ("layout.yaml", "group 0", "stride")),
        ({"entries": [{"name": "k", "bytes": 8}, {"name": "k", "bytes": 8}]}, ("group 0", "given twice")),
        ({"kind": "fuul"}, ("group 0", "unknown kind", "full")),
        ({"kind": "sliding_window"}, ("group 0", "window")),
        ({"layers": [0, 0]}, ("group 0", "given twice")),
        ({"block_tokens": 0}, ("group 0", "block_tokens")),
    ],
)
def test_a_bad_layout(tmp_path: Path, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    path = layout(tmp_path, **change)
    refused(run("replay", str(SAMPLE), "--layout", path), *parts)
    refused(run("layout", "show", path), *parts)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--layout", "lama-3.1-8b"], ("llama-3.1-8b",)),
        (["--layout", "none.yaml"], ("none.yaml", "cannot be read")),
        (["--capacity", "15"], ("--capacity", "16 bytes")),
        (["--capacity", "50%"], ("--capacity", "50%")),
        (["--capacity", "10XB"], ("--capacity", "10XB")),
        (["--capacity", "-5"], ("--capacity", "-5")),
        (["--retention", "1000"], ("--retention", "1024")),
        (["--scale", "0"], ("--scale",)),
        (["--scale", "x"], ("--scale",)),
        (["--block-tokens", "0"], ("--block-tokens",)),
        (["--concurrency", "0"], ("--concurrency",)),
        (["--speed", "0"], ("--speed",)),
        (["--speed", "nan"], ("--speed",)),
        (["--requests", "0"], ("--requests",)),
        (["--local-blocks", "0"], ("--local-blocks",)),
        (["--faults", "no-such"], ("--faults", "flaky-store")),
        (["--faults", "none.yaml"], ("none.yaml",)),
        (["--store", "mooncake", "--virtual"], ("--store mooncake", "virtual")),
        (["--store", "mooncake", "--capacity", "1GB"], ("--capacity", "--local-master")),
        (["--store", "mooncake", "--local-master", "--capacity", "1MB"], ("--capacity", "16 MiB")),
        (["--store", "mooncake"], ("master_server_address", "MOONCAKE_CONFIG_PATH")),
        (["--namespace", "a::b"], ("namespace", "a::b")),
        (["--store", "redis"], ("--store redis", "memory")),
        (["--local-master"], ("--local-master", "--store mooncake")),
        (["--bandwidth", "1GB/s"], ("--bandwidth", "--virtual")),
        (["--latency", "0"], ("--latency", "--virtual")),
        (["--layer-time", "0"], ("--layer-time", "--virtual")),
        (["--event-log", "x"], ("--event-log", "--virtual")),
        (["--virtual", "--bandwidth", "0"], ("--bandwidth", "more than 0")),
        (["--virtual", "--bandwidth", "fast"], ("--bandwidth", "fast")),
        (["--virtual", "--latency", "-1"], ("--latency",)),
        (["--virtual", "--layer-time", "inf"], ("--layer-time",)),
        (["--report", ""], ("--report", "name of a file")),
        (["--event-log", " ", "--virtual"], ("--event-log", "name of a file")),
        (["--faults", ""], ("--faults", "flaky-store")),
        (["--report", "/no/such/folder/r.json"], ("--report", "/no/such/folder")),
        (["--html", "/"], ("--html", "directory")),
        (["--report", str(SAMPLE)], ("--report", "same file")),
        (["--report", "x.json", "--html", "x.json"], ("--html", "same file")),
        (["--bogus"], ("--bogus",)),
        (["extra"], ("extra",)),
    ],
)
def test_a_bad_option_is_refused_before_anything_runs(args: list[str], parts: tuple[str, ...]) -> None:
    refused(run("replay", str(SAMPLE), *args), *parts)


@pytest.mark.parametrize(
    ("args", "part"),
    [(["replay"], "TRACE"), (["replay", "none.jsonl"], "none.jsonl"), (["fly"], "fly"), (["layout", "show"], "NAME")],
)
def test_bad_usage(args: list[str], part: str) -> None:
    refused(run(*args), part)


@pytest.mark.parametrize("seeds", ["0:" + "9" * 5000, "1" * 5000 + ":2", "5:5", "5", "a:b"])
def test_bad_seeds_are_refused(seeds: str) -> None:
    result = run("simulate", "--seeds", seeds)
    refused(result, "--seeds", "A < B")
    assert len(result.stderr) < 200


def test_a_bad_fault_plan_file(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("faults: [{what: explode}]")
    refused(run("replay", str(SAMPLE), "--faults", str(plan)), "plan.yaml", "explode")


def test_a_failed_request_exits_1_and_says_why() -> None:
    result = run("replay", str(SAMPLE), "--requests", "20", "--local-blocks", "3")
    assert result.exit_code == 1
    assert "the pool has 3" in result.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_an_output_that_fails_at_the_end_exits_1_and_the_others_are_written(tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    result = run("replay", str(SAMPLE), "--requests", "5", "--report", "/dev/full", "--html", str(page))
    assert result.exit_code == 1
    assert "/dev/full: cannot be written" in result.stderr
    assert page.exists()


def test_faults_from_a_plan_file(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("{seed: 3, faults: [{what: outcome, call: get_ranges, every: 5, outcome: transfer failed}]}")
    report = tmp_path / "r.json"
    result = run("replay", str(SAMPLE), "--requests", "60", "--faults", str(plan), "--report", str(report))
    assert result.exit_code == 0, result.output
    data = json.loads(report.read_text())
    assert data["failures"]["injected"] > 0
    assert data["failures"]["load_failed"] > 0
    assert data["bytes"]["mismatched"] == 0


def test_no_hits_says_why(tmp_path: Path) -> None:
    result = run("replay", trace(tmp_path, row(100, (1,)), row(100, (1,))))
    assert result.exit_code == 0
    assert "No hits: every prompt is shorter than one boundary of 1024" in result.stdout


def test_gz_trace_with_a_layout_file(tmp_path: Path) -> None:
    import gzip

    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(b"".join(json.dumps(row()).encode() + b"\n" for _ in range(3))))
    report = tmp_path / "r.json"
    result = run("replay", str(packed), "--layout", layout(tmp_path), "--report", str(report))
    assert result.exit_code == 0, result.output
    assert json.loads(report.read_text())["tokens"]["hit"] == 2 * 1184


def test_layout_list_and_show() -> None:
    names = run("layout", "list").stdout
    assert all(name in names for name in ("llama-3.1-8b", "kimi-k3", "seed-example"))
    data = json.loads(run("layout", "show", "seed-example", "--json").stdout)
    assert [g["object_bytes"] for g in data["groups"]] == [16, 32, 36]
    assert [g["commit_layer"] for g in data["groups"]] == [2, 3, 3]
    assert [r["offset"] for r in data["groups"][1]["ranges"]] == [0, 10, 21]
    assert len(data["digest"]) == 64
    assert data["boundary_tokens"] == 1024
    assert data["groups"][0]["example_key"].startswith(f"seed-example@mooncake_hybrid_v1:{data['digest']}@group:0@block:512@")
    text = run("layout", "show", "llama-3.1-8b", "--block-tokens", "512", "--scale", "4096").stdout
    assert "16,384 bytes" in text
    assert "config.json" in text
    assert "boundary  512 tokens" in text
    listed = json.loads(run("layout", "list", "--json").stdout)
    assert [entry["name"] for entry in listed] == list(FAMILIES)
    assert [entry["boundary_tokens"] for entry in listed] == [1024, 128, 128, 512, 256, 3072]


def test_version_and_help() -> None:
    assert run("--version").stdout == f"kvactors, version {__version__}\n"
    text = run("replay", "--help").stdout
    assert "--layout" in text
    assert "--virtual" in text
    assert "--local-master" in text


def test_ctrl_c_drains_and_prints_the_partial_report(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    rows = [row(1200, (1, 2, 3), timestamp=i * 200) for i in range(1000)]
    command = [sys.executable, "-m", "kvactors.cli", "replay", trace(tmp_path, *rows), "--speed", "1", "--report", str(report)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        try:
            assert "replaying" in child.stderr.readline()
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 130, err
    assert "Interrupted" in out
    data = json.loads(report.read_text())
    assert data["interrupted"] is True
    assert data["sessions"]["open_at_end"] == 0
    assert data["requests"]["completed"] < 1000
    assert data["invariants"]["violations"] == []


@pytest.fixture
def no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/mooncake has the tests that start a master."""
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    monkeypatch.setattr(doctor, "mooncake_loopback", lambda: doctor.Finding("mooncake loopback", doctor.OK, ""))


@pytest.mark.usefixtures("no_master")
def test_doctor_reports_and_tests_what_is_there() -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = {f["name"]: f for f in json.loads(result.stdout)}
    assert found["engine"]["status"] == found["embedded store"]["status"] == "ok"
    for f in found.values():
        assert f["status"] == "ok" or f["fix"], f
    assert "4096 bytes written" in found["embedded store"]["detail"]
    assert "3072 tokens hit" in found["engine"]["detail"]
    text = run("doctor").stdout
    for f in found.values():
        assert f["fix"] in text


@pytest.mark.usefixtures("no_master")
def test_doctor_says_how_to_install_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "uvloop" else version(name))
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert re.search(r"^uvloop +missing +not installed", result.stdout, re.MULTILINE)
    assert "  pip install uvloop\n" in result.stdout.split("To install what is missing")[1]


FOR_CPUS = {
    "torch": "pip install torch --index-url ",
    "vllm": ".ci/install-vllm VENV  # ",
    "torch-npu": "pip install 'kvactors[ascend]'  # on an Ascend NPU only",
}
EXTRAS = {"torch": "pip install 'kvactors[torch]'", "vllm": "pip install 'kvactors[vllm]'"}


@pytest.mark.parametrize("device", [None, "nvidia0", "davinci0"])
def test_doctor_names_what_a_cpu_needs_where_there_is_no_accelerator(
    device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    monkeypatch.setattr(doctor, "_devices", lambda *names: device is not None and device.startswith(names))
    fixes = {f.name: f.fix for f in (doctor._torch(), doctor._vllm(), doctor._torch_npu())}
    for name, extra in EXTRAS.items():
        assert fixes[name].endswith(extra), "the extra stands behind, for whoever has one"
        assert (fixes[name] == extra) == (device is not None)
        assert fixes[name].startswith(FOR_CPUS[name]) == (device is None)
    assert fixes["torch-npu"].startswith(FOR_CPUS["torch-npu"]) == (device != "davinci0")


@pytest.mark.parametrize("status", [doctor.OK, doctor.MISSING, doctor.BROKEN])
def test_doctor_shows_what_a_native_library_wrote_only_if_something_is_broken(
    status: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def check() -> doctor.Finding:
        os.write(2, b"E1130 Local segment descriptor not found\n")
        return doctor.Finding("pool", status, "")

    assert doctor._quietly(check).status == status
    os.write(2, b"after\n")
    shown = "E1130 Local segment descriptor not found\n" if status == doctor.BROKEN else ""
    assert capfd.readouterr().err == shown + "after\n"


def broken_parts(result: Result) -> dict[str, str]:
    assert result.exit_code == 1, result.output
    return {f["name"]: f["detail"] for f in json.loads(result.stdout) if f["status"] == "broken"}


@pytest.mark.usefixtures("no_master")
def test_doctor_tells_of_a_store_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise StoreError(f"{name}: no store here")

    monkeypatch.setattr(stores, "open_store", broken)
    assert broken_parts(run("doctor", "--json")) == {"embedded store": "self-test raised StoreError: memory: no store here"}
    assert run("doctor").exit_code == 1


@pytest.mark.usefixtures("no_master")
def test_doctor_compares_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores.MemoryStore, "get_ranges", lambda _self, batch: [Outcome.OK] * len(batch.keys))
    found = broken_parts(run("doctor", "--json"))
    assert set(found) == {"embedded store", "engine"}
    assert found["embedded store"].startswith("self-test answered")
