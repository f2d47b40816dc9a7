"""One actor alone on virtual time, its peers played by the test."""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from kvactors.disagg import Descriptors, Worker
from kvactors.disagg.blocks import GroupBlocks, RequestBlocks
from kvactors.disagg.links import Link
from kvactors.disagg.memory_links import MemoryLink, MemoryNetwork
from kvactors.disagg.messages import Outcome, Prefilled, Receive, Requested, Source
from kvactors.disagg.receiver import ReceiverActor
from kvactors.disagg.remotes import Prefill, Remote
from kvactors.disagg.sender import SenderActor
from kvactors.disagg.sends import SendLimits
from kvactors.disagg.transports.writing import WriteCounts
from kvactors.disagg.wire import Hello, Message, Pull, Sent, Stopped, Welcome
from kvactors.errors import PeerUnreachableError, TransferFailedError
from kvactors.simulate.loop import VirtualLoop, run_virtual
from tests.disagg.shapes import gqa


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a plain test of a coroutine whose first argument is the loop."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        loop = VirtualLoop(random.Random(0), most_events=200_000)
        run_virtual(test(loop, *args, **kwargs), loop)

    del run.__wrapped__
    signature = inspect.signature(test)
    run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return run


def blocks(*ids: int, tokens: int = 48) -> RequestBlocks:
    return RequestBlocks(tokens, (GroupBlocks(0, ids),))


HELD = blocks(1, 2, 3)
NOTHING = RequestBlocks(0)


def hello(process: str = "d", memory: str = "dm", engine: str = "D", rank: int = 0, tp: int = 1) -> Hello:
    return Hello(engine_id=engine, process=process, memory=memory, geometry=gqa(2, tp, rank))


class Transport:
    """Writes take `seconds`, and `fails`, if so, at their end."""

    memory = "p"

    def __init__(self, seconds: float = 0.0, *, fails: bool = False) -> None:
        self.seconds, self.fails = seconds, fails
        self.counts = WriteCounts()
        self.begun: list[str] = []
        self.now: Counter[str] = Counter()
        self.most = self.most_to_one = 0
        self.forgot: list[str] = []

    def register(self, address: int, nbytes: int) -> None: ...

    async def write(self, memory: str, descriptors: Descriptors) -> None:  # noqa: ARG002 - nothing is moved
        self.begun.append(memory)
        self.now[memory] += 1
        self.most, self.most_to_one = max(self.most, self.now.total()), max(self.most_to_one, self.now[memory])
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.now[memory] -= 1
        if self.fails:
            raise TransferFailedError("drawn")

    async def forget(self, memory: str) -> None:
        self.forgot.append(memory)

    def close(self) -> None: ...


class SenderRig:
    """A real sender; `link` opens a link to it as a decode worker does."""

    def __init__(self, loop: VirtualLoop, transport: Transport | None = None, *, runs: bool = True, **limits: Any) -> None:
        self.transport = transport or Transport()
        self.freed: list[tuple[str, float]] = []
        """transfer id and time"""
        self.actor = SenderActor("P", "p", gqa(2, 1), self.transport, loop, self._freed, SendLimits(**limits))
        self.actor.mailbox.bind(loop)
        self.network = MemoryNetwork()
        self.network.listen("p", self.actor.serve)
        self._loop = loop
        if runs:
            self.run()

    def run(self) -> None:
        self.task = asyncio.ensure_future(self.actor.run())

    def _freed(self, transfer_id: str) -> None:
        self.freed.append((transfer_id, self._loop.now()))

    @property
    def freed_ids(self) -> list[str]:
        return [transfer_id for transfer_id, _ in self.freed]

    def post(self, *messages: Any) -> None:
        for message in messages:
            self.actor.mailbox.post(message)

    def compute(self, *transfer_ids: str) -> None:
        """Requests come, and are computed."""
        for transfer_id in transfer_ids:
            self.post(Requested(transfer_id), Prefilled(transfer_id, HELD))

    async def link(self, **who: Any) -> MemoryLink:
        link = await self.network.connect("p")
        await link.send(hello(**who))
        assert isinstance(await link.receive(), Welcome)
        return link


async def say(link: MemoryLink, message: Message, within_s: float = 1.0) -> Message | None:
    """What is answered to a message; None if nothing is in time."""
    await link.send(message)
    return await heard(link, within_s)


async def heard(link: MemoryLink, within_s: float = 1.0) -> Message | None:
    try:
        return await link.receive(within_s)
    except TimeoutError:
        return None


def sends(message: Message) -> Message:
    """What a prefill worker answers that has everything."""
    assert hasattr(message, "transfer_id")
    return Sent(message.transfer_id) if isinstance(message, Pull) else Stopped(message.transfer_id)


def silent(message: Message) -> None:  # noqa: ARG001 - it hears and says nothing
    return None


class ReceiverRig:
    """A real receiver; prefill workers, one of each stage at addresses p0, p1 …, answer as the test says.

    Attributes:
        asked: questions to the bootstrap server; `answers`: what it says one after another, the last one for ever.
        slow: seconds that a link to an address takes; `unreachable`: addresses from which nothing comes back.
        opened: addresses that links were opened to, and when.
        heard: (process, kind of message, transfer id) of what prefill workers heard.
        told: outcomes, and when.
    """

    def __init__(self, loop: VirtualLoop, stages: int = 1, deadline_s: float = 20.0) -> None:
        self.network = MemoryNetwork()
        addresses = {Worker(stage, 0): f"p{stage}" for stage in range(stages)}
        self.asked = 0
        self.answers: list[Mapping[str, Prefill]] = [{"P": Prefill("P", 1, stages, addresses)}]
        self.slow: dict[str, float] = {}
        self.unreachable: set[str] = set()
        self.opened: list[tuple[str, float]] = []
        self.heard: list[tuple[str, str, str]] = []
        self.told: list[tuple[float, Outcome]] = []
        self._loop, self._connect = loop, self.network.connector("d")
        self.actor = ReceiverActor(hello(), self._open, self._query, loop, self._tell, deadline_s)
        self.actor.mailbox.bind(loop)
        self.task = asyncio.ensure_future(self.actor.run())

    def _tell(self, outcome: Outcome) -> None:
        self.told.append((self._loop.now(), outcome))

    async def _open(self, address: str) -> Link:
        self.opened.append((address, self._loop.now()))
        await asyncio.sleep(self.slow.get(address, 0.0))
        if address in self.unreachable:
            raise PeerUnreachableError("nothing comes back")
        return await self._connect(address)

    async def _query(self, bootstrap: str) -> Mapping[str, Prefill]:  # noqa: ARG002 - there is one
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    @property
    def kinds(self) -> list[str]:
        """What was told, in order."""
        return [outcome.kind.value for _, outcome in self.told]

    @property
    def remote(self) -> Remote:
        return next(iter(self.actor._remotes.values()))

    def receive(self, number: int, wanted: RequestBlocks | None = None, transfer_id: str = "") -> None:
        """Request r1 pulls transfer t1, and so on."""
        source = Source(transfer_id or f"t{number}", "P", "bootstrap")
        self.actor.mailbox.post(Receive(f"r{number}", source, wanted or blocks(4, 5, 6)))

    def prefill(
        self,
        answer: Callable[[Message], Message | None] = silent,
        *,
        stage: int = 0,
        process: str = "p",
        engine: str = "P",
        refuses: str = "",
    ) -> None:
        """A prefill worker listens. `refuses`: why it takes no links."""

        async def serve(link: Link) -> None:
            await link.receive()
            if refuses:
                await link.close(refuses)
                return
            await link.send(Welcome(engine_id=engine, process=process, pp_rank=stage, tp_rank=0))
            while True:
                message = await link.receive()
                self.heard.append((process, type(message).__name__, getattr(message, "transfer_id", "")))
                if (said := answer(message)) is not None:
                    await link.send(said)

        self.network.listen(f"p{stage}", serve)
