"""Simulated transfer workers: a call takes virtual time, and its effect happens somewhere within it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvactors.actors.pool import TransferPool
from kvactors.actors.workers import Worker
from kvactors.messages import Job, Transfer, TransferDone
from kvactors.simulate.loop import VirtualLoop

PAUSES = 0.3
"""Chance that a worker stops after a call, before its answer; and again after that."""
MOST_PAUSE_S = 0.002
"""How long at most: several calls of others."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Speed:
    """How long a call takes: `latency_s` + bytes / `bandwidth`, times a seeded factor from 1 - `jitter` to 1 + `jitter`."""

    latency_s: float = 0.0005
    bandwidth: float = 1e9
    jitter: float = 0.5

    def duration_s(self, job: Job, rng: random.Random | None) -> float:
        nbytes = job.call.batch.nbytes_per_key * job.count if isinstance(job, Transfer) else 0
        factor = 1.0 if rng is None else 1 - self.jitter + 2 * self.jitter * rng.random()
        return factor * (self.latency_s + nbytes / self.bandwidth)


class SimulatedWorkers:
    """An `Executor` on a virtual loop.

    Args:
        rng: draws durations and where in a call its effect happens (at its begin, or at its end); None: always at its end.
        delay_s: asked once per call for the seconds that a fault adds.
        pauses: draws whether a worker stops, as a thread may, between a call, its answer and what follows it; None: never.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        speed: Speed,
        rng: random.Random | None = None,
        delay_s: Callable[[], float] | None = None,
        pauses: random.Random | None = None,
    ) -> None:
        self._loop, self._speed, self._rng = loop, speed, rng
        self._delay_s = delay_s
        self._pauses = pauses
        self._pool: TransferPool | None = None

    def start(self, pool: TransferPool, workers: Sequence[Worker]) -> None:
        self._pool = pool
        for worker in workers:
            self._loop.call_soon(self._look, worker)

    def wake(self, worker: Worker) -> None:
        self._loop.call_soon(self._look, worker)

    def replace(self, lost: Worker, fresh: Worker) -> None:  # noqa: ARG002 - part of the protocol
        self._loop.call_soon(self._look, fresh)

    def stop(self) -> None:
        """The pool says itself whether it is stopped."""

    def _look(self, worker: Worker) -> None:
        pool = self._pool
        assert pool is not None
        if worker.lost or pool.stopped:
            return
        job = pool.take(worker)
        if job is None:
            return
        duration = self._speed.duration_s(job, self._rng)
        if self._delay_s is not None:
            duration += self._delay_s()
        if self._rng is not None and self._rng.random() < 0.5:
            done = pool.call(job)
            self._loop.call_later(duration, partial(self._finish, worker, lambda: done))
        else:
            self._loop.call_later(duration, partial(self._finish, worker, partial(pool.call, job)))

    def _finish(self, worker: Worker, call: Callable[[], TransferDone]) -> None:
        pool, done = self._pool, call()
        assert pool is not None
        pool.note(worker, done)
        self._go_on(self._answer, worker, done)

    def _answer(self, worker: Worker, done: TransferDone) -> None:
        pool = self._pool
        assert pool is not None
        self._go_on(self._settle, worker, pool.answer(worker, done))

    def _settle(self, worker: Worker, answers: Sequence[TransferDone]) -> None:
        pool = self._pool
        assert pool is not None
        pool.settle(answers)
        self._look(worker)

    def _go_on(self, then: Callable[[Worker, T], None], worker: Worker, what: T) -> None:
        """Now, or after a pause."""
        if self._pauses is not None and self._pauses.random() < PAUSES:
            self._loop.call_later(self._pauses.uniform(0.0, MOST_PAUSE_S), then, worker, what)
        else:
            then(worker, what)
