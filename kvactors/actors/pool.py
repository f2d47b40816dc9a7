"""The transfer pool: hands blocking store calls to a bounded set of workers, and answers for calls that do not return.

The pool decides (which job, is it still allowed, what does its answer mean); who runs the calls is an `Executor`: our own
daemon threads live, simulated workers under a virtual clock; which call belongs to a job says `store_calls.py`. Workers take
the next job themselves, so that the event loop is not on the way from one transfer to the next.

Replies are posted under the pool's lock: whoever looks (`jobs_of`) sees a job, or finds its reply in the mailbox, and the
answer of a lost call always stands before its late return.

Where a store has ranges that can be too short, a transfer takes riders along from the queue (`core/riders.py`). From there to
its answer the call is one job, with a deadline of its own; whoever asks for jobs, and whatever is answered, knows its parts.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvactors.actors.actor import Post
from kvactors.actors.audit import AuditedStore
from kvactors.actors.latch import Latch
from kvactors.actors.store_calls import StoreCalls
from kvactors.actors.workers import Executor, Worker
from kvactors.core.clock import Clock
from kvactors.core.config import EngineConfig
from kvactors.core.observe import Observer, Span
from kvactors.core.queue import LOADS_ONLY, Priority, TransferQueue
from kvactors.core.riders import Riders
from kvactors.core.store import Outcome, Store
from kvactors.log import get_logger
from kvactors.messages import Commit, Job, JoinedTransfer, Kind, Revoke, StoreLost, Transfer, TransferDone

log = get_logger("kvactors.pool")


class Running(NamedTuple):
    """A call under way; `started_s` on the pool's clock; `group_id` is -1 for one that is no group's."""

    worker: str
    call: str
    group_id: int
    step: int
    keys: int
    started_s: float


class Glance(NamedTuple):
    """See `TransferPool.glance`.

    Attributes:
        queued: jobs that wait for a worker.
        gated: jobs that wait for their device event.
        late: calls past their deadline that have not returned.
        missing: lost workers that were not replaced.
    """

    queued: Mapping[Priority, int]
    gated: int
    running: Sequence[Running]
    late: Sequence[Running]
    missing: int


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
        self._calls = StoreCalls(self.store, clock, audit)
        self.epoch = 0
        self.lost_workers = 0
        self.joined_transfers = 0
        self.peak_running = 0
        self._config, self._clock, self._executor = config, clock, executor
        self._observer, self._on_store_lost = observer, on_store_lost
        self._lock = threading.Lock()
        self._queue: TransferQueue[Job] = TransferQueue()
        self.good_range_bytes: int = max(0, getattr(self.store, "good_range_bytes", 0))
        self.reads_whole_objects = self.good_range_bytes > 0 and bool(getattr(self.store, "reads_whole_objects", False))
        self._riders = Riders[Transfer](self.good_range_bytes, config.max_transfer_bytes) if self.good_range_bytes else None
        self._gated: dict[int, Job] = {}
        self._running: dict[Worker, tuple[Job, float]] = {}
        self._late: dict[Worker, tuple[Job, float]] = {}
        self._idle: list[Worker] = []
        self._missing = {False: 0, True: 0}
        """lost workers that were not replaced, by whether they take loads only"""
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._at_rest: Latch | None = None

    def start(self) -> None:
        workers = [Worker(f"worker-{i}", False) for i in range(self._config.workers)] + [Worker("worker-loads", True)]
        self._executor.start(self, workers)

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queues a job, after its device event. Its reply comes exactly once, whatever happens to it, and in time: a job that
        no worker took within the step's deadline is answered, and so is a call that passes its own."""
        self.submit_together((job,))

    def submit_together(self, jobs: Sequence[Job]) -> None:
        """`submit` for jobs that share an event: no worker takes one of them before all are queued."""
        if not jobs:
            return
        deadline_s = self._clock.now() + self._config.step_deadline_s
        for job in jobs:
            job.deadline_s = deadline_s
        event, waits = jobs[0].event, False
        if event is None:
            self._enqueue(jobs)
        else:
            try:
                if event.fired():
                    self._enqueue(jobs)
                else:
                    with self._lock:
                        self._gated.update((id(job), job) for job in jobs)
                    waits = True
                    event.on_fire(partial(self._ungate, jobs))
            except Exception as e:  # a device error: the work before the event may not have been done
                log.warning("a device event raised", call=jobs[0].label, group=jobs[0].group_id, error=repr(e))
                self._fail_gated(jobs, waits)
        self._arm()

    def promote(self, step: int, layer: int) -> None:
        """A compute thread waits for the loads of a layer: they go before every prefetch."""
        with self._lock:
            self._queue.promote(lambda j: j.step == step and j.layer == layer)
            for job in self._gated.values():
                if job.step == step and job.layer == layer and job.priority is Priority.PREFETCH:
                    job.priority = Priority.DEMANDED

    def cancel(self, step: int, group_id: int | None = None) -> None:
        """Of a step (of one group, or all): transfers that did not start are answered `CANCELLED`; put opens, and questions
        which of them are needed, `NOT_STARTED`. Commits and revokes stay."""

        def unwanted(job: Job) -> bool:
            started_for_nothing = isinstance(job, Transfer) or job.priority is Priority.PUT_OPEN
            return job.step == step and started_for_nothing and group_id in (None, job.group_id)

        def answer(job: Job) -> Outcome:
            return Outcome.CANCELLED if isinstance(job, Transfer) else Outcome.NOT_STARTED

        with self._lock:
            jobs = self._unqueue(unwanted)
            jobs += [self._gated.pop(key) for key, job in list(self._gated.items()) if unwanted(job)]
            replies = [self._post(job, answer(job)) for job in jobs]
        self.settle(replies)

    def jobs_of(self, group_id: int) -> list[Job]:
        """Every job of a group that has not been answered."""
        with self._lock:
            running = [part for job, _ in self._running.values() for part in job.parts]
            jobs = [*self._queue, *self._gated.values(), *running]
        return [j for j in jobs if j.group_id == group_id]

    def lost_of(self, group_id: int) -> list[Job]:
        """Jobs of a group that were given up, and whose calls may still return."""
        with self._lock:
            return [part for job, _ in self._late.values() for part in job.parts if part.group_id == group_id]

    def stop(self) -> Latch:
        """No job starts any more; queued ones are answered `CANCELLED`. The latch opens when no call is under way."""
        at_rest = Latch()
        with self._lock:
            self._stopped = True
            jobs = self._unqueue(lambda _: True) + list(self._gated.values())
            self._gated.clear()
            replies = [self._post(job, Outcome.CANCELLED) for job in jobs]
            self._at_rest = at_rest
            if not self._running and not self._late:
                at_rest.open()
        self.settle(replies)
        if self._timer is not None:
            self._timer.cancel()
        self._executor.stop()
        return at_rest

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
                if self._riders is not None and isinstance(job, Transfer):
                    job = self._with_riders(job, self._riders)
                self._running[worker] = (job, self._clock.now())
                self.peak_running = max(self.peak_running, len(self._running))
        return job

    def run(self, job: Job, worker: Worker) -> None:
        """Makes the job's store call and answers it. Whatever the store raises becomes an outcome."""
        self.finish(worker, self.call(job))

    def call(self, job: Job) -> TransferDone:
        """Makes the job's store call."""
        started, epoch = self._clock.now(), self.epoch
        outcomes, error = self._calls.make(job, epoch)
        return TransferDone(job, outcomes, started, self._clock.now(), epoch, error)

    def finish(self, worker: Worker, done: TransferDone) -> None:
        """What follows a call. A thread may stop between any two of these, and actors act on what was posted before."""
        self.note(worker, done)
        self.settle(self.answer(worker, done))

    def note(self, worker: Worker, done: TransferDone) -> None:
        """Tells the observer of a call, and the coordinator what it says about the store."""
        self._observe(worker, done)
        self._note_store(done)

    def answer(self, worker: Worker, done: TransferDone) -> list[TransferDone]:
        """Answers a job whose call returned; the answer is late if that was given up. Returns what is to be settled."""
        answers = done.answers()
        with self._lock:
            late = self._running.pop(worker, None) is None
            if self._late.pop(worker, None) is not None and self._missing[worker.loads_only]:
                self._missing[worker.loads_only] -= 1
                worker.lost = False
            for answer in answers:
                answer.late = late
                _reply(answer)
            if self._at_rest is not None and not self._running and not self._late:
                self._at_rest.open()
        return answers

    @staticmethod
    def settle(answers: Sequence[TransferDone]) -> None:
        """After the reply: uncounts tasks and opens latches; whoever one wakes finds the reply already on its way."""
        for done in answers:
            if done.job.settled is not None and not done.late:
                done.job.settled()

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def queued(self) -> int:
        """Jobs that wait for a worker; not those that wait for their device event."""
        return len(self._queue)

    @property
    def waiting(self) -> int:
        """Jobs that wait for a worker or for their device event: a plain read from any thread."""
        return len(self._queue) + len(self._gated)

    def glance(self) -> Glance:
        """What is queued and running now: plain reads from any thread, without the lock, so that nobody waits for who looks."""
        queued = self._queue.counts()
        running, late = (
            [Running(w.name, job.label, job.group_id, job.step, job.count, start) for w, (job, start) in list(calls.items())]
            for calls in (self._running, self._late)
        )
        return Glance(queued, len(self._gated), running, late, sum(self._missing.values()))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _enqueue(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            refused = [done for job in jobs for done in self._push(job)]
        self.settle(refused)

    def _push(self, job: Job) -> list[TransferDone]:
        """Puts a job into the queue and wakes a worker, with the lock held. Returns a refused job's answer, to be settled."""
        if self._stopped or not self._has_worker(job):
            return [self._post(job, Outcome.CANCELLED if self._stopped else Outcome.NOT_STARTED)]
        self._queue.push(job)
        if self._riders is not None and isinstance(job, Transfer):
            self._riders.add(job)
        worker = next((w for w in self._idle if not w.loads_only or job.priority in LOADS_ONLY), None)
        if worker is not None:
            self._idle.remove(worker)
            self._executor.wake(worker)
        return []

    def _with_riders(self, first: Transfer, waiting: Riders[Transfer]) -> Transfer:
        """What goes in one call, with the lock held: the transfer alone, or joined with those that continue it."""
        riders = waiting.pick(first)
        if not riders:
            return first
        for rider in riders:
            self._queue.take(rider)
        self.joined_transfers += len(riders)
        return JoinedTransfer.of([first, *riders])

    def _unqueue(self, unwanted: Callable[[Job], bool]) -> list[Job]:
        jobs = self._queue.remove(unwanted)
        if self._riders is not None:
            for job in jobs:
                if isinstance(job, Transfer):
                    self._riders.discard(job)
        return jobs

    def _has_worker(self, job: Job) -> bool:
        general = self._config.workers > self._missing[False]
        return general or (not self._missing[True] and job.priority in LOADS_ONLY)

    def _ungate(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            waiting = [job for job in jobs if self._gated.pop(id(job), None) is not None]
            refused = [done for job in waiting for done in self._push(job)]
        self.settle(refused)

    def _fail_gated(self, jobs: Sequence[Job], waits: bool) -> None:
        """The event raised. If the jobs waited for it already, it may have fired before: then they are on their way."""
        with self._lock:
            failed = [job for job in jobs if not waits or self._gated.pop(id(job), None) is not None]
            replies = [self._post(job, Outcome.EVENT_LOST) for job in failed]
        self.settle(replies)

    def _observe(self, worker: Worker, done: TransferDone) -> None:
        if self._observer is None:
            return
        job = done.job
        try:
            self._observer.span(Span(worker.name, job.label, done.started_s, done.ended_s, _span_args(job, done.outcomes)))
        except Exception as e:
            log.warning("the observer raised; it is not asked again", error=repr(e))
            self._observer = None

    def _note_store(self, done: TransferDone) -> None:
        """Unreachable, or a put that the store no longer knows, voids every open session (I11)."""
        job, outcomes = done.job, done.outcomes
        if outcomes.count(Outcome.OK) == len(outcomes):
            return
        unreachable = Outcome.UNREACHABLE in outcomes
        put = isinstance(job, Commit | Revoke) or (isinstance(job, Transfer) and job.kind is Kind.PUT)
        if not unreachable and not (put and Outcome.NOT_FOUND in outcomes):
            return
        with self._lock:
            first = self.epoch == done.epoch
            if first:
                self.epoch += 1
        if first or unreachable:
            cause = f"{job.label} answered {'unreachable' if unreachable else 'not found'}"
            self._on_store_lost(StoreLost(self.epoch, unreachable, cause))

    def _post(self, job: Job, outcome: Outcome) -> TransferDone:
        """Posts the pool's own answer to a job, with the lock held; the caller settles it afterwards, without."""
        now = self._clock.now()
        done = TransferDone(job, [outcome] * job.count, now, now, self.epoch)
        _reply(done)
        return done

    # -- deadlines -----------------------------------------------------------------------------------------------------

    def _arm(self, wait: float = math.inf) -> None:
        """Checks after `wait` seconds at the latest: sooner, when a job that comes in the meantime can be past its deadline."""
        if self._timer is None and not self._stopped:
            wait = min(wait, self._config.call_deadline_s, self._config.step_deadline_s)
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wait), self._check)

    def _check(self) -> None:
        """Answers for jobs past their deadline, and replaces lost workers; comes back when the next one can be due."""
        self._timer = None
        now, limit = self._clock.now(), self._config.call_deadline_s
        replies: list[TransferDone] = []
        fresh: list[tuple[Worker, Worker]] = []
        with self._lock:
            for worker, (job, start) in [(w, call) for w, call in self._running.items() if now >= call[1] + limit]:
                replies += [self._post(part, Outcome.LOST) for part in job.parts]
                del self._running[worker]
                self._late[worker] = (job, start)
                worker.lost = True
                self.lost_workers += 1
                if len(self._late) > self._config.max_lost_workers:
                    self._missing[worker.loads_only] += 1
                else:
                    fresh.append((worker, Worker(f"{worker.name.split('~')[0]}~{self.lost_workers}", worker.loads_only)))
            for key, job in list(self._gated.items()):
                if now >= job.deadline_s:
                    del self._gated[key]
                    replies.append(self._post(job, Outcome.EVENT_LOST))
            stuck = self._unqueue(lambda j: now >= j.deadline_s or not self._has_worker(j))
            replies += [self._post(job, Outcome.NOT_STARTED) for job in stuck]
            dues = [start + limit for _, start in self._running.values()]
            dues += [j.deadline_s for j in self._gated.values()] + [j.deadline_s for j in self._queue]
        for lost, worker in fresh:
            self._executor.replace(lost, worker)
        for done in replies:
            if done.outcomes[0] is Outcome.LOST:
                log.warning("a store call passed its deadline", store=self.store.name, call=done.job.method, after_s=limit)
            else:
                log.warning("a store call was not made in time", call=done.job.method, why=done.outcomes[0].value)
        self.settle(replies)
        if dues:
            self._arm(min(dues) - now)


def _reply(done: TransferDone) -> None:
    """Puts an answer into its mailbox. A worker outlives a mailbox that refuses."""
    try:
        done.job.reply(done)
    except Exception as e:
        done.job.settled = None  # nobody learned what failed: its latch stays shut, and a deadline tells
        log.error("a reply could not be posted", call=done.job.label, error=repr(e))


def _span_args(job: Job, outcomes: list[Outcome]) -> dict[str, Any]:
    args: dict[str, Any] = {"group": job.group_id, "step": job.step, "keys": job.count}
    if isinstance(job, Transfer):
        args |= {"layer": job.layer, "bytes": job.call.batch.nbytes_per_key * job.count}
        if len(job.parts) > 1:
            args["layers"] = len(job.parts)
    failed = job.count - outcomes.count(Outcome.OK)
    return args | {"failed": failed} if failed else args
