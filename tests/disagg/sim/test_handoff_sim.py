"""Sender and receiver actors through hundreds of seeded histories: no byte where it does not belong, nothing lost or kept."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.disagg.sim.histories import history

pytestmark = pytest.mark.sim

COMMON = ("loaded", "failed", "failed fenced", "aborted", "returned", "late", "freed", "id used again", "two instances")
RARE = ("restart p", "restart d", "asked again", "close p", "close and restart p")


def test_seeds() -> None:
    seen: Counter[str] = Counter()
    for seed in range(400):
        world = history(seed)
        assert not world.problems, (seed, world.problems[:5])
        seen.update(world.seen)
    rare = {what for what in COMMON if seen[what] < 20} | {what for what in RARE if seen[what] < 5}
    assert not rare, (rare, seen)
