"""Who makes the blocking store calls: a worker takes a job from the pool, makes its call, and looks again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvactors.actors.pool import TransferPool


class Worker:
    """One transfer worker, whatever runs it."""

    __slots__ = ("loads_only", "lost", "name")

    def __init__(self, name: str, loads_only: bool) -> None:
        self.name = name
        self.loads_only = loads_only
        self.lost = False


class Executor(Protocol):
    """Runs workers. Each loops: `job = pool.take(worker)`; None: sleep until woken; else `pool.run(job, worker)`."""

    def start(self, pool: TransferPool, workers: Sequence[Worker]) -> None: ...

    def wake(self, worker: Worker) -> None:
        """The worker, which found nothing to do, should look again; called with the pool's lock held, must not block."""
        ...

    def replace(self, lost: Worker, fresh: Worker) -> None: ...

    def stop(self) -> None: ...
