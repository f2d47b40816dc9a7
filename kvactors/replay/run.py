"""Plays a plan on the running loop, whichever clock that has: builds pool, engine and harness, and makes the report."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvactors.actors.loops import call_on
from kvactors.actors.workers import Executor
from kvactors.core.clock import Clock
from kvactors.core.config import EngineConfig
from kvactors.core.observe import Observer, Span
from kvactors.core.store import Store
from kvactors.devices import CpuDevices
from kvactors.engine import Engine
from kvactors.replay.compute import Compute
from kvactors.replay.harness import Harness, Pace
from kvactors.replay.interrupts import Interrupts
from kvactors.replay.leaving import leave, leave_now
from kvactors.replay.local_pool import LocalPool
from kvactors.replay.plan import Plan, local_blocks
from kvactors.replay.report import NoHitsPart, Report, TracePart, build_report
from kvactors.replay.tally import Sample, Tally
from kvactors.replay.trace import TraceReader, TraceRequest
from kvactors.stores import FaultyStore, MemoryStore

GIVE_UP_S = 5.0
"""How long a run that was given up may take to fall apart."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What a run stands on: the parts that differ between the live and the virtual clock.

    Attributes:
        name: "live" or "virtual".
        executor: runs the transfer workers; None = threads.
    """

    name: str
    clock: Clock
    compute: Compute
    store: Store
    executor: Executor | None = None


@dataclass(frozen=True, slots=True)
class Watchers:
    """Who looks on while a plan is played; all optional.

    Attributes:
        observers: take spans.
        on_progress: called after each step.
        on_stopping: called at the first signal.
        on_giving_up: called at the second signal, with the store's calls that have not returned, as text.
        on_outcome: called when the engine is closed, before the store is left: that may take long, or be cut short.
        on_leaving: called when leaving the store takes longer than a moment.
        looks: each is entered with the engine while it runs.
        interrupts: whose signals stop the run; None = they do what they usually do.
    """

    observers: Sequence[Observer] = ()
    on_progress: Callable[[Tally], None] | None = None
    on_stopping: Callable[[], None] | None = None
    on_giving_up: Callable[[Sequence[str]], None] | None = None
    on_outcome: Callable[[Outcome], None] | None = None
    on_leaving: Callable[[], None] | None = None
    looks: Sequence[Callable[[Engine], contextlib.AbstractContextManager[None]]] = ()
    interrupts: Interrupts | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a replay ended."""

    report: Report
    samples: list[Sample]
    interrupted: bool


async def play_plan(plan: Plan, ground: Ground, watchers: Watchers) -> Outcome:
    """Plays a plan to its end, or until it is interrupted: the first time the step in hand ends and everything is drained, the
    second time nothing is awaited any more. Either way there is a report."""
    options = plan.options
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(ground.compute.close)
        pool = LocalPool(options.layout, local_blocks(plan), options.local_blocks)
        if ground.executor is None:
            stack.push_async_callback(leave, pool, ground.store, watchers.interrupts, watchers.on_leaving)
        else:  # no call of simulated workers is under way while the loop's own code runs
            stack.callback(leave_now, pool, ground.store)
        pool.register(ground.store)
        outcome = await _play_on(plan, ground, watchers, pool)
        if watchers.on_outcome is not None:
            watchers.on_outcome(outcome)
        return outcome


async def _play_on(plan: Plan, ground: Ground, watchers: Watchers, pool: LocalPool) -> Outcome:
    options, rules = plan.options, plan.rules
    observer = _together(watchers.observers)
    stopping, given_up = asyncio.Event(), asyncio.Event()
    engine = Engine(
        options.layout,
        ground.store,
        pool.bases,
        EngineConfig(audit=True),
        clock=ground.clock,
        rng=random.Random(plan.seed),
        devices=CpuDevices(),
        hash_tokens=rules.hash_tokens,
        observer=observer,
        executor=ground.executor,
    )
    harness = Harness(
        engine,
        pool,
        rules,
        ground.compute,
        clock=ground.clock,
        sleep=partial(_sleep, stopping),
        pace=Pace(options.concurrency, options.chunk_tokens, options.speed),
        observer=observer,
        on_progress=watchers.on_progress,
    )

    def interrupted(count: int) -> None:
        if count > 1:
            given_up.set()
        elif not stopping.is_set():
            stopping.set()
            harness.stop()
            if watchers.on_stopping is not None:
                watchers.on_stopping()

    known = plan.summary
    reader = TraceReader(
        plan.source, skip_bad=options.skip_bad, limit=known.requests, expected=known.checksum, format=known.format
    )
    with _passing_on(watchers.interrupts, interrupted):
        async with engine:
            with contextlib.ExitStack() as looking:
                for look in watchers.looks:
                    looking.enter_context(look(engine))
                await _play(harness, engine, iter(reader), given_up, watchers.on_giving_up)
            report = _report(plan, ground, engine, harness)
    return Outcome(report, harness.tally.samples, harness.stopped)


async def _play(
    harness: Harness,
    engine: Engine,
    requests: Iterator[TraceRequest],
    given_up: asyncio.Event,
    on_giving_up: Callable[[Sequence[str]], None] | None,
) -> None:
    playing = asyncio.ensure_future(harness.play(requests))
    waiting = asyncio.ensure_future(given_up.wait())
    try:
        await asyncio.wait({playing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            playing.result()
            return
        if on_giving_up is not None:
            on_giving_up(_calls_under_way(engine))
        playing.cancel()
        await engine.close()  # answers whatever the harness waits for
        done, _ = await asyncio.wait({playing}, timeout=GIVE_UP_S)
        if done and not playing.cancelled():
            playing.exception()  # whatever broke in the middle of it is of no interest any more
        harness.give_up()
    finally:
        playing.cancel()
        waiting.cancel()


def _calls_under_way(engine: Engine) -> list[str]:
    """Each call of the store that has not returned, those past their deadline first."""
    inside = engine.inside()
    now, glance = inside.clock.now(), inside.pool.glance()
    return [
        f"{call.call}{'' if call.group_id < 0 else f' of group {call.group_id}'} for {now - call.started_s:.1f} s"
        for call in (*glance.late, *glance.running)
    ]


def _report(plan: Plan, ground: Ground, engine: Engine, harness: Harness) -> Report:
    options, store = plan.options, ground.store
    return build_report(
        trace=TracePart(
            path=_text(options.trace),
            requests=plan.summary.requests,
            skipped=plan.summary.skipped,
            format=plan.summary.format,
            block_tokens=plan.summary.block_tokens,
        ),
        layout=options.layout,
        boundary_tokens=plan.rules.boundary_tokens,
        hash_tokens=plan.rules.hash_tokens,
        store=options.store,
        clock=ground.name,
        seed=plan.seed,
        tally=harness.tally,
        stats=engine.stats(),
        violations=[*harness.violations, *engine.violations()],
        checked=harness.checks + engine.invariants_checked,
        wall_s=harness.wall_s,
        injected=store.injected if isinstance(store, FaultyStore) else 0,
        preemptions=harness.scheduler.preempted_in_all,
        interrupted=harness.stopped,
        no_hits=None if harness.tally.hit_tokens else _no_hits(plan, store, harness.tally),
    )


def _no_hits(plan: Plan, store: Store, tally: Tally) -> NoHitsPart:
    """What is known of a run without hits. A real store is not asked: that may take long."""
    faulty = store if isinstance(store, FaultyStore) else None
    behind = store if faulty is None else faulty.store
    return NoHitsPart(
        shared_prefix=tally.shared,
        evictions=behind.pool.evictions if isinstance(behind, MemoryStore) else None,
        faults={} if faulty is None else faulty.counts,
        together=plan.options.concurrency > 1,
        retention=plan.options.retention is not None,
    )


def _text(path: str) -> str:
    """A path as text that can be written anywhere: bytes that are no UTF-8 are replaced."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


async def _sleep(stopping: asyncio.Event, wait_s: float) -> None:
    if wait_s <= 0:
        await asyncio.sleep(0)
        return
    try:
        await asyncio.wait_for(stopping.wait(), wait_s)
    except TimeoutError:
        pass


def _together(observers: Sequence[Observer]) -> Observer | None:
    return observers[0] if len(observers) == 1 else _All(observers) if observers else None


class _All:
    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def span(self, span: Span) -> None:
        for observer in self._observers:
            observer.span(span)


class _passing_on:
    """While it is entered, signals reach the loop that is running."""

    def __init__(self, interrupts: Interrupts | None, act: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()
        self._passed = None if interrupts is None else interrupts.passed_to(lambda n: call_on(loop, act, n))

    def __enter__(self) -> None:
        if self._passed is not None:
            self._passed.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._passed is not None:
            self._passed.__exit__(None, None, None)
