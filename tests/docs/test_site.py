"""The site builds from the pages, without a link that leads nowhere, and asks no other machine for anything."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.blocks import PAGES, ROOT

NEEDED = ("mkdocs", "material", "mkdocstrings_handlers")

needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="needs mkdocs: pip install 'kvactors[docs]'"
)


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", root / "mkdocs.yml", "--site-dir", site],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.docs
@needs_mkdocs
def test_the_site_builds(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "cookbook.html", "examples/disagg/index.html", "kvactors/dashboards/index.html"} <= pages.keys()
    assert (tmp_path / "examples/embed.py").read_bytes() == (ROOT / "examples/embed.py").read_bytes()
    assert 'id="kvactors.engine.BlockingEngine.begin_step"' in pages["api.html"]
    for name, text in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]*)"|<link(?![^>]*canonical)[^>]* href="([^"]*)"', text)
        assert not [url for urls in loaded for url in urls if urlsplit(url).netloc], name


@pytest.mark.docs
@needs_mkdocs
def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for name in ("examples", "kvactors"):
        (tmp_path / name).symlink_to(ROOT / name)
    page = tmp_path / "docs/quickstart.md"
    page.write_text(f"{page.read_text()}\n[a](nothing.md) [b](concepts.md#nothing) [c](../examples/nothing.py)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert done.stderr.count("WARNING") == 3
    assert all(name in done.stderr for name in ("'nothing.md'", "#nothing", "nothing.py'"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_addresses_of_other_sites_are_well_formed(page: Path) -> None:
    for address in re.findall(r"\]\((\w+:[^)]*)\)", page.read_text()):
        parts = urlsplit(address)
        assert parts.scheme == "https", address
        assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), address
        assert not re.search(r"\s", address), address
