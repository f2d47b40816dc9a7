"""The saving half of a group actor: put sessions from open to their end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from kvactors.actors.group_step import GroupContext, GroupStep
from kvactors.actors.loader import NO_ANSWER, OPEN_BATCH
from kvactors.actors.step_state import LayerTask
from kvactors.core.queue import Priority
from kvactors.core.saves import StepSaves
from kvactors.core.sessions import Owner, PutEvent, PutSession, PutState
from kvactors.core.steps import NULL_BLOCK
from kvactors.core.store import Outcome, Store
from kvactors.messages import Ask, Commit, Kind, LayerReady, Open, PrepareGroup, Revoke, Transfer, TransferDone

SPACE_RETRY_S = (0.01, 0.02, 0.04)
"""Waits between background retries of keys that found no space; eviction takes some tens of ms, the limit is 100 ms."""

REVOKE_RETRY_S = (0.05, 0.2, 1.0)
"""Waits between retries of a failed revoke; after the last the key is poisoned."""


class RetryOpens:
    """Timer to itself: open again the keys of a step that found no space."""

    __slots__ = ("step",)

    def __init__(self, step: int) -> None:
        self.step = step


class RetryCleanUp:
    """Timer to itself: revoke again what an open that raised may have opened."""

    __slots__ = ("sessions", "step")

    def __init__(self, step: int, sessions: Sequence[PutSession]) -> None:
        self.step = step
        self.sessions = sessions


class RetryRevokes:
    """Timer to itself: revoke again."""

    __slots__ = ("sessions",)

    def __init__(self, sessions: Sequence[PutSession]) -> None:
        self.sessions = sessions


class Saver:
    """Opens, puts, commits and revokes. A key has one writer in the process (I10), and every session ends once (I2)."""

    def __init__(self, context: GroupContext) -> None:
        self._c = context

    # -- preparing -----------------------------------------------------------------------------------------------------

    def prepare(self, gs: GroupStep, message: PrepareGroup) -> None:
        """Begins a session for each block to save that nobody writes; asks which of their keys are readable already."""
        c = self._c
        if not c.stores:
            return
        gs.saves = StepSaves(c.ranges)
        sessions: list[PutSession] = []
        for request_id, hashes, blocks in message.requests:
            if not len(blocks.save):
                continue
            if request_id not in message.saves:
                c.stats.skipped_tainted += len(blocks.save)
                continue
            for index in blocks.save:
                block_id = int(blocks.block_ids[index])
                if block_id == NULL_BLOCK:
                    continue
                key, owner = c.key(hashes[index]), Owner(request_id, c.group_id, index)
                if c.table.remembered(request_id, index) == key or not c.table.may_open(key) or owner in c.table.puts:
                    c.stats.skipped_existing += 1
                    continue
                session = c.table.begin_put(key, owner, gs.state.id)
                gs.block_of[session] = block_id
                sessions.append(session)
        for lo in range(0, len(sessions), OPEN_BATCH):
            gs.puts_awaited += 1
            part = sessions[lo : lo + OPEN_BATCH]
            c.submit(
                Ask(
                    reply=partial(self._post_readable, part),
                    priority=Priority.PUT_OPEN,
                    group_id=c.group_id,
                    step=gs.state.id,
                    run=partial(_readable, [s.key for s in part]),
                )
            )

    def _post_readable(self, sessions: list[PutSession], done: TransferDone) -> None:
        self._c.mailbox.post(ReadableDone(sessions, done))

    def readable(self, gs: GroupStep, sessions: list[PutSession], done: TransferDone) -> None:
        """Which keys need no save; the others are opened."""
        c = self._c
        gs.puts_awaited -= 1
        job = done.job
        assert isinstance(job, Ask)
        answer = job.result
        if done.outcomes[0] is not Outcome.OK or not isinstance(answer, list) or len(answer) != len(sessions):
            answered = f"{answer!r:.60} for {len(sessions)} keys" if done.outcomes[0] is Outcome.OK else done.outcomes[0].value
            gs.error = gs.error or f"readable: {done.error or answered}"
            self._refuse(gs, [s for s in sessions if s.state is PutState.OPENING], "readable failed")
            return
        wanted: list[PutSession] = []
        for s, exists in zip(sessions, answer, strict=True):
            if s.state is not PutState.OPENING:
                continue  # abandoned by a drain meanwhile
            if exists:
                c.stats.skipped_existing += 1
                self._refuse(gs, [s], "readable already")
                s.memory[s.owner.block_index] = s.key
            else:
                wanted.append(s)
        if wanted and (gs.ending or gs.error):
            self._refuse(gs, wanted, "the step ended before it was opened")
        elif wanted:
            self._open(gs, wanted)

    def _open(self, gs: GroupStep, sessions: Sequence[PutSession], background: bool = False) -> None:
        c = self._c
        if background:
            gs.opening += 1
        else:
            gs.puts_awaited += 1
        for s in sessions:
            s.attempts += 1
        c.submit(
            Open(
                reply=c.mailbox.post,
                priority=Priority.PUT_OPEN,
                group_id=c.group_id,
                step=gs.state.id,
                kind=Kind.PUT,
                sessions=sessions,
                object_bytes=c.ranges.object_bytes,
                background=background,
            )
        )

    def opened(self, gs: GroupStep, sessions: Sequence[PutSession], done: TransferDone, background: bool) -> None:
        """An open came back. What found no space is opened again, once at once (eviction may have been immediate)."""
        c = self._c
        again: list[PutSession] = []
        fresh: list[PutSession] = []
        unknown: list[PutSession] = []
        for s, outcome in zip(sessions, done.outcomes, strict=True):
            if s.state is not PutState.OPENING:
                continue  # abandoned by a drain meanwhile
            if outcome is Outcome.OK:
                s.opened_at, s.epoch, s.attempts = done.started_s, done.epoch, 0
                c.table.put(s, PutEvent.OPENED)
                fresh.append(s)
            elif outcome is Outcome.NO_SPACE and not gs.ending:
                again.append(s)
            elif outcome is Outcome.LOST:
                gs.block_of.pop(s, None)
                c.table.put(s, PutEvent.LOST, "put open did not return")
            elif outcome in NO_ANSWER:
                unknown.append(s)
            else:
                self._refuse(gs, [s], outcome.value)
        self._admit(gs, fresh)
        self._clean_up(gs.state.id, unknown)
        if background:
            gs.opening -= 1
        else:
            gs.puts_awaited -= 1
            bad = next((o for o in done.outcomes if o in NO_ANSWER), None)
            if bad is not None:
                gs.error = gs.error or f"put open: {done.error or bad.value}"
        self._again(gs, again, background)

    def _admit(self, gs: GroupStep, sessions: Sequence[PutSession]) -> None:
        saves = gs.saves
        if saves is None or not sessions:
            return
        block_ids = [gs.block_of.pop(s) for s in sessions]
        if saves.signalled or saves.ended:
            for s in sessions:
                self._c.table.put(s, PutEvent.REVOKE, "space turned up after its first save was due")
            self._revoke(sessions, "too late")
            saves.adopt(sessions)
            return
        saves.admit(sessions, block_ids)
        if gs.ending or gs.error:
            saves.kill_all("its step was rolled back")

    def _again(self, gs: GroupStep, sessions: list[PutSession], background: bool) -> None:
        if not sessions:
            return
        c = self._c
        if not background and all(s.attempts < 2 for s in sessions):
            self._open(gs, sessions)
            return
        attempt = sessions[0].attempts - 2
        if attempt >= len(SPACE_RETRY_S):
            self._refuse(gs, sessions, Outcome.NO_SPACE.value)
            return
        gs.retries.extend(sessions)
        c.later(SPACE_RETRY_S[attempt], RetryOpens(gs.state.id))

    def retry_opens(self, gs: GroupStep) -> None:
        sessions, gs.retries = gs.retries, []
        if sessions:
            self._open(gs, sessions, background=True)

    def _refuse(self, gs: GroupStep, sessions: Iterable[PutSession], cause: str) -> None:
        c = self._c
        for s in sessions:
            gs.block_of.pop(s, None)
            if cause == Outcome.NO_SPACE.value:
                c.stats.skipped_no_space += 1
            elif cause == Outcome.EXISTS.value:
                c.stats.skipped_existing += 1
            c.table.put(s, PutEvent.REFUSED, cause)

    def _clean_up(self, step: int, sessions: Sequence[PutSession]) -> None:
        """The open raised: whether the store has the sessions is unknown. Nobody may write the keys until a revoke said so."""
        c = self._c
        if not sessions:
            return
        for s in sessions:
            c.table.record(*s.owner, "put opening: the open failed; revoking whatever the store opened")
        c.submit(
            Ask(
                reply=partial(self._post_cleaned, list(sessions)),
                priority=Priority.COMMIT,
                group_id=c.group_id,
                step=step,
                run=partial(_put_revoke, [s.key for s in sessions]),
            )
        )

    def _post_cleaned(self, sessions: list[PutSession], done: TransferDone) -> None:
        self._c.mailbox.post(Cleaned(sessions, done))

    def cleaned(self, gs: GroupStep, sessions: Sequence[PutSession], done: TransferDone) -> None:
        """The revoke after an open that raised: fine if the store had the session or had none; else tried again, bounded."""
        answers = [done.outcomes[0]] * len(sessions)
        if done.outcomes[0] is Outcome.OK:
            result = done.job.result if isinstance(done.job, Ask) else None
            whole = isinstance(result, list) and len(result) == len(sessions)
            answers = result if whole and isinstance(result, list) else [Outcome.CALL_FAILED] * len(sessions)
        again: list[PutSession] = []
        for s, outcome in zip(sessions, answers, strict=True):
            if s.state is not PutState.OPENING:
                continue
            if outcome in (Outcome.OK, Outcome.INVALID, Outcome.NOT_FOUND):
                self._refuse(gs, [s], "put open failed")
            elif s.attempts <= len(REVOKE_RETRY_S) and outcome not in (Outcome.LOST, Outcome.UNREACHABLE):
                s.attempts += 1
                again.append(s)
            else:
                gs.block_of.pop(s, None)
                self._c.table.put(s, PutEvent.LOST, f"put open failed, and so did its revoke: {outcome.value}")
        if again:
            wait = REVOKE_RETRY_S[min(again[0].attempts - 1, len(REVOKE_RETRY_S) - 1)]
            self._c.later(wait, RetryCleanUp(gs.state.id, again))

    def retry_clean_up(self, message: RetryCleanUp) -> None:
        self._clean_up(message.step, [s for s in message.sessions if s.state is PutState.OPENING])

    def late_open(self, sessions: Sequence[PutSession], done: TransferDone) -> None:
        """A put open that was given up has returned: whatever it opened is revoked; the keys stay abandoned."""
        c = self._c
        keys = [s.key for s, o in zip(sessions, done.outcomes, strict=True) if o is Outcome.OK]
        if keys:
            c.submit(Ask(reply=c.mailbox.post, priority=Priority.COMMIT, group_id=c.group_id, run=partial(_put_revoke, keys)))

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
            self._refuse(gs, gs.retries, Outcome.NO_SPACE.value)
            gs.retries = []
        if state.failed:
            saves.kill_where(state.failed, "a load of its request failed")
        calls = saves.signal(message.layer)
        jobs: list[Transfer] = []
        for call in calls:
            sessions = [saves.sessions[row] for row in call.rows.tolist()]
            jobs.append(
                Transfer(
                    reply=c.mailbox.post,
                    priority=Priority.SAVE,
                    group_id=c.group_id,
                    step=state.id,
                    layer=message.layer,
                    event=message.event,
                    settled=partial(_uncount, task),
                    epoch=min(s.epoch for s in sessions),
                    kind=Kind.PUT,
                    call=call,
                    object_bytes=c.ranges.object_bytes,
                    oldest_s=min(s.opened_at for s in sessions),
                )
            )
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
        saves.returned(job.call, done.outcomes)
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
            saves.kill_where(gs.state.failed, "a load of its request failed")
        if not saves.anything_due:
            return
        commit, revoke = saves.due()
        ready: list[PutSession] = []
        for s in commit:
            if s.epoch == c.pool.epoch and c.clock.now() - s.opened_at <= c.pool.store.put_safe_age_s:
                c.table.put(s, PutEvent.COMMIT)
                ready.append(s)
            else:
                s.dropped = True
                revoke.append((s, "its session is older than the store's safe age"))
        for s, cause in revoke:
            c.table.put(s, PutEvent.REVOKE, cause)
        for lo in range(0, len(ready), OPEN_BATCH):
            c.submit(
                Commit(
                    reply=c.mailbox.post,
                    priority=Priority.COMMIT,
                    group_id=c.group_id,
                    step=gs.state.id,
                    sessions=ready[lo : lo + OPEN_BATCH],
                    epoch=c.pool.epoch,
                )
            )
        self._revoke([s for s, _ in revoke], revoke[0][1] if revoke else "")

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _revoke(self, sessions: Sequence[PutSession], cause: str) -> None:
        c = self._c
        for lo in range(0, len(sessions), OPEN_BATCH):
            part = sessions[lo : lo + OPEN_BATCH]
            c.submit(
                Revoke(
                    reply=c.mailbox.post,
                    priority=Priority.COMMIT,
                    group_id=c.group_id,
                    step=part[0].step,
                    sessions=part,
                    cause=cause,
                )
            )

    def committed(self, sessions: Iterable[PutSession], done: TransferDone) -> None:
        """A commit came back: what it did not commit is revoked."""
        c = self._c
        failed: list[PutSession] = []
        for s, outcome in zip(sessions, done.outcomes, strict=True):
            if s.state is not PutState.COMMITTING:
                continue
            if outcome is Outcome.OK:
                c.table.put(s, PutEvent.COMMITTED)
                c.stats.saved += 1
                c.stats.bytes_saved += c.ranges.object_bytes
            elif outcome is Outcome.LOST:
                c.table.put(s, PutEvent.LOST, "commit did not return")
            else:
                s.dropped = s.dropped or outcome in (Outcome.UNREACHABLE, Outcome.NOT_FOUND, Outcome.STALE)
                c.table.put(s, PutEvent.COMMIT_FAILED, outcome.value)
                failed.append(s)
        self._revoke(failed, "commit failed")

    def revoked(self, sessions: Iterable[PutSession], done: TransferDone) -> None:
        """A revoke came back. Bounded retries, then the key is poisoned; a session the store lost gets one try only."""
        c = self._c
        again: list[PutSession] = []
        for s, outcome in zip(sessions, done.outcomes, strict=True):
            if s.state is not PutState.REVOKING:
                continue
            if outcome is Outcome.OK:
                c.table.put(s, PutEvent.REVOKED)
            elif outcome is Outcome.INVALID:  # an earlier call ended it, and its answer was lost
                c.table.put(s, PutEvent.REVOKED, "the store had no session")
            elif outcome is Outcome.LOST:
                c.table.put(s, PutEvent.LOST, "revoke did not return")
            elif s.dropped or outcome is Outcome.UNREACHABLE:
                c.table.put(s, PutEvent.LOST, f"the store lost its session; revoke: {outcome.value}")
            elif outcome is Outcome.NOT_OWNER or s.attempts >= len(REVOKE_RETRY_S):
                c.table.put(s, PutEvent.POISON, outcome.value)
            else:
                again.append(s)
        if again:
            wait = REVOKE_RETRY_S[again[0].attempts]
            for s in again:
                s.attempts += 1
            c.later(wait, RetryRevokes(again))

    def retry_revokes(self, sessions: Sequence[PutSession]) -> None:
        self._revoke([s for s in sessions if s.state is PutState.REVOKING], "retry")

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
        if gs.retries:
            self._refuse(gs, gs.retries, Outcome.NO_SPACE.value)
            gs.retries = []
        if gs.saves is not None:
            gs.saves.end()
            if revoke:
                gs.saves.kill_all(reason)
            self.settle(gs)


class ReadableDone:
    """The answer to a `readable` question, back in the group's mailbox."""

    __slots__ = ("done", "sessions")

    def __init__(self, sessions: list[PutSession], done: TransferDone) -> None:
        self.sessions = sessions
        self.done = done


class Cleaned:
    """The revoke after an open that raised has returned."""

    __slots__ = ("done", "sessions")

    def __init__(self, sessions: list[PutSession], done: TransferDone) -> None:
        self.sessions = sessions
        self.done = done


def _readable(keys: Sequence[str], store: Store) -> list[bool]:
    return store.readable(keys)


def _put_revoke(keys: Sequence[str], store: Store) -> list[Outcome]:
    return store.put_revoke(keys)


def _uncount(task: LayerTask, _outcomes: list[Outcome]) -> None:
    task.job_done()
