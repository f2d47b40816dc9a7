"""The transfer pool: hands blocking store calls to a bounded set of workers, and answers for calls that do not return.

The pool decides (which job, is it still allowed, what does its answer mean); who runs the calls is an `Executor`: our own
daemon threads live, simulated workers under a virtual clock. Workers take the next job themselves, so that the event loop
is not on the way from one transfer to the next.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import structlog

from kvactors.actors.actor import Post
from kvactors.actors.audit import AuditedStore
from kvactors.core.clock import Clock
from kvactors.core.config import EngineConfig
from kvactors.core.observe import Observer, Span
from kvactors.core.queue import LOADS_ONLY, TransferQueue
from kvactors.core.store import Outcome, Store
from kvactors.errors import StoreUnreachableError
from kvactors.messages import Ask, Close, Commit, Job, Kind, Open, Revoke, StoreLost, Transfer, TransferDone

log = structlog.get_logger("kvactors.pool")


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


class TransferPool:
    """See the module. `submit`, `cancel`, `promote` are called on the loop; `take` and `run` by the workers."""

    def __init__(
        self,
        store: Store,
        config: EngineConfig,
        clock: Clock,
        executor: Executor,
        *,
        on_store_lost: Post,
        observer: Observer | None = None,
        audit: AuditedStore | None = None,
    ) -> None:
        self.store: Store = store if audit is None else audit
        self._audit = audit
        self.epoch = 0
        self.lost_workers = 0
        self._config, self._clock, self._executor = config, clock, executor
        self._observer, self._on_store_lost = observer, on_store_lost
        self._lock = threading.Lock()
        self._queue: TransferQueue[Job] = TransferQueue()
        self._gated: dict[int, Job] = {}
        self._running: dict[Worker, tuple[Job, float]] = {}
        self._idle: list[Worker] = []
        self._missing = {False: 0, True: 0}
        """lost workers that were not replaced, by whether they take loads only"""
        self._late: dict[Worker, Job] = {}
        self._answering: dict[Worker, Job] = {}
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self.peak_running = 0

    def start(self) -> None:
        workers = [Worker(f"worker-{i}", False) for i in range(self._config.workers)] + [Worker("worker-loads", True)]
        self._executor.start(self, workers)

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queues a job, after its device event. Its reply comes exactly once, whatever happens to it, and in time: a job that
        no worker took within the step's deadline is answered, and so is a call that passes its own."""
        event = job.event
        job.deadline_s = self._clock.now() + self._config.step_deadline_s
        if event is None or event.fired():
            self._enqueue(job)
        else:
            with self._lock:
                self._gated[id(job)] = job
            event.on_fire(partial(self._ungate, job))
        self._arm()

    def promote(self, step: int, layer: int) -> None:
        """A compute thread waits for the loads of a layer: they go before every prefetch."""
        with self._lock:
            self._queue.promote(lambda j: j.step == step and j.layer == layer)

    def cancel(self, step: int) -> None:
        """Transfers of a step that did not start are answered `CANCELLED`."""

        def unwanted(job: Job) -> bool:
            return job.step == step and isinstance(job, Transfer)

        with self._lock:
            jobs = self._queue.remove(unwanted)
            gated = [key for key, job in self._gated.items() if unwanted(job)]
            jobs += [self._gated.pop(key) for key in gated]
        for job in jobs:
            self._answer(job, Outcome.CANCELLED)

    def jobs_of(self, group_id: int) -> list[Job]:
        """Every job of a group that has not been answered."""
        with self._lock:
            jobs = [*self._queue, *self._gated.values(), *(j for j, _ in self._running.values()), *self._answering.values()]
        return [j for j in jobs if j.group_id == group_id]

    def lost_of(self, group_id: int) -> list[Job]:
        """Jobs of a group that were given up, and whose calls may still return."""
        with self._lock:
            return [j for j in self._late.values() if j.group_id == group_id]

    def stop(self) -> None:
        """No job starts any more; queued ones are answered `CANCELLED`. Does not wait for calls under way."""
        with self._lock:
            self._stopped = True
            jobs = self._queue.remove(lambda _: True) + list(self._gated.values())
            self._gated.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._executor.stop()
        for job in jobs:
            self._answer(job, Outcome.CANCELLED)

    # -- on a worker ---------------------------------------------------------------------------------------------------

    def take(self, worker: Worker) -> Job | None:
        """The next job for a worker, or None: the worker is noted as idle and will be woken."""
        with self._lock:
            if worker.lost or self._stopped:
                return None
            job = self._queue.pop(worker.loads_only)
            if job is None:
                if worker not in self._idle:
                    self._idle.append(worker)
            else:
                self._running[worker] = (job, self._clock.now())
                self.peak_running = max(self.peak_running, len(self._running))
        return job

    def run(self, job: Job, worker: Worker) -> None:
        """Makes the job's store call and answers it. Never raises, whatever the store does."""
        self.finish(worker, self.call(job))

    def call(self, job: Job) -> TransferDone:
        """Makes the job's store call."""
        started, epoch = self._clock.now(), self.epoch
        outcomes, error = self._call(job, epoch)
        return TransferDone(job, outcomes, started, self._clock.now(), epoch, error)

    def finish(self, worker: Worker, done: TransferDone) -> None:
        """Answers a job whose call returned; the answer is late if the call had been given up."""
        job = done.job
        with self._lock:
            done.late = self._running.pop(worker, None) is None
            if self._late.pop(worker, None) is not None and self._missing[worker.loads_only]:
                self._missing[worker.loads_only] -= 1
                worker.lost = False
            self._answering[worker] = job
        if self._observer is not None:
            args = _span_args(job, done.outcomes)
            self._observer.span(Span(worker.name, job.label, done.started_s, done.ended_s, args))
        self._note_store(job, done.outcomes, done.epoch)
        self._reply(job, done)
        with self._lock:
            del self._answering[worker]

    @property
    def stopped(self) -> bool:
        return self._stopped

    # -- inside --------------------------------------------------------------------------------------------------------

    def _enqueue(self, job: Job) -> None:
        worker: Worker | None = None
        with self._lock:
            refused = self._stopped or not self._has_worker(job)
            if not refused:
                self._queue.push(job)
                worker = next((w for w in self._idle if not w.loads_only or job.priority in LOADS_ONLY), None)
                if worker is not None:
                    self._idle.remove(worker)
                    self._executor.wake(worker)
        if refused:
            self._answer(job, Outcome.CANCELLED if self._stopped else Outcome.NOT_STARTED)

    def _has_worker(self, job: Job) -> bool:
        general = self._config.workers > self._missing[False]
        return general or (not self._missing[True] and job.priority in LOADS_ONLY)

    def _ungate(self, job: Job) -> None:
        with self._lock:
            waiting = self._gated.pop(id(job), None)
        if waiting is not None:
            self._enqueue(job)

    def _call(self, job: Job, epoch: int) -> tuple[list[Outcome], BaseException | None]:
        count = job.count
        if self._audit is not None:
            self._audit.begin(epoch)
        if 0 <= job.epoch != epoch:
            return [Outcome.STALE] * count, None
        try:
            outcomes = self._dispatch(job)
        except StoreUnreachableError as e:
            return [Outcome.UNREACHABLE] * count, e
        except BaseException as e:  # a worker outlives anything that a store raises
            log.warning("store call raised", call=job.label, group=job.group_id, error=repr(e))
            return [Outcome.CALL_FAILED] * count, e
        if not isinstance(outcomes, list) or len(outcomes) != count or not all(isinstance(o, Outcome) for o in outcomes):
            error = TypeError(f"{job.label}: the store answered {outcomes!r:.200} for {count} keys; expected one Outcome each")
            return [Outcome.CALL_FAILED] * count, error
        return outcomes, None

    def _dispatch(self, job: Job) -> list[Outcome]:
        store = self.store
        match job:
            case Transfer(kind=Kind.PUT):
                return self._put(job)
            case Transfer(kind=Kind.GET):
                return self._get(job)
            case Open(kind=kind):
                keys = [s.key for s in job.sessions]
                call = store.put_open if kind is Kind.PUT else store.get_open
                return call(keys, [job.object_bytes] * len(keys))
            case Commit():
                return store.put_commit([s.key for s in job.sessions])
            case Revoke():
                return store.put_revoke([s.key for s in job.sessions])
            case Close():
                return store.get_close([s.key for s in job.sessions])
            case Ask():
                job.result = job.run(store)
                return [Outcome.OK]
            case _:
                raise TypeError(f"no store call belongs to {job!r}")

    def _put(self, job: Transfer) -> list[Outcome]:
        """Range writes of sessions near the store's discard timeout could land in another object (I11): not made."""
        if self._clock.now() - job.oldest_s > self.store.put_safe_age_s:
            return [Outcome.STALE] * job.count
        return self.store.put_ranges(job.call.batch)

    def _get(self, job: Transfer) -> list[Outcome]:
        """Renews leases that are half gone, and refuses what came in after the lease: its bytes may be another object's."""
        store, batch = self.store, job.call.batch
        gone: dict[str, Outcome] = {}
        if self._clock.now() - job.oldest_s > store.lease_s / 2:
            keys = list(dict.fromkeys(batch.keys))
            renewed_at = self._clock.now()
            answers = store.get_open(keys, [job.object_bytes] * len(keys))
            gone = {k: o for k, o in zip(keys, answers, strict=True) if o is not Outcome.OK}
            job.oldest_s = renewed_at
        outcomes = store.get_ranges(batch)
        if self._clock.now() - job.oldest_s > store.lease_s:
            return [Outcome.LEASE_EXPIRED] * job.count
        if gone and len(outcomes) == len(batch.keys):
            return [gone.get(k, o) for k, o in zip(batch.keys, outcomes, strict=True)]
        return outcomes

    def _note_store(self, job: Job, outcomes: list[Outcome], epoch: int) -> None:
        """Unreachable, or a put that the store no longer knows, voids every open session (I11)."""
        if outcomes.count(Outcome.OK) == len(outcomes):
            return
        unreachable = Outcome.UNREACHABLE in outcomes
        put = isinstance(job, Commit | Revoke) or (isinstance(job, Transfer) and job.kind is Kind.PUT)
        if not unreachable and not (put and Outcome.NOT_FOUND in outcomes):
            return
        with self._lock:
            first = self.epoch == epoch
            if first:
                self.epoch += 1
        if first or unreachable:
            cause = f"{job.label} answered {'unreachable' if unreachable else 'not found'}"
            self._on_store_lost(StoreLost(self.epoch, unreachable, cause))

    def _answer(self, job: Job, outcome: Outcome) -> None:
        now = self._clock.now()
        self._reply(job, TransferDone(job, [outcome] * job.count, now, now, self.epoch))

    def _reply(self, job: Job, done: TransferDone) -> None:
        """Reply first, latches last: whoever a latch wakes finds the reply already on its way."""
        try:
            job.reply(done)
        finally:
            if job.settled is not None and not done.late:
                job.settled(done.outcomes)

    # -- deadlines -----------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        if self._timer is None and not self._stopped:
            wait = min(self._config.call_deadline_s, self._config.step_deadline_s)
            self._timer = asyncio.get_running_loop().call_later(wait, self._check)

    def _check(self) -> None:
        """Answers for jobs past their deadline; comes back when the next one can be."""
        self._timer = None
        now, limit = self._clock.now(), self._config.call_deadline_s
        with self._lock:
            expired = [(w, j) for w, (j, start) in self._running.items() if now >= start + limit]
            for worker, job in expired:
                del self._running[worker]
                self._late[worker] = job
                worker.lost = True
                self.lost_workers += 1
            unfired = [self._gated.pop(key) for key, job in list(self._gated.items()) if now >= job.deadline_s]
            stuck = self._queue.remove(lambda j: now >= j.deadline_s)
            dues = [start + limit for _, start in self._running.values()]
            dues += [j.deadline_s for j in self._gated.values()] + [j.deadline_s for j in self._queue]
        for worker, job in expired:
            log.warning("store call passed its deadline; its worker is lost", call=job.label, worker=worker.name, after_s=limit)
            self._replace(worker)
            self._answer(job, Outcome.LOST)
        for job in unfired:
            self._answer(job, Outcome.EVENT_LOST)
        for job in stuck:
            self._answer(job, Outcome.NOT_STARTED)
        if dues and not self._stopped and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, min(dues) - now), self._check)

    def _replace(self, lost: Worker) -> None:
        """Starts a worker in place of a lost one, while not too many are lost at a time; a lost one may come back."""
        fresh: Worker | None = None
        stranded: list[Job] = []
        with self._lock:
            if len(self._late) > self._config.max_lost_workers:
                self._missing[lost.loads_only] += 1
                stranded = self._queue.remove(lambda job: not self._has_worker(job))
            else:
                fresh = Worker(f"{lost.name.split('~')[0]}~{self.lost_workers}", lost.loads_only)
        if fresh is not None:
            self._executor.replace(lost, fresh)
        for job in stranded:
            self._answer(job, Outcome.NOT_STARTED)


def _span_args(job: Job, outcomes: list[Outcome]) -> dict[str, Any]:
    args: dict[str, Any] = {"group": job.group_id, "step": job.step, "keys": job.count}
    if isinstance(job, Transfer):
        args |= {"layer": job.layer, "bytes": job.call.batch.nbytes_per_key * job.count}
    failed = job.count - outcomes.count(Outcome.OK)
    return args | {"failed": failed} if failed else args
