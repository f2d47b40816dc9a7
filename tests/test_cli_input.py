"""What the command line takes and refuses: a dash for standard input, times and speeds, advice, memory; the progress line."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvactors.cli import cli
from kvactors.errors import ConfigError
from kvactors.simulate.progress import Progress, progress_line
from kvactors.simulate.run import Totals
from kvactors.stores import FaultPlan

SAMPLE = Path(__file__).parent.parent / "examples/sample_trace.jsonl"


def run(*words: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, list(words), input=stdin)


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    for part in parts:
        assert part in line


# -- a dash ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "key"),
    [("replay - --requests 5 --json", "requests"), ("trace stats - --requests 5 --json", "requests")],
)
def test_a_dash_is_standard_input(words: str, key: str) -> None:
    result = run(*words.split(), stdin=SAMPLE.read_bytes())
    assert result.exit_code == 0, result.output
    assert key in json.loads(result.stdout)


def test_convert_reads_a_dash_into_a_file(tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    result = run("trace", "convert", "-", str(out), "--requests", "5", stdin=SAMPLE.read_bytes())
    assert result.exit_code == 0, result.output
    assert len(out.read_text().splitlines()) == 5


def test_convert_from_and_to_a_dash() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvactors", "trace", "convert", "-", "-", "--requests", "5"],
        input=SAMPLE.read_bytes(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == 5
    assert b"5 requests" in done.stderr


def test_a_bad_line_of_standard_input_is_named_so() -> None:
    refused(run("replay", "-", stdin=b"{\n"), "standard input:1")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["replay", "--report", "-"], ("--report -", "not to standard output")),
        (["replay", "--html", "-"], ("--html -", "not to standard output")),
        (["replay", "--layout", "-"], ("layout '-'", "/dev/stdin")),
        (["replay", "--faults", "-"], ("--faults -", "/dev/stdin")),
        (["trace", "stats", "--plot", "-"], ("--plot -", "not to standard output")),
    ],
)
def test_a_dash_that_means_nothing_is_refused(words: list[str], parts: tuple[str, ...]) -> None:
    refused(run(*words, str(SAMPLE)), *parts)


def test_convert_has_one_standard_output() -> None:
    refused(run("trace", "convert", str(SAMPLE), "-", "--json"), "OUT -", "--json")


# -- advice ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--latency 0", "give --virtual too"),
        ("--latency 0 --store mooncake", "--store mooncake needs a real one, so leave --latency out"),
        ("--bandwidth 1GB --store mooncake --local-master", "--local-master needs a real one, so leave --bandwidth out"),
        ("--layer-time 0 --live s.sock", "--live needs a real one, so leave --layer-time out"),
        ("--virtual --local-master", "leave it or --virtual out"),
        ("--virtual --store mooncake", "leave --virtual out"),
        ("--faults flaky-keys", "is a preset of `kvactors simulate`"),
        ("--faults all", "is a preset of `kvactors simulate`"),
    ],
)
def test_a_replay_is_advised_of_what_can_work(words: str, part: str) -> None:
    refused(run("replay", str(SAMPLE), *words.split()), part)


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
def test_a_simulation_takes_no_plan_file(name: str) -> None:
    refused(run("simulate", "--faults", name), f"--faults {name}", "`kvactors replay`", "flaky-keys")


# -- times and speeds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--virtual --latency 3601", "--latency 3601: must be from 0 to 3600 seconds"),
        ("--virtual --layer-time 1e9", "--layer-time 1e+09: must be from 0 to 3600 seconds"),
        ("--speed 1e-7", "--speed 1e-07: must be from 1e-06 to 1e+09"),
        ("--speed 1e10", "--speed 1e+10: must be from 1e-06 to 1e+09"),
    ],
)
def test_times_and_speeds_that_mean_nothing_are_refused(words: str, part: str) -> None:
    refused(run("replay", str(SAMPLE), *words.split()), part)


@pytest.mark.parametrize("latency_s", [3600.5, float("inf"), float("nan"), -1])
def test_the_latency_of_a_plan_is_an_hour_at_most(latency_s: float) -> None:
    with pytest.raises(ConfigError, match=r"latency_s.*from 0 to 3600"):
        FaultPlan.from_mapping({"faults": [{"what": "latency", "latency_s": latency_s}]})


# -- memory ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "words", "warned"),
    [
        (100, [], True),
        (100, ["--json"], True),
        (100, ["--virtual", "--json"], True),
        (100, ["--json", "--capacity", "1GB"], False),
        (None, ["--json"], False),
    ],
)
def test_a_replay_warns_of_too_little_memory_and_runs(
    monkeypatch: pytest.MonkeyPatch, nbytes: int | None, words: list[str], warned: bool
) -> None:
    monkeypatch.setattr("kvactors.replay.command.available_bytes", lambda: nbytes)
    result = run("replay", str(SAMPLE), "--requests", "5", *words)
    assert result.exit_code == 0, result.output
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning:")]
    assert len(warnings) == warned
    assert all("100 B of memory left" in line and "--scale" in line and "--capacity" in line for line in warnings)
    assert "warning:" not in result.stdout
    assert json.loads(result.stdout)["requests"]["completed"] == 5 if "--json" in words else "5 of 5" in result.stdout


# -- the progress of a simulation ------------------------------------------------------------------------------------------


def test_the_progress_line_comes_ten_times_a_second_and_goes() -> None:
    shown, now = io.StringIO(), iter([0.0, 0.0, 0.0, 0.05, 0.2, 0.2])
    progress = Progress(shown, 40, lambda: next(now))
    for seeds in (1, 2, 3):
        progress.update(Totals(seeds=seeds, wall_s=1.0))
    progress.clear()
    assert [n for n in (1, 2, 3) if f"{n} of 40 seeds" in shown.getvalue()] == [1, 3]
    assert shown.getvalue().endswith("\r\x1b[K")
    assert progress_line(Totals(seeds=10, failing=1, wall_s=2.0), 40) == "10 of 40 seeds, 1 failing, 5 seeds/s, 6 s left"


def test_no_stream_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(None, 40)
    progress.update(Totals(seeds=1))
    progress.say("told")
    progress.clear()
    assert capsys.readouterr() == ("told\n", "")


@pytest.mark.parametrize(
    ("words", "terminal", "shown"), [([], "xterm", True), (["--json"], "xterm", False), ([], "dumb", False)]
)
def test_only_a_terminal_that_can_shows_progress(words: list[str], terminal: str, shown: bool) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvactors", "simulate", "--seeds", "0:2", "--requests", "2", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, text=True, env={**os.environ, "TERM": terminal}
    ) as child:
        os.close(theirs)
        out, _ = child.communicate(timeout=60)
        said = bytearray()
        try:
            while part := os.read(ours, 65536):
                said += part
        except OSError:  # Linux's way to say that the other side was closed
            pass
        os.close(ours)
    assert child.returncode == 0, out
    assert (b"1 of 2 seeds" in said) == shown
    assert "of 2 seeds" not in out


def test_into_a_pipe_there_is_no_progress() -> None:
    result = run("simulate", "--seeds", "0:2", "--requests", "2")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
