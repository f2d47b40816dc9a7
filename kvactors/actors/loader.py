"""The loading half of a group actor: get sessions, and the layers that are read under them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import partial

from kvactors.actors.group_step import GroupContext, GroupStep, per_call
from kvactors.actors.step_state import StepState
from kvactors.core.answers import in_words
from kvactors.core.calls import RangeCall
from kvactors.core.events import DeviceEvent
from kvactors.core.loads import StepLoads
from kvactors.core.queue import Priority
from kvactors.core.ranges import read_runs, whole_rows
from kvactors.core.sessions import GetEvent, GetSession, GetState, Record
from kvactors.core.steps import NULL_BLOCK
from kvactors.core.store import Outcome
from kvactors.messages import Close, Kind, Open, PrepareGroup, Transfer, TransferDone

CLOSE_TRIES = 3
NO_STEP = -1

NO_ANSWER = frozenset(
    {
        Outcome.CALL_FAILED,
        Outcome.UNREACHABLE,
        Outcome.LOST,
        Outcome.STALE,
        Outcome.CANCELLED,
        Outcome.NOT_STARTED,
    }
)
"""The call as a whole failed: a preparation that gets one of these is rolled back."""


class Loader:
    """Opens one get session per distinct key, fans it out to every block that wants it, closes it with its last owner."""

    def __init__(self, context: GroupContext) -> None:
        self._c = context
        good = context.pool.good_range_bytes
        self._runs = read_runs(context.ranges, good) if good else {}
        self._run_ends = sorted(set(self._runs.values()))
        self._whole_rows = whole_rows(context.ranges, context.config) if context.pool.reads_whole_objects else 0
        """keys of a call that reads whole objects; 0 = none does"""
        self._waiting: dict[str, list[GroupStep]] = {}
        """key -> steps whose preparation waits for its session"""
        self._reopen: dict[str, list[GroupStep]] = {}
        """key -> steps that want it while its session is being closed"""
        self._lost: dict[Transfer, GroupStep] = {}
        """reads past their deadline that have not returned"""

    # -- preparing -----------------------------------------------------------------------------------------------------

    def prepare(self, gs: GroupStep, message: PrepareGroup) -> None:
        """Collects the destinations and gets a session for each distinct key."""
        c = self._c
        loads = StepLoads(c.ranges)
        for request_id, hashes, blocks in message.requests:
            for index in blocks.load:
                block_id = int(blocks.block_ids[index])
                if block_id == NULL_BLOCK:
                    continue
                remembered = c.table.remembered(request_id, index)
                key = c.key(hashes[index]) if index < len(hashes) else remembered
                if key is None:
                    first = next(iter(c.ranges.layers))
                    gs.state.fail(request_id, first, [(c.group_id, index)], "neither its hash nor a memory of its key is known")
                    continue
                loads.add(request_id, index, key, block_id)
        loads.seal()
        gs.loads = loads
        fresh: list[GetSession] = []
        for key in dict.fromkeys(loads.keys):
            gs.gets_awaited += self._want(gs, key, fresh)
        self._open(fresh, gs.state.id)

    def _want(self, gs: GroupStep, key: str, fresh: list[GetSession]) -> int:
        """Takes a share of the key's session; 1 if its answer must be awaited."""
        c = self._c
        session = c.table.gets.get(key)
        if session is not None and session.state is not GetState.OPEN and session.held_by_lost_calls:
            self._fail_key(gs, key, Outcome.LOST.value)  # it would only wait for the same call
            return 0
        if session is not None and session.state in (GetState.CLOSING, GetState.EXPIRED):
            self._reopen.setdefault(key, []).append(gs)
            return 1
        session, is_new = c.table.acquire_get(key)
        gs.held.append(key)
        if is_new:
            fresh.append(session)
        elif session.state is GetState.OPEN:
            assert gs.loads is not None
            gs.loads.note_opened(session)
            self._tell(gs, key, "get opening -> open (shared)")
            return 0
        self._waiting.setdefault(key, []).append(gs)
        return 1

    def _open(self, sessions: list[GetSession], step: int) -> None:
        """Opens sessions for a step, though others may share them before the answer: so its end cancels no such call."""
        c = self._c
        for part in per_call(sessions):
            c.submit(
                Open(
                    reply=c.mailbox.post,
                    priority=Priority.DEMANDED,
                    group_id=c.group_id,
                    step=step,
                    kind=Kind.GET,
                    sessions=part,
                    object_bytes=c.ranges.object_bytes,
                )
            )

    def opened(self, done: TransferDone, sessions: Iterable[GetSession]) -> list[GroupStep]:
        """An open came back: tells every step that waited for one of its keys; answers which they were."""
        c = self._c
        if done.late:
            self._opened_late(sessions, done)
            return []
        touched: dict[int, GroupStep] = {}
        for session, outcome in zip(sessions, done.outcomes, strict=True):
            waiting = self._waiting.pop(session.key, [])
            if session.state is not GetState.OPENING:
                continue  # abandoned by a drain meanwhile
            if outcome is Outcome.OK:
                session.opened_at, session.epoch = done.started_s, done.epoch
                c.table.get(session, GetEvent.OPENED)
            else:
                c.table.get(session, GetEvent.LOST if outcome is Outcome.LOST else GetEvent.FAILED)
            for gs in waiting:
                gs.gets_awaited -= 1
                touched[gs.state.id] = gs
                if outcome is Outcome.OK:
                    if gs.loads is not None:
                        gs.loads.note_opened(session)
                    self._tell(gs, session.key, "get opening -> open")
                    continue
                why = in_words(outcome, done.error)
                self._tell(gs, session.key, f"get opening -> failed ({why})")
                gs.held.remove(session.key)
                if outcome in NO_ANSWER:
                    gs.error = gs.error or f"get open: {why}"
                self._fail_key(gs, session.key, why)
        return list(touched.values())

    def _tell(self, gs: GroupStep, key: str, what: str) -> None:
        loads, record = gs.loads, self._c.table.record
        if loads is not None and record is not None:
            for row in loads.rows_of.get(key, ()):
                record(loads.requests[row], self._c.group_id, loads.blocks[row], what)

    def _fail_key(self, gs: GroupStep, key: str, why: str) -> None:
        loads = gs.loads
        assert loads is not None
        first = next(iter(loads.ranges.layers))
        for row in loads.rows_of[key]:
            blocks = [(self._c.group_id, loads.blocks[row])]
            gs.state.fail(loads.requests[row], first, blocks, f"get open: {why}")

    def _opened_late(self, sessions: Iterable[GetSession], done: TransferDone) -> None:
        """An open that was given up as lost has returned after all: nobody owns its sessions, so they are closed."""
        c = self._c
        closing: list[GetSession] = []
        for session, outcome in zip(sessions, done.outcomes, strict=True):
            if session.state is not GetState.LOST:
                continue
            if outcome is Outcome.OK:
                c.table.get(session, GetEvent.CLOSE)
                closing.append(session)
            else:
                c.table.get(session, GetEvent.CLOSED)
        if closing:
            self._close(closing)

    # -- reading -------------------------------------------------------------------------------------------------------

    def start(self, gs: GroupStep, layers: Iterable[int], event: DeviceEvent | None, priority: Priority) -> None:
        """Starts the loads of these stage layers, as far as the group has them and they did not start."""
        loads = gs.loads
        if loads is None:
            return
        planned = [(layer, self._reads(gs, layer, event, priority)) for layer in self._due(loads, layers)]
        if not planned:
            return
        for layer, jobs in planned:  # whatever raised before this left the layer unplanned, so that it can still be failed
            gs.state.loads[layer].plan(self._c.group_id, len(jobs))
            gs.reads += len(jobs)
        self._c.submit_together([job for _, jobs in planned for job in jobs])

    def _due(self, loads: StepLoads, layers: Iterable[int]) -> list[int]:
        started, mine = loads.started, self._c.ranges.layers
        return [layer for layer in layers if layer not in started and layer in mine]

    def _reads(self, gs: GroupStep, layer: int, event: DeviceEvent | None, priority: Priority) -> list[Transfer]:
        """The transfers that load a layer; requests that failed on a later one fail here already."""
        c, state, loads = self._c, gs.state, gs.loads
        assert loads is not None
        lost = loads.lost(state.first_wrong(), state.block_tokens(c.group_id))
        for row in lost:  # skipped from here on, so its request fails here already (I5)
            if state.failed[loads.requests[row]] > layer:
                state.fail(loads.requests[row], layer, [(c.group_id, loads.blocks[row])], "")
        most_rows = 0 if state.windowed else self._whole_rows
        calls = loads.start(layer, lost, most_rows)
        if c.range_debug is not None:
            for call in calls:
                owners = [(loads.requests[row], loads.blocks[row]) for row in call.rows.tolist()]
                c.range_debug.ranges("get", c.group_id, call, owners, event)
        return [
            Transfer(
                reply=partial(self._answer, gs, call),
                priority=priority,
                group_id=c.group_id,
                step=state.id,
                layer=layer,
                distance=layer,
                event=event,
                settled=state.loads[layer].job_done,
                epoch=call.part.epoch,
                kind=Kind.GET,
                call=call,
                object_bytes=c.ranges.object_bytes,
                oldest_s=call.part.oldest_s,
                run=self._runs.get(layer, -1) if state.windowed else -1,
                whole=bool(most_rows),
            )
            for call in calls
        ]

    def window(self, state: StepState, after: int) -> Sequence[int]:
        """The layers of a step that may be read once `after` is ready: those of the prefetch distance, what is read in one run
        with any of them, and the run after the one that is being computed, so that it has as long to come as that takes."""
        prefetch = self._c.config.prefetch_layers
        layers = state.window(after, prefetch)
        if not prefetch or not self._runs:
            return layers
        at = bisect_left(self._run_ends, after)
        last = max([self._runs[layer] for layer in layers if layer in self._runs] + self._run_ends[at + 1 : at + 2], default=-1)
        return (*layers, *(layer for layer in state.load_layers[len(layers) :] if layer <= last))

    def _answer(self, gs: GroupStep, call: RangeCall, done: TransferDone) -> None:
        """On the thread that finished the call: failures are noted before its answer can be seen. Then they are known to
        whoever ends the step because of the answer, as well as to whoever waits for the layer's latch."""
        if not done.late and done.outcomes.count(Outcome.OK) != len(done.outcomes):
            self._note_failures(gs, call, done)
        self._c.mailbox.post(done)

    def _note_failures(self, gs: GroupStep, call: RangeCall, done: TransferDone) -> None:
        loads, group_id = gs.loads, self._c.group_id
        assert loads is not None
        for row, outcome in zip(call.rows.tolist(), done.outcomes, strict=True):
            if outcome is not Outcome.OK:
                why = f"layer {call.layer}: {in_words(outcome, done.error)}"
                gs.state.fail(loads.requests[row], call.layer, [(group_id, loads.blocks[row])], why)
            if outcome is Outcome.LOST:
                gs.state.fenced.add((group_id, int(loads.block_ids[row])))

    def transferred(self, gs: GroupStep, done: TransferDone, job: Transfer) -> None:
        """A read came back: counts it, notes renewed or expired leases, fences the destinations of a lost call."""
        c, loads = self._c, gs.loads
        assert loads is not None
        call = job.call
        gs.reads -= 1
        loads.returned(call, done.outcomes)
        if job.oldest_s != call.part.oldest_s:
            loads.renewed(call.part, job.oldest_s)
        if done.outcomes.count(Outcome.OK) == len(done.outcomes):
            return
        if Outcome.LOST in done.outcomes:
            self._lost[job] = gs
            c.fence(call, 1)
            for key in dict.fromkeys(call.batch.keys):
                session = c.table.gets.get(key)
                if session is not None:  # the call itself holds its sessions until it returns (I6)
                    session.refs += 1
                    session.lost_refs += 1
        if c.table.record is not None:
            for row, outcome in zip(call.rows.tolist(), done.outcomes, strict=True):
                if outcome is not Outcome.OK:
                    what = f"get layer {call.layer} failed ({in_words(outcome, done.error)})"
                    c.table.record(loads.requests[row], c.group_id, loads.blocks[row], what)
        for key, outcome in zip(call.batch.keys, done.outcomes, strict=True):
            session = c.table.gets.get(key)
            expired = outcome in (Outcome.LEASE_EXPIRED, Outcome.STALE)
            if expired and session is not None and session.state is GetState.OPEN:
                c.table.get(session, GetEvent.EXPIRE)

    def returned_late(self, job: Transfer) -> None:
        """A read that was given up has returned: it writes nothing more, and needs its sessions no longer."""
        gs = self._lost.pop(job, None)
        if gs is not None:
            self._c.fence(job.call, -1)
            for key in dict.fromkeys(job.call.batch.keys):
                session = self._c.table.gets.get(key)
                if session is not None:
                    session.lost_refs -= 1
            self._give_back(gs, dict.fromkeys(job.call.batch.keys))

    # -- letting go ----------------------------------------------------------------------------------------------------

    def may_release(self, gs: GroupStep) -> bool:
        return (
            not gs.released
            and not gs.reads
            and not gs.gets_awaited
            and (gs.ending or (gs.loads is not None and gs.loads.all_started))
        )

    def release(self, gs: GroupStep) -> None:
        """The step reads nothing more: gives back its shares, and counts what arrived completely."""
        gs.released = True
        loads, stats = gs.loads, self._c.stats
        if loads is not None:
            loaded = int(loads.arrived().sum())
            stats.loaded += loaded
            stats.load_failed += len(loads.keys) - loaded
            stats.bytes_loaded += loads.bytes_delivered
            if self._c.table.record is not None:
                self._tell_ends(gs.state, loads, self._c.table.record)
        held, gs.held = gs.held, []
        self._give_back(gs, held)

    def _tell_ends(self, state: StepState, loads: StepLoads, record: Record) -> None:
        """How each block's load ended, and if it did not arrive, why its request's load failed."""
        reasons = {f.request_id: f.reason for f in state.failures().values()} if state.failed else {}
        for row, arrived in enumerate(loads.arrived().tolist()):
            request = loads.requests[row]
            what = "loaded" if arrived else f"not loaded: {reasons.get(request, 'it was not read')}"
            record(request, self._c.group_id, loads.blocks[row], f"get released ({what})")

    def _give_back(self, gs: GroupStep, keys: Iterable[str]) -> None:
        c = self._c
        last: list[GetSession] = []
        for key in keys:
            session = c.table.gets.get(key)
            if session is None:
                continue
            session.refs -= 1
            if session.state is GetState.EXPIRED and session.held_by_lost_calls:
                self._fail_waiting(key)
            if session.refs <= 0 and session.state in (GetState.OPEN, GetState.EXPIRED):
                c.table.get(session, GetEvent.CLOSE)
                last.append(session)
        for part in per_call(last):
            gs.closing += 1
            self._close(part, gs.state.id)

    def _close(self, sessions: Sequence[GetSession], step: int = NO_STEP) -> None:
        """Closes go with the loads: a later load of the key waits for them, and must not wait for saves."""
        c = self._c
        c.submit(Close(reply=c.mailbox.post, priority=Priority.DEMANDED, group_id=c.group_id, step=step, sessions=sessions))

    def _fail_waiting(self, key: str) -> None:
        """Whoever waits for the key to be opened again waits for a call that may never return."""
        for gs in self._reopen.pop(key, []):
            gs.gets_awaited -= 1
            self._fail_key(gs, key, Outcome.LOST.value)

    def stop_waiting(self, gs: GroupStep) -> None:
        """The step is over: it opens nothing again."""
        for key, waiting in list(self._reopen.items()):
            gs.gets_awaited -= waiting.count(gs)
            left = [w for w in waiting if w is not gs]
            if left:
                self._reopen[key] = left
            else:
                del self._reopen[key]

    def closed(self, sessions: Iterable[GetSession], done: TransferDone) -> None:
        """A close came back. One that was not made, or raised, is tried again, bounded; then the lease ends the session.
        Opens again what is wanted by now."""
        c = self._c
        fresh: list[GetSession] = []
        again: list[GetSession] = []
        steps: set[int] = set()
        lost = Outcome.LOST in done.outcomes and not done.late
        for session, outcome in zip(sessions, done.outcomes, strict=True):
            if session.state is not (GetState.LOST if done.late else GetState.CLOSING):
                continue
            if outcome in (Outcome.CALL_FAILED, Outcome.NOT_STARTED) and session.attempts < CLOSE_TRIES:
                session.attempts += 1
                if done.late:
                    c.table.get(session, GetEvent.CLOSE)
                again.append(session)
                continue
            c.table.get(session, GetEvent.LOST if lost else GetEvent.CLOSED)
            for gs in self._reopen.pop(session.key, []):
                gs.gets_awaited -= 1
                gs.gets_awaited += self._want(gs, session.key, fresh)
                steps.add(gs.state.id)
        self._open(fresh, steps.pop() if len(steps) == 1 else NO_STEP)
        if again:
            self._close(again)

    def drop(self, epoch: int) -> None:
        """The store lost its sessions of earlier epochs (I11)."""
        for session in list(self._c.table.gets.values()):
            if session.epoch < epoch and session.state is GetState.OPEN:
                self._c.table.get(session, GetEvent.EXPIRE)
                if session.held_by_lost_calls:
                    self._fail_waiting(session.key)
