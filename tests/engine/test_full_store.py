"""A store that stays full costs no calls: saves pause, and go on once it has space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvactors.core.store import Outcome
from kvactors.devices import MonotonicClock
from kvactors.stores.memory import MemoryStore
from tests.engine.rig import Rig, full_layout, hashes


class FullStore(MemoryStore):
    """Has space once the test says so."""

    full = True

    def put_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        return [Outcome.NO_SPACE] * len(keys) if self.full else super().put_open(keys, sizes)


class ShiftedClock(MonotonicClock):
    """The real time, and what the test adds to it."""

    shift_s = 0.0

    def now(self) -> float:
        return super().now() + self.shift_s


class Prompts:
    """Saves two blocks of a new prompt with each step, and looks at what that cost."""

    def __init__(self) -> None:
        self.clock, self.memory = ShiftedClock(), FullStore()
        self.rig = Rig(full_layout(), inner=self.memory, clock=self.clock)
        self._count = 0

    async def step(self) -> tuple[int, int, int]:
        """Runs a step. Answers how many opens it took, and the blocks that were saved, and skipped without a call."""
        before = self._counts()
        self._count += 1
        name = f"p{self._count}"
        await self.rig.save(name, hashes(2, name))
        opens, saved, paused = (now - then for now, then in zip(self._counts(), before, strict=True))
        return opens, saved, paused

    def _counts(self) -> tuple[int, int, int]:
        stats: Any = self.rig.engine.stats().groups[0]
        return self.rig.store._calls["put_open"] + self.rig.store._calls["readable"], stats.saved, stats.paused_no_space


async def test_a_store_that_stays_full_is_asked_ever_less_often() -> None:
    prompts = Prompts()
    async with prompts.rig:
        for _ in range(3):
            opens, saved, paused = await prompts.step()
            assert opens >= 3, "readable, and two opens at once"
            assert (saved, paused) == (0, 0)
        assert await prompts.step() == (0, 0, 2)
        for pause_s in (0.5, 1.0, 2.0):
            prompts.clock.shift_s += pause_s
            opens, _, paused = await prompts.step()
            assert opens >= 3
            assert paused == 0
            assert await prompts.step() == (0, 0, 2)
        assert prompts.rig.engine.stats().groups[0].skipped_no_space == 2 * 10


async def test_saves_go_on_after_an_open_that_succeeds() -> None:
    prompts = Prompts()
    async with prompts.rig:
        for _ in range(4):
            await prompts.step()
        prompts.memory.full = False
        assert await prompts.step() == (0, 0, 2), "nobody knows before the pause is over"
        prompts.clock.shift_s += 0.5
        assert await prompts.step() == (2, 2, 0)
        prompts.memory.full = True
        for _ in range(3):
            _, _, paused = await prompts.step()
            assert paused == 0, "three full steps again"
        assert await prompts.step() == (0, 0, 2)
