"""Sender and receiver actors through hundreds of seeded histories: no byte where it does not belong, nothing lost or kept."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvactors.simulate.loop import VirtualLoop, run_virtual
from tests.disagg.sim.world import World, play

pytestmark = pytest.mark.sim


def history(seed: int) -> World:
    loop = VirtualLoop(random.Random(seed), most_events=2_000_000)
    made: list[World] = []

    async def main() -> None:
        world = World(seed, loop)
        made.append(world)
        await play(world)

    run_virtual(main(), loop)
    return made[0]


def test_seeds() -> None:
    seen: Counter[str] = Counter()
    for seed in range(400):
        world = history(seed)
        assert not world.problems, (seed, world.problems[:5])
        seen.update(world.seen)
    rare = {what for what in ("loaded", "failed", "failed fenced", "aborted", "returned", "late", "freed") if seen[what] < 20}
    assert not rare, (rare, seen)
