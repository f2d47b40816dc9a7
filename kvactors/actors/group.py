"""The actor of one KV group: drives the sessions of its group through each step.

Preparation (get sessions, then put sessions) -> active (a layer is signalled: save it, load ahead) -> ending (nothing new
starts) -> ended (no transfer under way, no put session `open`) -> settled (every session at its end; the step is forgotten).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvactors.actors.actor import Actor, Post
from kvactors.actors.fences import Fences
from kvactors.actors.group_step import GroupContext, GroupStep
from kvactors.actors.loader import Loader
from kvactors.actors.pool import TransferPool
from kvactors.actors.put_opens import Cleaned, ReadableDone, RetryCleanUp, RetryOpens
from kvactors.actors.range_debug import RangeDebug
from kvactors.actors.saver import RetryRevokes, Saver
from kvactors.actors.step_state import StepState
from kvactors.core.clock import Clock
from kvactors.core.config import EngineConfig
from kvactors.core.observe import Observer
from kvactors.core.queue import Priority
from kvactors.core.ranges import GroupRanges
from kvactors.core.sessions import GetSession, PutSession, SessionTable
from kvactors.core.stats import GroupStats
from kvactors.messages import (
    Abandon,
    Ask,
    Close,
    Commit,
    Drained,
    DropSessions,
    EndGroup,
    ForgetRequest,
    GroupCommitted,
    GroupEnded,
    GroupIdle,
    Kind,
    LayerReady,
    LayerWanted,
    Open,
    Prepared,
    PrepareFailed,
    PrepareGroup,
    Revoke,
    Transfer,
    TransferDone,
)


class AbandonNow:
    """Timer to itself: the grace of a drain is over."""

    __slots__ = ("left",)

    def __init__(self, left: list[str]) -> None:
        self.left = left


class GroupActor(Actor):
    """See the module. Its session table belongs to the supervisor and outlives it."""

    def __init__(
        self,
        group_id: int,
        ranges: GroupRanges,
        key_parts: tuple[str, str],
        *,
        stores: bool,
        table: SessionTable,
        stats: GroupStats,
        steps: Mapping[int, StepState],
        pool: TransferPool,
        config: EngineConfig,
        clock: Clock,
        upward: Post,
        fences: Fences,
        observer: Observer | None = None,
        range_debug: RangeDebug | None = None,
    ) -> None:
        super().__init__(f"group-{group_id}", clock, observer, mailbox_limit=256 + 4 * len(ranges.layers))
        self.group_id = group_id
        self.table = table
        self.steps: dict[int, GroupStep] = {}
        self._states = steps
        self._stray = False
        """sessions outlived their step: a lost call holds them until it returns"""
        self.context = GroupContext(
            group_id,
            ranges,
            key_parts,
            stores,
            table,
            stats,
            pool,
            clock,
            config,
            self.mailbox,
            upward,
            self.later,
            fences,
            range_debug,
        )
        self._loader = Loader(self.context)
        self._saver = Saver(self.context)

    async def handle(self, message: Any) -> None:
        match message:
            case TransferDone():
                self._done(message)
            case LayerReady():
                self._layer_ready(message)
            case LayerWanted():
                self._layer_wanted(message)
            case PrepareGroup():
                self._prepare(message)
            case EndGroup():
                self._end(message)
            case ReadableDone():
                self._readable(message)
            case Cleaned():
                self._cleaned(message)
            case RetryOpens():
                gs = self.steps.get(message.step)
                if gs is not None:
                    self._saver.opens.retry_opens(gs)
            case RetryCleanUp():
                self._saver.opens.retry_clean_up(message)
            case RetryRevokes():
                self._saver.retry_revokes(message.sessions)
            case ForgetRequest():
                self.table.forget(message.request_id)
            case DropSessions():
                self._loader.drop(message.epoch)
                self._saver.drop(self.steps.values(), message.epoch)
                self._progress_all()
            case Abandon():
                self._abandon(message)
            case AbandonNow():
                self._abandon_now(message.left)
            case _:
                raise TypeError(f"{self.name} has no handler for {message!r}")

    # -- a step --------------------------------------------------------------------------------------------------------

    def _prepare(self, message: PrepareGroup) -> None:
        state = self._states[message.step]
        gs = self.steps[message.step] = GroupStep(state, message.event)
        if self.group_id in state.load_groups:
            self._loader.prepare(gs, message)
        if self.group_id in state.save_groups:
            self._saver.opens.prepare(gs, message)
        self._progress(message.step)

    def _load_early(self, gs: GroupStep) -> None:
        """The first layers' loads need only their own group's sessions: they do not wait for the other preparations."""
        gs.started_early = True
        state = gs.state
        layers = self._loader.window(state, -1) if state.windowed else state.load_layers
        self._loader.start(gs, layers, gs.event, Priority.PREFETCH if state.windowed else Priority.DEMANDED)

    def _layer_ready(self, message: LayerReady) -> None:
        gs = self.steps.get(message.step)
        if gs is None or gs.ending:
            state = self._states.get(message.step)
            if state is not None and message.layer in state.saves:
                state.saves[message.layer].plan(self.group_id, 0)  # nothing of it is saved any more, but it was counted
            return
        self._loader.start(gs, self._loader.window(gs.state, message.layer), message.event, Priority.PREFETCH)
        if message.saves:
            self._saver.layer_ready(gs, message)
        self._progress(message.step)

    def _layer_wanted(self, message: LayerWanted) -> None:
        gs = self.steps.get(message.step)
        if gs is None or gs.ending or gs.state.aborted:
            return
        self.context.pool.promote(message.step, message.layer)
        self._loader.start(gs, (message.layer,), message.event, Priority.DEMANDED)
        self._progress(message.step)

    def _end(self, message: EndGroup) -> None:
        gs = self.steps.get(message.step)
        if gs is None:
            self.context.upward(GroupEnded(message.step, self.group_id))
            self.context.upward(GroupCommitted(message.step, self.group_id))
            return
        gs.ending = True
        if message.revoke:
            self.context.pool.cancel(message.step, self.group_id)
        self._loader.stop_waiting(gs)
        gs.state.forgo(self.group_id, message.reason or "the step ended before its load started")
        self._saver.end(gs, message.revoke, message.reason)
        self._progress(message.step)

    # -- answers from the pool -----------------------------------------------------------------------------------------

    def _done(self, done: TransferDone) -> None:
        job = done.job
        if not done.late:
            self.context.replied()
        gs = self.steps.get(job.step)
        match job:
            case Transfer():
                if job.kind is Kind.PUT:
                    if gs is not None:
                        self._saver.transferred(gs, done, job)
                elif done.late:
                    self._loader.returned_late(job)
                    self._progress_all()
                elif gs is not None:
                    self._loader.transferred(gs, done, job)
            case Open(kind=Kind.GET):
                sessions = [s for s in job.sessions if isinstance(s, GetSession)]
                for touched in self._loader.opened(done, sessions):
                    self._progress(touched.state.id)
            case Open(kind=Kind.PUT):
                puts = [s for s in job.sessions if isinstance(s, PutSession)]
                if done.late:
                    self._saver.opens.late_open(puts, done)
                elif gs is not None:
                    self._saver.opens.opened(gs, puts, done, job.background)
            case Commit() if not done.late:
                self._saver.committed(job.sessions, done, self._states.get(job.step))
            case Revoke() if not done.late:
                self._saver.revoked(job.sessions, done)
            case Close():
                if gs is not None and not done.late:
                    gs.closing -= 1
                self._loader.closed(job.sessions, done)
                self._progress_all()
            case Ask() | Commit() | Revoke():
                pass  # a question of our own without consequence, or a late answer for a session that has ended
        self._progress(job.step)

    def _readable(self, message: ReadableDone) -> None:
        if message.done.late:
            return
        self.context.replied()
        gs = self.steps.get(message.done.job.step)
        if gs is not None:
            self._saver.opens.readable(gs, message.sessions, message.done)
            self._progress(gs.state.id)

    def _cleaned(self, message: Cleaned) -> None:
        if message.done.late:
            return
        self.context.replied()
        gs = self.steps.get(message.done.job.step)
        if gs is not None:
            self._saver.opens.cleaned(gs, message.sessions, message.done)
            self._progress(gs.state.id)

    # -- progress ------------------------------------------------------------------------------------------------------

    def _progress_all(self) -> None:
        for step in list(self.steps):
            self._progress(step)

    def _progress(self, step: int) -> None:
        """Reports each stage that the step has now reached in this group, once."""
        c = self.context
        if self._stray:
            if self.table.idle:
                self._stray = False
                c.upward(GroupIdle(self.group_id))
        elif not self.steps:
            self._stray = not self.table.idle
        gs = self.steps.get(step)
        if gs is None:
            return
        if gs.loads is not None and not gs.gets_awaited and not gs.started_early and not gs.error and not gs.ending:
            self._load_early(gs)
        awaited = gs.gets_awaited + gs.puts_awaited
        if not gs.prepared and not awaited:
            gs.prepared = True
            c.upward(PrepareFailed(step, self.group_id, gs.error) if gs.error else Prepared(step, self.group_id))
        if self._loader.may_release(gs):
            self._loader.release(gs)
            self._progress_all()  # others may have waited for a key that this one held
            if step not in self.steps:
                return
        if not gs.ending:
            return
        saves = gs.saves
        idle = not awaited and not gs.opening and not gs.reads and not gs.writes and not (saves is not None and saves.any_open)
        if idle and not gs.ended:
            gs.ended = True
            c.upward(GroupEnded(step, self.group_id))
        if gs.ended and gs.released and not gs.closing and not gs.block_of and not (saves is not None and saves.unsettled):
            del self.steps[step]
            c.upward(GroupCommitted(step, self.group_id))
            self._stray = self._stray or not self.table.idle

    # -- a drain's deadline --------------------------------------------------------------------------------------------

    def _abandon(self, message: Abandon) -> None:
        """Lists what is not at its end, gives revokes a short grace, then abandons the rest."""
        left = self.table.left()
        for step in list(self.steps):
            self._end(EndGroup(step, True, "the drain's deadline passed"))
        self.later(message.grace_s, AbandonNow(left))

    def _abandon_now(self, left: list[str]) -> None:
        self.table.abandon_all("the drain's deadline passed")
        for gs in self.steps.values():
            if gs.saves is not None:
                gs.saves.close_all()
        self.context.upward(Drained(self.group_id, left))
