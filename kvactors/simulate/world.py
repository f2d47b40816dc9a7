"""One simulated run: instances of a model serve prompts over one store, with faults, and everything is checked.

The driver plays an unfriendly vLLM: chunked prefill, shared prefixes, duplicate keys, preemption with other blocks, aborts
at any point, forward passes aborted half-way or overtaken by the next step, finish while saving, loads outside steps, late
events, a drain at any time. Freed blocks are scribbled over at once, so a late read or write shows as wrong bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvactors.core.config import EngineConfig
from kvactors.core.layout import KVLayout, finest_hash_tokens
from kvactors.core.observe import Span
from kvactors.core.reachability import Reachability
from kvactors.engine import Engine
from kvactors.errors import DeadlineError, DrainTimeout, EngineError, StoreError
from kvactors.simulate.driver import Driver
from kvactors.simulate.faults import FREEZE_S, FaultRates, Trouble, WorkerDeath
from kvactors.simulate.local import LocalBlocks, local_bytes_of
from kvactors.simulate.loop import DeadlockError, RunawayError, VirtualLoop, run_virtual
from kvactors.simulate.models import DRAWN, Rank, instance
from kvactors.simulate.prompts import prompts
from kvactors.simulate.store import Mishap, SimulatedPool, SimulatedStore
from kvactors.simulate.stream import Stream
from kvactors.simulate.workers import SimulatedWorkers, Speed

LOCAL_BLOCKS = 48
"""Of each group: few, so that requests wait for blocks and preempt each other."""
CALL_DEADLINE_S = 5.0
GOOD_RANGE_BYTES = (0, 0, 20, 1 << 20)
"""What a run's store calls a good range: nothing is joined, a few layers are, or as many as the limits of a call allow."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What fixes a run. The same scenario gives the same event log, byte for byte.

    Attributes:
        seed: draws everything.
        faults: name of the preset, for the record.
        rates: its chances.
        requests: prompts in all.
        most_faults: inject no more than that many; None = as drawn.
        model: one of `models.NAMES`, or a layout by name or file; None = drawn.
    """

    seed: int
    faults: str
    rates: FaultRates
    requests: int = 20
    most_faults: int | None = None
    model: str | None = None


@dataclass(slots=True)
class Outcomes:
    """What a run did and what was wrong with it."""

    scenario: Scenario
    violations: list[str] = field(default_factory=list)
    events: int = 0
    log_hash: str = ""
    log_tail: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    injected: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    saved: int = 0
    loaded: int = 0
    joined: int = 0
    """transfers of layers that went in another's store call"""
    paused: int = 0
    """blocks that were not saved because the store stayed full"""
    model: str = ""


class EventLog:
    """Every span of every actor and worker, hashed in order; the last lines are kept for the reader."""

    def __init__(self, tail: int = 60) -> None:
        self._hash = hashlib.sha256()
        self._unhashed: list[str] = []
        self._last: deque[str] = deque(maxlen=tail)

    def span(self, span: Span) -> None:
        args = span.args
        self.note(f"{span.end_s:.6f} {span.track} {span.name} {args}" if args else f"{span.end_s:.6f} {span.track} {span.name}")

    def note(self, line: str) -> None:
        self._unhashed.append(line)
        if len(self._unhashed) >= 512:
            self._flush()

    def _flush(self) -> None:
        self._hash.update("\n".join([*self._unhashed, ""]).encode())
        self._last.extend(self._unhashed)
        self._unhashed.clear()

    @property
    def digest(self) -> str:
        self._flush()
        return self._hash.hexdigest()

    @property
    def tail(self) -> list[str]:
        """The last lines."""
        self._flush()
        return list(self._last)


class World:
    """Builds the store, the engines and the drivers of one scenario, and runs them to the end."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario

        def rng(what: str) -> random.Random:
            return random.Random(f"{scenario.seed}/{what}")

        shape = rng("shape")
        self.model = scenario.model or DRAWN[shape.randrange(len(DRAWN))]
        self.log = EventLog()
        self.trouble = Trouble(scenario.rates, rng("faults"), scenario.most_faults)
        self.loop = VirtualLoop(rng("schedule"), self._after_event)
        self.rng = rng("workload")
        self.violations: list[str] = []
        self.events = 0
        self.slowed_s = 0.0
        """by how much calls were slowed so far, frozen ones not counted"""
        self.stores: list[SimulatedStore] = []
        self.excused: set[str] = set()
        """keys that need not be published: their writer's load failed"""
        ranks = instance(self.model)
        instances = 2 if len(ranks) == 1 and shape.random() < 0.3 and scenario.requests > 1 else 1
        self.local_blocks = max(_blocks_to_run(r.layout) for r in ranks)
        local_bytes = max(local_bytes_of(r.layout, self.local_blocks) for r in ranks)
        object_bytes = max(r.layout.object_bytes(g.id) for r in ranks for g in r.layout.groups)
        pool_bytes = (40 if scenario.rates.space else 3000) * object_bytes
        memory = bytearray(local_bytes * len(ranks) * instances + pool_bytes)
        rates = self.rates = scenario.rates
        self.pool = SimulatedPool(
            memory,
            local_bytes * len(ranks) * instances,
            pool_bytes,
            self.loop.time,
            rng("store"),
            lease_s=1.0 if rates.lease else 10.0,
        )
        self.pool.sloppy_leases = rates.lease
        self.good_range_bytes = rng("ranges").choice(GOOD_RANGE_BYTES)
        half = scenario.requests // instances
        shares = [scenario.requests - half * (instances - 1), half]
        self.drivers = [
            self._driver(number, ranks, memory, local_bytes, rng(f"instance {number}"), shares[number])
            for number in range(instances)
        ]
        engines = [engine for driver in self.drivers for engine in driver.engines]
        self.watched = [(engine.crew.audit, engine.gate) for engine in engines if engine.crew.audit is not None]

    # -- building ------------------------------------------------------------------------------------------------------

    def _driver(
        self, number: int, ranks: Sequence[Rank], memory: bytearray, local_bytes: int, rng: random.Random, count: int
    ) -> Driver:
        layouts = list({id(r.layout): r.layout for r in ranks}.values())
        config = EngineConfig(
            prefetch_layers=rng.choice((0, 1, 2, 5)),
            max_pending_saves=rng.choice((1, 2, 8)),
            max_transfer_blocks=rng.choice((3, 64, 64, 0)),
            max_transfer_bytes=rng.choice((13, 64, *(1 << 20,) * 4)),
            workers=rng.choice((1, 2, 3)),
            call_deadline_s=CALL_DEADLINE_S,
            step_deadline_s=2 * CALL_DEADLINE_S,
            drain_deadline_s=30.0,
            probe_interval_s=0.5,
            max_lost_workers=6,
            audit=True,
        )
        hash_tokens = finest_hash_tokens(layouts[0].groups)
        engines, locals_, streams = [], [], []
        for i, rank in enumerate(ranks):
            base = local_bytes * (number * len(ranks) + i)
            local = LocalBlocks(rank.layout, rank.tp_rank, memory, base, self.local_blocks, rng)
            store = SimulatedStore(self.pool, number * len(ranks) + i, self._store_trouble, self.good_range_bytes)
            pauses = random.Random(f"{self.scenario.seed}/pauses {number} {i}")
            workers = SimulatedWorkers(self.loop, Speed(), random.Random(rng.random()), self._delay_s, pauses)
            stream = Stream(self.loop)
            engine = Engine(
                rank.layout,
                store,
                local.bases,
                config,
                clock=self.loop,
                rng=random.Random(rng.random()),
                devices=stream,
                tp_rank=rank.tp_rank,
                stages=layouts,
                observer=self.log,
                executor=workers,
                hash_tokens=hash_tokens,
            )
            engine.keep_stories()
            store.epoch = partial(_epoch_of, engine)
            self.stores.append(store)
            engines.append(engine)
            locals_.append(local)
            streams.append(stream)
        boundary = engines[0].reachability.boundary_tokens
        requests = prompts(count, hash_tokens, boundary, self.rng, f"r{number}-" if number else "r")
        return Driver(self, number, engines, locals_, requests, streams, rng)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _store_trouble(self, call: str, keys: Sequence[str]) -> Mishap:
        trouble, rates, pool = self.trouble, self.trouble.rates, self.pool
        if trouble.draw("evict", rates.evict):
            pool.evict_any()
        if pool.alive and trouble.draw("kill", rates.kill):
            pool.kill()
            self.loop.call_later(trouble.pick(0.0, 20.0), pool.restart)
        if trouble.draw("full", rates.full):
            pool.full_until = self.loop.now() + trouble.pick(0.0, 5.0)
        lost: BaseException | None = None
        if trouble.draw("raises", rates.raises):
            lost = StoreError(f"{call}: injected")
        elif trouble.draw("dies", rates.dies):
            lost = WorkerDeath(f"{call}: injected")
        if lost is not None and trouble.pick(0.0, 1.0) < 0.5:
            raise lost
        return Mishap(trouble.key_outcomes(call, keys), bool(keys) and trouble.draw("short", rates.short), lost)

    def _delay_s(self) -> float:
        trouble, rates = self.trouble, self.trouble.rates
        if trouble.draw("freeze", rates.freeze):
            return FREEZE_S
        if trouble.draw("spike", rates.spike):
            spike_s = trouble.pick(0.0, 1.5 * CALL_DEADLINE_S)
            self.slowed_s += spike_s
            return spike_s
        return 0.0

    # -- running -------------------------------------------------------------------------------------------------------

    def _after_event(self) -> None:
        """Cheap checks after every event; each violation ends the run."""
        for audit, gate in self.watched:
            if audit.violations:
                self.violations.extend(audit.violations)
            if not 0 <= gate.pending <= gate.limit + 1:
                self.broke(f"I7: {gate.pending} save tasks are pending; the limit is {gate.limit}")
        if self.pool.violations:
            self.violations.extend(self.pool.violations)
        if self.violations:
            raise InvariantBroken

    def _check_stores(self) -> None:
        """After the drain no client has a put session left, unless a call never returned, or the engine gave a key up."""
        if set(self.trouble.injected) & {"freeze", "spike", "kill", "crash"}:
            return
        given_up = {k for d in self.drivers for e in d.engines for k in (e.stats().abandoned_keys + e.stats().poisoned_keys)}
        for store in self.stores:
            left = [s for s in store.open_sessions() if s.split(" ", 1)[1] not in given_up and s.startswith("put")]
            if left:
                self.broke(f"I2: the store still has sessions that the engine ended: {left[0]}")

    def broke(self, what: str) -> None:
        self.violations.append(what)
        self.log.note(f"VIOLATION {what}")

    def run(self) -> Outcomes:
        out = Outcomes(self.scenario, self.violations, model=self.model)
        try:
            run_virtual(self._main(), self.loop)
        except InvariantBroken:
            pass
        except (DeadlockError, RunawayError) as e:
            self.violations.append(f"I9: {e}")
        out.events = self.events or self.loop.events
        out.log_hash, out.log_tail = self.log.digest, self.log.tail
        out.injected = dict(self.trouble.injected)
        for driver in self.drivers:
            out.steps += driver.steps
            for engine in driver.engines:
                stats = engine.stats()
                out.saved += sum(g.saved for g in stats.groups.values())
                out.loaded += sum(g.loaded for g in stats.groups.values())
                out.paused += sum(g.paused_no_space for g in stats.groups.values())
                out.joined += stats.joined_transfers
            if self.violations:
                out.story += driver.story(self.violations[0])
        return out

    async def _main(self) -> None:
        for driver in self.drivers:
            await driver.start()
        tasks = [asyncio.ensure_future(driver.serve()) for driver in self.drivers]
        try:
            await asyncio.gather(*tasks)
            for driver in self.drivers:
                await driver.finish()
            self._check_stores()
        except (DeadlineError, DrainTimeout) as e:
            self.broke(f"I9: {type(e).__name__}: {e}")
        except EngineError as e:
            self.broke(f"I9: {e!r}")
        finally:
            self.events = self.loop.events  # what closing takes is no part of the run
            for driver in self.drivers:
                await driver.stop()


class InvariantBroken(BaseException):
    """Ends a run at the event that broke an invariant."""


def _epoch_of(engine: Engine) -> int:
    return engine.crew.pool.epoch


def _blocks_to_run(layout: KVLayout) -> int:
    """Local blocks of each group: `LOCAL_BLOCKS`, or more for a layout whose boundary is too many blocks of some group."""
    boundary = Reachability(layout.groups, finest_hash_tokens(layout.groups)).boundary_tokens
    most = max(boundary // g.block_tokens for g in layout.groups)
    return LOCAL_BLOCKS if 4 * most <= LOCAL_BLOCKS else 6 * most
