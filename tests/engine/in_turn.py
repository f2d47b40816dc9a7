"""Workers whose calls reach the store in the order in which they were taken, so that the `nth` of a fault is the same call in
every run: of two threads, the second may else be the first to call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from kvactors.actors.threads import WorkerThreads
from kvactors.actors.workers import Worker
from kvactors.stores.faulty import FaultyStore


class InTurn(WorkerThreads):
    """A worker has the turn from the look for a job until the store has counted its call."""

    def __init__(self, store: FaultyStore) -> None:
        super().__init__()
        self._turn, self._mine = threading.Lock(), threading.local()
        plan_call = store._plan_call

        def counted(call: str, keys: Sequence[str]) -> Any:
            planned = plan_call(call, keys)
            self._pass_on()
            return planned

        store._plan_call = counted  # type: ignore[method-assign]  # it tells when a call was counted

    def _pass_on(self) -> None:
        if getattr(self._mine, "turn", False):
            self._mine.turn = False
            self._turn.release()

    def _work(self, worker: Worker, parked: SimpleQueue[None]) -> None:
        pool = self._pool
        assert pool is not None
        while not worker.lost and not pool.stopped:
            self._turn.acquire()
            self._mine.turn = True
            try:
                job = pool.take(worker)
                if job is not None:
                    pool.run(job, worker)
            finally:
                self._pass_on()
            if job is None:
                parked.get()
        self._parked.pop(worker, None)
