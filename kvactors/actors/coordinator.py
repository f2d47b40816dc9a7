"""The coordinator: one per engine. Owns steps and requests, prepares in two phases, joins the groups' answers.

A step is open from `BeginStep` to `EndStep` or `AbortStep`; at most one is. Its messages are held, in order, until every
group is prepared; then they are passed on as they come. If one preparation fails, all are rolled back and the step passes
through: nothing is moved, its loads are reported failed, the model goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvactors.actors.actor import Actor
from kvactors.actors.draining import DrainExpired, Draining
from kvactors.actors.lookups import Find, LookupDone, LookupExpired, Lookups
from kvactors.actors.mailbox import Mailbox
from kvactors.actors.pool import TransferPool
from kvactors.actors.request_story import RequestStory
from kvactors.actors.step_run import Run, group_names
from kvactors.actors.step_state import StepState
from kvactors.actors.store_watch import ProbeDone, ProbeNow, StoreWatch
from kvactors.core.clock import Clock
from kvactors.core.config import EngineConfig
from kvactors.core.layout import KVLayout, group_hashes
from kvactors.core.observe import Observer
from kvactors.core.reachability import Hit
from kvactors.core.sessions import SessionTable
from kvactors.core.stats import EngineStats
from kvactors.core.steps import GroupBlocks, ReleaseReason
from kvactors.core.taint import Taints
from kvactors.log import get_logger
from kvactors.messages import (
    Abandon,
    AbortStep,
    BeginStep,
    Drain,
    Drained,
    DropSessions,
    EndGroup,
    EndStep,
    ForgetRequest,
    GroupCommitted,
    GroupEnded,
    GroupFailed,
    GroupIdle,
    LayerReady,
    LayerWanted,
    LoadBlocks,
    Lookup,
    Prepared,
    PrepareFailed,
    PrepareGroup,
    ReleaseRequest,
    StoreLost,
)

log = get_logger("kvactors.coordinator")

ABANDON_GRACE_S = 0.5
"""How long the revokes that a drain's deadline asks for may take before their keys are abandoned."""


@dataclass(slots=True)
class PrepareExpired:
    """Timer to itself: a step's preparation has taken too long."""

    step: int


class Coordinator(Actor):
    """See the module. `fence` takes destinations that a store call may still write when their step is given up."""

    def __init__(
        self,
        layout: KVLayout,
        hash_tokens: int,
        *,
        groups: Mapping[int, Mailbox[Any]],
        tables: Sequence[SessionTable],
        states: dict[int, StepState],
        pool: TransferPool,
        stats: EngineStats,
        taints: Taints,
        find: Find,
        fence: Callable[[Iterable[tuple[int, int]]], None],
        config: EngineConfig,
        clock: Clock,
        observer: Observer | None = None,
    ) -> None:
        super().__init__("coordinator", clock, observer, mailbox_limit=16384 + 8 * layout.stage_layers)
        self.watch = StoreWatch(config.probe_interval_s, pool, stats, self.mailbox, self.later)
        self._layout, self._hash_tokens = layout, hash_tokens
        self._groups, self._tables, self._states, self._pool = groups, tables, states, pool
        self._stats, self._taints, self._fence, self._config = stats, taints, fence, config
        miss = Hit(0, tuple(() for _ in layout.groups))
        self._lookups = Lookups(find, miss, pool, stats, self.mailbox)
        self._runs: dict[int, Run] = {}
        self._open: Run | None = None
        self._next: deque[Any] = deque()
        """messages of steps that began while an earlier one is still being aborted"""
        self._releases: list[ReleaseRequest] = []
        self._drain = Draining(stats)
        self._degraded = ""
        self.story = RequestStory()

    async def handle(self, message: Any) -> None:
        match message:
            case LayerReady() | LayerWanted() | EndStep():
                await self._of_step(message)
            case BeginStep():
                await self._begin(message)
            case Prepared() | PrepareFailed():
                await self._prepared(message)
            case PrepareExpired():
                await self._prepare_expired(message.step)
            case GroupEnded():
                await self._group_ended(message.step, message.group_id)
            case GroupCommitted():
                await self._group_settled(message.step, message.group_id)
            case GroupIdle():
                self._check_drained()
            case AbortStep():
                await self._abort(message.step, message.reason)
            case LoadBlocks():
                await self._load(message)
            case Lookup():
                self._lookup(message)
            case LookupDone():
                self._lookups.done(message)
            case LookupExpired():
                self._lookups.fail(message.number)
            case ReleaseRequest():
                await self._release(message)
            case ForgetRequest():
                await self._release(ReleaseRequest(message.request_id, ReleaseReason.FINISHED, _nobody))
                await self._broadcast(message)
            case StoreLost():
                await self._store_lost(message)
            case ProbeNow():
                self.watch.probe()
            case ProbeDone():
                self.watch.probed(message.done)
            case GroupFailed():
                self._group_failed(message)
            case Drain():
                self._start_drain(message)
            case DrainExpired():
                await self._drain_expired()
            case Drained():
                await self._group_drained(message)
            case _:
                raise TypeError(f"the coordinator has no handler for {message!r}")

    # -- a step begins -------------------------------------------------------------------------------------------------

    async def _begin(self, message: BeginStep) -> None:
        if self._open is not None:
            self._next.append(message)
            await self._abort(self._open.state.id, "the next step began while it was open")
            return
        state = self._states[message.step]
        self._stats.steps += 1
        self._open = self._runs[state.id] = Run(state)
        refusal = self._refusal()
        if refusal:
            self._pass_through(self._open, refusal)
            return
        saving = frozenset(r.request_id for r in state.requests.values() if not self._taints.check(r))
        self.story.begins(state)
        await self._prepare(self._open, message.event, saving)

    def _refusal(self) -> str:
        """Why a step is passed through at once; empty if it is not."""
        if self._drain.asked:
            return "the engine is draining"
        if self.watch.circuit.is_open:
            return "the store cannot be reached"
        return self._degraded

    async def _prepare(self, run: Run, event: Any, saving: frozenset[str]) -> None:
        state = run.state
        for answers in (run.preparing, run.ending, run.settling):
            answers.update(state.groups)
        if not state.groups:
            run.active = True
            return
        for group_id in sorted(state.groups):
            await self._groups[group_id].send(PrepareGroup(state.id, self._views(state, group_id), event, saving))
        state.prepare_timer = self.later(self._config.step_deadline_s, PrepareExpired(state.id))

    def _views(self, state: StepState, group_id: int) -> list[tuple[str, Sequence[bytes], GroupBlocks]]:
        """Each request as one group sees it: hashes of the group's own blocks."""
        block_tokens = self._layout.group(group_id).block_tokens
        return [
            (r.request_id, group_hashes(r.hashes, block_tokens, self._hash_tokens), r.groups[group_id])
            for r in state.requests.values()
            if group_id in r.groups
        ]

    def _pass_through(self, run: Run, reason: str) -> None:
        self._stats.steps_passed_through += 1
        run.active = True
        run.failed = reason
        self.story.passes_through(run.state, reason)
        run.state.pass_through(reason)

    async def _prepared(self, message: Prepared | PrepareFailed) -> None:
        run = self._runs.get(message.step)
        if run is None:
            return
        run.preparing.discard(message.group_id)
        if isinstance(message, PrepareFailed) and not run.active:
            run.failed = run.failed or f"group {message.group_id}: {message.reason}"
        if not run.preparing and not run.active:
            await self._activate(run)

    async def _prepare_expired(self, step: int) -> None:
        run = self._runs.get(step)
        if run is not None and not run.active:
            run.failed = run.failed or f"{group_names(run.preparing)} were not prepared before the deadline"
            await self._activate(run)

    async def _activate(self, run: Run) -> None:
        """Every group is prepared, or none will be: the step's held messages are passed on."""
        run.active = True
        self._stop_prepare_timer(run)
        if run.failed:
            await self._roll_back(run)
        if not run.state.windowed:
            run.end_asked = True
            await self._send_end(run, revoke=bool(run.failed))
        held, run.held = run.held, deque()
        for m in held:
            await self._of_step(m)
        await self._check_end(run)

    @staticmethod
    def _stop_prepare_timer(run: Run) -> None:
        if run.state.prepare_timer is not None:
            run.state.prepare_timer.cancel()

    async def _roll_back(self, run: Run) -> None:
        """Every put that the preparation opened, in any group, is revoked; gets are released; loads are reported failed."""
        log.warning("preparation failed; the step passes through", step=run.state.id, reason=run.failed)
        self._stats.steps_passed_through += 1
        self.story.rolled_back(run.state, run.failed)
        run.state.passed_through = True
        if run.state.load_layers:
            run.state.fail_layer(run.state.load_layers[0], f"preparation failed: {run.failed}")
        await self._send_end(run, revoke=True, reason=f"preparation failed: {run.failed}")

    # -- a step runs, and ends -----------------------------------------------------------------------------------------

    async def _of_step(self, message: LayerReady | LayerWanted | EndStep) -> None:
        run = self._open
        if run is None or run.state.id != message.step or run.end_asked:
            if any(m.step == message.step for m in self._next):
                self._next.append(message)
            else:
                self._stats.stale_messages += 1
            return
        if not run.active:
            run.held.append(message)
        elif isinstance(message, EndStep):
            run.end_asked = True
            await self._send_end(run, revoke=False)
            await self._check_end(run)
        elif run.failed or run.end_sent:
            task = run.state.saves.get(message.layer)
            for group_id in run.state.groups if task is not None else ():
                assert task is not None
                task.plan(group_id, 0)
        else:
            await self._to_groups(run, message)

    async def _send_end(self, run: Run, revoke: bool, reason: str = "") -> None:
        if not run.end_sent:
            run.end_sent = True
            await self._to_groups(run, EndGroup(run.state.id, revoke, reason))

    async def _abort(self, step: int, reason: str) -> None:
        """No new transfer starts, those under way are awaited, every put is revoked."""
        run = self._runs.get(step)
        if run is None:
            await self._abort_waiting(step, reason)
            return
        run.state.aborted = True
        run.end_asked = True
        run.held.clear()
        run.failed = run.failed or f"aborted: {reason}"
        self.story.aborted(run.state, reason)
        self._pool.cancel(step)
        run.active = True  # a preparation still under way is not waited for
        self._stop_prepare_timer(run)
        await self._send_end(run, revoke=True, reason=run.failed)
        await self._check_end(run)

    async def _abort_waiting(self, step: int, reason: str) -> None:
        """A step that has not begun, because an earlier one is still being aborted: it never will."""
        self._next = deque(m for m in self._next if m.step != step)
        state = self._states.pop(step, None)
        if state is not None:
            state.pass_through(f"aborted: {reason}")
            self._note_failures(state)
            state.close()
            state.ended.open()
            state.settled.open()
            await self._check_releases()

    async def _group_ended(self, step: int, group_id: int) -> None:
        run = self._runs.get(step)
        if run is not None:
            run.ending.discard(group_id)
            await self._check_end(run)

    async def _group_settled(self, step: int, group_id: int) -> None:
        run = self._runs.get(step)
        if run is not None:
            run.settling.discard(group_id)
            self._check_settled(run)

    async def _check_end(self, run: Run) -> None:
        """All groups ended, and the caller asked for the end: its blocks may be reused."""
        state = run.state
        if not run.end_asked or not run.active or run.ending or state.ended.is_open:
            return
        self._note_failures(state)
        if not state.windowed and not run.failed:
            for request in state.requests.values():
                if request.request_id not in state.failed:
                    self._taints.loaded(request)
        state.close()
        state.ended.open()
        if run is self._open:
            self._open = None
        self._check_settled(run)
        await self._check_releases()
        await self._begin_next()

    def _note_failures(self, state: StepState) -> None:
        for failure in state.failures().values():
            self._taints.add(failure)
            self.story.load_failed(failure)

    async def _begin_next(self) -> None:
        if self._open is None and self._next:
            waiting, self._next = self._next, deque()
            for message in waiting:
                await self.handle(message)

    def _check_settled(self, run: Run) -> None:
        if run.settling or not run.state.ended.is_open or run.state.id not in self._runs:
            return
        del self._runs[run.state.id]
        self._states.pop(run.state.id, None)
        run.state.settled.open()
        self._check_drained()

    # -- loads outside steps -------------------------------------------------------------------------------------------

    async def _load(self, message: LoadBlocks) -> None:
        state = self._states[message.step]
        run = self._runs[state.id] = Run(state)
        refusal = self._refusal()
        if refusal or not state.groups:
            self._pass_through(run, refusal or "nothing to load")
            run.end_asked = True
            await self._check_end(run)
            return
        self.story.begins(state)
        await self._prepare(run, message.event, frozenset())

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _release(self, message: ReleaseRequest) -> None:
        """Takes effect at the end of the open step; loads of the request outside steps are cancelled, or awaited."""
        for run in list(self._runs.values()):
            aborting = message.reason is not ReleaseReason.FINISHED
            if not run.state.windowed and message.request_id in run.state.requests and aborting:
                await self._give_up_load(run, message.request_id, f"its request was {message.reason.value}")
        self._releases.append(message)
        await self._check_releases()

    async def _give_up_load(self, run: Run, request_id: str, reason: str) -> None:
        """The request's part of a load outside steps: what did not start of it is skipped, the others go on. With the last
        request the load is aborted."""
        state = run.state
        if state.ended.is_open:
            return
        run.released.add(request_id)
        if run.released.issuperset(state.requests):
            await self._abort(state.id, reason)
        elif state.load_layers:
            state.fail_request(request_id, state.load_layers[0], f"aborted: {reason}")

    async def _check_releases(self) -> None:
        states = [run.state for run in self._runs.values() if not run.state.ended.is_open]
        states += [self._states[m.step] for m in self._next if isinstance(m, BeginStep)]
        busy = {r for state in states for r in state.requests}
        due = [m for m in self._releases if m.request_id not in busy]
        self._releases = [m for m in self._releases if m.request_id in busy]
        for m in due:
            if m.reason is not ReleaseReason.PREEMPTED:
                self._taints.forget(m.request_id)
            if m.answer is _nobody:
                self.story.forgotten(m.request_id)
            else:
                self.story.released(m.request_id, m.reason.value)
            m.answer()

    # -- the store, and trouble ----------------------------------------------------------------------------------------

    def _lookup(self, message: Lookup) -> None:
        if self._refusal():
            self._lookups.refuse(message)
        else:
            self._lookups.begin(message, self.later)

    async def _store_lost(self, message: StoreLost) -> None:
        log.warning("the store lost its sessions", cause=message.cause, unreachable=message.unreachable)
        await self._broadcast(DropSessions(message.epoch, message.cause))
        if message.unreachable:
            self.watch.unreachable()

    def _group_failed(self, message: GroupFailed) -> None:
        """Its sessions are revoked by the supervisor, which also answers for it; further steps pass through."""
        self._degraded = f"group {message.group_id} crashed: {message.error!r}"
        if self._stats.state == "running":
            self._stats.state = "degraded"

    # -- drain ---------------------------------------------------------------------------------------------------------

    def _start_drain(self, message: Drain) -> None:
        if self._drain.ask(message):
            self.later(message.deadline_s, DrainExpired())
            self._check_drained()

    def _check_drained(self) -> None:
        drain = self._drain
        busy = self._runs or self._next or any(not table.idle for table in self._tables)
        if drain.asked and not drain.over and not drain.abandoning and not busy:
            for table in self._tables:
                table.abandon_all("only a call that did not return held it")
            drain.finish()

    async def _drain_expired(self) -> None:
        if self._drain.expire(self._groups):
            for step in [s for s, r in self._runs.items() if not r.state.ended.is_open]:
                self._pool.cancel(step)
            await self._broadcast(Abandon(ABANDON_GRACE_S))

    async def _group_drained(self, message: Drained) -> None:
        """What the groups could not end in time is abandoned; every step is given up, its destinations are fenced."""
        if not self._drain.abandoned(message):
            return
        left = [f"step {r.state.id}: {r.waits_for()}" for r in self._runs.values()]
        for run in list(self._runs.values()):
            self._fence(run.state.fence_unended())
            run.state.give_up("the drain's deadline passed")
            self._states.pop(run.state.id, None)
        self._runs.clear()
        self._open = None
        self._drain.finish(left)
        await self._check_releases()
        await self._begin_next()

    def answer_all(self) -> None:
        """The engine ended: whoever waits gets an answer. Called again for messages that came in too late; any thread."""
        self._lookups.fail_all()
        waiting = [*self._next, *self._releases, self.current, *self.mailbox.take_all()]
        self._next.clear()
        self._releases.clear()
        for message in waiting:
            match message:
                case Lookup():
                    message.answer(self._lookups.miss)
                case ReleaseRequest():
                    message.answer()
                case Drain():
                    message.answer(["the engine ended before it was drained"])
        self._drain.fail("the engine ended before it was drained")

    # -- sending -------------------------------------------------------------------------------------------------------

    async def _to_groups(self, run: Run, message: Any) -> None:
        for group_id in run.state.groups:
            await self._groups[group_id].send(message)

    async def _broadcast(self, message: Any) -> None:
        for mailbox in self._groups.values():
            await mailbox.send(message)


def _nobody() -> None:
    """Nobody waits for the end of this."""
