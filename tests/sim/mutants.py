"""Seeded bugs: each breaks one rule of the engine, and the simulator must notice.

A mutant is a function that patches the engine's classes; its name says what it breaks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvactors.actors.coordinator import Coordinator
from kvactors.actors.group import GroupActor
from kvactors.actors.group_step import GroupContext
from kvactors.actors.latch import SaveGate
from kvactors.actors.loader import Loader
from kvactors.actors.mailbox import Mailbox
from kvactors.actors.pool import TransferPool
from kvactors.actors.saver import Saver
from kvactors.actors.step_state import LayerTask, StepState
from kvactors.actors.store_calls import StoreCalls
from kvactors.actors.undertaker import Undertaker
from kvactors.core import loads as core_loads
from kvactors.core.calls import RowPlan
from kvactors.core.coverage import Coverage
from kvactors.core.loads import StepLoads
from kvactors.core.reachability import Reachability
from kvactors.core.riders import Riders
from kvactors.core.saves import StepSaves
from kvactors.core.sessions import PutEvent, PutSession, SessionTable
from kvactors.core.steps import Phase
from kvactors.core.store import Outcome
from kvactors.core.taint import Taints
from kvactors.engine.driver import StepDriver
from kvactors.messages import Commit, EndGroup, Kind, LayerReady, Transfer, TransferDone


class Patch:
    """pytest's monkeypatch, for methods that take what those take in whose place they are put.

    Others would raise by themselves, and the simulator would notice that instead of the bug.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        real = getattr(owner, name)
        if inspect.isfunction(real):
            taken, takes = inspect.signature(real).parameters.values(), inspect.signature(value)
            named = {p.name: p for p in taken if p.kind is p.KEYWORD_ONLY}
            for given in (taken, [p for p in taken if p.default is p.empty]):
                takes.bind(*[p for p in given if p.name not in named], **named)
            assert inspect.iscoroutinefunction(value) == inspect.iscoroutinefunction(real), name
        self._monkeypatch.setattr(owner, name, value)


MUTANTS: dict[str, tuple[Callable[[Patch], None], str]] = {}
"""name -> (patch, preset under which it must be caught)"""


def mutant(preset: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS[patch.__name__] = (patch, preset)
        return patch

    return add


@mutant("flaky-store")
def commit_without_coverage(patch: Patch) -> None:
    patch.setattr(StepSaves, "kill", lambda self, row, cause: None)
    patch.setattr(Coverage, "complete", lambda self, rows: np.ones(len(rows), dtype=bool))


@mutant("flaky-store")
def coverage_counts_failed_ranges(patch: Patch) -> None:
    def returned(self: Any, call: Any, *_: Any) -> None:
        self._inflight[call.rows] -= 1
        self._coverage.add(call.rows, call.first_piece, call.last_piece)

    patch.setattr(StepSaves, "returned", returned)


@mutant("none")
def ownership_without_group(patch: Patch) -> None:
    """Block 0 of one group is block 0 of another."""
    shared: dict[int, SessionTable] = {}
    real = GroupActor.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        table = kwargs["table"]
        kwargs["table"] = shared.setdefault(id(kwargs["steps"]), table)
        real(self, *args, **kwargs)

    from kvactors.actors import put_opens

    patch.setattr(GroupActor, "__init__", init)
    patch.setattr(put_opens, "Owner", lambda request, group, block: (request, 0, block))
    patch.setattr(SessionTable, "put", _put_with_plain_owner(SessionTable.put))


def _put_with_plain_owner(real: Any) -> Any:
    def put(self: Any, session: PutSession, event: PutEvent, cause: str = "") -> Any:
        from kvactors.core.sessions import Owner

        if not isinstance(session.owner, Owner):
            key, session.owner = session.owner, Owner(*session.owner)
            if key in self.puts:
                self.puts[session.owner] = self.puts.pop(key)
        return real(self, session, event, cause)

    return put


@mutant("none")
def release_before_in_flight_read(patch: Patch) -> None:
    def may_release(self: Any, gs: Any) -> bool:
        return not gs.released and not gs.gets_awaited and (gs.ending or (gs.loads is not None and gs.loads.all_started))

    patch.setattr(Loader, "may_release", may_release)


@mutant("none")
def commit_at_the_models_last_layer(patch: Patch) -> None:
    """A group that has no part in the model's last layer waits for it for ever."""

    def fully(self: Any) -> bool:
        return len(self.signalled) == len(self.ranges.layers) and 3 in self.signalled

    patch.setattr(StepSaves, "fully_signalled", property(fully))


@mutant("flaky-store")
def what_lies_before_a_failed_block_is_skipped_too(patch: Patch) -> None:
    """The request would start again from a boundary whose blocks never came."""
    patch.setattr(StepLoads, "lost", lambda self, wrong, tokens: {i for i, r in enumerate(self.requests) if r in wrong})


@mutant("none")
def refcount_ignored(patch: Patch) -> None:
    real = Loader._give_back

    def give_back(self: Any, gs: Any, keys: Any) -> None:
        keys = list(keys)
        for key in keys:
            session = self._c.table.gets.get(key)
            if session is not None:
                session.refs = 1
        real(self, gs, keys)

    patch.setattr(Loader, "_give_back", give_back)


@mutant("evicting")
def no_age_check_on_reads(patch: Patch) -> None:
    patch.setattr(StoreCalls, "_get", lambda self, job: self._store.get_ranges(job.call.batch))


@mutant("slow-store")
def no_age_check_on_writes(patch: Patch) -> None:
    patch.setattr(StoreCalls, "_put", lambda self, job: self._store.put_ranges(job.call.batch))


@mutant("flaky-store")
def worker_exception_swallowed(patch: Patch) -> None:
    real = StoreCalls.make

    def call(self: Any, job: Any, epoch: int) -> Any:
        outcomes, error = real(self, job, epoch)
        return ([Outcome.OK] * job.count, None) if error is not None else (outcomes, error)

    patch.setattr(StoreCalls, "make", call)


@mutant("flaky-store")
def saves_after_a_failed_load(patch: Patch) -> None:
    patch.setattr(StepSaves, "kill_where", lambda self, unwanted, cause: None)


@mutant("flaky-keys")
def taint_forgotten_between_steps(patch: Patch) -> None:
    patch.setattr(Taints, "check", lambda self, request: False)


@mutant("none")
def commit_with_a_range_call_in_flight(patch: Patch) -> None:
    real = StepSaves.due

    def due(self: Any) -> Any:
        inflight = self._inflight
        self._inflight = np.zeros_like(inflight)
        try:
            return real(self)
        finally:
            self._inflight = inflight

    patch.setattr(StepSaves, "due", due)
    patch.setattr(Coverage, "complete", lambda self, rows: np.ones(len(rows), dtype=bool))


@mutant("none")
def stale_step_messages_accepted(patch: Patch) -> None:
    """A late signal of a step that was overtaken counts for the step that is open."""
    real = Coordinator._of_step

    async def of_step(self: Any, message: Any) -> None:
        run = self._open
        if run is not None and run.state.id != message.step and isinstance(message, LayerReady):
            message = LayerReady(run.state.id, message.layer, message.event, Phase.EXIT, True)
            if message.layer in run.state.save_layers and message.layer not in run.state.saves:
                run.state.begin_save(message.layer, lambda: None)
        await real(self, message)

    def signal(self: Any, state: Any, layer: int, event: Any, phase: Any, **more: Any) -> None:
        if state.aborted or state.closed:
            self._post(LayerReady(state.id, layer, event, phase, True))
        else:
            real_signal(self, state, layer, event, phase, **more)

    real_signal = StepDriver.signal
    patch.setattr(StepDriver, "signal", signal)
    patch.setattr(Coordinator, "_of_step", of_step)


@mutant("none")
def blocks_released_before_transfers_ended(patch: Patch) -> None:
    real = Coordinator._check_end

    async def check_end(self: Any, run: Any) -> None:
        run.ending.clear()
        await real(self, run)

    patch.setattr(Coordinator, "_check_end", check_end)


@mutant("none")
def window_one_block_short(patch: Patch) -> None:
    """A sliding window's need is one block too small, in every mask and hit."""
    from kvactors.core import reachability
    from kvactors.core.layout import GroupKind

    real = reachability._Spec.first_block

    def first_block(self: Any, end: int) -> int:
        first = real(self, end)
        return min(first + 1, end) if self.kind is GroupKind.SLIDING_WINDOW else first

    patch.setattr(reachability._Spec, "first_block", first_block)


@mutant("flaky-store")
def no_rollback(patch: Patch) -> None:
    async def roll_back(self: Any, run: Any) -> None:
        run.state.passed_through = True
        run.end_sent = True

    patch.setattr(Coordinator, "_roll_back", roll_back)


@mutant("none")
def saves_not_gated_by_their_event(patch: Patch) -> None:
    _without_event(patch, Kind.PUT)


@mutant("none")
def loads_not_gated_by_their_event(patch: Patch) -> None:
    _without_event(patch, Kind.GET)


def _without_event(patch: Patch, kind: Kind) -> None:
    real = TransferPool.submit_together

    def submit(self: Any, jobs: Any) -> None:
        for job in jobs:
            if isinstance(job, Transfer) and job.kind is kind:
                job.event = None
        real(self, jobs)

    patch.setattr(TransferPool, "submit_together", submit)


@mutant("none")
def state_saved_at_entry(patch: Patch) -> None:
    real = StepDriver.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        self._state_layers = frozenset()

    patch.setattr(StepDriver, "__init__", init)


@mutant("none")
def fan_out_reaches_one_destination(patch: Patch) -> None:
    real = core_loads.RowPlan

    def plan(rows: Any, keys: Any, *rest: Any) -> Any:
        seen: set[str] = set()
        first = [i for i in rows.tolist() if not (keys[i] in seen or seen.add(keys[i]))]
        return real(np.asarray(first, dtype=np.intp), keys, *rest)

    patch.setattr(core_loads, "RowPlan", plan)


@mutant("none")
def every_rank_writes_head_0(patch: Patch) -> None:
    real = GroupContext.key

    def key(self: Any, block_hash: bytes) -> str:
        return real(self, block_hash).rsplit("@", 1)[0] + "@0"

    patch.setattr(GroupContext, "key", key)


@mutant("none")
def a_wake_is_lost(patch: Patch) -> None:
    real = Mailbox.post
    count = [0]

    def post(self: Any, message: Any) -> None:
        count[0] += 1
        if count[0] % 101 == 0 and self._sleeping:
            self._queue.append(message)
        else:
            real(self, message)

    patch.setattr(Mailbox, "post", post)


@mutant("none")
def checkpoint_ignores_its_limit(patch: Patch) -> None:
    patch.setattr(SaveGate, "blocked", lambda self: None)


@mutant("none")
def batches_beyond_their_limit(patch: Patch) -> None:
    real = RowPlan._cut
    patch.setattr(RowPlan, "_cut", lambda self, most: real(self, max(most, 1 << 20)))


@mutant("lost-master")
def stale_sessions_written(patch: Patch) -> None:
    """A lost master voids no session."""

    async def lost(self: Any, message: Any) -> None:
        if message.unreachable:
            self.watch.unreachable()

    real = TransferPool.submit_together

    def submit(self: Any, jobs: Any) -> None:
        for job in jobs:
            job.epoch = -1
        real(self, jobs)

    patch.setattr(Coordinator, "_store_lost", lost)
    patch.setattr(TransferPool, "submit_together", submit)


@mutant("flaky-store")
def a_failed_revoke_counts_as_revoked(patch: Patch) -> None:
    def revoked(self: Any, sessions: Any, done: Any) -> None:
        for s in sessions:
            self._c.table.put(s, PutEvent.REVOKED)

    patch.setattr(Saver, "revoked", revoked)


@mutant("kill-writer")
def nobody_answers_for_a_crashed_group(patch: Patch) -> None:
    real = Undertaker.handle

    async def handle(self: Any, message: Any) -> None:
        if not isinstance(message, EndGroup | LayerReady):
            await real(self, message)

    patch.setattr(Undertaker, "handle", handle)


@mutant("slow-store")
def a_write_past_its_deadline_counts_as_done(patch: Patch) -> None:
    real = TransferPool._post

    def post(self: Any, job: Any, outcome: Outcome) -> Any:
        put = isinstance(job, Transfer) and job.kind is Kind.PUT
        return real(self, job, Outcome.OK if put and outcome is Outcome.LOST else outcome)

    patch.setattr(TransferPool, "_post", post)


@mutant("none")
def a_save_task_is_uncounted_twice(patch: Patch) -> None:
    real = LayerTask._end

    def end(self: Any) -> None:
        real(self)
        if self._on_end is not None and self.layer == 0:
            self._on_end()

    patch.setattr(LayerTask, "_end", end)


@mutant("flaky-keys")
def one_failed_key_costs_its_whole_call(patch: Patch) -> None:
    """A failed put revokes every key of its call, not its own."""
    real = StepSaves.returned

    def returned(self: Any, call: Any, outcomes: Any, error: Any = None) -> None:
        bad = next((o for o in outcomes if o is not Outcome.OK), None)
        real(self, call, outcomes if bad is None else [bad] * len(outcomes), error)

    patch.setattr(StepSaves, "returned", returned)


@mutant("lost-master")
def commits_without_epoch(patch: Patch) -> None:
    real = TransferPool.submit

    def submit(self: Any, job: Any) -> None:
        if isinstance(job, Commit):
            job.epoch = -1
        real(self, job)

    patch.setattr(TransferPool, "submit", submit)


@mutant("none")
def a_hit_may_be_the_whole_prompt(patch: Patch) -> None:
    real = Reachability.longest_hit

    def longest_hit(self: Any, hashes: Any, prompt_tokens: int, *args: Any, **kwargs: Any) -> Any:
        return real(self, hashes, prompt_tokens + 1, *args, **kwargs)

    patch.setattr(Reachability, "longest_hit", longest_hit)


@mutant("flaky-store")
def skipped_loads_count_as_loaded(patch: Patch) -> None:
    """A request that failed on a later layer is skipped on an earlier one, and reported loaded there."""
    real = StepState.fail

    def fail(self: Any, request_id: str, layer: int, blocks: Any, reason: str) -> None:
        if reason:  # the note of a skipped load has none of its own
            real(self, request_id, layer, blocks, reason)

    patch.setattr(StepState, "fail", fail)


@mutant("none")
def only_the_first_layer_of_a_joined_call_is_answered(patch: Patch) -> None:
    real = TransferDone.answers
    patch.setattr(TransferDone, "answers", lambda self: real(self)[:1])


@mutant("flaky-keys")
def outcomes_of_a_joined_call_are_shifted(patch: Patch) -> None:
    """The layers that ride along get the outcomes of the next key."""
    real = TransferDone.answers

    def answers(self: Any) -> Any:
        first, *riders = real(self)
        for done in riders:
            done.outcomes = [*done.outcomes[1:], *done.outcomes[:1]]
        return [first, *riders]

    patch.setattr(TransferDone, "answers", answers)


@mutant("none")
def a_rider_of_other_rows_is_taken(patch: Patch) -> None:
    from kvactors.core import riders

    def place(job: Any, piece: int) -> Any:
        return job.kind, job.group_id, job.step, piece, len(job.call.rows)

    patch.setattr(riders, "_place", place)
    patch.setattr(riders, "_same_way", lambda first, job: first.priority is job.priority)


@mutant("none")
def riders_beyond_the_limits_of_a_call(patch: Patch) -> None:
    real = Riders.__init__
    patch.setattr(Riders, "__init__", lambda self, good, limit: real(self, good, 0))


@mutant("flaky-keys")
def failures_noted_after_the_answer(patch: Patch) -> None:
    """As it was once: whoever acts on an answer before its worker goes on knows of no failure."""
    note, settle = Loader._note_failures, TransferPool.settle
    unnoted: dict[int, Callable[[], None]] = {}

    def note_later(self: Any, gs: Any, call: Any, done: TransferDone) -> None:
        unnoted[id(done)] = partial(note, self, gs, call, done)

    def settled(answers: Any) -> None:
        for done in answers:
            unnoted.pop(id(done), lambda: None)()
        settle(answers)

    patch.setattr(Loader, "_note_failures", note_later)
    patch.setattr(TransferPool, "settle", staticmethod(settled))
