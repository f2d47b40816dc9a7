"""Which transfer goes next: the pool's queue policy.

Get opens and demanded loads first, then prefetched loads by distance, put opens, saves, and last commits and revokes. A
worker for loads only never takes a save, so that saves can never block a load. Not thread-safe: the pool holds its lock.
"""

from __future__ import annotations

from collections import OrderedDict
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
EVERY = tuple(Priority)  # made once: to go through the enumeration costs more than to look at the queues


class Queueable(Protocol):
    priority: Priority
    distance: int


J = TypeVar("J", bound=Queueable)


class TransferQueue(Generic[J]):
    """Jobs by priority; first in, first out within one, except prefetches, which go by distance."""

    def __init__(self) -> None:
        self._fifo: dict[Priority, OrderedDict[J, None]] = {p: OrderedDict() for p in Priority if p is not Priority.PREFETCH}
        self._prefetch: dict[int, OrderedDict[J, None]] = {}
        """by distance; a distance without jobs has no entry"""
        self._count = 0
        self.peak = 0

    def push(self, job: J) -> None:
        if job.priority is not Priority.PREFETCH:
            self._fifo[job.priority][job] = None
        elif job.distance in self._prefetch:
            self._prefetch[job.distance][job] = None
        else:
            self._prefetch[job.distance] = OrderedDict({job: None})
        self._count += 1
        self.peak = max(self.peak, self._count)

    def pop(self, loads_only: bool) -> J | None:
        """The next job for a general worker, or for one that takes loads only."""
        if not self._count:
            return None
        for priority in LOADS_ONLY if loads_only else EVERY:
            if priority is Priority.PREFETCH:
                if self._prefetch:
                    return self._pop_prefetch()
            elif self._fifo[priority]:
                self._count -= 1
                return self._fifo[priority].popitem(last=False)[0]
        return None

    def _pop_prefetch(self) -> J:
        nearest = min(self._prefetch)
        jobs = self._prefetch[nearest]
        job = jobs.popitem(last=False)[0]
        if not jobs:
            del self._prefetch[nearest]
        self._count -= 1
        return job

    def promote(self, wanted: Callable[[J], bool]) -> None:
        """Turns the prefetches that a compute thread now waits for into demanded loads."""
        for job in [j for j in self._prefetches() if wanted(j)]:
            self.take(job)
            job.priority = Priority.DEMANDED
            self.push(job)

    def take(self, job: J) -> None:
        """Takes out one job, wherever it stands."""
        self._count -= 1
        if job.priority is not Priority.PREFETCH:
            del self._fifo[job.priority][job]
            return
        of_distance = self._prefetch[job.distance]
        del of_distance[job]
        if not of_distance:
            del self._prefetch[job.distance]

    def remove(self, unwanted: Callable[[J], bool]) -> list[J]:
        """Takes out every job for which `unwanted` holds."""
        removed = [j for j in self if unwanted(j)]
        for job in removed:
            self.take(job)
        return removed

    def _prefetches(self) -> Iterator[J]:
        for distance in sorted(self._prefetch):
            yield from self._prefetch[distance]

    def counts(self) -> dict[Priority, int]:
        """Jobs by priority; plain reads, so that another thread may ask."""
        prefetches = sum(len(jobs) for jobs in list(self._prefetch.values()))
        return {p: prefetches if p is Priority.PREFETCH else len(self._fifo[p]) for p in Priority}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[J]:
        for queue in self._fifo.values():
            yield from queue
        yield from self._prefetches()
