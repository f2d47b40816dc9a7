"""The examples on vLLM say what is wrong with their arguments, and need no vLLM for it."""

from __future__ import annotations

import re
import runpy
import subprocess
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
    assert told(Stub(model="gptoss", backend="memory"), cold, warm, 128) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.rstrip("\n").split("\n")] == shown.split("\n")


@pytest.mark.parametrize(
    ("tokens", "said"), [(50, "give --tokens 129 or more"), (128, "give --tokens 129 or more"), (129, None), (900, None)]
)
def test_a_run_says_why_nothing_could_be_loaded(
    tokens: int, said: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Stub(prompt_token_ids=range(tokens), num_cached_tokens=0, outputs=[Stub(token_ids=[1])])
    monkeypatch.syspath_prepend(FOLDER)
    told = runpy.run_path(str(FOLDER / "run.py"))["told"]
    monkeypatch.delitem(sys.modules, "tiny")
    assert told(Stub(model="gptoss", backend="memory", tokens=tokens), [(run, 0.1)], [(run, 0.1)], 128) == 1
    out = capsys.readouterr().out
    assert said in out if said else "nothing could be loaded" not in out


WITHOUT = """import importlib.abc, runpy, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name.split(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.modules["vllm"] = None
sys.path.insert(0, {folder!r})
sys.argv = [{program!r}]
runpy.run_path({program!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("program", "missing", "said"),
    [
        (
            "vllm_cpu/run.py",
            "vllm",
            "vLLM is not installed here; in the root of the repository, for a CPU: .ci/install-vllm VENV",
        ),
        ("vllm_cpu/compare.py", "vllm", "vLLM is not installed here; in the root of the repository, for a CPU: "),
        ("disagg/start.py", "vllm", "vLLM is not installed here; in the root of the repository, for a CPU: "),
        ("disagg/start.py", "aiohttp", "aiohttp is not installed here; in the root of the repository: pip install '.[disagg]'"),
        ("disagg/proxy.py", "aiohttp", "aiohttp is not installed here: pip install aiohttp"),
    ],
)
def test_what_is_not_installed_is_said_in_a_line(program: str, missing: str, said: str) -> None:
    path = FOLDER.parent / program
    if missing != "aiohttp" and program.startswith("disagg"):
        pytest.importorskip("aiohttp")
    code = WITHOUT.format(missing=missing, folder=str(path.parent), program=str(path))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith(said)
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "usage: .ci/install-vllm VENV [VERSION]"),
        ([], 2, "usage: .ci/install-vllm VENV [VERSION]"),
        (["--fast"], 2, "usage: .ci/install-vllm VENV [VERSION]"),
        (["/nonexist"], 2, "install-vllm: /nonexist is no virtual environment with pip; make one: python3 -m venv /nonexist"),
    ],
)
def test_vllm_is_installed_into_an_environment_that_is_there(words: list[str], code: int, said: str) -> None:
    script = FOLDER.parent.parent / ".ci/install-vllm"
    ran = subprocess.run([script, *words], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == code
    assert (ran.stderr or ran.stdout).startswith(said)
    assert (ran.stderr + ran.stdout).count("\n") == 1


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
