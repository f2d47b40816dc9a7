"""Files of stories: what a running engine would have told, after its end."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvactors.cli import cli
from kvactors.core import story
from kvactors.core.story import StoryEvent
from kvactors.errors import ConfigError
from kvactors.live import Address, LiveView
from kvactors.live.client import read_story
from kvactors.live.story_file import StoryFile, StoryWriter
from kvactors.replay.stories import StoryLog
from tests.engine.rig import Rig, full_layout, hashes
from tests.live.prometheus import until

SAMPLE = Path(__file__).parents[2] / "examples/sample_trace.jsonl"
REPLAY = ("replay", SAMPLE, "--layout", "gemma-3-27b", "--scale", "4096", "--requests", "12", "--faults", "flaky-store")


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def refused(result: Result, code: int, *parts: str) -> None:
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.strip().splitlines()
    for part in parts:
        assert part in line


def written(folder: Path, *pages: tuple[str, list[StoryEvent]]) -> Path:
    """A file of stories with these pages."""
    sink = io.BytesIO()
    writer = StoryWriter(sink, "a trace", 10.0)
    for request, events in pages:
        writer.write(request, events)
    writer.end()
    path = folder / "stories"
    path.write_bytes(sink.getvalue())
    return path


def page(request: str, *texts: str, at_s: float = 11.0) -> tuple[str, list[StoryEvent]]:
    return request, [StoryEvent(at_s + n, 0, n, text) for n, text in enumerate(texts)]


def test_a_file_tells_what_the_running_engine_told(tmp_path: Path) -> None:
    async def play() -> None:
        async with Rig(full_layout()) as rig:
            address = Address.of(str(tmp_path / "live.sock"))
            with LiveView(rig.engine, address):
                book, sink = rig.engine.keep_stories(), io.BytesIO()
                book.hand_to(StoryWriter(sink, "a rig", rig.engine.clock.now()).write)
                for name in ("a", "b"):
                    await rig.save(name, hashes(2, name))
                running = {name: await asyncio.to_thread(read_story, address, name) for name in ("a", "b")}
                book.hand_on()
            path = tmp_path / "stories"
            path.write_bytes(sink.getvalue())
            told = StoryFile(str(path))
            assert told.names() == ["a", "b"]
            for name in ("a", "b"):
                (there,), (here,) = running[name], told.story(name)
                assert [event[1:] for event in here.events] == [event[1:] for event in there.events]
                assert len(here.events) > 4
                assert [event[0] for event in here.events] == pytest.approx([event[0] for event in there.events], abs=2e-6)

    asyncio.run(play())


def test_several_pages_are_one_story(tmp_path: Path) -> None:
    path = written(tmp_path, page("a", "one", "two"), page("b", "x"), page("a", "three", at_s=20.0))
    (part,) = StoryFile(str(path)).story("a")
    assert part.events == [(0.0, 0, 0, "one"), (1.0, 0, 1, "two"), (9.0, 0, 0, "three")]
    assert StoryFile(str(path)).story("c") == []


@pytest.mark.parametrize(("left", "told"), [(-5, ["a", "b"]), (0, ["a", "b"]), (5, ["a"])])
def test_a_file_that_has_no_end_says_so(tmp_path: Path, left: int, told: list[str]) -> None:
    """Cut within its last line, before it, and within the line before."""
    path = written(tmp_path, page("a", "one"), page("b", "x"))
    whole = path.read_bytes()
    end = len(whole.splitlines(keepends=True)[-1])
    path.write_bytes(whole[: -end - left])
    file = StoryFile(str(path))
    assert (file.names(), file.cut) == (told, True)
    cut = f"{path} has no end: its run was killed or still goes on, or the file was cut, and there may be more to tell"
    refused(run("story", "c", path), 1, f"no story of it; {len(told)} are kept, such as ", cut)
    shown = run("story", "a", path)
    assert (shown.exit_code, shown.stdout.splitlines()[0], shown.stderr) == (0, "a, 1 events", f"kvactors: {cut}\n")
    path.write_bytes(whole)
    assert (file.names(), file.cut, run("story", "a", path).stderr) == (["a", "b"], False, "")


def test_a_run_that_told_nothing(tmp_path: Path) -> None:
    path = written(tmp_path)
    refused(run("story", "a", path), 1, "there is no story; nothing has happened there")
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    refused(run("story", "a", path), 1, "nothing has happened there; ", "has no end")


def test_what_is_no_utf_8_costs_a_letter(tmp_path: Path) -> None:
    path = written(tmp_path, page("a", "cannot read /mnt/\udcff"))
    (part,) = StoryFile(str(path)).story("a")
    assert part.events[0][3] == "cannot read /mnt/?"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is no file of stories"),
        ("\xff\xfe", "is no file of stories"),
        ('{"schema": 1, "trace": {}}\n', "is no file of stories"),
        ('{\n "schema": 1,\n "trace": {}}\n', "is no file of stories"),
        ('{"kvactors_stories": 2, "run": "x"}\n', "stories of schema 2, this is 1"),
        ('{"kvactors_stories": 1, "run": "x"}\n{"request": 3}\n', "is a damaged file of stories"),
        ('{"kvactors_stories": 1, "run": "x"}\n' + "[" * 100_000 + "\n", "is a damaged file of stories"),
        ("[" * 100_000 + "\n", "is no file of stories"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=part):
        StoryFile(str(path)).names()
    refused(run("story", "r1", path), 2, str(path), part)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(run("story", "r1", tmp_path / "pipe"), 2, "is something else and no engine's socket")
    refused(run("story", "r1", tmp_path / "none.stories"), 2, "none.stories: there is nothing of this name")
    refused(run("story", "r1", "x" * 300), 2, "is no path: File name too long")


def test_one_bad_file_hides_no_other(tmp_path: Path) -> None:
    good, bad = written(tmp_path, page("a", "one")), tmp_path / "bad"
    bad.write_bytes(b"x")
    result = run("story", "a", bad, good)
    assert (result.exit_code, result.stdout.splitlines()[0]) == (1, "a, 1 events")
    assert f"{bad}: is no file of stories" in result.stderr


def test_the_environment_may_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVACTORS_LIVE", str(written(tmp_path, page("a", "one"))))
    assert run("story", "a").stdout.startswith("a, 1 events")


def test_a_replay_that_has_ended_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.stories"
    ran = run(*REPLAY, "--stories", path, "--json")
    report = json.loads(ran.stdout)
    told = StoryFile(str(path))
    assert (told.names(), told.cut, told.interrupted) == ([f"r{n}" for n in range(1, 13)], False, False)
    texts = [what for name in told.names() for part in told.story(name) for _, _, _, what in part.events]
    sessions = report["sessions"]
    assert texts.count("put opening -> open") == sessions["put_opened"]
    assert texts.count("put committing -> committed") == sessions["put_committed"]
    assert sum(text.endswith("-> revoked") for text in texts) == sessions["put_revoked"] > 0
    assert texts.count("forgotten") == 12
    shown = run("story", "r2", path)
    assert (shown.exit_code, shown.stdout.splitlines()[0].split(", ")[0]) == (0, "r2")
    (part,) = json.loads(run("story", "r2", path, "--json").stdout)
    assert (part["address"], part["request"]) == (str(path), "r2")
    refused(run("story", "r99", path), 1, "there is no story of it; 12 are kept, such as r9")


def test_nothing_is_lost_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run with books of other sizes writes the same stories."""
    paths, stories = [tmp_path / "large", tmp_path / "small"], []
    monkeypatch.setattr(StoryLog, "progress", lambda _: None)  # or memory is never short
    for path in paths:
        assert run(*REPLAY, "--virtual", "--stories", path).exit_code == 0
        told = StoryFile(str(path))
        stories.append({name: told.story(name) for name in told.names()})
        monkeypatch.setattr(story, "MOST_EVENTS_EACH", 20)
        monkeypatch.setattr(story, "MOST_REQUESTS", 2)
    assert stories[0] == stories[1]
    assert paths[0].read_bytes() != paths[1].read_bytes()


def test_on_virtual_time_a_file_is_repeatable_byte_for_byte(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        assert run(*REPLAY, "--virtual", "--stories", path).exit_code == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("signals", [1, 2])
def test_a_run_that_is_interrupted_is_told_to_its_end(tmp_path: Path, signals: int) -> None:
    path = tmp_path / "run.stories"
    words = [*map(str, REPLAY), "--speed", "5", "--stories", str(path), "--json"]
    with subprocess.Popen([sys.executable, "-m", "kvactors", *words], stdout=subprocess.PIPE, text=True) as ran:
        until("a request is told", lambda: path.exists() and b'"r2"' in path.read_bytes())
        for _ in range(signals):
            ran.send_signal(signal.SIGINT)
        report = json.loads(ran.communicate(timeout=60)[0])
    assert ran.returncode == 130
    told = StoryFile(str(path))
    texts = [what for name in told.names() for part in told.story(name) for _, _, _, what in part.events]
    assert (texts.count("put opening -> open"), told.cut) == (report["sessions"]["put_opened"], False)
    assert told.interrupted
    refused(
        run("story", "r9999", path), 1, f"{path} is of a run that was interrupted, and did not come to the end of its trace"
    )


def test_a_run_that_is_killed_leaves_what_it_told(tmp_path: Path) -> None:
    path = tmp_path / "run.stories"
    words = [*map(str, REPLAY), "--speed", "5", "--stories", str(path)]
    with subprocess.Popen(
        [sys.executable, "-m", "kvactors", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as ran:
        until("a request is told", lambda: path.exists() and b'"r2"' in path.read_bytes())
        ran.kill()
    told = StoryFile(str(path))
    assert ([part.request for part in told.story("r1")], told.cut) == (["r1"], True)


@pytest.mark.parametrize(
    "refused_by",
    ["--live /nonexist/x.sock", "--layout HUGE --scale 1", "--layout HUGE --scale 1 --virtual --event-log OTHER"],
)
def test_a_run_that_is_refused_leaves_what_is_there(tmp_path: Path, refused_by: str) -> None:
    kept, other, huge = tmp_path / "kept", tmp_path / "other", tmp_path / "huge.yaml"
    for path in (kept, other):
        path.write_text("of another run")
    huge.write_text(
        f"{{name: m, groups: [{{kind: full, block_tokens: 512, layers: [0], entries: [{{name: k, bytes: {10**17}}}]}}]}}"
    )
    words = refused_by.replace("OTHER", str(other)).replace("HUGE", str(huge)).split()
    result = run(*REPLAY, "--stories", kept, *words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert [kept.read_text(), other.read_text()] == ["of another run"] * 2


def test_a_pipe_that_nobody_reads_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = run(*REPLAY, "--stories", tmp_path / "pipe")
    assert (result.exit_code, "12 of 12" in result.stdout) == (1, True)
    assert "pipe: cannot be written: nobody reads this pipe" in result.stderr


@pytest.mark.parametrize("option", ["--stories", "--event-log"])
def test_a_file_that_another_run_writes_is_left_to_it(tmp_path: Path, option: str) -> None:
    path = tmp_path / "kept"
    with path.open("wb") as other:
        other.write(b"of another run")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        result = run(*REPLAY, "--virtual", option, path)
        assert (result.exit_code, "12 of 12" in result.stdout) == (1, True)
        assert "kept: cannot be written: it is locked; is another run writing it?" in result.stderr
        assert path.read_text() == "of another run"
    assert run(*REPLAY, "--virtual", option, path).exit_code == 0
    written = path.read_bytes()
    assert not written.startswith(b"of another run")
    path.write_bytes(written + b"and more")
    assert run(*REPLAY, "--virtual", option, path).exit_code == 0
    assert path.read_bytes() == written, "what a longer run left is gone"


def test_a_name_that_is_no_utf_8(tmp_path: Path) -> None:
    trace = tmp_path / os.fsdecode(b"tr\xfface.jsonl")
    trace.write_bytes(SAMPLE.read_bytes())
    path = tmp_path / "run.stories"
    result = run("replay", trace, *REPLAY[2:], "--stories", path)
    assert (result.exit_code, StoryFile(str(path)).names()[0]) == (0, "r1")


def test_a_file_cannot_be_the_live_view_too(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    refused(run(*REPLAY, "--stories", path, "--live", path), 2, "is the same file as --live")
    assert not path.exists()


@pytest.mark.parametrize("more", [(), ("--virtual",)], ids=["live", "virtual"])
def test_a_full_disk_does_not_end_the_run(more: tuple[str, ...]) -> None:
    result = run(*REPLAY, "--stories", "/dev/full", *more)
    assert result.exit_code == 1
    assert "12 of 12" in result.stdout
    assert "/dev/full: cannot be written: No space left on device" in result.stderr


def test_files_and_engines_are_told_together(tmp_path: Path) -> None:
    path = written(tmp_path, page("a", "one"))

    async def play() -> Result:
        async with Rig(full_layout()) as rig:
            with LiveView(rig.engine, Address.of(str(tmp_path / "live.sock"))):
                await rig.save("a", hashes(2))
                return await asyncio.to_thread(run, "story", "a", tmp_path / "live.sock", path)

    result = asyncio.run(play())
    assert result.exit_code == 0, result.output
    heads = [line for line in result.stdout.splitlines() if " events" in line]
    assert [head.split(", ")[0] for head in heads] == [f"a on {path}", f"a on {tmp_path / 'live.sock'}"]
