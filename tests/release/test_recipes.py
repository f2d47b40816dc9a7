"""CONTRIBUTING.md: the files and tests that it names are there, and a recipe that was left half done fails here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvactors.core.layout import GroupKind
from kvactors.errors import ConfigError, KVActorsError
from kvactors.stores import BACKENDS, open_store
from kvactors.stores.fault_plan import WHATS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_what_the_page_names_is_there() -> None:
    paths = {p for p in re.findall(r"`([\w./-]+/[\w./-]*)`", PAGE) if not p.startswith(("/", "."))}
    assert len(paths) > 20
    assert [p for p in sorted(paths) if not (ROOT / p).exists()] == []


def test_the_tests_that_the_page_names_are_there() -> None:
    named = re.findall(r"`((?:tests/)[\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 5
    assert [(p, name) for p, name in named if not re.search(rf"def {name}\(", text(p))] == []


def test_the_make_targets_that_the_page_names_are_there() -> None:
    assert [t for t in re.findall(r"`make ([\w-]+)`", PAGE) if not re.search(rf"^{t}:", text("Makefile"), re.MULTILINE)] == []


@pytest.mark.parametrize("name", BACKENDS)
def test_a_store_opens_and_is_under_contract(name: str) -> None:
    with pytest.raises((KVActorsError, TypeError)) as refused:
        open_store(name, no_such_option=1)
    assert not (isinstance(refused.value, ConfigError) and "not supported" in str(refused.value)), refused.value
    suite = f"class Test{name.capitalize()}Store(StoreContract)"
    suites = [p.name for p in (ROOT / "tests").rglob("test_*.py") if suite in p.read_text()]
    assert len(suites) == 1, "a test module gives StoreContract a world of this store"


@pytest.mark.parametrize("kind", GroupKind)
def test_a_group_kind_is_described_drawn_and_decided(kind: GroupKind) -> None:
    assert f"`{kind}`" in text("docs/layout-files.md")
    assert f"_K.{kind.name}" in text("kvactors/simulate/models.py"), "no simulated model has such a group"
    assert f"GroupKind.{kind.name}" in text("tests/core/test_reachability.py"), "no table says what a hit of this kind needs"


@pytest.mark.parametrize("what", WHATS)
def test_a_fault_is_described_and_tested(what: str) -> None:
    rows = [line.split("|")[1] for line in text("docs/faults.md").splitlines() if line.startswith("|")]
    assert any(f"`{what}`" in row for row in rows)
    assert f'what="{what}"' in text("tests/stores/test_faulty.py")
