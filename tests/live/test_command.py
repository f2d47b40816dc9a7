"""`kvactors top` and `kvactors story`, and the replay that they look at."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from kvactors.cli import cli
from kvactors.core.store import Outcome
from kvactors.live import Address, LiveView, command, top
from kvactors.live.printable import printable, shown_bytes, shown_seconds
from kvactors.live.snapshot import GroupView, Snapshot
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import Rig, full_layout, hashes

SAMPLE = Path(__file__).parents[2] / "examples/sample_trace.jsonl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two ranks' views: of an engine with a revoked save and a failed load, and of one that did nothing."""
    folder = tmp_path_factory.mktemp("live")
    faults = [
        Fault(what="outcome", call="put_ranges", outcome=Outcome.TRANSFER_FAILED, nth=3, times=1),
        Fault(what="outcome", call="get_ranges", outcome=Outcome.TRANSFER_FAILED, times=1),
    ]

    async def play(rig: Rig) -> None:
        async with rig:
            await rig.engine.lookup(hashes(2), 33)
            await rig.save("a", hashes(2))
            await rig.save("b", hashes(1, "b"))
            await rig.run(rig.request("c", hashes(2), load={0: [0, 1]}, first_id=9))

    busy, idle = Rig(full_layout(), faults), Rig(full_layout())
    address = Address.of(str(folder / "live.sock"))
    with (
        LiveView(busy.engine, address.of_rank("0"), name="busy", rank="0") as first,
        LiveView(idle.engine, address.of_rank("1"), name="idle", rank="1"),
    ):
        asyncio.run(play(busy))
        first.note_waits({"exposed_wait_s": [0.02, 0.03]})
        yield folder
    idle.memory.close()


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args])


def refused(result: Result, code: int, *parts: str) -> None:
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.strip().splitlines()
    for part in parts:
        assert part in line


def test_top_shows_every_rank_once(folder: Path) -> None:
    result = run("top", folder / "live.sock", "--once")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout, "plain where there is no terminal"
    text = " ".join(result.stdout.split())
    for part in (
        "busy rank 0",
        "idle rank 1",
        "circuit closed",
        "1, 0.0% hit, 0.0% of the tokens, 0 failed",
        "3 opened: 2 committed, 1 revoked",
        "revokes │ 1 transfer failed",
        "50 ms for loads in 2 steps, half of them at most 25 ms; none for saves",
    ):
        assert part in text, text


def test_top_as_json(folder: Path) -> None:
    result = run("top", folder, "--once", "--json")
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    busy, idle = json.loads(line)
    assert (busy["name"], busy["groups"][0]["saved"], busy["revoked_by"]) == ("busy", 2, {"transfer failed": 1})
    assert idle["address"] == str(folder / "live.rank1.sock")


def test_top_goes_on_when_one_rank_is_gone(folder: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone.sock"
    with LiveView(None, Address.of(str(gone))):
        gone.rename(tmp_path / "stale.sock")  # its file stays behind
    result = run("top", folder / "live.rank1.sock", tmp_path / "stale.sock", "--once")
    assert result.exit_code == 1
    assert "idle" in result.stdout
    assert "Connection refused; is the engine running, as the same user?" in " ".join(result.stdout.split())


def test_top_looks_again_and_again_until_nobody_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(command.time, "sleep", naps.append)
    monkeypatch.setattr(command, "_nobody_reads", lambda: len(naps) == 2)
    result = run("top", folder / "live.rank1.sock", "--every", "0.5")
    assert (result.exit_code, result.stdout.count("idle  rank 1"), naps) == (0, 3, [0.5, 0.5])


def test_rates_are_since_the_last_look() -> None:
    address = Address.of("/x.sock")

    def at(seconds: float, saved: int, nbytes: int) -> Snapshot:
        group = GroupView(0, "full", 16, saved, 0, 0, 0, 0, 0, 0, 0, 0, {}, {}, 0.0, 0, 0, 0)
        counters = {"saved_bytes": nbytes}
        return Snapshot("n", "0", 1, "1", "m", seconds, 1.0, "running", "closed", counters, groups=[group])

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(top.render([top.Seen(address, at(12.0, 30, 4096))], {address: at(10.0, 10, 2048)}))
    text = console.export_text()
    assert "30 (10/s)" in text
    assert "saved 4.00 KiB (1.00 KiB/s)" in text


@pytest.mark.parametrize("width", [30, 40, 80, 400])
def test_no_number_is_cut_on_a_narrow_terminal(width: int) -> None:
    puts = {"open": 12_345, "opening": 67_890}
    group = GroupView(3, "sliding_window", 16_384, 1_234_567, 2_345_678, 3, 4_567_890, 5, 6, 7, 8, 9, puts, {}, 0.25, 0, 0, 0)
    causes = {"a_cause_that_is_longer_than_a_line_of_forty_cells": 7}
    counters = {"saved_bytes": 4096}
    seen = Snapshot("n", "0", 1, "1", "m", 12.0, 1.0, "running", "closed", counters, revoked_by=causes, groups=[group])
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(top.render([top.Seen(Address.of("/x.sock"), seen)], {}))
    text = console.export_text()
    assert "…" not in text
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    whole = "".join(character for character in text if character.isalnum() or character in ",_")
    for part in ("3sliding_window16384", "1,234,567", "2,345,678", "4,567,890", "12,345open", "67,890opening", *causes):
        assert part in whole, text


def test_story_tells_what_happened_and_why(folder: Path) -> None:
    result = run("story", "b", folder / "live.sock")
    assert result.exit_code == 0, result.output
    lines = [re.sub(r"^ +[\d.]+ s +", "", line) for line in result.stdout.splitlines()]
    assert lines[0] == "b, 4 events"
    assert [re.sub(r"  +", " | ", line) for line in lines[1:]] == [
        "request | step 2 begins: 0 blocks to load, 1 to save",
        "group 0 block 0 | put opening -> open",
        "group 0 block 0 | put open -> revoking (layer 0: transfer failed)",
        "group 0 block 0 | put revoking -> revoked",
    ]
    failed = run("story", "c", folder / "live.rank0.sock").stdout
    assert "get released (not loaded: layer 0: transfer failed)" in failed
    assert "load failed from token 0 on (layer 0: transfer failed)" in failed


def test_story_finds_the_names_that_vllm_gives(tmp_path: Path) -> None:
    async def play(path: Path) -> Result:
        async with Rig(full_layout()) as rig:
            with LiveView(rig.engine, Address.of(str(path))):
                for name in ("cmpl-7-ab12", "cmpl-7-ab12#1", "cmpl-77-ab12"):
                    await rig.save(name, hashes(1, name))
                return run("story", "cmpl-7", path)

    result = asyncio.run(play(tmp_path / "live.sock"))
    assert result.exit_code == 0, result.output
    assert re.findall(r"^(\S+), \d+ events", result.stdout, re.MULTILINE) == ["cmpl-7-ab12", "cmpl-7-ab12#1"]


def test_story_as_json_and_line_by_line(folder: Path) -> None:
    (part,) = json.loads(run("story", "a", folder, "--json").stdout)
    assert part["request"] == "a"
    assert part["events"][1][1:] == [0, 0, "put opening -> open"]
    assert len(run("story", "a", folder, "--all").stdout.splitlines()) == len(part["events"]) + 1


def test_bad_usage_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVACTORS_LIVE", raising=False)
    refused(run("top"), 2, "which engine?", "KVACTORS_LIVE")
    refused(run("top", "10.0.0.1:9400", "--once"), 2, "loopback")
    refused(run("top", folder / "none.sock", "--once"), 2, "nothing of this name")
    refused(run("top", SAMPLE, "--once"), 2, "is a file and no engine's socket", "kvactors story")
    refused(run("top", folder, "--every", "nan"), 2, "--every")
    refused(run("story", "aa", folder), 1, "no story of it", "such as a")
    refused(run("story", "zz", folder / "live.rank1.sock"), 1, "nothing has happened")
    refused(run("story", "\x1b[2Ja", folder), 1, "\\x1b[2Ja")
    refused(run("replay", SAMPLE, "--live", folder / "x.sock", "--virtual"), 2, "--live", "--virtual", "--stories FILE")
    refused(run("replay", SAMPLE, "--live", "0.0.0.0:9"), 2, "loopback")


def test_the_environment_says_where(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVACTORS_LIVE", str(folder / "live.rank1.sock"))
    assert "idle" in run("top", "--once").stdout


def test_a_replay_is_shown_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvactors.live.client import read_snapshot
    from kvactors.replay.onlooker import Onlooker

    path, seen = tmp_path / "live.sock", []
    progress = Onlooker.progress

    def look(self: Onlooker, tally: object) -> None:
        progress(self, tally)  # type: ignore[arg-type]
        if not seen:
            seen.append(read_snapshot(Address.of(str(path))))

    monkeypatch.setattr(Onlooker, "progress", look)
    result = run("replay", SAMPLE, "--requests", "5", "--scale", "4096", "--live", path)
    assert result.exit_code == 0, result.output
    assert (seen[0].name, seen[0].state, seen[0].waits["save_wait_s"].count) == ("replay", "running", 1)
    assert not path.exists()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("a b", "a b"),
        ("\x1b]0;x\x07", "\\x1b]0;x\\x07"),
        ("ü", "ü"),
        ("a\nb", "a\\nb"),
        ("\u202e", "\\u202e"),
        ("x" * 300, "x" * 199 + "…"),
    ],
)
def test_what_others_chose_cannot_steer_a_terminal(given: str, shown: str) -> None:
    assert printable(given) == shown


def test_units() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.50 KiB", 3 << 20: "3.00 MiB", 5 << 40: "5.00 TiB"}
    times = {0.00025: "250 µs", 0.0025: "2.5 ms", 2.5: "2.5 s", 125: "2 min 5 s", 9000: "2 h 30 min"}
    assert {n: shown_bytes(n) for n in sizes} == sizes
    assert {s: shown_seconds(s) for s in times} == times
