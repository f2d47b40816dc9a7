"""What starts the example: its arguments, its model's words, and servers that do not start, die, or do not end."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from tests.examples_disagg.fakes import example

models = example("models")
servers = example("servers")
start = example("start")

UP = "import signal, sys, time; print('up', flush=True); "


def test_arguments() -> None:
    given = start.arguments([])
    assert (given.model, given.tokens, given.concurrent, given.check, given.once, given.folder) == (
        ("gptoss", 897, False, False, False, None)
    )
    given = start.arguments(["--model", "qwen3", "--tokens", "5", "--once", "--check", "--concurrent", "--folder", "x"])
    assert (given.model, given.tokens, given.concurrent, given.check, given.once) == ("qwen3", 5, True, True, True)
    assert given.folder == Path("x")


@pytest.mark.parametrize(
    ("words", "problem"),
    [(["--model", "bert"], "invalid choice"), (["--tokens", "0"], "from 1"), (["--tokens", "2001"], "to 2000")],
)
def test_wrong_arguments(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        start.arguments(words)
    assert problem in capsys.readouterr().err


def test_every_id_has_a_word_of_its_own() -> None:
    assert len(set(models.words())) == len(models.words()) == models.tiny.BASE["vocab_size"]
    special = [models.words()[models.tiny.BASE[f"{name}_token_id"]] for name in ("pad", "bos", "eos")]
    assert special == ["<pad>", "<bos>", "<eos>"]
    assert len(models.prompt(30).split()) == 30
    assert models.prompt(30) == models.prompt(30) != models.prompt(30, seed=2)


def test_the_tokenizer_reads_words_and_writes_them(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = models.make_folder("qwen3", tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = tokenizer.encode(models.prompt(20)).ids
    assert [models.words()[i] for i in ids] == models.prompt(20).split()
    assert tokenizer.decode(ids) == models.prompt(20)


async def start_one(group: object, code: str, folder: Path, name: str = "it", processes: int = 1) -> None:
    """Starts a Python program as a server that is ready when all its processes have printed "up"."""

    async def ready() -> bool:
        return (folder / f"{name}.log").read_bytes().count(b"up") == processes

    await group.start(name, [sys.executable, "-I", "-c", code], dict(os.environ), ready)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "POLL_S", 0.01)


async def test_a_server_that_does_not_start_shows_its_last_lines(tmp_path: Path) -> None:
    async with servers.Servers(tmp_path) as group:
        with pytest.raises(
            servers.ServerError, match=r"(?s)it ended with exit code 3; the end of .*it\.log:\n.*  no such model"
        ):
            await start_one(group, "import sys; print('no such model'); sys.exit(3)", tmp_path)


async def test_a_server_that_is_never_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "START_S", 0.1)
    async with servers.Servers(tmp_path) as group:
        with pytest.raises(servers.ServerError, match=r"it does not answer after 0 s; the end of "):
            await start_one(group, "import time; time.sleep(60)", tmp_path)


async def test_a_server_that_dies_later(tmp_path: Path) -> None:
    async with servers.Servers(tmp_path) as group:
        await start_one(group, UP + "time.sleep(60)", tmp_path, "well")
        await start_one(group, UP + "sys.stdin.read(); time.sleep(0.05); sys.exit('out of memory')", tmp_path, "ill")
        with pytest.raises(servers.ServerError, match=r"(?s)ill ended with exit code 1; .*  out of memory"):
            await group.watch()


@pytest.mark.parametrize("ignores", [False, True])
async def test_servers_end_with_the_context(tmp_path: Path, ignores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that does not want to, and the child that a server left behind."""
    monkeypatch.setattr(servers, "STOP_S", 0.2)
    code = "import os, signal, time; child = os.fork(); signal.signal(15, signal.SIG_IGN) if {} else 0; "
    code += "print('up', os.getpid(), flush=True); time.sleep(60)"
    async with servers.Servers(tmp_path) as group:
        await start_one(group, code.format(f"{ignores} or not child"), tmp_path, processes=2)
        pids = [int(line.split()[1]) for line in (tmp_path / "it.log").read_text().splitlines()]
    deadline = time.monotonic() + 5
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def _runs(pid: int) -> bool:
    """Not gone, and no zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_ports_are_free_and_different() -> None:
    assert len(set(servers.free_ports(5))) == 5
