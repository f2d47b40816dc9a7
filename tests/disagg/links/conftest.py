"""Goodbyes to peers that do not read are short in tests."""

from __future__ import annotations

import pytest

from kvactors.disagg import bootstrap, websockets


@pytest.fixture(autouse=True)
def _short_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websockets, "CLOSE_S", 0.1)
    monkeypatch.setattr(bootstrap, "STOP_S", 0.1)
