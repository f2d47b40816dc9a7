"""`kvactors bench state-rows`, as a user types it, on few bytes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kvactors.bench import state_rows
from kvactors.bench.measure import Measured
from kvactors.cli import cli


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_rows, "_MOVED_BYTES", 4 << 20)


def test_prints_every_size_and_the_criterion() -> None:
    result = CliRunner().invoke(cli, ["bench", "state-rows", "--quick"])
    assert result.exit_code == 0, result.output
    for kib in state_rows.KIBS:
        assert f" {kib} KiB " in result.stdout
        assert f"measuring rows of {kib} KiB" in result.stderr
    assert "criterion: gather and scatter at 0.8" in result.stderr


def test_prints_json() -> None:
    result = CliRunner().invoke(cli, ["bench", "state-rows", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == 3 * len(state_rows.KIBS)
    for row in rows:
        assert row["bench"] == "state-rows"
        assert row["ours"] > 0
        assert row["ratio"] == row["ours"] / row["baseline"]


@pytest.mark.parametrize(("kib", "gather_s", "meets"), [(64, 1.24, True), (64, 1.26, False), (16, 5.0, True)])
def test_the_criterion_is_for_large_rows(kib: int, gather_s: float, meets: bool) -> None:
    row = state_rows.Row(kib, 1, Measured({"gather": (gather_s,), "scatter": (1.0,), "memcpy": (1.0,)}))
    assert row.meets() is meets
