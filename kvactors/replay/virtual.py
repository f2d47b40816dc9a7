"""Runs a replay on virtual time: the same harness, player and engine, with simulated workers and a model of the compute.

What is modelled: a store call takes latency + bytes / bandwidth, ten percent more or less; three workers make calls at the same
time, each with the whole bandwidth; every layer of a step computes for the same time, whatever the step holds. The bytes are
real, and are filled, moved and compared as in a live run, in no virtual time. All that could happen in any order (which ready
task runs next, how long a call takes) is drawn from the seed: the same seed gives the same event log, byte for byte.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from kvactors.actors.pool import TransferPool
from kvactors.actors.workers import Worker
from kvactors.core.clock import Clock
from kvactors.core.observe import Span
from kvactors.messages import Job, TransferDone
from kvactors.replay.compute import Computed
from kvactors.replay.plan import Plan, VirtualOptions
from kvactors.replay.run import Ground, Outcome, Watchers, play_plan
from kvactors.simulate.loop import VirtualLoop, run_virtual
from kvactors.simulate.workers import SimulatedWorkers, Speed
from kvactors.stores import FaultyStore, open_store

JITTER = 0.1
"""Calls take up to this share less or more than the model says."""

_LINES_AT_ONCE = 1024


class ByteSink(Protocol):
    """Where an event log goes: a binary file, or what behaves like one."""

    def write(self, line: bytes, /) -> object: ...


def run_on_virtual_time(plan: Plan, watchers: Watchers | None = None, event_log: ByteSink | None = None) -> Outcome:
    """Runs a plan whose options have a `virtual`; every event goes to the event log as a line, if there is one.

    Raises:
        DeadlockError: every task waits, for nothing that could happen.
    """
    assert plan.options.virtual is not None
    watchers = watchers or Watchers()
    log = EventLog(event_log)
    loop = VirtualLoop(random.Random(f"{plan.seed}/schedule"), most_events=math.inf, most_s=math.inf)
    on_outcome = watchers.on_outcome

    def logged(outcome: Outcome) -> None:
        outcome.report.event_log_sha256 = log.digest
        if on_outcome is not None:
            on_outcome(outcome)

    watchers = replace(watchers, observers=[log, *watchers.observers], on_outcome=logged)
    return run_virtual(_replay(plan, plan.options.virtual, loop, watchers), loop)


async def _replay(plan: Plan, virtual: VirtualOptions, loop: VirtualLoop, watchers: Watchers) -> Outcome:
    options = plan.options
    speed = Speed(virtual.latency_s, virtual.bandwidth, JITTER)
    workers = ReplayWorkers(loop, speed, random.Random(f"{plan.seed}/calls"))
    store = open_store(options.store, capacity=options.capacity, clock=loop)
    if options.faults is not None:
        store = FaultyStore(store, replace(options.faults, seed=plan.seed), sleep=workers.sleep)
    compute = ModelledCompute(loop, virtual.layer_time_s)
    return await play_plan(plan, Ground("virtual", loop, compute, store, workers), watchers)


class ReplayWorkers(SimulatedWorkers):
    """Simulated workers whose calls take effect at their end, and take longer by what the store slept in them."""

    def __init__(self, loop: VirtualLoop, speed: Speed, rng: random.Random) -> None:
        super().__init__(loop, speed, rng)
        self._slept_s = 0.0

    def sleep(self, seconds: float) -> None:
        """For a store that delays its answers: the call that is being made ends so much later."""
        self._slept_s += seconds

    def _look(self, worker: Worker) -> None:
        pool = self._pool
        assert pool is not None
        if worker.lost or pool.stopped:
            return
        job = pool.take(worker)
        if job is not None:
            duration = self._speed.duration_s(job, self._rng)
            self._loop.call_later(duration, self._call, pool, worker, job, self._loop.now())

    def _call(self, pool: TransferPool, worker: Worker, job: Job, started_s: float) -> None:
        self._slept_s = 0.0
        done = pool.call(job)
        done.started_s = started_s
        if self._slept_s:
            self._loop.call_later(self._slept_s, self._end, pool, worker, done)
        else:
            self._end(pool, worker, done)

    def _end(self, pool: TransferPool, worker: Worker, done: TransferDone) -> None:
        done.ended_s = self._loop.now()
        pool.finish(worker, done)
        self._look(worker)


class ModelledCompute:
    """Computes on the loop, in no time, and then lets the time of a layer pass."""

    every_layer = True

    def __init__(self, clock: Clock, layer_time_s: float) -> None:
        self._clock, self._layer_time_s = clock, layer_time_s

    async def run(self, work: Callable[[], int]) -> Computed:
        start = self._clock.now()
        mismatched_bytes = work()
        await asyncio.sleep(self._layer_time_s)
        return Computed(mismatched_bytes, start, self._clock.now())

    def close(self) -> None:
        pass


class EventLog:
    """An observer that hashes every span, one line each, in the order in which they end."""

    def __init__(self, file: ByteSink | None = None) -> None:
        self._hash = hashlib.sha256()
        self._file = file
        self._lines: list[str] = []

    def span(self, span: Span) -> None:
        args = " ".join([f"{name}={value}" for name, value in span.args.items()])
        self._lines.append(f"{span.start_s:.9f} {span.end_s:.9f} {span.track} {span.name} {args}\n")
        if len(self._lines) >= _LINES_AT_ONCE:
            self._put()

    def _put(self) -> None:
        lines = "".join(self._lines).encode()
        self._lines.clear()
        self._hash.update(lines)
        if self._file is not None:
            self._file.write(lines)

    @property
    def digest(self) -> str:
        """SHA-256 of all lines so far, which are in the file then."""
        self._put()
        return self._hash.hexdigest()
