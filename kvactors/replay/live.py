"""Runs a replay with the real clock: real threads, real bytes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from kvactors.core.clock import Clock
from kvactors.core.store import Store
from kvactors.devices import MonotonicClock
from kvactors.replay.compute import ThreadCompute
from kvactors.replay.leaving import left_in_a_hurry
from kvactors.replay.plan import Plan
from kvactors.replay.run import Ground, Outcome, Watchers, play_plan
from kvactors.stores import FaultyStore, LocalMaster, open_store
from kvactors.stores.mooncake.client import clients_left_open

LEAVE_S = 5.0
"""How long a run waits for calls under way when it leaves a pool: it is over, and its memory is never used again."""

LOCAL_CAPACITY = 4 << 30
"""What a master of our own is given if nothing else is said, bytes."""


def run_live(plan: Plan, watchers: Watchers | None = None) -> Outcome:
    """Runs a plan to its end, or until it is interrupted through the watchers' `interrupts`."""
    return _loop_run(_replay(plan, watchers or Watchers()))


async def _replay(plan: Plan, watchers: Watchers) -> Outcome:
    clock = MonotonicClock()
    with contextlib.ExitStack() as stack:
        store = _open(plan, clock, stack)
        return await play_plan(plan, Ground("live", clock, ThreadCompute(clock), store), watchers)


def _open(plan: Plan, clock: Clock, stack: contextlib.ExitStack) -> Store:
    """The run's store, which whoever plays the plan closes; a master of its own goes with the stack."""
    options = plan.options
    if options.store == "memory":
        store = open_store("memory", capacity=options.capacity, clock=clock)
    elif options.local_master:
        master = stack.enter_context(LocalMaster())
        stack.callback(  # a frozen one would be waited for
            lambda: master.kill() if left_in_a_hurry() or clients_left_open() else None
        )
        segment = LOCAL_CAPACITY if options.capacity is None else options.capacity
        store = open_store("mooncake", clock=clock, config=master.config(global_segment_size=segment, close_deadline_s=LEAVE_S))
    else:
        store = open_store("mooncake", clock=clock, close_deadline_s=LEAVE_S)
    return store if options.faults is None else FaultyStore(store, replace(options.faults, seed=plan.seed))


def _loop_run(main: Coroutine[Any, Any, Outcome]) -> Outcome:
    try:
        if sys.platform != "linux":
            raise ImportError
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
