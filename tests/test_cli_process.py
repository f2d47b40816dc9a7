"""The command in a process of its own: streams that are gone or full, traces that can be read once, Ctrl-C at bad moments."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvactors.cli import cli
from kvactors.errors import KVActorsError
from kvactors.replay.report import Report
from kvactors.simulate import run as simulated
from kvactors.simulate.world import Outcomes

EXAMPLES = Path(__file__).parent.parent / "examples"
SAMPLE = EXAMPLES / "sample_trace.jsonl"
KVACTORS = [sys.executable, "-m", "kvactors"]
FULL = Path("/dev/full")

forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # threads that other tests left
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs a file that is always full")


def outputs(folder: Path) -> list[str]:
    return ["--report", str(folder / "r.json"), "--html", str(folder / "p.html"), "--timeline", str(folder / "t.json")]


def assert_written(folder: Path) -> dict[str, Any]:
    assert "<svg" in (folder / "p.html").read_text()
    assert json.loads((folder / "t.json").read_text())["traceEvents"]
    report: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return report


def shell(line: str, **env: str) -> subprocess.CompletedProcess[str]:
    words = {"KVACTORS": f"{sys.executable} -m kvactors", "SAMPLE": str(SAMPLE)}
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, **words, **env}, timeout=60, check=False
    )


def one_line(text: str) -> str:
    assert len(text.splitlines()) == 1, text
    assert "Traceback" not in text
    return text


# -- streams -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", ["| true", ">&-", "2>&-", ">&- 2>&-"])
def test_the_files_are_written_whatever_becomes_of_the_streams(tmp_path: Path, sink: str) -> None:
    words = " ".join(outputs(tmp_path))
    done = shell(f"set -o pipefail; $KVACTORS replay $SAMPLE --requests 20 {words} {sink}")
    assert done.returncode == 0, done.stderr
    assert done.stderr in ("", "replaying 20 requests\n")
    assert assert_written(tmp_path)["requests"]["completed"] == 20


@needs_full
def test_a_full_stdout_is_said_and_costs_no_file(tmp_path: Path) -> None:
    done = shell(f"$KVACTORS replay $SAMPLE --requests 20 {' '.join(outputs(tmp_path))} >/dev/full")
    assert done.returncode == 1
    assert one_line(done.stderr.removeprefix("replaying 20 requests\n")).startswith(
        "kvactors: standard output cannot be written"
    )
    assert_written(tmp_path)


@needs_full
@pytest.mark.parametrize("words", ["layout list", "layout show kimi-k3", "layout show kimi-k3 --json", "--help", "--version"])
def test_other_commands_with_a_full_stdout(words: str) -> None:
    done = shell(f"$KVACTORS {words} >/dev/full")
    assert done.returncode == 1
    assert "cannot be written" in one_line(done.stderr)
    assert shell(f"set -o pipefail; $KVACTORS {words} | true").stderr == ""


DOCTOR = pytest.param("doctor", marks=pytest.mark.mooncake)
"""It starts a master where one is installed."""


@pytest.mark.parametrize("words", ["layout list", "layout show kimi-k3", DOCTOR, "replay $SAMPLE --requests 5", "--help"])
def test_ascii_streams(words: str) -> None:
    done = shell(f"$KVACTORS {words}", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["", "layout"])
def test_usage_goes_to_stderr(words: str) -> None:
    done = shell(f"$KVACTORS {words}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: kvactors" in done.stderr


def test_warnings_go_to_stderr_and_only_where_nothing_breaks_on_purpose() -> None:
    words = ["replay", str(SAMPLE), "--requests", "20", "--virtual"]
    with_faults = CliRunner().invoke(cli, [*words, "--faults", "lost-master"])
    assert with_faults.stderr.splitlines() == ["replaying 20 requests"]
    debug = CliRunner().invoke(cli, [*words, "--faults", "lost-master"], env={"KVACTORS_RANGE_DEBUG": "1"})
    assert any(line.startswith("WARNING kvactors.") for line in debug.stderr.splitlines()), debug.stderr
    assert "kvactors." not in debug.stdout
    json.loads(CliRunner().invoke(cli, ["layout", "list", "--json"], env={"KVACTORS_RANGE_DEBUG": "1"}).stdout)
    assert not logging.getLogger("kvactors").handlers


# -- names from users ----------------------------------------------------------------------------------------------------


def test_names_are_printed_as_they_are(tmp_path: Path) -> None:
    name, entry = "a[/b]:key:[red]", "k[/]"
    group = {"kind": "full", "block_tokens": 16, "layers": [0], "entries": [{"name": entry, "bytes": 8, "dtype": "[x]"}]}
    path = tmp_path / "[bold]l.json"
    path.write_text(json.dumps({"name": name, "groups": [group]}))
    run = CliRunner().invoke(cli, ["replay", str(SAMPLE), "--requests", "3", "--layout", str(path), *outputs(tmp_path)])
    assert run.exit_code == 0, run.output
    assert name in run.stdout
    assert assert_written(tmp_path)["layout"]["name"] == name
    shown = CliRunner().invoke(cli, ["layout", "show", str(path)]).stdout
    assert name in shown
    assert entry in shown
    assert "[x]" in shown


def test_a_trace_whose_name_is_no_text(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/t\xff.jsonl"
    Path(os.fsdecode(path)).write_bytes(SAMPLE.read_bytes())
    done = subprocess.run([*KVACTORS, "replay", path, "--requests", "3", *outputs(tmp_path)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert assert_written(tmp_path)["trace"]["path"].endswith("t\ufffd.jsonl")


# -- traces --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "$KVACTORS replay <(cat $SAMPLE) --requests 30",
        "cat $SAMPLE | $KVACTORS replay /dev/stdin --requests 30",
        "$KVACTORS replay /dev/stdin --requests 30 < $SAMPLE",
        "gzip -c $SAMPLE | $KVACTORS replay /dev/stdin --requests 30",
    ],
)
def test_a_trace_that_can_be_read_only_once(line: str) -> None:
    done = shell(line)
    assert done.returncode == 0, done.stderr
    assert "30 of 30" in done.stdout


def test_a_trace_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + SAMPLE.read_bytes())
    run = CliRunner().invoke(cli, ["replay", str(path), "--requests", "5"])
    assert run.exit_code == 0, run.output


def test_deep_nesting_in_a_trace_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"more": ' + "[" * 100_000 + "\n")
    run = CliRunner().invoke(cli, ["replay", str(path)])
    assert run.exit_code == 2
    assert "t.jsonl:1: is nested too deeply" in one_line(run.stderr)


def test_a_trace_that_is_edited_during_the_run_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"timestamp": 300 * i, "input_length": 600, "hash_ids": [i, 9], "note": "x" * 50_000} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [*KVACTORS, "replay", str(path), "--speed", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert "replaying" in child.stderr.readline()
        path.write_text("")
        out, err = child.communicate(timeout=60)
    assert child.returncode == 1, (out, err)
    assert out.count("was changed while it was replayed") == 1
    assert "Traceback" not in out + err


# -- Ctrl-C --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_drain(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run whose drain would take long, some steps old."""
    plan = tmp_path / "plan.yaml"
    plan.write_text("faults: [{what: latency, call: put_commit, latency_s: 25}]")
    words = ["replay", str(SAMPLE), "--concurrency", "2", "--faults", str(plan), *outputs(tmp_path)]
    with subprocess.Popen([*KVACTORS, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        try:
            assert "replaying" in child.stderr.readline()
            yield child
        finally:
            child.kill()


def test_a_second_ctrl_c_gives_up_the_drain_but_not_the_output(slow_drain: subprocess.Popen[str], tmp_path: Path) -> None:
    assert slow_drain.stderr is not None
    slow_drain.send_signal(signal.SIGINT)
    assert any("stopping" in line for line in slow_drain.stderr)  # a line of progress may come before it
    slow_drain.send_signal(signal.SIGINT)
    out, err = slow_drain.communicate(timeout=15)
    assert slow_drain.returncode == 130, err
    assert "Traceback" not in err
    assert "Interrupted" in out
    assert "given up" in out
    assert re.search(r"giving up; calls of the store that have not returned: commit of group \d for \d+\.\d s", err)
    report = assert_written(tmp_path)
    assert report["interrupted"] is True
    assert report["sessions"]["open_at_end"] > 0
    assert report["invariants"]["violations"] == []


def test_ctrl_c_while_the_files_are_written_leaves_none_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Report.write

    def interrupted(report: Report, path: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write(report, path)

    monkeypatch.setattr(Report, "write", interrupted)
    run = CliRunner().invoke(cli, ["replay", str(SAMPLE), "--requests", "5", *outputs(tmp_path)])
    assert run.exit_code == 130, run.output
    assert "5 of 5" in run.stdout
    assert assert_written(tmp_path)["interrupted"] is False
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_during_the_first_imports_is_no_traceback() -> None:
    program = """
import builtins, os, signal
real = builtins.__import__
def importing(name, *rest):
    if name == "click":
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest)
builtins.__import__ = importing
from kvactors.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("jobs", [1, 2])
@forks
def test_simulate_ends_after_the_run_in_hand_and_tells_what_it_did(number: signal.Signals, jobs: int) -> None:
    before, level = signal.getsignal(number), logging.getLogger("kvactors").level
    plans = (simulated.scenario(seed, "none", requests=1) for seed in itertools.count())

    def signalled(totals: simulated.Totals) -> None:
        if totals.seeds == 1:
            os.kill(os.getpid(), number)

    totals = simulated.simulate(plans, jobs=jobs, most_failures=1, say=print, on_progress=signalled)
    assert (totals.seeds, totals.interrupted, totals.exit_code) == (1, True, 128 + number)
    assert totals.line().endswith("; interrupted")
    assert (signal.getsignal(number), logging.getLogger("kvactors").level) == (before, level)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_simulate_prints_its_summary(number: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Signalled(simulated.World):
        def run(self) -> Outcomes:
            os.kill(os.getpid(), number)
            return super().run()

    monkeypatch.setattr(simulated, "World", Signalled)
    result = CliRunner().invoke(cli, ["simulate", "--requests", "1"])
    assert result.exit_code == code
    assert result.stdout.startswith("1 seeds over 1 preset(s)")
    assert result.stdout.endswith("; interrupted\n")


@forks
def test_a_signal_to_all_processes_of_simulate_is_an_interruption_and_a_killed_one_an_error() -> None:
    plans = [simulated.scenario(seed, "none", requests=1) for seed in range(200)]

    def all_signalled(totals: simulated.Totals) -> None:
        for child in multiprocessing.active_children():
            child.terminate()
        if totals.seeds == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def killed(_totals: simulated.Totals) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    totals = simulated.simulate(plans, jobs=2, most_failures=1, say=print, on_progress=all_signalled)
    assert (totals.interrupted, totals.exit_code) == (True, 143)
    with pytest.raises(KVActorsError, match=r"a process of the simulation was killed .*; give fewer --jobs"):
        simulated.simulate(plans, jobs=2, most_failures=1, say=print, on_progress=killed)


def test_a_hang_can_still_be_interrupted() -> None:
    from kvactors.replay.interrupts import PATIENCE, Interrupts

    assert threading.current_thread() is threading.main_thread()
    heard: list[int] = []
    with Interrupts() as interrupts, interrupts.passed_to(heard.append):
        for _ in range(PATIENCE):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert heard == [1, 2, 3]
