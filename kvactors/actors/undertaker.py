"""What takes over when a group actor crashed: ends its sessions from the table, and answers for it.

The session table, and the mailbox into which late completions go, outlive the actor. A session is revoked (or closed) once
no store call of its key is under way; the group's part of every step is reported failed. Nothing new is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvactors.actors.actor import Actor
from kvactors.actors.group import AbandonNow, GroupActor
from kvactors.actors.group_step import per_call
from kvactors.actors.loader import NO_ANSWER
from kvactors.actors.put_opens import Cleaned, ReadableDone, revoke_unowned
from kvactors.actors.saver import end_of_revoke
from kvactors.actors.step_state import StepState
from kvactors.core.answers import in_words
from kvactors.core.queue import Priority
from kvactors.core.sessions import PUT_TERMINAL, GetEvent, GetSession, GetState, PutEvent, PutSession, PutState
from kvactors.core.store import Outcome
from kvactors.log import get_logger
from kvactors.messages import (
    Abandon,
    Close,
    Commit,
    Drained,
    EndGroup,
    ForgetRequest,
    GroupCommitted,
    GroupEnded,
    GroupIdle,
    Job,
    Kind,
    LayerReady,
    LayerWanted,
    Open,
    PrepareFailed,
    PrepareGroup,
    Revoke,
    Transfer,
    TransferDone,
)

log = get_logger("kvactors.undertaker")


class Undertaker(Actor):
    """Reads the crashed actor's mailbox from where it stopped."""

    def __init__(self, crashed: GroupActor, states: Mapping[int, StepState]) -> None:
        context = crashed.context
        super().__init__(f"undertaker of {crashed.name}", context.clock)
        self.mailbox = crashed.mailbox
        self._c = context
        self._states = states
        self._steps = set(crashed.steps)
        self._unprepared = [step for step, gs in crashed.steps.items() if not gs.prepared]
        self._current = crashed.current
        self._reason = f"{crashed.name} crashed"

    async def begin(self) -> None:
        """Gives up the group's part of every step, ends the sessions that no call holds, and takes up the message in hand."""
        for step in self._unprepared:
            self._c.upward(PrepareFailed(step, self._c.group_id, self._reason))
        for step in self._steps:
            self._c.pool.cancel(step, self._c.group_id)
            state = self._states.get(step)
            if state is not None:
                state.forgo(self._c.group_id, self._reason)
        match self._current:  # the slot of a reply was freed before the actor looked at it
            case None:
                pass  # it crashed between two messages
            case TransferDone():
                self._done(self._current)
                self._sweep()
            case ReadableDone() | Cleaned():
                self._sweep()
            case _:
                await self.handle(self._current)

    async def handle(self, message: Any) -> None:
        c = self._c
        match message:
            case TransferDone():
                if not message.late:
                    self.mailbox.replied()
                self._done(message)
            case ReadableDone() | Cleaned():
                if not message.done.late:
                    self.mailbox.replied()
            case PrepareGroup():
                c.upward(PrepareFailed(message.step, c.group_id, self._reason))
                self._steps.add(message.step)
            case EndGroup() | LayerReady() | LayerWanted():
                if isinstance(message, EndGroup):
                    self._steps.add(message.step)
                state = self._states.get(message.step)
                if state is not None:
                    state.forgo(c.group_id, self._reason)
            case ForgetRequest():
                c.table.forget(message.request_id)
            case Abandon():
                self._abandon(self._c.table.left())
            case AbandonNow():
                self._abandon(message.left)
            case _:
                pass  # signals of steps that pass through, timers and questions of the crashed actor
        self._sweep()

    def _done(self, done: TransferDone) -> None:
        """Moves the sessions of a call that came back to where the call brought them."""
        job, table = done.job, self._c.table
        match job:
            case Open():
                for session, outcome in zip(job.sessions, done.outcomes, strict=True):
                    if isinstance(session, PutSession):
                        self._put_opened(session, outcome)
                    elif isinstance(session, GetSession):
                        self._opened(session, outcome, done.late)
            case Commit():
                for put, outcome in zip(job.sessions, done.outcomes, strict=True):
                    if put.state is PutState.COMMITTING:
                        ok = outcome is Outcome.OK
                        table.put(put, PutEvent.COMMITTED if ok else PutEvent.LOST, in_words(outcome, done.error))
            case Revoke():
                for put, outcome in zip(job.sessions, done.outcomes, strict=True):
                    if put.state is PutState.REVOKING:
                        end = end_of_revoke(put, outcome, done.error, may_retry=False)
                        event, why = end or (PutEvent.POISON, in_words(outcome, done.error))
                        table.put(put, event, why)
            case Close():
                lost = Outcome.LOST in done.outcomes and not done.late
                for get in job.sessions:
                    if get.state is (GetState.LOST if done.late else GetState.CLOSING):
                        table.get(get, GetEvent.LOST if lost else GetEvent.CLOSED)
            case Transfer(kind=Kind.GET) if done.late or Outcome.LOST in done.outcomes:
                self._c.fence(job.call, -1 if done.late else 1)
            case Transfer(kind=Kind.PUT) if Outcome.LOST in done.outcomes and not done.late:
                keys = set(job.call.batch.keys)
                for put in [p for p in table.puts.values() if p.key in keys and p.state is PutState.OPEN]:
                    table.put(put, PutEvent.LOST, "put did not return")

    def _put_opened(self, session: PutSession, outcome: Outcome) -> None:
        """Opened, refused, or unknown: what the store may have opened without anybody knowing is revoked."""
        table = self._c.table
        if session.state is not PutState.OPENING:
            if outcome is Outcome.OK:  # it was given up
                revoke_unowned(self._c, [session.key])
        elif outcome is Outcome.OK:
            table.put(session, PutEvent.OPENED)
        elif outcome is Outcome.LOST:
            table.put(session, PutEvent.LOST, "put open did not return")
        elif outcome in NO_ANSWER:
            self._give_up_opening([session])
        else:
            table.put(session, PutEvent.REFUSED, outcome.value)

    def _give_up_opening(self, sessions: Sequence[PutSession]) -> None:
        """Whether the store has these sessions is unknown."""
        for session in sessions:
            self._c.table.put(session, PutEvent.LOST, self._reason)
        for part in per_call(sessions):
            revoke_unowned(self._c, [s.key for s in part])

    def _opened(self, session: GetSession, outcome: Outcome, late: bool) -> None:
        table, ok = self._c.table, outcome is Outcome.OK
        if session.state is GetState.OPENING:
            failed = GetEvent.LOST if outcome is Outcome.LOST else GetEvent.FAILED
            table.get(session, GetEvent.OPENED if ok else failed)
        elif session.state is GetState.LOST and late:
            if ok:
                self._close([session])
            else:
                table.get(session, GetEvent.CLOSED)

    def _close(self, sessions: list[GetSession]) -> None:
        c = self._c
        for session in sessions:
            c.table.get(session, GetEvent.CLOSE)
        for part in per_call(sessions):
            c.submit(Close(reply=c.mailbox.post, priority=Priority.DEMANDED, group_id=c.group_id, sessions=part))

    def _sweep(self) -> None:
        """Ends what no call holds any more, and reports the steps that have come to rest."""
        c = self._c
        jobs = c.pool.jobs_of(c.group_id)
        busy = {key for job in [*jobs, *c.pool.lost_of(c.group_id)] for key in _keys(job)}
        revoke = [p for p in c.table.puts.values() if p.state is PutState.OPEN and p.key not in busy]
        for put in revoke:
            c.table.put(put, PutEvent.REVOKE, self._reason)
        for part in per_call(revoke):
            c.submit(Revoke(reply=c.mailbox.post, priority=Priority.COMMIT, group_id=c.group_id, sessions=part))
        self._close([g for g in c.table.gets.values() if g.state in (GetState.OPEN, GetState.EXPIRED) and g.key not in busy])
        if not len(self.mailbox):  # no answer is on its way either
            left = [p for p in c.table.puts.values() if p.key not in busy and p not in revoke]
            self._give_up_opening([p for p in left if p.state is PutState.OPENING and p.attempts])
            for put in [p for p in left if p.state not in PUT_TERMINAL]:
                c.table.put(put, PutEvent.REFUSED if put.state is PutState.OPENING else PutEvent.LOST, self._reason)
        if c.table.idle:
            c.upward(GroupIdle(c.group_id))
        moving = {job.step for job in jobs if isinstance(job, Transfer)}
        for step in [s for s in self._steps if s not in moving]:
            self._steps.discard(step)
            c.upward(GroupEnded(step, c.group_id))
            c.upward(GroupCommitted(step, c.group_id))

    def _abandon(self, left: list[str]) -> None:
        self._c.table.abandon_all("the drain's deadline passed")
        self._c.upward(Drained(self._c.group_id, left))


def _keys(job: Job) -> list[str]:
    match job:
        case Transfer():
            return list(job.call.batch.keys)
        case Open() | Commit() | Revoke() | Close():
            return [s.key for s in job.sessions]
        case _:
            return []
