"""What the documentation shows runs, and its links lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvactors.core.metrics import COUNTERS, GAUGES, WAITS
from kvactors.stores import PRESETS, FaultPlan
from kvactors.vllm.settings import REFUSED, WITHOUT_EFFECT, ConnectorSettings

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def run(*words: str | Path) -> str:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_embedding_page_prints_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "docs/embedding.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    shown = re.findall(r"(?:It|This program) prints\n\n((?:    .*\n)+)", text)
    assert len(programs) == len(shown) == 2
    for program, output in zip(programs, shown, strict=True):
        path = tmp_path / "program.py"
        path.write_text(program)
        assert run(path) == re.sub(r"^    ", "", output, flags=re.MULTILINE)


@pytest.mark.parametrize(("copies", "code"), [(True, 0), (False, 1)])
def test_the_embedding_page_shows_how_bytes_are_tested(copies: bool, code: int, tmp_path: Path) -> None:
    text = (ROOT / "docs/embedding.md").read_text()
    (program, _) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (lines,) = re.findall(r"before request two:\n\n((?:      .*\n)+)", text)
    store = "FaultyStore(MemoryStore(), broken)"
    forgetful = "type('F', (MemoryStore,), {'put_ranges': lambda _, batch: [Outcome.OK] * len(batch.keys)})()"
    program = program.replace(store, "MemoryStore()" if copies else forgetful)
    before = '        engine.forget("one")\n'
    assert program.count(before) == 1
    path = tmp_path / "program.py"
    path.write_text(
        "from kvactors.core.store import Outcome\n"
        + program.replace(before, before + re.sub(r"^      ", "        ", lines, flags=re.MULTILINE))
    )
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == code, ran.stderr
    assert copies or "assert (memory[:, 4:8] == memory[:, 0:4]).all()" in ran.stderr


def test_the_example_runs() -> None:
    assert "loaded bytes equal the saved ones: True" in run(ROOT / "examples/embed.py")


def test_the_fault_plan_page_shows_a_plan_and_every_preset(tmp_path: Path) -> None:
    text = (ROOT / "docs/faults.md").read_text()
    (plan,) = re.findall(r"^    seed: .*\n(?:    .*\n)+", text, re.MULTILINE)
    path = tmp_path / "plan.yaml"
    path.write_text(re.sub(r"^    ", "", plan, flags=re.MULTILINE))
    loaded = FaultPlan.load(path)
    assert (loaded.seed, len(loaded.faults)) == (7, len(PRESETS["slow-store"]) + 5)
    assert set(re.findall(r"^\| `([a-z-]+-?[a-z]*)` \| ", text.split("## The file")[0], re.MULTILINE)) == set(PRESETS)


def part(heading: str) -> str:
    """A part of the vLLM page."""
    return (ROOT / "docs/vllm.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_the_vllm_page_has_every_key_and_its_default() -> None:
    text = part("Configuration")
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| (\S+) \|", text, re.MULTILINE)
    shown = {key: None if default == "unset" else json.loads(default.strip("`")) for key, default in rows}
    assert shown == {f.name: f.default for f in fields(ConnectorSettings)}
    others = text.rpartition("|\n\n")[2].split("Two are refused")
    assert set(re.findall(r"`(\w+)`", others[0])) == set(WITHOUT_EFFECT)
    assert set(re.findall(r"`(\w+)`", others[1])) == set(REFUSED)


def test_the_vllm_page_has_every_metric() -> None:
    first_cells = re.findall(r"^\| (`.*?) \|", part("Metrics"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(first_cells))) == {
        metric.name for metrics in (COUNTERS, WAITS, GAUGES) for metric in metrics.values()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
