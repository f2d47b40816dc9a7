"""The simulator catches every seeded bug within 200 seeds."""

from __future__ import annotations

import pytest

from kvactors.simulate.run import scenario
from kvactors.simulate.world import World
from tests.sim.mutants import MUTANTS

pytestmark = pytest.mark.sim

MOST_SEEDS = 200


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 20


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulator_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, preset = MUTANTS[name]
    patch(monkeypatch)
    for seed in range(MOST_SEEDS):
        if World(scenario(seed, preset)).run().violations:
            return
    pytest.fail(f"{name}: not caught in {MOST_SEEDS} seeds under {preset}")
