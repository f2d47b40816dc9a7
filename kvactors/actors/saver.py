"""The saving half of a group actor: put sessions from open to their end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvactors.actors.group_step import GroupContext, GroupStep, per_call
from kvactors.actors.put_opens import PutOpens
from kvactors.actors.step_state import StepState
from kvactors.core.answers import in_words
from kvactors.core.queue import Priority
from kvactors.core.sessions import PutEvent, PutSession, PutState
from kvactors.core.store import Outcome
from kvactors.log import get_logger
from kvactors.messages import Commit, Kind, LayerReady, Revoke, Transfer, TransferDone

log = get_logger("kvactors.saves")

REVOKE_RETRY_S = (0.05, 0.2, 1.0)
"""Waits between retries of a failed revoke; after the last the key is poisoned."""


class RetryRevokes:
    """Timer to itself: revoke again."""

    __slots__ = ("sessions",)

    def __init__(self, sessions: Sequence[PutSession]) -> None:
        self.sessions = sessions


class Saver:
    """Puts, commits and revokes; `opens` brings sessions up to `open`. Every session ends once (I2)."""

    def __init__(self, context: GroupContext) -> None:
        self._c = context
        self.opens = PutOpens(context, self._revoke)
        self._warned = False

    # -- writing -------------------------------------------------------------------------------------------------------

    def layer_ready(self, gs: GroupStep, message: LayerReady) -> None:
        """Puts the layer's bytes. The first save of a group ends the search for space."""
        c, saves, state = self._c, gs.saves, gs.state
        task = state.saves.get(message.layer)
        if task is None:
            return
        if saves is None or message.layer not in c.ranges.layers:
            task.plan(c.group_id, 0)
            return
        if gs.retries:
            self.opens.stop_retrying(gs)
        if state.failed:
            saves.kill_where(dict(state.failed), "a load of its request failed")
        calls = saves.signal(message.layer)
        jobs = [
            Transfer(
                reply=c.mailbox.post,
                priority=Priority.SAVE,
                group_id=c.group_id,
                step=state.id,
                layer=message.layer,
                event=message.event,
                settled=task.job_done,
                epoch=call.part.epoch,
                kind=Kind.PUT,
                call=call,
                object_bytes=c.ranges.object_bytes,
                oldest_s=call.part.oldest_s,
            )
            for call in calls
        ]
        task.plan(c.group_id, len(jobs))
        gs.writes += len(jobs)
        if c.range_debug is not None:
            for call in calls:
                whose = [saves.sessions[row].owner for row in call.rows.tolist()]
                c.range_debug.ranges("put", c.group_id, call, [(o.request_id, o.block_index) for o in whose], message.event)
        for job in jobs:
            c.submit(job)
        if not calls:
            self.settle(gs)

    def transferred(self, gs: GroupStep, done: TransferDone, job: Transfer) -> None:
        """A write came back. A lost one may still write: its keys are abandoned, never committed and never revoked."""
        c, saves = self._c, gs.saves
        assert saves is not None
        if done.late:
            return
        gs.writes -= 1
        saves.returned(job.call, done.outcomes, done.error)
        if done.outcomes.count(Outcome.OK) == len(done.outcomes):
            self.settle(gs)
            return
        if Outcome.INVALID in done.outcomes and not self._warned:
            self._warned = True  # it would be said of every layer
            log.warning(
                "the store calls a put invalid; was the local memory registered with it (store.register)?",
                store=c.pool.store.name,
                group=c.group_id,
                layer=job.layer,
            )
        if Outcome.LOST in done.outcomes:
            for row in job.call.rows.tolist():
                session = saves.sessions[row]
                saves.close(row)
                if session.state is PutState.OPEN:
                    c.table.put(session, PutEvent.LOST, f"layer {job.layer}: put did not return")
        if Outcome.UNREACHABLE in done.outcomes or Outcome.STALE in done.outcomes:
            for row in job.call.rows.tolist():
                saves.sessions[row].dropped = True
        self.settle(gs)

    def settle(self, gs: GroupStep) -> None:
        """Commits and revokes what is due."""
        c, saves = self._c, gs.saves
        if saves is None or not saves.any_open:
            return
        if gs.state.failed:
            saves.kill_where(dict(gs.state.failed), "a load of its request failed")
        if not saves.anything_due:
            return
        commit, revoke = saves.due()
        epoch = c.pool.epoch  # read once: a worker may raise it at any time
        ready: list[PutSession] = []
        for s in commit:
            if s.epoch == epoch and c.clock.now() - s.opened_at <= c.pool.store.put_safe_age_s:
                c.table.put(s, PutEvent.COMMIT)
                ready.append(s)
            else:
                s.dropped = True
                revoke.append((s, "its session is older than the store's safe age"))
        for s, cause in revoke:
            c.table.put(s, PutEvent.REVOKE, cause)
        for part in per_call(ready):
            c.submit(
                Commit(
                    reply=c.mailbox.post,
                    priority=Priority.COMMIT,
                    group_id=c.group_id,
                    step=gs.state.id,
                    sessions=part,
                    epoch=epoch,
                )
            )
        self._revoke([s for s, _ in revoke])

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _revoke(self, sessions: Sequence[PutSession]) -> None:
        c = self._c
        for part in per_call(sessions):
            c.submit(
                Revoke(
                    reply=c.mailbox.post,
                    priority=Priority.COMMIT,
                    group_id=c.group_id,
                    step=part[0].step,
                    sessions=part,
                )
            )

    def committed(self, sessions: Iterable[PutSession], done: TransferDone, state: StepState | None) -> None:
        """A commit came back: what it did not commit is revoked. `state`: of the step that opened the sessions."""
        c = self._c
        failed: list[PutSession] = []
        for s, outcome in zip(sessions, done.outcomes, strict=True):
            if s.state is not PutState.COMMITTING:
                continue
            if outcome is Outcome.OK:
                c.table.put(s, PutEvent.COMMITTED)
                c.stats.saved += 1
                if state is not None:
                    state.saved.append(s.owner)
                c.stats.bytes_saved += c.ranges.object_bytes
            elif outcome is Outcome.LOST:
                c.table.put(s, PutEvent.LOST, "commit did not return")
            else:
                s.dropped = s.dropped or outcome in (Outcome.UNREACHABLE, Outcome.NOT_FOUND, Outcome.STALE)
                c.table.put(s, PutEvent.COMMIT_FAILED, in_words(outcome, done.error))
                failed.append(s)
        self._revoke(failed)

    def revoked(self, sessions: Iterable[PutSession], done: TransferDone) -> None:
        """A revoke came back. Bounded retries, then the key is poisoned; a session the store lost gets one try only."""
        c = self._c
        again: list[PutSession] = []
        for s, outcome in zip(sessions, done.outcomes, strict=True):
            if s.state is not PutState.REVOKING:
                continue
            end = end_of_revoke(s, outcome, done.error, may_retry=s.attempts < len(REVOKE_RETRY_S))
            if end is None:
                again.append(s)
            else:
                c.table.put(s, *end)
        if again:
            wait = REVOKE_RETRY_S[again[0].attempts]
            for s in again:
                s.attempts += 1
            c.later(wait, RetryRevokes(again))

    def retry_revokes(self, sessions: Sequence[PutSession]) -> None:
        self._revoke([s for s in sessions if s.state is PutState.REVOKING])

    def drop(self, steps: Iterable[GroupStep], epoch: int) -> None:
        """The store lost its sessions of earlier epochs: no further range or commit, one best-effort revoke (I11)."""
        for s in self._c.table.puts.values():
            if s.epoch < epoch and s.state is not PutState.OPENING:
                s.dropped = True
        for gs in steps:
            saves = gs.saves
            if saves is None:
                continue
            for row, s in enumerate(saves.sessions):
                if s.dropped and s.state is PutState.OPEN:
                    saves.kill(row, "the store lost its session")
            self.settle(gs)

    def end(self, gs: GroupStep, revoke: bool, reason: str) -> None:
        """No layer is signalled any more; with `revoke` nothing of the step is committed."""
        self.opens.stop_retrying(gs)
        if gs.saves is not None:
            if revoke:
                gs.saves.kill_all(reason)
            gs.saves.end()
            self.settle(gs)


def end_of_revoke(
    session: PutSession, outcome: Outcome, error: BaseException | None, *, may_retry: bool
) -> tuple[PutEvent, str] | None:
    """What the answer to a revoke makes of the session, and why; None: it is tried again."""
    if outcome is Outcome.OK:
        return PutEvent.REVOKED, ""
    if outcome is Outcome.INVALID:  # an earlier call ended it, and its answer was lost
        return PutEvent.REVOKED, "the store had no session"
    if outcome is Outcome.LOST:
        return PutEvent.LOST, "revoke did not return"
    if session.dropped or outcome is Outcome.UNREACHABLE:
        return PutEvent.LOST, f"the store lost its session; revoke: {in_words(outcome, error)}"
    if outcome is Outcome.NOT_OWNER or not may_retry:
        return PutEvent.POISON, in_words(outcome, error)
    return None
