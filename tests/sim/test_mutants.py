"""The simulator catches every seeded bug within 200 seeds."""

from __future__ import annotations

import pytest

from kvactors.actors.coordinator import Coordinator
from kvactors.core.sessions import SessionTable
from kvactors.simulate.run import scenario
from kvactors.simulate.world import World
from tests.sim.mutants import MUTANTS, Patch

pytestmark = pytest.mark.sim

MOST_SEEDS = 200


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 20


def test_a_mutant_that_would_raise_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = Patch(monkeypatch)
    with pytest.raises(TypeError, match="too many positional arguments"):
        patch.setattr(SessionTable, "put", lambda self, session: None)  # noqa: ARG005 - what counts is what it takes
    with pytest.raises(TypeError, match="missing a required argument"):
        patch.setattr(SessionTable, "put", lambda self, session, event, cause, more: None)  # noqa: ARG005 - as above
    with pytest.raises(AssertionError, match="handle"):
        patch.setattr(Coordinator, "handle", lambda self, message: None)  # noqa: ARG005 - as above


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulator_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, preset = MUTANTS[name]
    patch(Patch(monkeypatch))
    for seed in range(MOST_SEEDS):
        if World(scenario(seed, preset)).run().violations:
            return
    pytest.fail(f"{name}: not caught in {MOST_SEEDS} seeds under {preset}")
