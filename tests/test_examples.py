"""The examples on vLLM say what is wrong with their arguments, and need no vLLM for it."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Stub
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "examples/vllm_cpu"


@pytest.fixture
def arguments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], Any]:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it would fail
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    parse: Callable[[list[str]], Any] = runpy.run_path(str(FOLDER / request.param))["arguments"]
    monkeypatch.delitem(sys.modules, "tiny")
    return parse


@pytest.mark.parametrize("arguments", ["run.py"], indirect=True)
def test_a_run(arguments: Callable[[list[str]], Any]) -> None:
    given = arguments([])
    assert (given.model, given.backend, given.local_master, given.prompts, given.tokens) == ("gptoss", "memory", False, 4, 900)
    given = arguments(["--model", "qwen3next", "--backend", "mooncake", "--local-master", "--tokens", "400"])
    assert (given.model, given.backend, given.local_master, given.tokens) == ("qwen3next", "mooncake", True, 400)


def test_the_page_shows_the_table_of_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = "examples/vllm_cpu/README.md"
    (shown,) = re.findall(r"```text\n(.*?)\n```", (FOLDER.parent.parent / page).read_text(), re.DOTALL)
    rows = re.findall(r"│ +\d+ │ +(\d+) │ +(\d+) │ +yes │ +(\d+) ms │ +(\d+) ms │", shown)
    assert len(rows) == 4
    output = Stub(token_ids=[1, 2])
    runs = [
        Stub(prompt_token_ids=range(int(tokens)), num_cached_tokens=int(loaded), outputs=[output])
        for tokens, loaded, *_ in rows
    ]
    cold = [(run, int(row[2]) / 1e3) for run, row in zip(runs, rows, strict=True)]
    warm = [(run, int(row[3]) / 1e3) for run, row in zip(runs, rows, strict=True)]
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("COLUMNS", "70")
    told = runpy.run_path(str(FOLDER / "run.py"))["told"]
    monkeypatch.delitem(sys.modules, "tiny")
    assert told(Stub(model="gptoss", backend="memory"), cold, warm) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.rstrip("\n").split("\n")] == shown.split("\n")


@pytest.mark.parametrize("arguments", ["compare.py"], indirect=True)
def test_a_comparison(arguments: Callable[[list[str]], Any]) -> None:
    given = arguments(["--model", "qwen3", "--rounds", "3", "--no-pause", "--remote"])
    assert (given.model, given.prompts, given.tokens, given.rounds) == ("qwen3", 8, 900, 3)
    assert given.no_pause
    assert given.remote


@pytest.mark.parametrize(
    ("arguments", "words", "problem"),
    [
        ("run.py", ["--model", "bert"], "invalid choice"),
        ("run.py", ["--local-master"], "goes with --backend mooncake"),
        ("run.py", ["--backend", "mooncake"], "needs --local-master, or MOONCAKE_CONFIG_PATH"),
        ("run.py", ["--tokens", "2001"], "from 1 to 2000"),
        ("run.py", ["--prompts", "0"], "at least 1"),
        ("compare.py", ["--rounds", "0"], "at least 1"),
    ],
    indirect=["arguments"],
)
def test_what_is_wrong(
    arguments: Callable[[list[str]], Any], words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments(words)
    assert problem in capsys.readouterr().err
