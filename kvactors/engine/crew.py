"""The actors of an engine, its pool, and what they share: builds, runs and supervises them, and answers for those that end."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import anyio

from kvactors.actors.audit import AuditedStore
from kvactors.actors.coordinator import Coordinator
from kvactors.actors.fences import Fences
from kvactors.actors.group import GroupActor
from kvactors.actors.latch import SaveGate
from kvactors.actors.lookups import Find
from kvactors.actors.mailbox import Mailbox
from kvactors.actors.pool import TransferPool
from kvactors.actors.range_debug import RangeDebug
from kvactors.actors.range_debug import wanted as range_debug_wanted
from kvactors.actors.step_state import StepState
from kvactors.actors.threads import WorkerThreads
from kvactors.actors.undertaker import Undertaker
from kvactors.actors.workers import Executor
from kvactors.core.clock import Clock
from kvactors.core.config import EngineConfig
from kvactors.core.layout import KVLayout
from kvactors.core.observe import Observer
from kvactors.core.ranges import Bases, group_ranges
from kvactors.core.reachability import Reachability
from kvactors.core.sessions import Owner, SessionTable
from kvactors.core.stats import EngineStats, GroupStats, SessionStats
from kvactors.core.store import Store
from kvactors.core.story import StoryBook
from kvactors.core.taint import Taints
from kvactors.errors import EngineClosedError, EngineError
from kvactors.log import get_logger
from kvactors.messages import GroupFailed

log = get_logger("kvactors.engine")

CLOSED = "the engine was closed"
"""The one reason to give up that is no failure."""

CLOSE_GRACE_S = 1.0
"""How long `close` waits for store calls under way."""


class Crew:
    """See the module; for the arguments, see `Engine`.

    Attributes:
        states: the steps, and loads outside steps, that are not settled; by their ids.
        stats: counters, as they are now; `snapshot` has a copy.
        story: what happens to requests, once somebody wants to know.
        dead: why nothing is moved any more; empty while the crew is at work.
    """

    def __init__(
        self,
        layout: KVLayout,
        store: Store,
        bases: Bases,
        config: EngineConfig,
        *,
        clock: Clock,
        reachability: Reachability,
        hash_tokens: int,
        tp_rank: int,
        find: Find,
        observer: Observer | None,
        executor: Executor | None,
    ) -> None:
        self._config, self._clock = config, clock
        self.states: dict[int, StepState] = {}
        self.stats = EngineStats(groups={g.id: GroupStats() for g in layout.groups}, sessions=SessionStats())
        self.story: StoryBook | None = None
        self.dead = ""
        self.fences = Fences()
        self.gate = SaveGate(config.max_pending_saves)
        self.audit = AuditedStore(store, clock, config) if config.audit else None
        self._range_debug = RangeDebug() if range_debug_wanted() else None
        self.pool = TransferPool(
            store,
            config,
            clock,
            WorkerThreads() if executor is None else executor,
            on_store_lost=lambda m: self.coordinator.mailbox.post(m),
            observer=observer,
            audit=self.audit,
        )
        self.groups = {g.id: self._group_actor(layout, g.id, bases, tp_rank, observer) for g in layout.groups if g.layers}
        self.coordinator = Coordinator(
            layout,
            hash_tokens,
            groups={gid: actor.mailbox for gid, actor in self.groups.items()},
            tables=self.tables,
            states=self.states,
            pool=self.pool,
            stats=self.stats,
            taints=Taints(reachability),
            find=find,
            fence=self.fences.keep,
            config=config,
            clock=clock,
            observer=observer,
        )
        self._started = False
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None

    def _group_actor(
        self, layout: KVLayout, group_id: int, bases: Bases, tp_rank: int, observer: Observer | None
    ) -> GroupActor:
        return GroupActor(
            group_id,
            group_ranges(layout, group_id, bases, self._config, self.pool.good_range_bytes),
            layout.key_parts(group_id, layout.head_of(group_id, tp_rank)),
            stores=layout.stores(group_id, tp_rank),
            table=SessionTable(group_id, self.stats.sessions, None if self._range_debug is None else self._record),
            stats=self.stats.groups[group_id],
            steps=self.states,
            pool=self.pool,
            config=self._config,
            clock=self._clock,
            upward=lambda m: self.coordinator.mailbox.post(m),
            fences=self.fences,
            observer=observer,
            range_debug=self._range_debug,
        )

    @property
    def tables(self) -> Sequence[SessionTable]:
        return [actor.table for actor in self.groups.values()]

    @property
    def mailboxes(self) -> Sequence[Mailbox[Any]]:
        return [actor.mailbox for actor in (self.coordinator, *self.groups.values())]

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts actors and workers on the running loop.

        Raises:
            EngineClosedError: for a second time.
        """
        if self._started:
            raise EngineClosedError("this engine was started before; make a new one")
        self._started = True
        loop = asyncio.get_running_loop()
        for mailbox in self.mailboxes:
            mailbox.bind(loop)
        self._stop = asyncio.Event()
        self.pool.start()
        self._task = asyncio.create_task(self._run(), name="kvactors engine")

    async def close(self) -> None:
        """Stops everything; idempotent. Store calls under way get a moment to return."""
        if self._task is None or self._stop is None:
            return
        self._stop.set()
        task, self._task = self._task, None
        await task
        if not await self.pool.stop().wait_async(CLOSE_GRACE_S):
            log.warning("closed with store calls under way; they may still touch memory", fenced=len(self.fences))

    async def _run(self) -> None:
        """The parent of all actors: whatever ends it, every waiter is answered."""
        assert self._stop is not None
        reason = CLOSED
        try:
            async with anyio.create_task_group() as actors:
                for actor in self.groups.values():
                    actors.start_soon(self._supervise, actor)
                actors.start_soon(self.coordinator.run)
                await self._stop.wait()
                actors.cancel_scope.cancel()
        except Exception as e:
            reason = f"the engine died: {e!r}"
            log.error("the engine died; the model goes on without a KV cache", error=repr(e), exc_info=True)
        finally:
            self.give_up(reason)

    async def _supervise(self, actor: GroupActor) -> None:
        """Runs a group's actor; if it crashes, the undertaker ends its sessions from the table and answers for it."""
        try:
            await actor.run()
        except Exception as e:
            log.error("a group's actor crashed; further steps pass through", actor=actor.name, error=repr(e), exc_info=True)
            self.coordinator.mailbox.post(GroupFailed(actor.group_id, e))
            undertaker = Undertaker(actor, self.states)
            await undertaker.begin()
            await undertaker.run()

    def give_up(self, reason: str) -> None:
        """Answers every waiter: nothing more will be moved. Called when the loop or the coordinator ended; any thread."""
        self.pool.stop()  # what is only queued never writes
        for state in list(self.states.values()):  # before anybody can see the end
            self.fences.keep(state.fence_unended())
        self.dead = self.dead or reason
        self.stats.state = "closed" if self.dead == CLOSED else "dead"
        self.coordinator.stop_timers()
        for actor in self.groups.values():
            actor.stop_timers()
        for state in list(self.states.values()):
            state.give_up(reason)
        self.states.clear()
        self.gate.release_all()
        self.coordinator.answer_all()

    def is_dead(self) -> bool:
        """Asked anew each time: another thread may have given up since, which a type checker does not see of an attribute."""
        return bool(self.dead)

    def post(self, message: Any) -> None:
        """Sends the coordinator a message; any thread.

        Raises:
            EngineError: nothing was started.
        """
        if not self._started:
            raise EngineError("this engine was not started; use `async with engine:`, or `await engine.start()`")
        self.coordinator.mailbox.post(message)
        if self.dead:  # nobody reads any more
            self.coordinator.answer_all()

    # -- what they know ------------------------------------------------------------------------------------------------

    def snapshot(self) -> EngineStats:
        """A copy of all counters."""
        sessions, tables = self.stats.sessions, self.tables
        return dataclasses.replace(
            self.stats,
            groups={g: dataclasses.replace(s) for g, s in self.stats.groups.items()},
            sessions=dataclasses.replace(sessions, revoked_by=dict(sessions.revoked_by)),
            queued=self.pool.queued,
            lost_workers=self.pool.lost_workers,
            joined_transfers=self.pool.joined_transfers,
            peak_pending_saves=self.gate.peak,
            poisoned_keys=sorted(k for t in tables for k in list(t.poisoned)),
            abandoned_keys=sorted(k for t in tables for k in list(t.abandoned)),
        )

    def keep_stories(self) -> StoryBook:
        """Has the actors note what happens to requests; asked for again, the same book."""
        if self.story is None:
            self.story = StoryBook(self._clock)
            self.coordinator.story.record = self.story.record
            for table in self.tables:
                table.record = self.story.record if self._range_debug is None else self._record
        return self.story

    def _record(self, request_id: str, group_id: int, block_index: int, what: str) -> None:
        if self.story is not None:
            self.story.record(request_id, group_id, block_index, what)
        if self._range_debug is not None:
            self._range_debug.session(what, Owner(request_id, group_id, block_index))

    def violations(self) -> list[str]:
        """See `Engine.violations`."""
        found = [] if self.audit is None else list(self.audit.violations)
        s = self.stats.sessions
        ends = s.put_committed + s.put_revoked + s.put_poisoned + s.put_abandoned
        if self.stats.state == "drained" and s.put_opened != ends:
            found.append(f"I2: {s.put_opened} put sessions were opened, {ends} are accounted for")
        return found
