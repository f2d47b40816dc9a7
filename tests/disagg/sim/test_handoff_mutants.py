"""Every seeded bug is noticed: by the simulation within 200 seeds, or by the actor's test that it names."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.disagg.sim.histories import history
from tests.disagg.sim.mutants import MUTANTS, Mutant

pytestmark = pytest.mark.sim

MOST_SEEDS = 200


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("kvactors")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 25
    assert sum(mutant.test is None for mutant in MUTANTS.values()) >= 10


@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    if not (_by_the_simulation() if mutant.test is None else _by_its_test(mutant)):
        pytest.fail(f"{name}: not noticed")


def _by_the_simulation() -> bool:
    for seed in range(MOST_SEEDS):
        try:
            if history(seed).problems:
                return True
        except Exception:  # it crashed, or never came to an end
            return True
    return False


def _by_its_test(mutant: Mutant) -> bool:
    assert mutant.test is not None
    try:
        mutant.test(**mutant.given)
    except (Exception, pytest.fail.Exception):
        return True
    return False
