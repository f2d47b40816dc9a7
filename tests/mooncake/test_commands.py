"""The commands that meet a real Mooncake: replay, doctor and bench, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvactors.bench.mooncake import ENGINE, MEMCPY, RAW, WHOLE
from kvactors.bench.mooncake import run as run_bench
from kvactors.bench.staging import PLAIN, STAGED
from kvactors.bench.staging import run as run_staging
from kvactors.cli import cli
from kvactors.stores import LocalMaster, MooncakeStore
from kvactors.stores.mooncake import coalesce

SAMPLE = Path(__file__).parents[2] / "examples" / "sample_trace.jsonl"
TRACES = Path(__file__).parents[3] / "shared" / "traces"


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def replayed(tmp_path: Path, *args: str) -> dict[str, Any]:
    report = tmp_path / "report.json"
    result = run("replay", *args, "--report", str(report))
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def same_hits(tmp_path: Path, *args: str) -> dict[str, Any]:
    """Replays on both stores; the report of the one on Mooncake."""
    memory = replayed(tmp_path, *args)
    real = replayed(tmp_path, *args, "--store", "mooncake", "--local-master", "--capacity", "1GB")
    assert real["tokens"] == memory["tokens"]
    assert real["blocks"] == memory["blocks"]
    assert (real["store"], real["clock"]) == ("mooncake", "live")
    assert real["bytes"]["verified"] == real["bytes"]["loaded"] > 0
    assert real["bytes"]["mismatched"] == 0
    assert real["sessions"]["open_at_end"] == 0
    assert real["invariants"]["violations"] == []
    return real


def test_a_replay_hits_what_it_hits_on_the_embedded_store(tmp_path: Path) -> None:
    same_hits(tmp_path, str(SAMPLE))


@pytest.mark.parametrize(("name", "requests"), [("conversation_head.jsonl", 400), ("synthetic_trace.jsonl", 400)])
def test_a_public_trace_hits_what_it_hits_on_the_embedded_store(tmp_path: Path, name: str, requests: int) -> None:
    if not (TRACES / name).exists():
        pytest.skip(f"the public trace {name} is not here")
    same_hits(tmp_path, str(TRACES / name), "--scale", "4096", "--requests", str(requests))


def test_several_requests_at_once_with_padding_and_windows(tmp_path: Path) -> None:
    args = (str(SAMPLE), "--layout", "gemma-3-27b", "--scale", "4096", "--requests", "60", "--concurrency", "4")
    found = replayed(tmp_path, *args, "--store", "mooncake", "--local-master", "--capacity", "1GB")
    assert found["tokens"]["hit"] > 0
    assert found["bytes"]["verified"] == found["bytes"]["loaded"] > 0
    assert found["bytes"]["mismatched"] == 0


def test_a_replay_on_a_configured_pool(tmp_path: Path, master: LocalMaster, owner: MooncakeStore, monkeypatch: Any) -> None:
    config = tmp_path / "mooncake.json"
    options = {**master.options(), "metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "global_segment_size": 0}
    config.write_text(json.dumps(options))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(config))
    args = (str(SAMPLE), "--store", "mooncake", "--requests", "30")
    first, other, again = (replayed(tmp_path, *args, "--namespace", name) for name in ("one", "two", "one"))
    assert first["tokens"] == other["tokens"]
    assert again["tokens"]["hit"] > first["tokens"]["hit"]
    assert again["bytes"]["mismatched"] == 0
    assert owner.health().ok
    doctor = {f["name"]: f for f in json.loads(run("doctor", "--json").stdout)}
    assert doctor["mooncake pool"]["status"] == "ok"
    assert master.address in doctor["mooncake pool"]["detail"]


def test_doctor_finds_client_master_libraries_and_makes_a_round_trip(tmp_path: Path, monkeypatch: Any) -> None:
    config = tmp_path / "mooncake.json"
    config.write_text(json.dumps({"master_server_address": "127.0.0.1:9"}))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(config))
    result = run("doctor", "--json")
    found = {f["name"]: f for f in json.loads(result.stdout)}
    parts = ("mooncake client", "mooncake master", "mooncake libraries", "mooncake loopback")
    assert [found[part]["status"] for part in parts] == ["ok"] * 4
    assert "read back and compared" in found["mooncake loopback"]["detail"]
    assert found["mooncake pool"]["status"] == "broken"
    assert "127.0.0.1:9" in found["mooncake pool"]["detail"]
    assert result.exit_code == 1


def test_the_benchmark_moves_every_byte_each_way() -> None:
    rows = run_bench(quick=True, kibs=(4,))
    assert [row.kib for row in rows] == [4]
    for measured in (rows[0].put, rows[0].get):
        assert set(measured.seconds) == {RAW, WHOLE, ENGINE, MEMCPY}
        assert measured.ratio(ENGINE, RAW) < 1  # 0.2 to 0.3 on an idle machine
    assert rows[0].as_dict()["put"][RAW]["ratio"] == 1


def test_the_staging_benchmark_restores_what_is_staged() -> None:
    before = coalesce.STAGE_MOST_BYTES
    rows = run_staging(quick=True, shapes=((4, 8), (128, 2)))
    assert [(row.kib, row.pieces) for row in rows] == [(4, 8), (128, 2)]
    assert rows[0].put.ratio(STAGED, PLAIN) < 1  # 0.2 on an idle machine
    assert rows[0].range_us > 0
    assert before == coalesce.STAGE_MOST_BYTES
