"""The coordinator: one per engine. Owns steps and requests, prepares in two phases, joins the groups' answers.

A step is open from `BeginStep` to `EndStep` or `AbortStep`; at most one is. Its messages are held, in order, until every
group is prepared; then they are passed on as they come. If one preparation fails, all are rolled back and the step passes
through: nothing is moved, its loads are reported failed, the model goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from kvactors.actors.actor import Actor
from kvactors.actors.mailbox import Mailbox
from kvactors.actors.pool import TransferPool
from kvactors.actors.step_state import StepState
from kvactors.core.circuit import Circuit
from kvactors.core.clock import Clock
from kvactors.core.config import EngineConfig
from kvactors.core.layout import KVLayout, group_hashes
from kvactors.core.observe import Observer
from kvactors.core.queue import Priority
from kvactors.core.reachability import Hit
from kvactors.core.sessions import SessionTable
from kvactors.core.stats import EngineStats
from kvactors.core.steps import GroupBlocks, ReleaseReason, StepRequest
from kvactors.core.store import Health, Outcome, Store
from kvactors.core.taint import Taints
from kvactors.messages import (
    Abandon,
    AbortStep,
    Activate,
    Ask,
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
    Rollback,
    StoreLost,
    TransferDone,
)

log = structlog.get_logger("kvactors.coordinator")

Find = Callable[[Sequence[bytes], int, Store], Hit]
"""Asks the store and decides the longest hit; runs on a transfer worker."""

ABANDON_GRACE_S = 0.5
"""How long the revokes that a drain's deadline asks for may take before their keys are abandoned."""


@dataclass(slots=True, eq=False)
class Run:
    """One step, or one `LoadBlocks`, as the coordinator sees it: which groups still owe which answer."""

    state: StepState
    preparing: set[int]
    ending: set[int]
    settling: set[int]
    held: deque[Any] = field(default_factory=deque)
    active: bool = False
    failed: str = ""
    end_asked: bool = False
    end_sent: bool = False


class ProbeNow:
    """Timer to itself: ask the store whether it answers again."""


@dataclass(slots=True)
class PrepareExpired:
    """Timer to itself: a step's preparation has taken too long."""

    step: int


@dataclass(slots=True)
class LookupExpired:
    """Timer to itself: a lookup's deadline passed."""

    number: int


@dataclass(slots=True)
class LookupDone:
    number: int
    done: TransferDone


@dataclass(slots=True)
class ProbeDone:
    done: TransferDone


class DrainExpired:
    """Timer to itself: the drain's deadline passed."""


class Coordinator(Actor):
    """See the module."""

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
        config: EngineConfig,
        clock: Clock,
        observer: Observer | None = None,
    ) -> None:
        super().__init__("coordinator", clock, observer, mailbox_limit=4096 + 8 * layout.stage_layers)
        self.circuit = Circuit(config.probe_interval_s)
        self._layout, self._hash_tokens = layout, hash_tokens
        self._groups, self._states, self._pool = groups, states, pool
        self._tables = tables
        self._stats, self._taints, self._find, self._config = stats, taints, find, config
        self._runs: dict[int, Run] = {}
        self._open: Run | None = None
        self._next: deque[Any] = deque()
        """messages of a step that began while an earlier one is still being aborted"""
        self._lookups: dict[int, Lookup] = {}
        self._lookup_number = 0
        self._releases: list[ReleaseRequest] = []
        self._drain: Drain | None = None
        self._left: list[str] | None = None
        self._draining_groups: set[int] = set()
        self._degraded = ""
        self._miss = Hit(0, tuple(() for _ in layout.groups))

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
                await self._check_drained()
            case AbortStep():
                await self._abort(message.step, message.reason)
            case LoadBlocks():
                await self._load(message)
            case Lookup():
                self._lookup(message)
            case LookupExpired():
                self._answer_lookup(message.number, None)
            case ReleaseRequest():
                await self._release(message)
            case ForgetRequest():
                self._taints.forget(message.request_id)
                await self._broadcast(message)
            case StoreLost():
                await self._store_lost(message)
            case ProbeNow():
                self._probe()
            case LookupDone():
                self._looked_up(message)
            case ProbeDone():
                self._probed(message.done)
            case GroupFailed():
                await self._group_failed(message)
            case Drain():
                await self._start_drain(message)
            case DrainExpired():
                await self._drain_expired()
            case Drained():
                self._drained(message)
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
        refusal = self._refusal()
        self._open = Run(state, set(), set(), set())
        self._runs[state.id] = self._open
        if refusal:
            self._pass_through(self._open, refusal)
            return
        saving = frozenset(r for r in state.requests if self._may_save(state.requests[r]))
        await self._prepare(self._open, message.event, saving)

    def _refusal(self) -> str:
        """Why a step is passed through at once; empty if it is not."""
        if self._drain is not None:
            return "the engine is draining"
        if self._circuit_open:
            return "the store cannot be reached"
        return self._degraded

    @property
    def _circuit_open(self) -> bool:
        return self.circuit.is_open

    def _may_save(self, request: StepRequest) -> bool:
        return not self._taints.check(request)

    async def _prepare(self, run: Run, event: Any, saving: frozenset[str]) -> None:
        state = run.state
        for answers in (run.preparing, run.ending, run.settling):
            answers.update(state.groups)
        for group_id in sorted(state.groups):
            await self._groups[group_id].send(PrepareGroup(state.id, self._views(state, group_id), event, saving))
        if not state.groups:
            run.active = True
        else:
            self.later(self._config.step_deadline_s, PrepareExpired(state.id))

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
            run.failed = run.failed or f"groups {sorted(run.preparing)} were not prepared before the deadline"
            await self._activate(run)

    async def _activate(self, run: Run) -> None:
        """Every group is prepared, or none will be: the step's held messages are passed on."""
        run.active = True
        if run.failed:
            await self._roll_back(run)
        else:
            await self._to_groups(run, Activate(run.state.id))
        if not run.state.windowed:
            run.end_asked = True
            await self._send_end(run, revoke=bool(run.failed))
        held, run.held = run.held, deque()
        for m in held:
            await self._of_step(m)
        await self._check_end(run)

    async def _roll_back(self, run: Run) -> None:
        log.warning("preparation failed; the step passes through", step=run.state.id, reason=run.failed)
        self._stats.steps_passed_through += 1
        run.state.passed_through = True
        if run.state.load_layers:
            run.state.fail_layer(run.state.load_layers[0], f"preparation failed: {run.failed}")
        self._pool.cancel(run.state.id)
        run.end_sent = True
        await self._to_groups(run, Rollback(run.state.id, f"preparation failed: {run.failed}"))

    # -- a step runs, and ends -----------------------------------------------------------------------------------------

    async def _of_step(self, message: LayerReady | LayerWanted | EndStep) -> None:
        run = self._open
        if run is None or run.state.id != message.step or run.end_asked:
            if self._next and any(m.step == message.step for m in self._next):
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
            self._next = deque(m for m in self._next if m.step != step)
            return
        run.state.aborted = True
        run.end_asked = True
        run.held.clear()
        run.failed = run.failed or f"aborted: {reason}"
        self._pool.cancel(step)
        if run.active:
            if not run.end_sent:
                await self._send_end(run, revoke=True, reason=run.failed)
            await self._check_end(run)

    async def _group_ended(self, step: int, group_id: int) -> None:
        run = self._runs.get(step)
        if run is not None:
            run.ending.discard(group_id)
            await self._check_end(run)

    async def _group_settled(self, step: int, group_id: int) -> None:
        run = self._runs.get(step)
        if run is not None:
            run.settling.discard(group_id)
            await self._check_settled(run)

    async def _check_end(self, run: Run) -> None:
        """All groups ended, and the caller asked for the end: its blocks may be reused."""
        state = run.state
        if not run.end_asked or not run.active or run.ending or state.ended.is_open:
            return
        for failure in state.failures().values():
            self._taints.add(failure)
        state.close()
        state.ended.open()
        if run is self._open:
            self._open = None
        await self._check_settled(run)
        await self._check_releases()
        if self._open is None and self._next:
            waiting, self._next = self._next, deque()
            for message in waiting:
                await self.handle(message)

    async def _check_settled(self, run: Run) -> None:
        if run.settling or not run.state.ended.is_open or run.state.id not in self._runs:
            return
        del self._runs[run.state.id]
        self._states.pop(run.state.id, None)
        run.state.settled.open()
        await self._check_drained()

    # -- loads outside steps -------------------------------------------------------------------------------------------

    async def _load(self, message: LoadBlocks) -> None:
        state = self._states[message.step]
        run = self._runs[state.id] = Run(state, set(), set(), set())
        refusal = self._refusal()
        if refusal or not state.groups:
            self._pass_through(run, refusal or "nothing to load")
            run.end_asked = True
            await self._check_end(run)
            return
        await self._prepare(run, message.event, frozenset())

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _release(self, message: ReleaseRequest) -> None:
        """Takes effect at the end of the open step; loads of the request outside steps are cancelled, or awaited."""
        for run in list(self._runs.values()):
            aborting = message.reason is not ReleaseReason.FINISHED
            if not run.state.windowed and message.request_id in run.state.requests and aborting:
                await self._abort(run.state.id, message.reason.value)
        self._releases.append(message)
        await self._check_releases()

    async def _check_releases(self) -> None:
        busy = {r for run in self._runs.values() if not run.state.ended.is_open for r in run.state.requests}
        due = [m for m in self._releases if m.request_id not in busy]
        self._releases = [m for m in self._releases if m.request_id in busy]
        for m in due:
            if m.reason is not ReleaseReason.PREEMPTED:
                self._taints.forget(m.request_id)
            m.answer()

    # -- lookups -------------------------------------------------------------------------------------------------------

    def _lookup(self, message: Lookup) -> None:
        """A lookup error, or a deadline, is a miss."""
        if self._refusal() or not self.mailbox.reserve():
            message.answer(self._miss)
            return
        self._lookup_number += 1
        number = self._lookup_number
        self._lookups[number] = message
        self._pool.submit(
            Ask(
                reply=lambda done: self.mailbox.post(LookupDone(number, done)),
                priority=Priority.DEMANDED,
                run=partial(self._find, message.hashes, message.prompt_tokens),
            )
        )
        self.later(message.deadline_s, LookupExpired(number))

    def _answer_lookup(self, number: int, hit: Hit | None) -> None:
        waiting = self._lookups.pop(number, None)
        if waiting is None:
            return
        if hit is None:
            self._stats.lookup_errors += 1
            hit = self._miss
        waiting.answer(hit)

    def _looked_up(self, message: LookupDone) -> None:
        done = message.done
        if done.late:
            return
        self.mailbox.replied()
        job = done.job
        ok = done.outcomes[0] is Outcome.OK and isinstance(job, Ask) and isinstance(job.result, Hit)
        if not ok:
            log.warning("a lookup failed; it counts as a miss", error=repr(done.error or done.outcomes[0].value))
        self._answer_lookup(message.number, job.result if ok and isinstance(job, Ask) else None)

    # -- the store -----------------------------------------------------------------------------------------------------

    async def _store_lost(self, message: StoreLost) -> None:
        log.warning("the store lost its sessions", cause=message.cause, unreachable=message.unreachable)
        await self._broadcast(DropSessions(message.epoch, message.cause))
        if message.unreachable and self.circuit.trip():
            self._stats.circuit = self.circuit.state
            self.later(self.circuit.next_probe_s(), ProbeNow())

    def _probe(self) -> None:
        if not self.mailbox.reserve():
            self.later(self.circuit.next_probe_s(), ProbeNow())
            return
        self._pool.submit(Ask(reply=lambda done: self.mailbox.post(ProbeDone(done)), priority=Priority.DEMANDED, run=_health))

    def _probed(self, done: TransferDone) -> None:
        if done.late:
            return
        self.mailbox.replied()
        answer = done.job.result if isinstance(done.job, Ask) else None
        self.circuit.probed(isinstance(answer, Health) and answer.ok)
        self._stats.circuit = self.circuit.state
        if self.circuit.is_open:
            self.later(self.circuit.next_probe_s(), ProbeNow())
        else:
            log.info("the store answers again")

    # -- trouble -------------------------------------------------------------------------------------------------------

    async def _group_failed(self, message: GroupFailed) -> None:
        """Its sessions are revoked by the supervisor, which also answers for it; further steps pass through."""
        self._degraded = f"group {message.group_id} crashed: {message.error!r}"
        if self._stats.state == "running":
            self._stats.state = "degraded"

    # -- drain ---------------------------------------------------------------------------------------------------------

    async def _start_drain(self, message: Drain) -> None:
        if self._drain is not None:
            previous = self._drain.answer

            def both(left: list[str]) -> None:
                previous(left)
                message.answer(left)

            self._drain.answer = both
            return
        self._drain = message
        self._stats.state = "draining"
        self.later(message.deadline_s, DrainExpired())
        await self._check_drained()

    async def _check_drained(self) -> None:
        busy = self._runs or self._next or any(not table.idle for table in self._tables)
        if self._drain is not None and self._left is None and not busy:
            self._finish_drain([])

    def _finish_drain(self, left: list[str]) -> None:
        assert self._drain is not None
        self._left = left
        self._stats.state = "drained"
        self._drain.answer(left)

    async def _drain_expired(self) -> None:
        if self._left is not None or self._drain is None:
            return
        self._draining_groups = set(self._groups)
        self._left = [f"step {r.state.id}: {_waits_for(r)}" for r in self._runs.values()]
        for step in [s for s, r in self._runs.items() if not r.state.ended.is_open]:
            self._pool.cancel(step)
        await self._broadcast(Abandon(min(ABANDON_GRACE_S, self._drain.deadline_s)))

    def _drained(self, message: Drained) -> None:
        self._draining_groups.discard(message.group_id)
        assert self._left is not None
        self._left.extend(message.left)
        if self._draining_groups:
            return
        for run in self._runs.values():
            run.state.give_up("the drain's deadline passed")
        self._finish_drain(self._left)

    def answer_all(self) -> None:
        """The engine ended: nobody waits for an answer any longer."""
        for number in list(self._lookups):
            self._answer_lookup(number, None)
        for release in self._releases:
            release.answer()
        if self._drain is not None and self._left is None:
            self._finish_drain(["the engine ended before it was drained"])

    # -- sending -------------------------------------------------------------------------------------------------------

    async def _to_groups(self, run: Run, message: Any) -> None:
        for group_id in run.state.groups:
            await self._groups[group_id].send(message)

    async def _broadcast(self, message: Any) -> None:
        for mailbox in self._groups.values():
            await mailbox.send(message)


def _waits_for(run: Run) -> str:
    if run.preparing:
        return f"groups {sorted(run.preparing)} are preparing"
    if run.ending:
        return f"groups {sorted(run.ending)} have transfers under way"
    return f"groups {sorted(run.settling)} have sessions without an end" if run.settling else "its end was not asked for"


def _health(store: Store) -> Health:
    return store.health()
