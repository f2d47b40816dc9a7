"""Every command: its help fits a screen and ends with an example that parses; unknown names are told the nearest one."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from kvactors import stores
from kvactors.cli import cli
from kvactors.cli.completion import VARIABLE
from kvactors.simulate import run as simulated
from kvactors.simulate.world import Outcomes

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "examples/sample_trace.jsonl"
SCREEN_LINES, SCREEN_COLUMNS = 40, 100


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All of them, groups too."""
    yield path, group
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(cli))
LEAVES = {path: command for path, command in COMMANDS.items() if not isinstance(command, click.Group)}
IDS = [" ".join(("kvactors", *path)) for path in COMMANDS]
LEAF_IDS = [" ".join(("kvactors", *path)) for path in LEAVES]


def run(*args: str, **env: str) -> Result:
    return CliRunner().invoke(cli, list(args), env=env)


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def help_of(path: tuple[str, ...]) -> list[str]:
    result = CliRunner().invoke(cli, [*path, "--help"], terminal_width=SCREEN_COLUMNS)
    assert result.exit_code == 0
    return result.stdout.splitlines()


def examples_of(path: tuple[str, ...]) -> list[str]:
    lines = help_of(path)
    start = len(lines) - lines[::-1].index("  Example:")
    assert all(line.startswith("    ") for line in lines[start:]), "the help must end with its example"
    return [line.strip() for line in lines[start:]]


def test_all_commands_are_walked() -> None:
    names = {" ".join(path) for path in LEAVES}
    assert names >= {"replay", "trace stats", "trace convert", "simulate", "layout list", "layout show", "store flush"}
    assert names >= {"bench", "doctor", "completion"}


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_help_fits_a_screen(path: tuple[str, ...]) -> None:
    lines = help_of(path)
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_help_ends_with_an_example_that_parses(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for line in examples_of(path):
        found = re.search(r"kvactors [^|)]*", line)
        assert found, line
        words = shlex.split(found[0])[1:]
        assert tuple(words[: len(path)]) == path
        context: click.Context | None = None
        command: click.Command | None = cli
        while command is not None:
            context = command.make_context(words[0] if words else "", words[bool(context) :], parent=context)
            words = [*context._protected_args, *context.args] if isinstance(command, click.Group) else []
            command = command.get_command(context, words[0]) if isinstance(command, click.Group) else None


def test_the_line_of_a_command_that_is_imported_late_is_its_own() -> None:
    for name, lazy in cli.lazy.items():
        command = COMMANDS[(name,)]
        assert command.get_short_help_str(200).startswith(lazy.help.rstrip("."))
        assert f"  {name} " in "\n".join(help_of(()))


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_an_unknown_option_is_told_the_nearest(path: tuple[str, ...]) -> None:
    for parameter in COMMANDS[path].params:
        for name in (name for name in parameter.opts if name.startswith("--") and len(name) > 4):
            line = refused(run(*path, f"{name[:-1]}{name[-1] * 2}x"))
            assert name in line


@pytest.mark.parametrize("path", [p for p in COMMANDS if p not in LEAVES], ids=lambda p: " ".join(("kvactors", *p)))
def test_an_unknown_command_is_told_the_nearest(path: tuple[str, ...]) -> None:
    group = COMMANDS[path]
    assert isinstance(group, click.Group)
    for name in group.list_commands(click.Context(group)):
        assert f"did you mean {name}?" in refused(run(*path, f"{name}x"))
    line = refused(run(*path, "0000"))
    assert "did you mean" not in line
    assert all(name in line for name in group.list_commands(click.Context(group)))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("layout show lama-3.1-8b", "llama-3.1-8b"),
        ("layout show Kimi-K3", "kimi-k3"),
        ("replay SAMPLE --layout gema-3-27b", "gemma-3-27b"),
        ("replay SAMPLE --store memry", "memory"),
        ("replay SAMPLE --faults flakey-store", "flaky-store"),
        ("replay SAMPLE --format mooncak", "mooncake"),
        ("replay SAMPLE --format moonckae", "mooncake"),
        ("trace stats SAMPLE --format balian", "bailian"),
        ("trace convert SAMPLE out.jsonl --to moncake", "mooncake"),
        ("simulate --faults lost-mster", "lost-master"),
        ("simulate --layout windws", "windows"),
        ("simulate --layout llama-3.1-8c", "llama-3.1-8b"),
        ("bench lokup", "lookup"),
        ("bench state-row", "state-rows"),
        ("completion bsh", "bash"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(words: str, name: str) -> None:
    line = refused(run(*words.replace("SAMPLE", str(SAMPLE)).split()))
    assert re.search(rf"did you mean '?{re.escape(name)}\b", line), line


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ("preset: slow-stor", "slow-store"),
        ("sed: 3", "seed"),
        ("faults: [{what: outcom}]", "outcome"),
        ("faults: [{what: raise, call: put_comit}]", "put_commit"),
        ("faults: [{what: raise, cal: put_commit}]", "call"),
        ("faults: [{what: outcome, outcome: transfer faild}]", "transfer failed"),
    ],
)
def test_an_unknown_name_in_a_fault_plan_is_told_the_nearest(tmp_path: Path, plan: str, name: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(plan)
    assert f"did you mean {name}?" in refused(run("replay", str(SAMPLE), "--faults", str(path)))


@pytest.mark.parametrize(
    ("group", "name"),
    [({"kind": "fuul"}, "full"), ({"block_tokns": 16}, "block_tokens")],
)
def test_an_unknown_name_in_a_layout_file_is_told_the_nearest(tmp_path: Path, group: dict[str, object], name: str) -> None:
    base = {"kind": "full", "block_tokens": 16, "layers": [0], "entries": [{"name": "k", "bytes": 8}]}
    path = tmp_path / "layout.json"
    path.write_text(json.dumps({"name": "m", "groups": [{**base, **group}]}))
    assert f"did you mean {name}?" in refused(run("layout", "show", str(path)))


# -- JSON ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LEAVES, ids=LEAF_IDS)
def test_every_command_with_results_has_json(path: tuple[str, ...]) -> None:
    has = any("--json" in parameter.opts for parameter in LEAVES[path].params)
    assert has or path in {("completion",), ("top",), ("story",)}


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("layout show seed-example", "digest"),
        ("replay SAMPLE --requests 5", "tokens"),
        ("replay SAMPLE --requests 5 --virtual", "event_log_sha256"),
        ("trace stats SAMPLE", "ceiling"),
        ("trace convert SAMPLE OUT", "lost"),
        ("simulate --seeds 0:2 --requests 3", "failing"),
    ],
)
def test_json_is_all_that_stdout_gets(tmp_path: Path, words: str, key: str) -> None:
    told = words.replace("SAMPLE", str(SAMPLE)).replace("OUT", str(tmp_path / "out.jsonl"))
    result = run(*told.split(), "--json", KVACTORS_RANGE_DEBUG="1", FORCE_COLOR="1")
    assert result.exit_code == 0, result.output
    assert key in json.loads(result.stdout)
    assert "\x1b" not in result.stdout


def test_the_json_of_a_replay_is_its_report(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    result = run("replay", str(SAMPLE), "--requests", "5", "--virtual", "--json", "--report", str(report))
    assert result.stdout == report.read_text()


def test_the_json_of_a_simulation_tells_of_failing_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    world = simulated.World

    class Failing(world):  # type: ignore[misc, valid-type]
        def run(self) -> Outcomes:
            outcomes = super().run()
            outcomes.violations.append("I0: an invariant of this test's own")
            return outcomes

    monkeypatch.setattr(simulated, "World", Failing)
    result = run("simulate", "--seeds", "7:8", "--requests", "1", "--faults", "none", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["seeds"], found["failing"], found["presets"]) == (1, 1, {"none": 1})
    assert any("kvactors simulate --seeds 7:8 --faults none" in line for line in found["told"])


def test_the_json_of_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def __init__(self, config: stores.MooncakeConfig) -> None:
            self.address = config.master_server_address

        def remove_matching(self, pattern: str) -> int:
            return 3 if pattern and self.address == "10.0.0.5:50051" else 0

        def close(self) -> None:
            pass

    monkeypatch.setattr(stores, "MooncakeStore", Pool)
    result = run("store", "flush", "--namespace", "epoch-7", "--master", "10.0.0.5:50051", "--json")
    assert json.loads(result.stdout) == {"namespace": "epoch-7", "removed": 3, "lease_s": 10.0}
    assert "stays" in result.stderr


# -- terminals -------------------------------------------------------------------------------------------------------------


def on_terminal(*words: str, **env: str) -> str:
    """What the command prints on a terminal."""
    ours, theirs = pty.openpty()
    known = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "kvactors", *words], stdout=theirs, stderr=theirs, env={**known, "TERM": "xterm-256color", **env}
    ) as child:
        os.close(theirs)
        out = bytearray()
        try:
            while part := os.read(ours, 65536):
                out += part
        except OSError:  # Linux's way to say that the other side was closed
            pass
        os.close(ours)
    assert child.returncode == 0, out.decode()
    return out.decode()


@pytest.mark.parametrize(
    ("env", "styled"), [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_are_for_terminals_that_want_them(env: dict[str, str], styled: bool) -> None:
    assert ("\x1b[" in on_terminal("layout", "show", "seed-example", **env)) == styled


def test_no_escapes_into_a_pipe() -> None:
    for words in (("layout", "show", "seed-example"), ("trace", "stats", str(SAMPLE))):
        assert "\x1b" not in run(*words).output


# -- completion ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvactors` on the PATH."""
    path = tmp_path / "kvactors"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvactors "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("lay", ["layout"]),
        ("trace st", ["stats"]),
        ("layout show qwen", ["qwen3.5-9b"]),
        ("replay t.jsonl --store m", ["memory", "mooncake"]),
        ("replay t.jsonl --faults slow", ["slow-store"]),
        ("replay t.jsonl --format b", ["bailian"]),
        ("simulate --faults lost", ["lost-master"]),
        ("simulate --layout wor", ["worked-example"]),
        ("bench look", ["lookup"]),
        ("replay --virt", ["--virtual"]),
    ],
)
def test_names_are_completed(line: str, want: list[str]) -> None:
    *words, incomplete = line.split()
    found = ShellComplete(cli, {}, "kvactors", VARIABLE).get_completions(words, incomplete)
    assert [item.value for item in found] == want


def test_a_name_that_is_none_of_ours_is_completed_as_a_file() -> None:
    (item,) = ShellComplete(cli, {}, "kvactors", VARIABLE).get_completions(["layout", "show"], "my-")
    assert (item.type, item.value) == ("file", "my-")


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(("line", "want"), [("kvactors lay", ["layout"]), ("kvactors layout show qwen", ["qwen3.5-9b"])])
def test_bash_completes(line: str, want: list[str]) -> None:
    words = line.split()
    script = (
        'eval "$(kvactors completion bash)"\n'
        f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}\n"
        "_kvactors_completion kvactors\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == want


@pytest.mark.parametrize(("shell", "word"), [("bash", "complete"), ("zsh", "compdef"), ("fish", "complete --no-files")])
def test_each_shell_has_a_script(shell: str, word: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert word in result.stdout
    assert f"_KVACTORS_COMPLETE={shell}_complete" in result.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_answers_to_other_shells(shell: str) -> None:
    env = {**os.environ, "_KVACTORS_COMPLETE": f"{shell}_complete", "COMP_WORDS": "kvactors lay", "COMP_CWORD": "1"}
    env["COMP_CWORD"] = "lay" if shell == "fish" else "1"
    done = subprocess.run([sys.executable, "-m", "kvactors"], capture_output=True, text=True, env=env, timeout=60, check=False)
    assert "layout" in done.stdout, done.stderr


# -- speed -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["replay", "--help"]])
def test_help_imports_next_to_nothing(words: list[str]) -> None:
    program = f"""
import sys
from kvactors.cli import main
try:
    main({words!r})
except SystemExit:
    pass
found = {{name.partition(".")[0] for name in sys.modules}}
print(sorted(found & {{"numpy", "torch", "rich", "msgspec", "yaml"}}), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "[]\n"
