"""Runs a replay with the real clock: real threads, real bytes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from kvactors.core.clock import Clock
from kvactors.core.store import Store
from kvactors.devices import MonotonicClock
from kvactors.replay.compute import ThreadCompute
from kvactors.replay.plan import Plan
from kvactors.replay.run import Ground, Outcome, Watchers, play_plan
from kvactors.stores import FaultyStore, open_store


def run_live(plan: Plan, watchers: Watchers | None = None) -> Outcome:
    """Runs a plan to its end, or until it is interrupted through the watchers' `interrupts`."""
    return _loop_run(_replay(plan, watchers or Watchers()))


async def _replay(plan: Plan, watchers: Watchers) -> Outcome:
    clock = MonotonicClock()
    return await play_plan(plan, Ground("live", clock, ThreadCompute(clock), _open(plan, clock)), watchers)


def _open(plan: Plan, clock: Clock) -> Store:
    options = plan.options
    store = open_store(options.store, capacity=options.capacity, clock=clock)
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
