"""`kvactors bench`, as a user types it, on few bytes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvactors.bench import rows, state_rows
from kvactors.bench.figures import Answer, Figure, Skipped, Target
from kvactors.bench.rows import NAMES
from kvactors.cli import cli
from kvactors.errors import StoreError
from tests.bench.sizes import CASES, TINY

ROW_KEYS = ["bench", "case", "ratio", "target", "ok", "ours", "baseline", "unit"]
MACHINE_KEYS = {"cpu", "cores", "affinity", "python", "numpy", "uvloop", "kernel", "load_average", "pinned"}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, sizes in TINY.values():
        monkeypatch.setattr(module, "QUICK", sizes)


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["bench", *words])


def found(*words: str) -> dict[str, Any]:
    result = run(*words, "--quick", "--json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_json_has_machine_and_rows_and_nothing_else() -> None:
    answer = found("groups", "copy")
    assert list(answer) == ["machine", "rows"]
    assert set(answer["machine"]) > MACHINE_KEYS
    assert [row["bench"] for row in answer["rows"]] == ["copy"] * CASES["copy"] + ["groups"] * CASES["groups"]
    for row in answer["rows"]:
        assert list(row) == ROW_KEYS
        assert isinstance(row["ratio"], float)
        assert isinstance(row["ok"], bool)
        assert row["target"] is None or isinstance(row["target"], str)
        assert row["ok"] or row["target"] is not None


def test_the_table_names_the_machine_and_every_case() -> None:
    result = run("groups", "--quick")
    assert result.exit_code == 0, result.output
    assert "cpu" in result.stdout
    assert "five groups / one group" in result.stdout
    assert "groups: 16 blocks" in result.stderr


def test_pinned_threads_are_free_again_afterwards() -> None:
    import os

    before = os.sched_getaffinity(0)
    assert found("copy", "--pin")["machine"]["pinned"] is True
    assert os.sched_getaffinity(0) == before


def answers(monkeypatch: pytest.MonkeyPatch, of: dict[str, Answer | Exception]) -> None:
    """What each benchmark finds, or raises."""

    def stand_in(name: str, *_: object) -> Answer:
        answer = of.get(name, Answer())
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("kvactors.bench.command.run", stand_in)


def figure(ok: bool) -> Figure:
    return Figure("copy", "put", 1.0 if ok else 2.0, 1.0, "s", Target("<=", 1.5))


@pytest.mark.parametrize(
    ("ok", "words", "code"), [(True, (), 0), (False, (), 0), (True, ("--check",), 0), (False, ("--check",), 1)]
)
def test_a_missed_target_fails_only_a_check(
    monkeypatch: pytest.MonkeyPatch, ok: bool, words: tuple[str, ...], code: int
) -> None:
    answers(monkeypatch, {"copy": Answer([figure(ok)])})
    assert run("copy", *words).exit_code == code
    assert run("copy", "--json", *words).exit_code == code


def test_what_cannot_run_here_is_skipped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {"copy": Answer([figure(True)]), "lookup": Skipped("no vLLM: install it")})
    answer = found("copy", "lookup")
    assert [row["bench"] for row in answer["rows"]] == ["copy"]
    assert answer["skipped"] == [{"bench": "lookup", "reason": "no vLLM: install it"}]
    result = run("copy", "lookup", "--check")
    assert result.exit_code == 0
    assert "lookup: skipped: no vLLM: install it" in result.stderr


def test_what_failed_is_named_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {"copy": StoreError("lost it"), "groups": Answer([figure(True)])})
    result = run("copy", "groups", "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert len(answer["rows"]) == 1
    assert answer["failed"] == [{"bench": "copy", "reason": "lost it"}]


def test_without_names_all_run_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def stand_in(name: str, *_: object) -> Answer:
        ran.append(name)
        return Answer([figure(True)])

    monkeypatch.setattr("kvactors.bench.command.run", stand_in)
    assert run("--json").exit_code == 0
    assert tuple(ran) == NAMES


def test_what_a_benchmark_prints_does_not_get_into_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(*_: object) -> Answer:
        print("a library says hello")
        return Answer([figure(True)])

    monkeypatch.setattr("kvactors.bench.command.run", stand_in)
    result = run("copy", "--json")
    assert len(json.loads(result.stdout)["rows"]) == 1
    assert "a library says hello" in result.stderr


USAGE = [
    (("nothing",), "Invalid value for"),
    (("staging", "copy"), "staging is a measurement of its own"),
    (("copy", "--timeline", "t.json"), "--timeline: only step and overlap"),
    (("copy", "--trace", __file__), "--trace: only replay"),
]


@pytest.mark.parametrize(("words", "text"), USAGE)
def test_bad_usage(words: tuple[str, ...], text: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert text in result.stderr


def test_no_figures_of_range_debug_or_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("KVACTORS_RANGE_DEBUG", "1")
        result = run("groups", "--quick")
    assert result.exit_code == 2
    assert "KVACTORS_RANGE_DEBUG" in result.stderr
    monkeypatch.setattr(sys, "getprofile", lambda: print)
    result = run("groups", "--quick")
    assert result.exit_code == 2
    assert "a profiler is on" in result.stderr


def test_a_timeline_is_written(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    found("overlap", "--timeline", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"compute", "coordinator", "group-0"} <= names


def test_replay_plays_a_trace_that_is_given() -> None:
    sample = Path(__file__).parents[2] / "examples" / "sample_trace.jsonl"
    (row,) = found("replay", "--trace", str(sample))["rows"]
    assert "3 requests" in row["case"]


def test_state_rows_in_the_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(state_rows, "_MOVED_BYTES", 1 << 20)
    monkeypatch.setattr(state_rows, "KIBS", (64,))
    answer = found("state-rows")
    assert list(answer) == ["machine", "rows"]
    assert len(answer["rows"]) == 3 * len(state_rows.KIBS)


def test_full_sizes_without_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    module, sizes = TINY["groups"]
    monkeypatch.setattr(module, "FULL", sizes)
    monkeypatch.setattr(module, "QUICK", None)
    assert rows.run("groups", rows.Settings(), lambda _: None).figures
