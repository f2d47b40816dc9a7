"""Wheel and sdist: the same bytes from the same sources, what is in them, and a first replay from the installed wheel."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest

import kvactors

pytest.importorskip("hatchling", reason="no hatchling: pip install -e '.[dev]'")
pytestmark = [pytest.mark.release, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SHIPPED = ("kvactors", "examples", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", ".gitignore")
PACKAGE = {".py", ".json", ".yaml", ".typed"}
"""The kinds of files that the package has."""

NEEDED = (
    "kvactors/py.typed",
    "kvactors/layouts/families.py",
    "kvactors/dashboards/kvactors.json",
    "kvactors/dashboards/alerts.yaml",
)
LEFT_OUT = re.compile(r"(^|/)(tests?|docs|\.git\w*|\.ci|__pycache__|\.\w+_cache)/|\.(pyc|orig|rej|log)$|\.coverage")


class Built(NamedTuple):
    wheel: Path
    sdist: Path


def copy_sources(target: Path, *, stamp: int) -> Path:
    """What a fresh checkout has of the package, with other times and a cache and an editor's leftover beside it."""
    target.mkdir()
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.orig", "*.rej"))
        else:
            shutil.copy(source, target / name)
    for path in target.rglob("*"):
        os.utime(path, (stamp, stamp))
    (target / "kvactors/__pycache__").mkdir()
    (target / "kvactors/__pycache__/errors.cpython-311.pyc").write_bytes(b"x")
    (target / "kvactors/errors.py.orig").write_text("x")
    (target / "tests").mkdir()
    (target / "tests/data.bin").write_bytes(b"x")
    return target


def build(sources: Path, out: Path) -> Built:
    env = os.environ | {"SOURCE_DATE_EPOCH": "1764460800"}
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    done = subprocess.run(command, cwd=sources, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    return build(copy_sources(folder / "sources", stamp=1_700_000_000), folder / "dist")


def package_files() -> set[str]:
    folder = ROOT / "kvactors"
    return {str(p.relative_to(ROOT)) for p in folder.rglob("*") if p.suffix in PACKAGE and "__pycache__" not in p.parts} | {
        "kvactors/py.typed"
    }


def metadata(built: Built) -> Message:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_same_sources_give_the_same_bytes(built: Built, tmp_path: Path) -> None:
    again = build(copy_sources(tmp_path / "elsewhere", stamp=1_600_000_000), tmp_path / "dist")
    assert again.wheel.name == built.wheel.name
    assert again.wheel.read_bytes() == built.wheel.read_bytes()
    assert again.sdist.read_bytes() == built.sdist.read_bytes()


def test_the_sdist_gives_the_same_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (sources,) = tmp_path.iterdir()
    assert build(sources, tmp_path / "dist").wheel.read_bytes() == built.wheel.read_bytes()


def test_what_is_in_the_wheel(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    assert {n for n in names if ".dist-info/" not in n} == package_files()
    assert {n.split("/", 1)[1] for n in names if ".dist-info/" in n} == {
        "METADATA",
        "WHEEL",
        "RECORD",
        "entry_points.txt",
        "licenses/LICENSE",
    }
    assert names >= set(NEEDED)


def test_what_is_in_the_sdist(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert [name for name in names if LEFT_OUT.search(name)] == []
    assert names >= package_files() | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "examples/sample_trace.jsonl"}


def test_what_the_metadata_says(built: Built) -> None:
    found = metadata(built)
    assert (found["Name"], found["Version"]) == ("kvactors", kvactors.__version__)
    assert (found["License-Expression"], found["License-File"]) == ("Apache-2.0", "LICENSE")
    assert found["Requires-Python"] == ">=3.11"
    assert not [line for line in found.get_all("Requires-Dist", []) if "torch" in line and "extra ==" not in line]


def test_the_version_stands_in_one_place() -> None:
    assert kvactors.__version__ == "0.1.0"
    files = [*(ROOT / "kvactors").rglob("*.py"), ROOT / "pyproject.toml"]
    assert [p.name for p in files if re.search(r"version\w* = \"\d+\.\d+\.\d+\"", p.read_text())] == ["__init__.py"]


def test_the_changelog_tells_of_this_version() -> None:
    """Its newest section is what comes next, or this version with the day of its release."""
    heads = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [head for head in heads if head != "Unreleased"]
    assert heads[0] == "Unreleased" or heads == released
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", head) for head in released)
    assert released[0].split()[0] == kvactors.__version__


def test_the_first_command_of_the_readme_runs_from_the_wheel(built: Built, tmp_path: Path) -> None:
    """In an environment that has nothing but the wheel and what it asks for, in a folder without our sources."""
    (command,) = re.findall(r"&& \.venv/bin/(kvactors replay examples/\S+)\n", (ROOT / "README.md").read_text())
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    place = tmp_path / ".venv"
    venv.create(place, with_pip=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(place / "bin" / words[0]), *words[1:]], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    run("python", "-m", "pip", "install", "-q", "--only-binary", ":all:", str(built.wheel))
    assert "334 of 334" in run(*command.split())
    assert kvactors.__version__ in run("kvactors", "--version")
    assert "llama-3.1-8b" in run("kvactors", "layout", "list")
    where = run("python", "-c", "import importlib.resources as r; print(r.files('kvactors'))").strip()
    assert Path(where).is_relative_to(place)
    assert all((Path(where).parent / name).is_file() for name in NEEDED)
