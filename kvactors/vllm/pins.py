"""Blocks that a late store call, or a late hand-off, may still write: held in vLLM's pool until it no longer can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvactors.core.clock import Clock

BUSY_S = 60.0
"""How long vLLM is kept stepping after the last report: a call that has not returned by then may never do."""


class Pins:
    """Counts by block; a block is held from its first report to its last return. `pool` is vLLM's `BlockPool`."""

    def __init__(self, clock: Clock) -> None:
        self.pool: Any = None
        self._clock = clock
        self._changed_at = 0.0
        self._held: Counter[int] = Counter()
        """block -> calls; below 0 where a return was seen before its hold"""

    def update(self, held: Mapping[int, int], returned: Mapping[int, int]) -> None:
        """What the workers reported: store calls under way on blocks that vLLM is about to free, and those that returned."""
        if held or returned:
            self._changed_at = self._clock.now()
        before = +self._held
        self._held.update(held)
        self._held.subtract(returned)
        after = +self._held
        self._held = Counter({block: count for block, count in self._held.items() if count})
        if self.pool is None:
            return
        taken = [self.pool.blocks[b] for b in after if not before[b]]
        if taken:
            self.pool.touch(taken)
        given = [self.pool.blocks[b] for b in before if not after[b]]
        if given:
            self.pool.free_blocks(given)

    @property
    def busy(self) -> bool:
        """Whether vLLM has to go on stepping, so that held blocks come back."""
        return len(self) > 0 and self._clock.now() - self._changed_at < BUSY_S

    def __len__(self) -> int:
        return sum(count > 0 for count in list(self._held.values()))  # a live view asks from another thread
