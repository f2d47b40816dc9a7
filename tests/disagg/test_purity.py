"""What decides and plans does without I/O, clock, thread and torch."""

from __future__ import annotations

import pytest

from tests.core.test_purity import IMPURE, PACKAGE, imports

PURE = ["blocks", "boundary", "descriptors", "geometry", "heads", "receiving", "regions", "routes", "sending", "states"]


@pytest.mark.parametrize("name", PURE)
def test_it_is_pure(name: str) -> None:
    source = (PACKAGE / "disagg" / f"{name}.py").read_text(encoding="utf-8")
    tops = {found.name.split(".")[0] for found in imports(source, "kvactors.disagg")}
    assert tops <= {"__future__", "collections", "dataclasses", "enum", "types", "typing", "msgspec", "numpy", "kvactors"}
    assert not tops & IMPURE
