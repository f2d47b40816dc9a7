"""The receiver: the actor of a decode worker. It pulls requests from prefill workers, and guards the blocks they write into.

What happens to a request is decided by its record (`receiving.py`). The actor finds the prefill workers, keeps one link to each
(`remotes.py`), carries out what records say, and keeps the time. A link that ends fails all that was asked over it; whoever may
still write is then aborted over a new link, or found to be gone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvactors.actors.actor import Actor
from kvactors.core.clock import Clock
from kvactors.disagg.blocks import RequestBlocks
from kvactors.disagg.heads import SharedGroup, TpMap, expected_pulls
from kvactors.disagg.links import Connect
from kvactors.disagg.messages import (
    GiveUp,
    Grace,
    Heard,
    LinkDown,
    LinkUp,
    Located,
    Outcome,
    OutcomeKind,
    Receive,
    Reconnect,
    Source,
    TimeUp,
)
from kvactors.disagg.receiving import ReceiveAction, ReceiveInstruction, Receiving
from kvactors.disagg.remotes import Instance, Prefill, Query, Remote, greet, locate
from kvactors.disagg.states import PEER_MAY_WRITE, RECEIVE_TERMINAL, PeerState, ReceiveState, Worker
from kvactors.disagg.wire import Abort, Failed, Hello, Message, Problem, Pull, Refused, Sent, Stopped, is_name
from kvactors.errors import PeerMismatchError
from kvactors.log import get_logger

log = get_logger("kvactors.disagg.receiver", burst=10)

GRACE_S = 1.0
"""How long bytes may land after their sender has stopped or died: they wait in this machine's socket buffers; the transport's
threads put them where they belong as soon as they run (measured: below 0.1 s)."""

MOST_GRACE_S = 120.0
"""After an outage, TCP sends again what it has after a pause of up to this time. So the grace is as long as the peer was not
heard, and the request was under way, within these bounds."""

GRACE_SLICES = 10

STEADY_S = 5.0
"""A link that lived so long was a good one: the next is tried at once."""

RECONNECT_S = (0.1, 5.0)
"""The first pause before a peer is tried again, and the longest."""

REFUSED_S = 60.0
"""How long a prefill worker that refused this one is not asked again."""

REMEMBERED = 4096

MAILBOX = 1 << 16


@dataclass(slots=True, eq=False)
class ReceiveCounts:
    """Requests since the start; empty pulls are `released`."""

    loaded: int = 0
    failed: int = 0
    aborted: int = 0
    released: int = 0
    fenced: int = 0


@dataclass(slots=True, eq=False)
class Handoff:
    """A request, from `Receive` to its end.

    Attributes:
        record: None until its prefill workers are known.
        remotes: the prefill workers that it pulls from.
        told: the engine knows its outcome; only RETURNED may follow.
    """

    request_id: str
    source: Source
    blocks: RequestBlocks
    record: Receiving | None = None
    remotes: dict[Worker, Remote] = field(default_factory=dict)
    pullers: dict[Worker, int] = field(default_factory=dict)
    asked_at: dict[Worker, float] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    told: bool = False

    @property
    def empty(self) -> bool:
        return self.blocks.empty


class ReceiverActor(Actor):
    """See the module.

    Args:
        hello: what it says of itself to prefill workers.
        connect: opens links; `query` asks bootstrap servers.
        tell: told each outcome.
        deadline_s: a request that has not arrived by then has failed.
    """

    def __init__(
        self,
        hello: Hello,
        connect: Connect,
        query: Query,
        clock: Clock,
        tell: Callable[[Outcome], None],
        deadline_s: float = 480.0,
    ) -> None:
        super().__init__("receiver", clock, mailbox_limit=MAILBOX)
        self.counts = ReceiveCounts()
        self._hello, self._connect, self._query, self._tell, self._deadline_s = hello, connect, query, tell, deadline_s
        self._handoffs: dict[str, Handoff] = {}
        """by transfer id"""
        self._by_request: dict[str, Handoff] = {}
        self._used: OrderedDict[str, None] = OrderedDict()
        """transfer ids that were pulled: nobody else may pull them, as prefill would take it for the same pull"""
        self._instances: dict[tuple[str, str], Instance] = {}
        self._remotes: dict[tuple[str, Worker], Remote] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> int:
        """Requests that have not ended, fenced ones included."""
        return len(self._handoffs)

    async def handle(self, message: Any) -> None:
        match message:
            case Heard(remote, link, said):
                if message.room is not None:
                    message.room.release()
                if remote.link is link:
                    self._heard(remote, said)
            case Receive():
                self._receive(message)
            case GiveUp(request_id, reason):
                self._give_up(request_id, reason)
            case Located(instance):
                self._located(instance, message)
            case LinkUp(remote):
                self._link_up(remote, message)
            case LinkDown(remote):
                self._link_down(remote, message)
            case TimeUp(handoff):
                self._fail(handoff, f"it did not arrive within {self._deadline_s:g} s")
            case Grace():
                self._grace(message)
            case Reconnect(remote):
                remote.retrying = False
                self._open(remote)

    # -- from the engine -----------------------------------------------------------------------------------------------

    def _receive(self, receive: Receive) -> None:
        source = receive.source
        handoff = Handoff(receive.request_id, source, receive.blocks)
        if not is_name(source.transfer_id):
            if not handoff.empty:
                self._end(handoff, OutcomeKind.FAILED, "its transfer id is no text of 1 to 512 characters")
            return
        if source.transfer_id in self._used:
            if handoff.empty:
                return  # whoever pulled it sees to it that prefill frees its blocks
            self._end(
                handoff, OutcomeKind.FAILED, f"transfer {source.transfer_id} was pulled before; each request needs its own"
            )
            return
        self._used[source.transfer_id] = None
        if len(self._used) > REMEMBERED + len(self._handoffs):
            oldest, _ = self._used.popitem(last=False)
            if oldest in self._handoffs:
                self._used[oldest] = None
        self._handoffs[source.transfer_id] = self._by_request[handoff.request_id] = handoff
        handoff.timer = self.later(self._deadline_s, TimeUp(handoff))
        instance = self._instance(source)
        if instance.entry is not None:
            self._begin(handoff, instance, instance.entry)
        else:
            instance.waiting.append(handoff)

    def _give_up(self, request_id: str, reason: str) -> None:
        handoff = self._by_request.get(request_id)
        if handoff is None or handoff.empty:
            return
        if handoff.record is None:  # nobody was asked yet: go on with nothing to get, so that prefill frees its blocks
            self._end(handoff, OutcomeKind.ABORTED, reason)
            handoff.blocks = RequestBlocks(handoff.blocks.tokens)
        else:
            self._do(handoff, handoff.record.abort(reason))

    # -- where prefill is ----------------------------------------------------------------------------------------------

    def _instance(self, source: Source) -> Instance:
        key = (source.bootstrap, source.engine_id)
        instance = self._instances.get(key)
        if instance is None:
            instance = self._instances[key] = Instance(source.bootstrap, source.engine_id)
            self._spawn(locate(instance, self._query, self.mailbox))
        return instance

    def _located(self, instance: Instance, found: Located) -> None:
        if found.entry is None:
            self._instances.pop((instance.bootstrap, instance.engine_id), None)
        instance.entry = found.entry
        waiting, instance.waiting = instance.waiting, []
        for handoff in waiting:
            if self._handoffs.get(handoff.source.transfer_id) is not handoff:
                continue
            if found.entry is None:
                self._fail(handoff, found.reason)
            else:
                self._begin(handoff, instance, found.entry)

    def _begin(self, handoff: Handoff, instance: Instance, prefill: Prefill) -> None:
        """The prefill workers are known: pulls from those that a link leads to, and opens links to the others."""
        mine = self._hello.geometry
        try:
            tp = TpMap([SharedGroup(g.kind, g.kv_heads) for g in mine.groups], prefill.tp_size, mine.tp_size)
        except PeerMismatchError as error:
            self._fail(handoff, str(error))
            return
        for stage in range(prefill.pp_size):
            for rank in tp.pulls(mine.tp_rank):
                worker = Worker(stage, rank)
                handoff.remotes[worker] = self._remote(instance, worker, prefill.addresses[worker])
                handoff.pullers[worker] = expected_pulls(tp, rank, mine.pp_size)
        handoff.record = Receiving(handoff.request_id, handoff.remotes, empty=handoff.empty)
        for remote in handoff.remotes.values():
            remote.handoffs[handoff.source.transfer_id] = handoff
        for worker, remote in handoff.remotes.items():
            if handoff.record.state in RECEIVE_TERMINAL:
                return
            if remote.refused and self.clock.now() < remote.refused_until:
                self._do(handoff, handoff.record.dead(worker, remote.refused))
            elif remote.link is not None:
                self._ask(handoff, worker)
            elif not remote.retrying:
                self._open(remote)

    def _remote(self, instance: Instance, worker: Worker, address: str) -> Remote:
        remote = self._remotes.get((instance.engine_id, worker))
        if remote is None or remote.address != address:
            remote = self._remotes[instance.engine_id, worker] = Remote(instance, worker, address)
        return remote

    # -- links ---------------------------------------------------------------------------------------------------------

    def _open(self, remote: Remote) -> None:
        """Opens a link unless there is one, or nobody needs it any more."""
        if remote.link is None and not remote.opening and remote.needed:
            remote.opening = True
            self._spawn(greet(remote, self._hello, self._connect, self.mailbox))

    def _link_up(self, remote: Remote, up: LinkUp) -> None:
        assert up.welcome is not None
        remote.heard(self.clock.now(), MOST_GRACE_S)
        remote.opened(up.link, self.clock.now())
        if remote.process not in ("", up.welcome.process):
            self._gone(remote, "its process was started again")
        remote.process = up.welcome.process
        for handoff in list(remote.handoffs.values()):
            record = handoff.record
            if record is None:
                continue
            state = record.peers[remote.worker]
            if state is PeerState.IDLE:
                self._ask(handoff, remote.worker)
            elif state in PEER_MAY_WRITE:
                self._say_abort(handoff, remote.worker)

    def _link_down(self, remote: Remote, down: LinkDown) -> None:
        if down.link is not None and remote.link is not down.link:
            return
        if down.link is not None and self.clock.now() - remote.opened_at > STEADY_S:
            remote.pause_s = 0.0
        remote.closed()
        if down.refused:
            remote.refused, remote.refused_until = down.reason, self.clock.now() + REFUSED_S
            log.error("a prefill worker refuses this one", peer=remote.address, reason=down.reason)
        for handoff in list(remote.handoffs.values()):
            record = handoff.record
            if record is None:
                continue
            state = record.peers[remote.worker]
            if state is PeerState.ASKED:
                self._do(handoff, record.failed(remote.worker, f"prefill worker {remote.address}: {down.reason}"))
            elif state is PeerState.IDLE and (down.gone or down.refused):
                self._do(handoff, record.dead(remote.worker, f"prefill worker {remote.address}: {down.reason}"))
        if down.gone or down.refused:
            remote.unsaid.clear()
        if down.gone:
            self._gone(remote, down.reason)
            self._instances.pop((remote.instance.bootstrap, remote.instance.engine_id), None)
            if self._remotes.get((remote.instance.engine_id, remote.worker)) is remote:
                del self._remotes[remote.instance.engine_id, remote.worker]
        elif remote.needed and not remote.retrying:
            remote.retrying = True
            remote.pause_s = min(max(2 * remote.pause_s, RECONNECT_S[0]), RECONNECT_S[1])
            self.later(remote.pause_s, Reconnect(remote))

    def _gone(self, remote: Remote, reason: str) -> None:
        """Its process is gone: nothing is written any more, once what is on the way has landed."""
        remote.process = ""
        for handoff in list(remote.handoffs.values()):
            record = handoff.record
            if record is not None and record.peers[remote.worker] in PEER_MAY_WRITE:
                self._do(handoff, record.failed(remote.worker, reason))
                self._wait_grace(handoff, remote.worker, dead=True)

    # -- what prefill workers say --------------------------------------------------------------------------------------

    def _heard(self, remote: Remote, message: Message) -> None:
        if isinstance(message, Problem):
            log.error("a prefill worker has a problem", peer=remote.address, reason=message.reason)
            return
        if not isinstance(message, Sent | Failed | Refused | Stopped):
            if remote.outbox is not None:
                remote.outbox.close()  # its end is told by whoever reads it, and fails what was asked over it
            return
        remote.heard(self.clock.now(), MOST_GRACE_S)
        handoff = remote.handoffs.get(message.transfer_id)
        if handoff is None or handoff.record is None:
            return
        record, worker = handoff.record, remote.worker
        match message:
            case Sent():
                self._do(handoff, record.reported(worker))
            case Failed(_, reason):
                self._do(handoff, record.failed(worker, reason))
            case Refused(_, reason):
                self._do(handoff, record.refused(worker, reason))
            case Stopped():
                if record.peers[worker] in PEER_MAY_WRITE and not record.empty:
                    self._wait_grace(handoff, worker, dead=False)
                else:
                    self._do(handoff, record.acknowledged(worker))

    def _wait_grace(self, handoff: Handoff, worker: Worker, *, dead: bool) -> None:
        assert handoff.record is not None
        if handoff.record.empty:
            self._do(handoff, handoff.record.dead(worker, "gone"))
            return
        remote, now = handoff.remotes[worker], self.clock.now()
        silent_s = max(remote.silent_s, 0.0 if remote.heard_at is None else now - remote.heard_at)
        grace_s = min(max(GRACE_S, min(silent_s, now - handoff.asked_at.get(worker, now))), MOST_GRACE_S)
        self.later(grace_s / GRACE_SLICES, Grace(handoff, worker, dead, GRACE_SLICES - 1, grace_s / GRACE_SLICES))

    def _grace(self, grace: Grace) -> None:
        handoff, worker = grace.of, grace.worker
        if grace.left:
            self.later(grace.slice_s, Grace(handoff, worker, grace.dead, grace.left - 1, grace.slice_s))
            return
        record = handoff.record
        self._do(handoff, record.dead(worker, "gone") if grace.dead else record.acknowledged(worker))

    # -- what records say ----------------------------------------------------------------------------------------------

    def _ask(self, handoff: Handoff, worker: Worker) -> None:
        record = handoff.record
        assert record is not None
        if record.state in (ReceiveState.CONNECTING, ReceiveState.PULLING, ReceiveState.RELEASING):
            record.ask(worker)
            handoff.asked_at[worker] = self.clock.now()
            handoff.remotes[worker].say(Pull(handoff.source.transfer_id, handoff.pullers[worker], handoff.blocks))

    def _say_abort(self, handoff: Handoff, worker: Worker) -> None:
        handoff.remotes[worker].say(Abort(handoff.source.transfer_id, handoff.pullers[worker]))
        if not handoff.remotes[worker].retrying:
            self._open(handoff.remotes[worker])

    def _fail(self, handoff: Handoff, reason: str) -> None:
        if handoff.record is not None:
            self._do(handoff, handoff.record.fail(reason))
        elif self._handoffs.get(handoff.source.transfer_id) is handoff:
            if not handoff.empty:
                self._end(handoff, OutcomeKind.FAILED, reason)
            self._forget(handoff)

    def _do(self, handoff: Handoff, instructions: list[ReceiveInstruction]) -> None:
        record = handoff.record
        assert record is not None
        for action, worker in instructions:
            match action:
                case ReceiveAction.ABORT:
                    assert worker is not None
                    self._say_abort(handoff, worker)
                case ReceiveAction.FAIL:
                    self._end(handoff, OutcomeKind.FAILED, record.reason, fenced=True)
                case ReceiveAction.RETURN:
                    self._end(handoff, _OUTCOMES[record.state], record.reason)
        if record.state in RECEIVE_TERMINAL:
            self._forget(handoff)

    def _end(self, handoff: Handoff, kind: OutcomeKind, reason: str, *, fenced: bool = False) -> None:
        if handoff.told:
            self._tell(Outcome(handoff.request_id, OutcomeKind.RETURNED, reason))
            return
        handoff.told = True
        if kind is OutcomeKind.FAILED:
            self.counts.failed += 1
            self.counts.fenced += fenced
            log.warning("a hand-off failed", request=handoff.request_id, transfer=handoff.source.transfer_id, reason=reason)
        else:
            self.counts.loaded += kind is OutcomeKind.LOADED
            self.counts.aborted += kind is OutcomeKind.ABORTED
        self._tell(Outcome(handoff.request_id, kind, "" if kind is OutcomeKind.LOADED else reason, fenced))

    def _forget(self, handoff: Handoff) -> None:
        """It is over: nothing that is said of it matters any more."""
        transfer_id = handoff.source.transfer_id
        if self._handoffs.get(transfer_id) is not handoff:
            return
        del self._handoffs[transfer_id]
        if self._by_request.get(handoff.request_id) is handoff:
            del self._by_request[handoff.request_id]
        if handoff.timer is not None:
            handoff.timer.cancel()
        self.counts.released += handoff.empty and not handoff.told
        for remote in handoff.remotes.values():
            remote.handoffs.pop(transfer_id, None)

    # -- tasks, and the end of the actor -------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Links end, which aborts what is under way; blocks that may still be written stay fenced for ever."""
        self.stop_timers()
        for task in self._tasks:
            task.cancel()
        for remote in self._remotes.values():
            remote.closed()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def collapse(self, reason: str) -> None:
        """After a crash: all that waits has failed, and its blocks may be written for ever; links end."""
        for message in [self.current, *self.mailbox.take_all()]:
            known = isinstance(message, Receive) and message.source.transfer_id in self._handoffs
            if isinstance(message, Receive) and not message.blocks.empty and not known:
                self._tell(Outcome(message.request_id, OutcomeKind.FAILED, reason))
        for handoff in self._handoffs.values():
            if not handoff.told and not handoff.empty:
                fenced = handoff.record is not None and handoff.record.may_be_written
                self._tell(Outcome(handoff.request_id, OutcomeKind.FAILED, reason, fenced))
        await self.close()


_OUTCOMES = {
    ReceiveState.LOADED: OutcomeKind.LOADED,
    ReceiveState.FAILED: OutcomeKind.FAILED,
    ReceiveState.ABORTED: OutcomeKind.ABORTED,
}
