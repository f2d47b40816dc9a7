"""Which transfer goes next: the pool's queue policy.

Get opens and demanded loads first, then prefetched loads by distance, put opens, saves, and last commits and revokes. A
worker for loads only never takes a save, so that saves can never block a load. Not thread-safe: the pool holds its lock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Generic, Protocol, TypeVar


class Priority(IntEnum):
    DEMANDED = 0
    """Opens and closes of get sessions, lookups, and loads that a compute thread waits for."""
    PREFETCH = 1
    PUT_OPEN = 2
    """Put opens, and which keys need none."""
    SAVE = 3
    COMMIT = 4
    """Commits and revokes."""


LOADS_ONLY = (Priority.DEMANDED, Priority.PREFETCH)


class Queueable(Protocol):
    priority: Priority
    distance: int


J = TypeVar("J", bound=Queueable)


class TransferQueue(Generic[J]):
    """Jobs by priority; first in, first out within one, except prefetches, which go by distance."""

    def __init__(self) -> None:
        self._fifo: dict[Priority, deque[J]] = {p: deque() for p in Priority if p is not Priority.PREFETCH}
        self._prefetch: list[tuple[int, int, J]] = []
        self._sequence = 0
        self.peak = 0

    def push(self, job: J) -> None:
        if job.priority is Priority.PREFETCH:
            self._sequence += 1
            heapq.heappush(self._prefetch, (job.distance, self._sequence, job))
        else:
            self._fifo[job.priority].append(job)
        self.peak = max(self.peak, len(self))

    def pop(self, loads_only: bool) -> J | None:
        """The next job for a general worker, or for one that takes loads only."""
        for priority in LOADS_ONLY if loads_only else Priority:
            if priority is Priority.PREFETCH:
                if self._prefetch:
                    return heapq.heappop(self._prefetch)[2]
            elif self._fifo[priority]:
                return self._fifo[priority].popleft()
        return None

    def promote(self, wanted: Callable[[J], bool]) -> None:
        """Turns the prefetches that a compute thread now waits for into demanded loads."""
        rest = []
        for item in sorted(self._prefetch, key=lambda i: i[:2]):
            if wanted(item[2]):
                item[2].priority = Priority.DEMANDED
                self._fifo[Priority.DEMANDED].append(item[2])
            else:
                rest.append(item)
        self._prefetch = rest

    def remove(self, unwanted: Callable[[J], bool]) -> list[J]:
        """Takes out every job for which `unwanted` holds."""
        removed = [j for j in self if unwanted(j)]
        if removed:
            gone = set(map(id, removed))
            for priority, queue in self._fifo.items():
                self._fifo[priority] = deque(j for j in queue if id(j) not in gone)
            self._prefetch = [item for item in self._prefetch if id(item[2]) not in gone]
            heapq.heapify(self._prefetch)
        return removed

    def __len__(self) -> int:
        return sum(map(len, self._fifo.values())) + len(self._prefetch)

    def __iter__(self) -> Iterator[J]:
        for queue in self._fifo.values():
            yield from queue
        for item in sorted(self._prefetch, key=lambda i: i[:2]):
            yield item[2]
