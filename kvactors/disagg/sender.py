"""The sender: the actor of a prefill worker. It holds the blocks of computed requests, and writes them to who pulls them.

What happens to a request is decided by its record (`sending.py`); the actor carries out what the record says, keeps the time,
and knows the links. A peer that is slow, frozen or silent holds up nobody else: answers go through outboxes, and of the bounded
number of sends at a time one peer gets only a part.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvactors.actors.actor import Actor
from kvactors.core.clock import Clock
from kvactors.disagg.blocks import RequestBlocks
from kvactors.disagg.geometry import WorkerGeometry
from kvactors.disagg.links import ROOM, Link
from kvactors.disagg.messages import Cancelled, Heard, LinkDown, LinkUp, Prefilled, Reached, Requested, TimeUp, WriteEnded
from kvactors.disagg.outbox import Outbox
from kvactors.disagg.routes import route
from kvactors.disagg.sending import SendAction, Sending, SendInstruction
from kvactors.disagg.sends import Puller, Send, SendCounts, SendLimits, Sends
from kvactors.disagg.states import PULL_TERMINAL, SEND_TERMINAL, SendState, Worker
from kvactors.disagg.transports import Transport
from kvactors.disagg.wire import Abort, Failed, Hello, Message, Pull, Refused, Sent, Stopped, Welcome
from kvactors.errors import DisaggError
from kvactors.log import get_logger

log = get_logger("kvactors.disagg.sender", burst=10)

HELLO_S = 10.0
"""A peer that opens a link says who it is within this time."""

REMEMBERED = 4096
"""Requests that ended are known so long, in number, that late messages are answered."""

KNOWN = 256
"""Decode workers whose geometry is kept when their link has ended."""

MAILBOX = 1 << 16

FLUSH_S = 1.0
"""How long the end of the actor waits for its last answers to be on their way."""


@dataclass(slots=True)
class Asked:
    """What a decode worker asked for. `blocks` goes when the request has ended; the hash stays, to know a twin by."""

    puller: Puller
    pullers: int
    blocks: RequestBlocks | None
    hash: int


@dataclass(slots=True, eq=False)
class Request:
    """A request, its blocks and those that pull it. `orphan_of`: who spoke of it before it came."""

    record: Sending
    engine_id: str | None = None
    blocks: RequestBlocks | None = None
    pulls: dict[Worker, Asked] = field(default_factory=dict)
    orphan_of: Puller | None = None
    sends: dict[Worker, Send] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class SenderActor(Actor):
    """See the module.

    Args:
        engine_id, process: what `Welcome` says.
        freed: told the transfer id of each request whose blocks are the engine's again, once.
    """

    def __init__(
        self,
        engine_id: str,
        process: str,
        geometry: WorkerGeometry,
        transport: Transport,
        clock: Clock,
        freed: Callable[[str], None],
        limits: SendLimits | None = None,
    ) -> None:
        super().__init__("sender", clock, mailbox_limit=MAILBOX)
        self.counts = SendCounts()
        self._engine_id, self._process, self._geometry, self._transport = engine_id, process, geometry, transport
        self._freed = freed
        self._limits = limits or SendLimits()
        self._requests: dict[str, Request] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._pullers: dict[tuple[str, Worker], Puller] = {}
        self._known: OrderedDict[str, Puller] = OrderedDict()
        """process of a decode worker -> what its geometry came to, so that a new link needs no new plan"""
        self._orphans = 0
        self._sends = Sends(geometry, transport, self._limits, self.counts, self.mailbox.post)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = self._crashed = False

    @property
    def under_way(self) -> int:
        """Requests whose blocks are held, or are to be."""
        ended = len(self._ended)  # any thread asks this: first what ended, so that nothing that is held is missed
        return max(0, len(self._requests) - ended)

    # -- links ---------------------------------------------------------------------------------------------------------

    async def serve(self, link: Link) -> None:
        """A decode worker opened a link; returns when it has ended."""
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await link.receive()
                if not isinstance(hello, Hello):
                    return await link.close(f"the first message has to be a Hello, not a {type(hello).__name__}")
                puller = self._puller(hello)
                await link.send(self._welcome())
        except TimeoutError:
            return await link.close(f"no Hello within {HELLO_S:g} s")
        except DisaggError as error:
            log.error("a decode worker is refused", peer=link.peer, reason=str(error))
            return await link.close(str(error))
        await self.mailbox.send(LinkUp(puller, link))
        reason, room = "the link ended", asyncio.Semaphore(ROOM)
        try:
            while True:
                message = await link.receive()
                if not isinstance(message, Pull | Abort):
                    return await link.close(f"a decode worker says Pull and Abort, not {type(message).__name__}")
                await room.acquire()
                await self.mailbox.send(Heard(puller, link, message, room))
        except DisaggError as error:
            reason = str(error)
        finally:
            self.mailbox.post(LinkDown(puller, link, reason))

    def _welcome(self) -> Welcome:
        g = self._geometry
        return Welcome(engine_id=self._engine_id, process=self._process, pp_rank=g.pp_rank, tp_rank=g.tp_rank)

    def _puller(self, hello: Hello) -> Puller:
        """What is known of a decode worker; one whose process is known already has the same geometry.

        Raises:
            PeerMismatchError, TransferPlanError: nothing can be handed over to it.
        """
        known = self._known.get(hello.process)
        if known is not None and known.memory == hello.memory and known.geometry == hello.geometry:
            self._known.move_to_end(hello.process)
            return replace(known, outbox=None)  # with the same bounds on sends and orphans
        g = hello.geometry
        puller = Puller(
            hello.engine_id,
            Worker(g.pp_rank, g.tp_rank),
            hello.memory,
            g,
            route(self._geometry, g),
            asyncio.Semaphore(self._limits.sends_to_one),
        )
        self._known[hello.process] = puller
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return puller

    # -- messages ------------------------------------------------------------------------------------------------------

    async def handle(self, message: Any) -> None:
        if isinstance(message, Heard) and message.room is not None:
            message.room.release()
        match message:
            case Heard(puller, link, Pull() as pull) if self._current(puller, link):
                self._pull(puller, pull)
            case Heard(puller, link, Abort() as abort) if self._current(puller, link):
                self._abort(puller, abort)
            case Requested(transfer_id):
                self._requested(transfer_id)
            case Prefilled(transfer_id, blocks):
                self._prefilled(transfer_id, blocks)
            case Cancelled(transfer_id, reason):
                self._cancelled(transfer_id, reason)
            case WriteEnded():
                self.mailbox.replied()
                self._write_ended(message)
            case LinkUp(puller, link):
                self._link_up(puller, link)
            case LinkDown(puller, link):
                self._link_down(puller, link, message.reason)
            case TimeUp(of):
                self._time_up(of)
            case Reached(event):
                event.set()

    # -- from the engine -----------------------------------------------------------------------------------------------

    def _requested(self, transfer_id: str) -> None:
        request = self._requests.get(transfer_id)
        if request is not None and request.record.state in SEND_TERMINAL:
            request = None  # the id is used again
        if request is None:
            request = self._new(transfer_id)
        elif request.record.state is not SendState.AWAITED:
            log.error("a transfer id is used twice; its first request goes on alone", transfer=transfer_id)
            return
        self._no_orphan(request)
        self._stop_timer(request)
        self._do(request, request.record.request())

    def _prefilled(self, transfer_id: str, blocks: RequestBlocks) -> None:
        request = self._requests.get(transfer_id)
        if request is None or request.record.state in (SendState.AWAITED, *SEND_TERMINAL):
            self._requested(transfer_id)
            request = self._requests[transfer_id]
        if request.record.state is not SendState.PREFILLING:
            log.error("a request that is held was computed again; it is ignored", transfer=transfer_id)
            return
        if self._closing:
            self._do(request, request.record.cancel("this prefill worker stops"))
            self._freed(transfer_id)
            return
        request.blocks = blocks
        request.timer = self.later(self._limits.abort_timeout_s, TimeUp(request))
        self._do(request, request.record.prefilled())

    def _cancelled(self, transfer_id: str, reason: str) -> None:
        request = self._requests.get(transfer_id)
        if request is None or request.record.state in (SendState.AWAITED, *SEND_TERMINAL):
            self._requested(transfer_id)  # it never got here: whoever pulls it later is refused
            request = self._requests[transfer_id]
        if request.record.state is SendState.PREFILLING:
            self._do(request, request.record.cancel(reason))

    # -- from decode workers -------------------------------------------------------------------------------------------

    def _current(self, puller: Puller, link: Link) -> bool:
        """Whether the link is the one that its worker has now; what an earlier one said died with it."""
        return puller.outbox is not None and puller.outbox.link is link

    def _link_up(self, puller: Puller, link: Link) -> None:
        key = (puller.engine_id, puller.worker)
        earlier = self._pullers.get(key)
        if earlier is not None and earlier.outbox is not None:
            self._link_down(earlier, earlier.outbox.link, "the worker opened another link")
        puller.outbox = Outbox(link)
        self._pullers[key] = puller

    def _link_down(self, puller: Puller, link: Link | None, reason: str) -> None:
        """All that the worker asked for and did not get is given up, as if it had said so."""
        if link is None or not self._current(puller, link):
            return
        assert puller.outbox is not None
        puller.outbox.close()
        puller.outbox = None
        if self._pullers.get((puller.engine_id, puller.worker)) is puller:
            del self._pullers[puller.engine_id, puller.worker]
        task = asyncio.ensure_future(self._transport.forget(puller.memory))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        for request in list(self._requests.values()):
            asked = request.pulls.get(puller.worker)
            if asked is None or asked.puller is not puller:
                continue
            if request.record.pulls.get(puller.worker) not in PULL_TERMINAL:
                log.warning("a pull is given up with its link", transfer=request.record.transfer_id, reason=reason)
                self._stop(request, puller.worker)
                self._do(request, request.record.abort(puller.worker, asked.pullers))

    def _pull(self, puller: Puller, pull: Pull) -> None:
        if self._closing:
            self._say(puller, Refused(pull.transfer_id, "this prefill worker stops"))
            return
        request = self._requests.get(pull.transfer_id) or self._orphan(pull.transfer_id, puller)
        if request is None:
            self._say(puller, Refused(pull.transfer_id, "too many requests are awaited that prefill does not know"))
        elif (problem := self._stranger(request, puller, pull)) is not None:
            self._say(puller, Refused(pull.transfer_id, problem))
        else:
            request.engine_id = puller.engine_id
            request.pulls.setdefault(puller.worker, Asked(puller, pull.pullers, pull.blocks, hash(pull.blocks)))
            self._do(request, request.record.pull(puller.worker, pull.pullers))

    def _abort(self, puller: Puller, abort: Abort) -> None:
        request = self._requests.get(abort.transfer_id) or self._orphan(abort.transfer_id, puller)
        if request is None or self._stranger(request, puller) is not None:
            self._say(puller, Stopped(abort.transfer_id))
            return
        request.engine_id = puller.engine_id
        asked = request.pulls.setdefault(puller.worker, Asked(puller, abort.pullers, None, 0))
        asked.puller = puller  # the answer goes over the link that asks
        self._stop(request, puller.worker)
        self._do(request, request.record.abort(puller.worker, abort.pullers))

    def _orphan(self, transfer_id: str, puller: Puller) -> Request | None:
        """Decode came first, or the request does not exist; it is waited for, for a while."""
        if self._orphans >= self._limits.orphans or len(puller.orphans) >= self._limits.orphans_of_one:
            return None
        self._orphans += 1
        puller.orphans.add(transfer_id)
        request = self._new(transfer_id)
        request.orphan_of = puller
        request.timer = self.later(self._limits.orphan_s, TimeUp(request))
        return request

    def _no_orphan(self, request: Request) -> None:
        if request.orphan_of is not None:
            request.orphan_of.orphans.discard(request.record.transfer_id)
            request.orphan_of = None
            self._orphans -= 1

    @staticmethod
    def _stranger(request: Request, puller: Puller, pull: Pull | None = None) -> str | None:
        """Why the request is not this worker's, or the pull not the one that it made before."""
        if request.engine_id not in (None, puller.engine_id):
            return f"instance {request.engine_id} pulls it already"
        before = request.pulls.get(puller.worker)
        if pull is not None and before is not None and (before.puller is not puller or before.hash != hash(pull.blocks)):
            return "another request pulled it already; each needs a transfer id of its own"
        return None

    # -- time, and the end ---------------------------------------------------------------------------------------------

    def _time_up(self, request: Request) -> None:
        record = request.record
        if record.state in SEND_TERMINAL:
            return
        if record.state is SendState.PREFILLING:
            return  # it is that of the time when it was awaited
        if not record.may_expire:  # never under a send; those that wait for their turn are none
            for send in list(request.sends.values()):
                if send.waiting:
                    send.stop()
            request.timer = self.later(min(self._limits.abort_timeout_s, 1.0), TimeUp(request))
            return
        orphan = record.state is SendState.AWAITED
        self._no_orphan(request)
        self.counts.expired += 1
        waited = self._limits.orphan_s if orphan else self._limits.abort_timeout_s
        what = "nobody sent it to this prefill instance" if orphan else "not all decode workers came for it"
        log.warning("a hand-off expired", transfer=record.transfer_id, reason=what, waited_s=waited)
        self._do(request, record.expire(f"{what} within {waited:g} s"))

    def _new(self, transfer_id: str) -> Request:
        request = self._requests[transfer_id] = Request(Sending(transfer_id))
        self._ended.pop(transfer_id, None)
        return request

    @staticmethod
    def _stop_timer(request: Request) -> None:
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None

    # -- what records say ----------------------------------------------------------------------------------------------

    def _do(self, request: Request, instructions: list[SendInstruction]) -> None:
        transfer_id = request.record.transfer_id
        for action, worker, reason in instructions:
            if action is SendAction.FREE:
                self.counts.freed += 1
                self._freed(transfer_id)
                continue
            assert worker is not None
            if action is SendAction.SEND:
                self._start(request, worker)
            else:
                self._answer(request, worker, _answer(action, transfer_id, reason))
        if request.record.state in SEND_TERMINAL:
            self._over(request)

    def _over(self, request: Request) -> None:
        """It ended: its record answers late messages for a while, the rest goes."""
        self._stop_timer(request)
        request.blocks = None
        for asked in request.pulls.values():
            asked.blocks = None
        if self._requests.get(request.record.transfer_id) is not request:
            return
        self._ended[request.record.transfer_id] = None
        if len(self._ended) > REMEMBERED:
            oldest, _ = self._ended.popitem(last=False)
            del self._requests[oldest]

    def _answer(self, request: Request, worker: Worker, message: Message) -> None:
        if isinstance(message, Refused):
            self.counts.refused += 1
            log.warning("a pull is refused", transfer=message.transfer_id, reason=message.reason)
        elif isinstance(message, Failed):
            self.counts.failed += 1
            log.warning("a send failed", transfer=message.transfer_id, reason=message.reason)
        asked = request.pulls.get(worker)
        if asked is not None:
            self._say(asked.puller, message)

    @staticmethod
    def _say(puller: Puller, message: Message) -> None:
        if puller.outbox is not None:
            puller.outbox.send(message)

    # -- sends ---------------------------------------------------------------------------------------------------------

    def _start(self, request: Request, worker: Worker) -> None:
        asked = request.pulls[worker]
        assert request.blocks is not None
        assert asked.blocks is not None
        self.mailbox.reserve()
        request.sends[worker] = self._sends.start(request.record.transfer_id, asked.puller, request.blocks, asked.blocks)

    @staticmethod
    def _stop(request: Request, worker: Worker) -> None:
        send = request.sends.get(worker)
        if send is not None:
            send.stop()

    def _write_ended(self, ended: WriteEnded) -> None:
        request = self._requests[ended.transfer_id]
        request.sends.pop(ended.worker, None)
        record = request.record
        if ended.failed is None:
            self._do(request, record.sent(ended.worker))
        elif ended.refused:
            self._do(request, record.refused(ended.worker, ended.failed))
        else:
            self._do(request, record.failed(ended.worker, ended.failed))

    # -- the end of the actor ------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Nothing is being sent when this returns, nothing will be, and who pulled knows; the rest goes with the process."""
        self._closing = True
        self.stop_timers()
        while sends := [s for r in self._requests.values() for s in r.sends.values()]:
            for send in sends:
                send.stop()
            await asyncio.gather(*(s.task for s in sends if s.task is not None), return_exceptions=True)
            if self._crashed:
                break
            reached = asyncio.Event()
            self.mailbox.post(Reached(reached))
            await reached.wait()  # the actor goes on, and says what became of the sends
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        outboxes = [p.outbox for p in self._pullers.values() if p.outbox is not None]
        if outboxes:
            await asyncio.gather(*(outbox.flush(FLUSH_S) for outbox in outboxes))
        for outbox in outboxes:
            outbox.close()

    async def collapse(self, reason: str) -> None:
        """After a crash: what is held is freed, once nothing of it is being sent; links end."""
        log.error("held blocks are given back", reason=reason)
        states = (SendState.HELD, SendState.SENDING)
        held = {r.record.transfer_id for r in self._requests.values() if r.record.state in states}
        self._crashed = True
        unread = [self.current, *self.mailbox.take_all()]
        held |= {message.transfer_id for message in unread if isinstance(message, Prefilled)}
        for message in unread:
            if isinstance(message, Reached):  # somebody closes already, and waits for it
                message.event.set()
        await self.close()
        for transfer_id in sorted(held):
            self._freed(transfer_id)


def _answer(action: SendAction, transfer_id: str, reason: str) -> Message:
    match action:
        case SendAction.REPORT:
            return Sent(transfer_id)
        case SendAction.FAIL:
            return Failed(transfer_id, reason)
        case SendAction.REFUSE:
            return Refused(transfer_id, reason)
        case _:
            return Stopped(transfer_id)
