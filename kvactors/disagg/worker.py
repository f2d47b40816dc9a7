"""One worker's end of the hand-off, for a caller that must not wait: the actors on a loop and a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from kvactors.actors.actor import Actor
from kvactors.actors.loops import START_S, call_on, new_loop
from kvactors.devices import MonotonicClock
from kvactors.disagg.blocks import RequestBlocks
from kvactors.disagg.bootstrap import BootstrapServer, Registration, query, register
from kvactors.disagg.geometry import WorkerGeometry
from kvactors.disagg.links import Link
from kvactors.disagg.messages import (
    Cancelled,
    GiveUp,
    Outcome,
    OutcomeKind,
    Prefilled,
    Receive,
    Requested,
    Source,
)
from kvactors.disagg.receiver import ReceiveCounts, ReceiverActor
from kvactors.disagg.remotes import Prefill
from kvactors.disagg.sender import SenderActor
from kvactors.disagg.sends import SendCounts, SendLimits
from kvactors.disagg.states import Worker
from kvactors.disagg.transports import Transport
from kvactors.disagg.websockets import LinkServer, connect
from kvactors.disagg.wire import Hello
from kvactors.errors import ConfigError, DisaggError, MailboxOverflowError
from kvactors.log import get_logger

log = get_logger("kvactors.disagg")

CONNECT_S = 5.0

REGISTER_PAUSE_S = 2.0

CLOSE_S = 75.0
"""A send under way is not broken off: with a frozen peer it may take 60 s."""

__all__ = ["HandoffConfig", "HandoffWorker", "Outcome", "OutcomeKind", "Source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """
    Attributes:
        host: where links and the bootstrap server listen, and where peers find them.
        public: `host` may be another address than this machine's own loopback.
        bootstrap: host and port of the bootstrap server that prefill workers register with; port 0 with `serve_bootstrap` takes
            a free one.
        serve_bootstrap: it is this worker that runs it.
        dp_rank: the data-parallel rank under which it registers.
        abort_timeout_s: prefill frees blocks that nobody came for after this time.
        deadline_s: decode gives a request up that has not arrived by then.
        sends: requests that prefill writes at a time.
    """

    host: str = "127.0.0.1"
    public: bool = False
    bootstrap: tuple[str, int] = ("127.0.0.1", 8998)
    serve_bootstrap: bool = True
    dp_rank: int = 0
    abort_timeout_s: float = 480.0
    deadline_s: float = 480.0
    sends: int = 32


class HandoffWorker:
    """A prefill worker, a decode worker, or both. Its methods post and return; any thread may call them.

    Where an actor crashes (a bug), nothing hangs: what decode waits for has failed, fenced; what prefill holds is freed once it
    is no longer being sent; later requests fail, or are freed, at once.

    Args:
        transport: registered with the worker's memory; closed here.
        engine_id: the instance's, the same for all of its workers.
        sends, receives: its roles.

    Raises:
        ConfigError: an address cannot be listened on.
    """

    def __init__(
        self,
        config: HandoffConfig,
        geometry: WorkerGeometry,
        transport: Transport,
        *,
        engine_id: str,
        sends: bool,
        receives: bool,
    ) -> None:
        self._config, self._geometry, self._transport = config, geometry, transport
        self._engine_id, self._process = engine_id, uuid.uuid4().hex
        self._free: deque[str] = deque()
        self._told: deque[Outcome] = deque()
        self._news = threading.Event()
        clock = MonotonicClock()
        limits = SendLimits(
            abort_timeout_s=config.abort_timeout_s,
            orphan_s=config.abort_timeout_s,
            sends=config.sends,
        )
        self._sender = SenderActor(engine_id, self._process, geometry, transport, clock, self._freed, limits) if sends else None
        hello = Hello(engine_id=engine_id, process=self._process, memory=transport.memory, geometry=geometry)
        self._receiver = ReceiverActor(hello, _connect, _query, clock, self._outcome, config.deadline_s) if receives else None
        self.bootstrap = ""
        """address of the bootstrap server, for those that tell decode where prefill is"""
        self._links: LinkServer | None = None
        self._dead: dict[str, str] = {}
        """why an actor, by its name, takes nothing any more"""
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._failed: BaseException | None = None
        self._closing: asyncio.Event | None = None
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._main, name="kvactors handoff", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S) or self._failed is not None:
            self.close()
            raise ConfigError(f"the hand-off cannot start: {self._failed or 'no answer from its thread'}") from self._failed

    # -- prefill -------------------------------------------------------------------------------------------------------

    def request(self, transfer_id: str) -> None:
        """A request whose blocks will be handed over came to this worker."""
        self._post(self._sender, Requested(transfer_id))

    def prefilled(self, transfer_id: str, blocks: RequestBlocks) -> None:
        """It is computed: its blocks are held until `freed` names it."""
        if not self._post(self._sender, Prefilled(transfer_id, blocks)):
            self._freed(transfer_id)

    def cancel(self, transfer_id: str, reason: str) -> None:
        """It ended before it was computed; the engine has its blocks."""
        self._post(self._sender, Cancelled(transfer_id, reason))

    def freed(self) -> set[str]:
        """Transfer ids whose blocks are the engine's again; each once."""
        return set(_taken(self._free))

    # -- decode --------------------------------------------------------------------------------------------------------

    def receive(self, request_id: str, source: Source, blocks: RequestBlocks) -> None:
        """Get a request's blocks from its prefill. Without ids nothing comes, and nothing is told: prefill frees its own."""
        if not self._post(self._receiver, Receive(request_id, source, blocks)) and not blocks.empty:
            self._outcome(Outcome(request_id, OutcomeKind.FAILED, self._dead.get("receiver", "it does not receive")))

    def give_up(self, request_id: str, reason: str) -> None:
        """The engine aborts a request that is under way; it is told ABORTED, or what came first."""
        self._post(self._receiver, GiveUp(request_id, reason))

    def outcomes(self) -> list[Outcome]:
        """What was told since the last call, in order."""
        return _taken(self._told)

    # -- both ----------------------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Waits until `freed` or `outcomes` has something, at most so long."""
        self._news.clear()
        if not self._free and not self._told:
            self._news.wait(seconds)

    @property
    def pending(self) -> int:
        """Hand-offs under way, fenced ones included."""
        return sum(actor.under_way for actor in (self._sender, self._receiver) if actor is not None)

    @property
    def sent(self) -> SendCounts | None:
        return None if self._sender is None else self._sender.counts

    @property
    def received(self) -> ReceiveCounts | None:
        return None if self._receiver is None else self._receiver.counts

    def close(self) -> None:
        """Ends links and transport; waits for sends under way. Idempotent."""
        if self._closing is not None:
            call_on(self._loop, self._closing.set)
        self._thread.join(CLOSE_S)
        self._transport.close()

    # -- the loop's thread ---------------------------------------------------------------------------------------------

    def _post(self, actor: Actor | None, message: Any) -> bool:
        if actor is None:
            return False
        with self._lock:  # so that a crash answers all that was posted before it, and nothing is posted after
            if actor.name in self._dead:
                return False
            try:
                actor.mailbox.post(message)
            except MailboxOverflowError as error:
                log.error("the hand-off does not keep up", reason=str(error))
                return False
        return True

    def _freed(self, transfer_id: str) -> None:
        self._free.append(transfer_id)
        self._news.set()

    def _outcome(self, outcome: Outcome) -> None:
        self._told.append(outcome)
        self._news.set()

    def _main(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failed = error
            log.error("the hand-off ended", error=repr(error))
        finally:
            self._end("the hand-off has ended")
            self._started.set()
            self._end_tasks()
            self._loop.close()

    def _end(self, reason: str) -> None:
        with self._lock:
            for name in ("sender", "receiver"):
                self._dead.setdefault(name, reason)

    def _end_tasks(self) -> None:
        """What a failed start left behind."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _serve(self) -> None:
        self._closing = asyncio.Event()
        actors = [actor for actor in (self._sender, self._receiver) if actor is not None]
        for actor in actors:
            actor.mailbox.bind(asyncio.get_running_loop())
        async with contextlib.AsyncExitStack() as ends:
            tasks = [asyncio.ensure_future(self._run(actor)) for actor in actors]
            if self._sender is not None:
                tasks.append(asyncio.ensure_future(await self._listen(self._sender, ends)))
            self._started.set()
            await self._closing.wait()
            self._end("the hand-off was closed")
            for actor in actors:  # sends end before the links do: a closed link says that nothing follows
                await actor.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, actor: SenderActor | ReceiverActor) -> None:
        try:
            await actor.run()
        except Exception as error:
            with self._lock:
                self._dead[actor.name] = f"the {actor.name} crashed: {error!r}"
            log.error(
                "an actor of the hand-off crashed", actor=actor.name, error=repr(error), message=type(actor.current).__name__
            )
            await actor.collapse(self._dead[actor.name])
            if isinstance(actor, SenderActor) and self._links is not None:
                await self._links.stop()  # decode finds nobody here, and knows that nothing follows

    async def _listen(self, sender: SenderActor, ends: contextlib.AsyncExitStack) -> Coroutine[Any, Any, None]:
        """Listens for links and, if it is this worker's task, for questions; returns what keeps it registered."""
        config = self._config
        self._links = LinkServer(sender.serve, config.host, public=config.public)
        address = await self._links.start()
        ends.push_async_callback(self._links.stop)
        host, port = config.bootstrap
        self.bootstrap = f"http://{host}:{port}"
        if config.serve_bootstrap:
            server = BootstrapServer(host, port, public=config.public)
            self.bootstrap = await server.start()
            ends.push_async_callback(server.stop)
        return self._keep_registered(address)

    async def _keep_registered(self, address: str) -> None:
        """Registers, however long that takes: the bootstrap server's worker may start later."""
        g = self._geometry
        entry = Registration(
            engine_id=self._engine_id,
            dp_rank=self._config.dp_rank,
            tp_rank=g.tp_rank,
            pp_rank=g.pp_rank,
            addr=address,
            tp_size=g.tp_size,
            pp_size=g.pp_size,
        )
        while True:
            try:
                await register(self.bootstrap, entry, CONNECT_S, attempts=3)
                return
            except DisaggError as error:
                log.error("this prefill worker is not registered yet; it goes on trying", reason=str(error))
            await asyncio.sleep(REGISTER_PAUSE_S)


async def _connect(address: str) -> Link:
    return await connect(address, CONNECT_S)


async def _query(bootstrap: str) -> Mapping[str, Prefill]:
    found = await query(bootstrap, CONNECT_S)
    return {
        entry.engine_id: Prefill(
            entry.engine_id,
            entry.tp_size,
            entry.pp_size,
            {Worker(int(pp), int(tp)): addr for tp, of in entry.worker_addr.items() for pp, addr in of.items()},
        )
        for entry in found.values()
        if entry.complete
    }


def _taken(queue: deque[Any]) -> list[Any]:
    taken: list[Any] = []
    while queue:
        taken.append(queue.popleft())
    return taken
