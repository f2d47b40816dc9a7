"""Blocks that a late store call may still write: held in vLLM's pool, so that nobody gets them, until the call returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


class Pins:
    """Counts by block; a block is held from its first report to its last return. `pool` is vLLM's `BlockPool`."""

    def __init__(self) -> None:
        self.pool: Any = None
        self._held: Counter[int] = Counter()

    def update(self, held: Mapping[int, int], returned: Mapping[int, int]) -> None:
        """What the workers reported: store calls under way on blocks that vLLM is about to free, and those that returned."""
        before = +self._held
        self._held.update(held)
        self._held.subtract(returned)
        if self.pool is None:
            return
        taken = [self.pool.blocks[b] for b in self._held if self._held[b] > 0 and not before[b]]
        if taken:
            self.pool.touch(taken)
        given = [self.pool.blocks[b] for b in before if self._held[b] <= 0]
        if given:
            self.pool.free_blocks(given)
        self._held = +self._held

    def __len__(self) -> int:
        return len(self._held)
