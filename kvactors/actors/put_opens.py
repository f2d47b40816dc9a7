"""Put sessions from the wish to save a block to `open`: what exists already, what finds no space, what raises.

A key without space is opened again until its first save is due. When step after step finds none, saves of the group pause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvactors.actors.group_step import GroupContext, GroupStep, per_call
from kvactors.actors.loader import NO_ANSWER
from kvactors.core.answers import in_words
from kvactors.core.pressure import SpacePressure
from kvactors.core.queue import Priority
from kvactors.core.saves import StepSaves
from kvactors.core.sessions import Owner, PutEvent, PutSession, PutState
from kvactors.core.steps import NULL_BLOCK
from kvactors.core.store import Outcome, Store
from kvactors.log import get_logger
from kvactors.messages import Ask, Kind, Open, PrepareGroup, TransferDone

log = get_logger("kvactors.saves")

SPACE_RETRY_S = (0.01, 0.02, 0.04)
"""Waits between background retries of keys that found no space; eviction takes some tens of ms, the limit is 100 ms."""

CLEAN_UP_RETRY_S = (0.05, 0.2, 1.0)
"""Waits between retries of the revoke after an open that raised; after the last the key is abandoned."""


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


class PutOpens:
    """Opens what a step saves. A key has one writer in the process (I10).

    Args:
        revoke: revokes sessions that are `revoking` already.
    """

    def __init__(self, context: GroupContext, revoke: Callable[[Sequence[PutSession]], None]) -> None:
        self._c = context
        self._revoke = revoke
        self._pressure = SpacePressure()

    def prepare(self, gs: GroupStep, message: PrepareGroup) -> None:
        """Begins a session for each block to save that nobody writes; asks which of their keys are readable already."""
        c = self._c
        if not c.stores:
            return
        gs.saves = StepSaves(c.ranges)
        paused = self._pressure.paused(c.clock.now())
        sessions: list[PutSession] = []
        for request_id, hashes, blocks in message.requests:
            if not len(blocks.save):
                continue
            if request_id not in message.saves:
                c.stats.skipped_tainted += len(blocks.save)
                for index in blocks.save if c.table.record is not None else ():
                    self._tell_skipped(Owner(request_id, c.group_id, index), "a load of its request failed")
                continue
            for index in blocks.save:
                block_id = int(blocks.block_ids[index])
                if block_id == NULL_BLOCK:
                    continue
                key, owner = c.key(hashes[index]), Owner(request_id, c.group_id, index)
                if c.table.remembered(request_id, index) == key or not c.table.may_open(key) or owner in c.table.puts:
                    c.stats.skipped_existing += 1
                    self._tell_skipped(owner, "it is saved already, being written, or unusable")
                    continue
                if paused:
                    c.stats.skipped_no_space += 1
                    c.stats.paused_no_space += 1
                    self._tell_skipped(owner, "the store stays full, saves pause")
                    continue
                session = c.table.begin_put(key, owner, gs.state.id)
                gs.block_of[session] = block_id
                sessions.append(session)
        for part in per_call(sessions):
            gs.puts_awaited += 1
            c.submit(
                Ask(
                    reply=partial(self._post_readable, part),
                    priority=Priority.PUT_OPEN,
                    group_id=c.group_id,
                    step=gs.state.id,
                    run=partial(_readable, [s.key for s in part]),
                )
            )

    def _tell_skipped(self, owner: Owner, why: str) -> None:
        if self._c.table.record is not None:
            self._c.table.record(*owner, f"put not begun ({why})")

    def _post_readable(self, sessions: Sequence[PutSession], done: TransferDone) -> None:
        self._c.mailbox.post(ReadableDone(sessions, done))

    def readable(self, gs: GroupStep, sessions: Sequence[PutSession], done: TransferDone) -> None:
        """Which keys need no save; the others are opened."""
        c = self._c
        gs.puts_awaited -= 1
        job = done.job
        assert isinstance(job, Ask)
        if done.outcomes[0] is not Outcome.OK:
            gs.error = gs.error or f"readable: {done.error or done.outcomes[0].value}"
            self.refuse(gs, [s for s in sessions if s.state is PutState.OPENING], "readable failed")
            return
        wanted: list[PutSession] = []
        for s, exists in zip(sessions, job.result, strict=True):
            if s.state is not PutState.OPENING:
                continue  # abandoned by a drain meanwhile
            if exists:
                c.stats.skipped_existing += 1
                self.refuse(gs, [s], "readable already")
                s.memory[s.owner.block_index] = s.key
            else:
                wanted.append(s)
        if wanted and (gs.ending or gs.error):
            self.refuse(gs, wanted, "the step ended before it was opened")
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
        if Outcome.OK in done.outcomes:
            self._pressure.found(gs.state.id)
        for s, outcome in zip(sessions, done.outcomes, strict=True):
            if s.state is not PutState.OPENING:
                continue  # abandoned by a drain meanwhile
            if outcome is Outcome.OK:
                s.opened_at, s.epoch, s.attempts = done.started_s, done.epoch, 0
                c.table.put(s, PutEvent.OPENED)
                fresh.append(s)
            elif outcome is Outcome.NO_SPACE and not gs.ending and not (gs.saves is not None and gs.saves.signalled):
                again.append(s)
            elif outcome is Outcome.LOST:
                gs.block_of.pop(s, None)
                c.table.put(s, PutEvent.LOST, "put open did not return")
            elif outcome in NO_ANSWER:
                unknown.append(s)
            else:
                self.refuse(gs, [s], outcome.value)
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
            self._revoke(sessions)
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
            self.refuse(gs, sessions, Outcome.NO_SPACE.value)
            return
        gs.retries.extend(sessions)
        c.later(SPACE_RETRY_S[attempt], RetryOpens(gs.state.id))

    def retry_opens(self, gs: GroupStep) -> None:
        sessions, gs.retries = gs.retries, []
        if sessions:
            self._open(gs, sessions, background=True)

    def stop_retrying(self, gs: GroupStep) -> None:
        """What found no space so far is not saved in this step."""
        sessions, gs.retries = gs.retries, []
        self.refuse(gs, sessions, Outcome.NO_SPACE.value)

    def refuse(self, gs: GroupStep, sessions: Sequence[PutSession], cause: str) -> None:
        c = self._c
        if cause == Outcome.NO_SPACE.value and any(s.attempts > 1 for s in sessions):
            pause_s = self._pressure.found_none(gs.state.id, c.clock.now())
            if pause_s:
                log.warning("the store stays full; saves pause", group=c.group_id, pause_s=pause_s)
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
        if c.table.record is not None:
            for s in sessions:
                c.table.record(*s.owner, "put opening: the open failed; revoking whatever the store opened")
        c.submit(
            Ask(
                reply=partial(self._post_cleaned, list(sessions)),
                priority=Priority.COMMIT,
                group_id=c.group_id,
                step=step,
                run=partial(_put_revoke, [s.key for s in sessions]),
                what="put revoke",
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
                self.refuse(gs, [s], "put open failed")
            elif s.attempts <= len(CLEAN_UP_RETRY_S) and outcome not in (Outcome.LOST, Outcome.UNREACHABLE):
                s.attempts += 1
                again.append(s)
            else:
                gs.block_of.pop(s, None)
                self._c.table.put(s, PutEvent.LOST, f"put open failed, and so did its revoke: {in_words(outcome, done.error)}")
        if again:
            wait = CLEAN_UP_RETRY_S[min(again[0].attempts - 1, len(CLEAN_UP_RETRY_S) - 1)]
            self._c.later(wait, RetryCleanUp(gs.state.id, again))

    def retry_clean_up(self, message: RetryCleanUp) -> None:
        self._clean_up(message.step, [s for s in message.sessions if s.state is PutState.OPENING])

    def late_open(self, sessions: Sequence[PutSession], done: TransferDone) -> None:
        """A put open that was given up has returned: whatever it opened is revoked; the keys stay abandoned."""
        revoke_unowned(self._c, [s.key for s, o in zip(sessions, done.outcomes, strict=True) if o is Outcome.OK])


def revoke_unowned(c: GroupContext, keys: Sequence[str]) -> None:
    """Revokes what the store may have opened of keys that the engine has given up; nobody waits for the answer."""
    if keys:
        revoke = partial(_put_revoke, keys)
        c.submit(Ask(reply=c.mailbox.post, priority=Priority.COMMIT, group_id=c.group_id, run=revoke, what="put revoke"))


class ReadableDone:
    """The answer to a `readable` question, back in the group's mailbox."""

    __slots__ = ("done", "sessions")

    def __init__(self, sessions: Sequence[PutSession], done: TransferDone) -> None:
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
