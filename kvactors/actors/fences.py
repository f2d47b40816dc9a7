"""Local blocks that a store call past its deadline may still write, and waiting until none of them is."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

Place = tuple[int, int]
"""(group id, local block id)"""


class Fences:
    """Thread-safe: the engine's loop changes it, a compute thread reads it and waits."""

    def __init__(self) -> None:
        self._calls: dict[Place, int] = {}
        self._changed = threading.Condition()

    def add(self, places: Iterable[Place], by: int) -> None:
        """Calls past their deadline (+1) may write these blocks; one that has returned (-1) may not."""
        with self._changed:
            for place in places:
                left = self._calls.get(place, 0) + by
                if left > 0:
                    self._calls[place] = left
                else:
                    self._calls.pop(place, None)
            self._changed.notify_all()

    def keep(self, places: Iterable[Place]) -> None:
        """Nobody will say any more whether calls on these blocks return."""
        with self._changed:
            for place in places:
                self._calls[place] = max(1, self._calls.get(place, 0))

    def blocks(self) -> frozenset[Place]:
        return frozenset(self._calls)

    def wait_clear(self, places: Collection[Place], seconds: float) -> bool:
        """Waits at most so long until no call may write any of these blocks; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(place in self._calls for place in places), seconds)

    def __len__(self) -> int:
        return len(self._calls)
