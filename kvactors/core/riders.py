"""Several layers in one store call: which queued transfers ride with the one that goes now.

Over some transports a range costs about the same whatever its size, and the layers of an object are neighbours in it. So a
store may say how long a range should be (`good_range_bytes`), and what waits in the queue and continues a shorter run goes
along. Nothing ever waits for a rider: a transfer that finds an idle worker goes alone and at once; only where the store is the
bottleneck the queue fills, and calls get longer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvactors.core.calls import RangeCall
from kvactors.core.queue import Priority
from kvactors.core.ranges import MAX_RANGES
from kvactors.core.store import RangeBatch


class Rider(Protocol):
    """A transfer, as far as it matters here."""

    priority: Priority
    group_id: int
    step: int
    epoch: int
    call: RangeCall
    run: int
    whole: bool

    @property
    def kind(self) -> Hashable: ...


R = TypeVar("R", bound=Rider)


class Riders(Generic[R]):
    """Knows by its first piece each transfer that is queued. Not thread-safe: the pool holds its lock.

    Args:
        good_range_bytes: runs of one key are joined until they are that long; those of a whole object, until it is whole.
        max_transfer_bytes: most bytes in one store call; 0 = no limit.
    """

    def __init__(self, good_range_bytes: int, max_transfer_bytes: int) -> None:
        self._good, self._limit = good_range_bytes, max_transfer_bytes
        self._by_start: dict[Hashable, R] = {}

    def add(self, job: R) -> None:
        """A transfer was queued."""
        self._by_start[_place(job, job.call.first_piece)] = job

    def discard(self, job: R) -> None:
        """A transfer left the queue."""
        start = _place(job, job.call.first_piece)
        if self._by_start.get(start) is job:
            del self._by_start[start]

    def pick(self, first: R) -> list[R]:
        """The queued transfers that go with `first`, which leaves the queue, in the order of their pieces. Forgets them all."""
        self.discard(first)
        batch = first.call.batch
        keys, ranges, run = len(batch.keys), len(batch.sizes), batch.nbytes_per_key
        picked: list[R] = []
        last = first
        while run < self._good or first.whole:
            job = self._by_start.get(_place(last, last.call.last_piece))
            if job is None or not _same_way(first, job):
                break
            run += job.call.batch.nbytes_per_key
            ranges += len(job.call.batch.sizes)
            if keys * ranges > MAX_RANGES or (self._limit and keys * run > self._limit):
                break
            self.discard(job)
            picked.append(job)
            last = job
        return picked


def _place(job: Rider, piece: int) -> Hashable:
    """Names a piece of the rows that a transfer moves: those of one group in one step, in this order."""
    return job.kind, job.group_id, job.step, piece, job.call.rows.tobytes()


def _same_way(first: Rider, job: Rider) -> bool:
    """Whether both may go in one call: in one run, of the same keys, under sessions of one life of the master, and as urgent;
    or the rider is a prefetch, which a demanded load of its run takes along."""
    along = first.priority is Priority.DEMANDED and job.priority is Priority.PREFETCH and first.run >= 0
    same = (along or first.priority is job.priority) and first.run == job.run and first.epoch == job.epoch
    return same and first.call.batch.keys == job.call.batch.keys


def joined(calls: Sequence[RangeCall]) -> RangeCall:
    """One call that moves what `calls` move: the same rows, pieces that follow on each other."""
    first, batches = calls[0], [c.batch for c in calls]
    batch = RangeBatch(
        first.batch.keys,
        np.concatenate([b.addresses for b in batches], axis=1),
        np.concatenate([b.sizes for b in batches]),
        np.concatenate([b.offsets for b in batches]),
    )
    return RangeCall(first.layer, batch, first.part, first.first_piece, calls[-1].last_piece)
