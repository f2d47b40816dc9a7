"""Runs a replay with the real clock: real threads, real bytes, Ctrl-C drains."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvactors.core.config import EngineConfig
from kvactors.core.layout import KVLayout
from kvactors.core.store import Store
from kvactors.devices import CpuDevices, MonotonicClock
from kvactors.engine import Engine
from kvactors.errors import ConfigError, KVActorsError
from kvactors.layouts import boundary_tokens
from kvactors.replay.blocks import BlockRules
from kvactors.replay.compute import ThreadCompute
from kvactors.replay.harness import Harness, Pace
from kvactors.replay.hashing import trace_hash_tokens
from kvactors.replay.local_pool import LocalPool
from kvactors.replay.report import Report, TracePart, build_report
from kvactors.replay.tally import Sample, Tally
from kvactors.replay.timeline import SpanLog
from kvactors.replay.trace import TraceReader, TraceSummary, scan_trace
from kvactors.stores import FaultPlan, FaultyStore, open_store

_MOST_BLOCKS = 1 << 31


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay, and how. Sizes in bytes, lengths in tokens."""

    trace: str
    layout: KVLayout
    store: str = "memory"
    capacity: int | None = None
    retention: int | None = None
    local_blocks: int | None = None
    concurrency: int = 1
    chunk_tokens: int = 8192
    speed: float | None = None
    requests: int | None = None
    skip_bad: bool = False
    faults: FaultPlan | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A replay whose every input was checked."""

    options: ReplayOptions
    summary: TraceSummary
    rules: BlockRules


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a replay ended."""

    report: Report
    samples: list[Sample]
    interrupted: bool


def plan_replay(options: ReplayOptions) -> Plan:
    """Checks the whole trace and every option against each other, before anything runs.

    Raises:
        LocalError: a bad trace line, a layout or an option that cannot work.
    """
    layout = options.layout
    b = boundary_tokens(layout)
    if options.retention is not None and (options.retention < 0 or options.retention % b):
        raise ConfigError(f"--retention {options.retention}: must be 0 or a multiple of the layout's boundary of {b} tokens")
    if options.capacity is not None:
        for group in layout.groups:
            if layout.object_bytes(group.id) > options.capacity:
                raise ConfigError(
                    f"--capacity {options.capacity}: is smaller than one object of group {group.id}, "
                    f"which has {layout.object_bytes(group.id)} bytes; give more capacity or a larger --scale"
                )
    rules = BlockRules(layout, trace_hash_tokens(g.block_tokens for g in layout.groups), options.retention)
    summary = scan_trace(options.trace, skip_bad=options.skip_bad, limit=options.requests)
    return Plan(options, summary, rules)


def run_live(
    plan: Plan,
    *,
    spans: SpanLog | None = None,
    on_progress: Callable[[Tally], None] | None = None,
    on_stopping: Callable[[], None] | None = None,
) -> Outcome:
    """Runs a plan to its end, or until SIGINT; the second SIGINT gives up the drain (KeyboardInterrupt)."""
    try:
        return _loop_run(_replay(plan, spans, on_progress, on_stopping))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _replay(
    plan: Plan,
    spans: SpanLog | None,
    on_progress: Callable[[Tally], None] | None,
    on_stopping: Callable[[], None] | None,
) -> Outcome:
    options, rules, clock = plan.options, plan.rules, MonotonicClock()
    pool = LocalPool(options.layout, local_blocks(plan), options.local_blocks)
    store = _open(options)
    compute = ThreadCompute(clock)
    stopping = asyncio.Event()
    engine = Engine(
        options.layout,
        store,
        pool.bases,
        EngineConfig(audit=True),
        clock=clock,
        rng=random.Random(options.seed),
        devices=CpuDevices(),
        hash_tokens=rules.hash_tokens,
        observer=spans,
    )
    harness = Harness(
        engine,
        pool,
        rules,
        compute,
        clock=clock,
        sleep=lambda s: _sleep(s, stopping),
        pace=Pace(options.concurrency, options.chunk_tokens, options.speed),
        observer=spans,
        on_progress=on_progress,
    )
    requests = iter(TraceReader(options.trace, skip_bad=options.skip_bad, limit=options.requests))
    pool.register(store)
    try:
        with _interruptible(harness, stopping, on_stopping):
            async with engine:
                await harness.play(requests)
                report = _report(plan, engine, harness, store)
    finally:
        compute.close()
        _release(pool, store)
    return Outcome(report, harness.tally.samples, harness.stopped)


def local_blocks(plan: Plan) -> dict[int, int]:
    """Local blocks per group: enough for the longest requests that can run at once, or the bound if that is less.

    Raises:
        ConfigError: when that is more than can be numbered.
    """
    longest = plan.summary.longest
    n = plan.options.concurrency
    together = [*longest[:n], *[longest[0]] * max(0, min(n, plan.summary.requests) - len(longest))]
    out: dict[int, int] = dict.fromkeys((g.id for g in plan.rules.groups), 0)
    for length in together:
        for g, most in plan.rules.most_blocks(length).items():
            out[g] += most
    limit = plan.options.local_blocks
    return {g: max(1, min(most, _MOST_BLOCKS if limit is None else limit)) for g, most in out.items()}


def _open(options: ReplayOptions) -> Store:
    store = open_store(options.store, capacity=options.capacity)
    if options.faults is not None:
        plan = options.faults if options.faults.seed else replace(options.faults, seed=options.seed)
        store = FaultyStore(store, plan)
    return store


def _report(plan: Plan, engine: Any, harness: Harness, store: Store) -> Report:
    options = plan.options
    return build_report(
        trace=TracePart(path=options.trace, requests=plan.summary.requests, skipped=plan.summary.skipped),
        layout=options.layout,
        boundary_tokens=plan.rules.boundary_tokens,
        hash_tokens=plan.rules.hash_tokens,
        store=options.store,
        clock="live",
        seed=options.seed,
        tally=harness.tally,
        stats=engine.stats(),
        violations=[*harness.violations, *engine.violations()],
        checked=harness.checks + engine.invariants_checked,
        wall_s=harness.wall_s,
        injected=store.injected if isinstance(store, FaultyStore) else 0,
        preemptions=harness.scheduler.preempted_in_all,
        interrupted=harness.stopped,
    )


def _release(pool: LocalPool, store: Store) -> None:
    try:
        pool.unregister(store)
        store.close()
    except KVActorsError:
        pass  # a store that was killed by a fault plan answers like that; the memory is the process's own


async def _sleep(wait_s: float, stopping: asyncio.Event) -> None:
    if wait_s <= 0:
        await asyncio.sleep(0)
        return
    try:
        await asyncio.wait_for(stopping.wait(), wait_s)
    except TimeoutError:
        pass


class _interruptible:
    """While it is entered, SIGINT stops the harness, and a second one cancels the run."""

    def __init__(self, harness: Harness, stopping: asyncio.Event, on_stopping: Callable[[], None] | None) -> None:
        self._harness, self._stopping, self._on_stopping = harness, stopping, on_stopping
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._armed = False

    def __enter__(self) -> None:
        try:
            self._loop.add_signal_handler(signal.SIGINT, self._interrupt)
            self._armed = True
        except (NotImplementedError, RuntimeError, ValueError):
            pass  # not the main thread, or a platform without signal handlers: Ctrl-C raises as usual

    def __exit__(self, *_: object) -> None:
        if self._armed:
            self._loop.remove_signal_handler(signal.SIGINT)

    def _interrupt(self) -> None:
        if self._stopping.is_set():
            if self._task is not None:
                self._task.cancel()
            return
        self._stopping.set()
        self._harness.stop()
        if self._on_stopping is not None:
            self._on_stopping()


def _loop_run(main: Any) -> Outcome:
    try:
        if sys.platform != "linux":
            raise ImportError
        import uvloop
    except ImportError:
        outcome: Outcome = asyncio.run(main)
        return outcome
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        done: Outcome = runner.run(main)
        return done
