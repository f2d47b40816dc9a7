"""Transfer workers as daemon threads of our own. (The standard executor joins its threads at exit and hangs Ctrl-C.)"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

from kvactors.actors.pool import TransferPool
from kvactors.actors.workers import Worker


class WorkerThreads:
    """An `Executor`: one daemon thread per worker, each parked on a queue of its own while it has nothing to do."""

    def __init__(self) -> None:
        self._parked: dict[Worker, SimpleQueue[None]] = {}
        self._pool: TransferPool | None = None

    def start(self, pool: TransferPool, workers: Sequence[Worker]) -> None:
        self._pool = pool
        for worker in workers:
            self._launch(worker)

    def wake(self, worker: Worker) -> None:
        self._parked[worker].put(None)

    def replace(self, lost: Worker, fresh: Worker) -> None:  # noqa: ARG002 - the lost thread ends when its call returns
        self._launch(fresh)

    def stop(self) -> None:
        for parked in list(self._parked.values()):
            parked.put(None)

    def _launch(self, worker: Worker) -> None:
        self._parked[worker] = SimpleQueue()
        threading.Thread(
            target=self._work, args=(worker, self._parked[worker]), name=f"kvactors {worker.name}", daemon=True
        ).start()

    def _work(self, worker: Worker, parked: SimpleQueue[None]) -> None:
        pool = self._pool
        assert pool is not None
        while not worker.lost and not pool.stopped:
            job = pool.take(worker)
            if job is None:
                parked.get()
            else:
                pool.run(job, worker)
        self._parked.pop(worker, None)
