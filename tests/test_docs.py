"""What the documentation shows runs, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvactors.stores import PRESETS, FaultPlan

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run(*words: str | Path) -> str:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_embedding_page_prints_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "docs/embedding.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "program.py"
    path.write_text(program)
    (shown,) = re.findall(r"It prints\n\n((?:    .*\n)+)", text)
    assert run(path) == re.sub(r"^    ", "", shown, flags=re.MULTILINE)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
