"""Files of stories: what a running engine would have told, after its end."""

from __future__ import annotations

import asyncio
import io
import json
import os
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
from tests.engine.rig import Rig, full_layout, hashes

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
                book.forgotten = StoryWriter(sink, "a rig", rig.engine.clock.now()).write
                for name in ("a", "b"):
                    await rig.save(name, hashes(2, name))
                running = {name: await asyncio.to_thread(read_story, address, name) for name in ("a", "b")}
                book.forget_all()
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


def test_a_last_line_that_was_cut_short_is_left_alone(tmp_path: Path) -> None:
    path = written(tmp_path, page("a", "one"), page("b", "x"))
    path.write_bytes(path.read_bytes()[:-5])
    file = StoryFile(str(path))
    assert (file.names(), file.cut) == (["a"], True)
    cut = f"{path} ends in the middle of a line: its run was killed, or it was cut, and there may be more to tell"
    refused(run("story", "b", path), 1, "no story of it; 1 are kept, such as a", cut)
    shown = run("story", "a", path)
    assert (shown.exit_code, shown.stdout.splitlines()[0], shown.stderr) == (0, "a, 1 events", f"kvactors: {cut}\n")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is no file of stories"),
        ("\xff\xfe", "is no file of stories"),
        ('{"schema": 1, "trace": {}}\n', "is no file of stories"),
        ('{\n "schema": 1,\n "trace": {}}\n', "is no file of stories"),
        ('{"kvactors_stories": 2, "run": "x"}\n', "stories of schema 2, this is 1"),
        ('{"kvactors_stories": 1, "run": "x"}\n{"request": 3}\n', "is a damaged file of stories"),
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


def test_a_replay_that_has_ended_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.stories"
    ran = run(*REPLAY, "--stories", path, "--json")
    report = json.loads(ran.stdout)
    told = StoryFile(str(path))
    assert told.names() == [f"r{n}" for n in range(1, 13)]
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
