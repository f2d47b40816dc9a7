"""Peers say anything, in any order, to one actor alone: it lives, each request ends once, and nothing is kept in the end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping

import pytest

from kvactors.disagg import Descriptors, Worker
from kvactors.disagg.blocks import GroupBlocks, RequestBlocks
from kvactors.disagg.links import Link
from kvactors.disagg.memory_links import MemoryLink, MemoryNetwork
from kvactors.disagg.messages import Cancelled, GiveUp, Outcome, OutcomeKind, Prefilled, Receive, Requested, Source
from kvactors.disagg.receiver import ReceiverActor
from kvactors.disagg.remotes import Prefill
from kvactors.disagg.sender import SenderActor
from kvactors.disagg.sends import SendLimits
from kvactors.disagg.states import SEND_TERMINAL
from kvactors.disagg.transports.writing import WriteCounts
from kvactors.disagg.wire import Abort, Failed, Hello, Message, Problem, Pull, Refused, Sent, Stopped, Welcome
from kvactors.errors import DisaggError, PeerGoneError, TransferFailedError, UnregisteredMemoryError, WireError
from kvactors.simulate.loop import VirtualLoop, run_virtual
from tests.disagg.shapes import gqa

pytestmark = pytest.mark.sim

SENDER_SEEDS = 250
RECEIVER_SEEDS = 250
SETTLED_S = 400.0
"""longer than all time limits together"""
IDS = [f"t{i}" for i in range(5)]
HELD = RequestBlocks(48, (GroupBlocks(0, (1, 2, 3)),))
HUGE = (0, 1, 99, 100, 2**62, -1, 2**64 - 1)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("kvactors")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def play(work: Callable[[VirtualLoop, random.Random], Awaitable[list[str]]], seeds: int) -> None:
    for seed in range(seeds):
        loop = VirtualLoop(random.Random(seed), most_events=1_000_000)

        async def run(loop: VirtualLoop = loop, seed: int = seed) -> list[str]:
            return await work(loop, random.Random(seed))

        problems = run_virtual(run(), loop)
        assert not problems, (seed, problems[:4])


def a_while(rng: random.Random) -> float:
    return rng.random() * rng.choice([0.0, 0.01, 2.0])


# -- the sender --------------------------------------------------------------------------------------------------------


class FailingTransport:
    """Writes take their time, though they are cancelled, and fail in all ways."""

    memory = "m"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.counts = WriteCounts()
        self.now = self.most = 0

    def register(self, address: int, nbytes: int) -> None: ...

    async def forget(self, memory: str) -> None: ...

    def close(self) -> None: ...

    async def write(self, memory: str, descriptors: Descriptors) -> None:  # noqa: ARG002 - nothing is moved
        rng = self._rng
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.shield(asyncio.sleep(rng.random() * rng.choice([0.001, 1.0, 20.0])))
        finally:
            self.now -= 1
        if rng.random() < 0.25:
            raise rng.choice([TransferFailedError, RuntimeError, UnregisteredMemoryError])("drawn")


def any_blocks(rng: random.Random) -> RequestBlocks:
    """What a pull may name: mostly sensible, else nothing or nonsense."""
    draw = rng.random()
    if draw < 0.2:
        return RequestBlocks(rng.choice([0, -5, 48]))
    if draw < 0.75:
        return RequestBlocks(48, (GroupBlocks(0, rng.choice([(4, 5, 6), (7, 8, 9)])),))
    groups = [
        GroupBlocks(rng.choice([0, -1, 2, 2**62]), tuple(rng.choice(HUGE) for _ in range(rng.randrange(4))))
        for _ in range(rng.choice([0, 1, 1, 2]))
    ]
    return RequestBlocks(rng.choice([48, 2**63 - 1, -(2**63), 0]), tuple(groups))


def any_words(rng: random.Random) -> Message:
    """What a decode worker may say."""
    transfer_id = rng.choice(IDS) if rng.random() < 0.97 else f"new{rng.random()}"
    draw = rng.random()
    if draw < 0.6:
        return Pull(transfer_id, rng.choice([1, 1, 2, 2, 3, 1 << 20]), any_blocks(rng))
    if draw < 0.97:
        return Abort(transfer_id, rng.choice([1, 2, 2, 3]))
    nonsense: list[Message] = [
        Sent(transfer_id),
        Failed(transfer_id, "x"),
        Refused(transfer_id, "x"),
        Stopped(transfer_id),
        Problem("x"),
        Welcome(engine_id="x", process="x", pp_rank=0, tp_rank=0),
    ]
    return rng.choice(nonsense)


async def a_peer(rng: random.Random, network: MemoryNetwork, number: int) -> None:
    """A decode worker opens links, says things, and breaks its links or closes them."""
    for _ in range(rng.randint(1, 4)):
        await asyncio.sleep(rng.random() * 5)
        geometry = gqa(2, 1) if rng.random() < 0.5 else gqa(2, 2, rng.randrange(2))
        engine, version = rng.choice(["D", "D", "E"]), rng.randrange(2)
        link = await network.connect("p")
        reader = asyncio.ensure_future(_reads(link))
        try:
            await link.send(Hello(engine_id=engine, process=f"d{number}{version}", memory=f"m{number}", geometry=geometry))
            for _ in range(rng.randrange(30)):
                message = any_words(rng)
                for _ in range(rng.choice([1, 1, 1, 1, 2])):
                    await link.send(message)
                await asyncio.sleep(a_while(rng))
        except DisaggError:
            pass
        if rng.random() < 0.5:
            network.cut(link)
        await link.close()
        await reader


async def _reads(link: MemoryLink) -> None:
    try:
        while True:
            await link.receive()
    except DisaggError:
        pass


async def an_engine(rng: random.Random, actor: SenderActor, held: Counter[str]) -> None:
    """Computes requests whose blocks it has; all that it began ends."""
    begun: set[str] = set()
    for _ in range(rng.randrange(40)):
        transfer_id, draw = rng.choice(IDS), rng.random()
        if held[transfer_id]:
            pass
        elif draw < 0.35:
            begun.add(transfer_id)
            actor.mailbox.post(Requested(transfer_id))
        elif draw < 0.8:
            held[transfer_id] += 1
            begun.discard(transfer_id)
            actor.mailbox.post(Prefilled(transfer_id, HELD))
        else:
            begun.discard(transfer_id)
            actor.mailbox.post(Cancelled(transfer_id, "x"))
        await asyncio.sleep(a_while(rng))
    for transfer_id in sorted(begun):
        actor.mailbox.post(Cancelled(transfer_id, "the end"))


async def fuzz_sender(loop: VirtualLoop, rng: random.Random) -> list[str]:
    limits = SendLimits(
        orphan_s=rng.choice([3.0, 30.0]),
        abort_timeout_s=rng.choice([3.0, 60.0]),
        orphans=rng.choice([2, 100]),
        orphans_of_one=rng.choice([1, 100]),
        sends=rng.choice([1, 4]),
        sends_to_one=rng.choice([1, 2]),
        batch=rng.choice([1, 2000]),
    )
    problems: list[str] = []
    held: Counter[str] = Counter()

    def freed(transfer_id: str) -> None:
        if not held[transfer_id]:
            problems.append(f"{transfer_id} is freed and was not held")
        held[transfer_id] -= 1

    transport, network = FailingTransport(rng), MemoryNetwork()
    actor = SenderActor("P", "p", gqa(2, 1), transport, loop, freed, limits)
    actor.mailbox.bind(loop)
    network.listen("p", actor.serve)
    task = asyncio.ensure_future(actor.run())
    await asyncio.gather(an_engine(rng, actor, held), *(a_peer(rng, network, i) for i in range(rng.randint(1, 4))))
    await asyncio.sleep(SETTLED_S)
    if task.done():
        return [f"it died of {task.exception()!r} at {actor.current!r}"]
    open_states = [r.record.state for r in actor._requests.values() if r.record.state not in SEND_TERMINAL]
    kept = {
        "requests": open_states or actor.under_way,
        "orphans": actor._orphans or [p.orphans for p in actor._known.values() if p.orphans],
        "blocks": +held,
        "blocks of what ended": [r for r in actor._requests.values() if r.blocks or any(a.blocks for a in r.pulls.values())],
        "slots": actor.mailbox._reserved,
        "links": actor._pullers,
        "sends": [r.sends for r in actor._requests.values() if r.sends],
        "timers": [timer for timer in actor._timers if not timer.cancelled()],
        "failures of links": network.failures,
    }
    problems += [f"{what} are left: {left}" for what, left in kept.items() if left]
    if transport.most > limits.sends:
        problems.append(f"{transport.most} sends at a time of {limits.sends}")
    task.cancel()
    await network.stop()
    return problems


def test_any_words_to_the_sender() -> None:
    play(fuzz_sender, SENDER_SEEDS)


# -- the receiver ------------------------------------------------------------------------------------------------------


class Prefills:
    """Prefill workers that answer too much, too little or nonsense, and are killed and started again."""

    def __init__(self, rng: random.Random, network: MemoryNetwork, stages: int, *, nonsense: bool) -> None:
        self._rng, self._network, self._nonsense = rng, network, nonsense
        self.stages = stages
        self._started = 0
        for stage in range(stages):
            self.listen(stage)

    def listen(self, stage: int) -> None:
        self._started += 1
        self._network.listen(f"p{stage}", self._serves(stage, f"p{stage}, {self._started}"))

    def _serves(self, stage: int, process: str) -> Callable[[Link], Awaitable[None]]:
        rng = self._rng

        async def serve(link: Link) -> None:
            await link.receive()
            draw = rng.random()
            if draw < 0.05:
                await link.close("refused")
                return
            if draw < 0.1:
                await asyncio.sleep(20.0)
            engine = "P" if rng.random() < 0.95 else "Q"
            named = process if rng.random() < 0.95 else "another"
            await link.send(Welcome(engine_id=engine, process=named, pp_rank=stage, tp_rank=0))
            while rng.random() > 0.05:
                message = await link.receive()
                for _ in range(rng.choice([0, 1, 1, 1, 2])):
                    await asyncio.sleep(a_while(rng) / 2)
                    await link.send(self._answer(message))

        return serve

    def _answer(self, message: Message) -> Message:
        rng = self._rng
        assert isinstance(message, Pull | Abort)
        t = message.transfer_id if rng.random() < 0.9 else f"t{rng.randrange(8)}"
        if self._nonsense and rng.random() < 0.03:
            answers: list[Message] = [
                Pull(t, 1, HELD),
                Welcome(engine_id="P", process="z", pp_rank=0, tp_rank=0),
                Problem("no"),
            ]
        elif isinstance(message, Pull):
            answers = [Sent(t), Sent(t), Failed(t, "f"), Refused(t, "r"), Stopped(t)]
        else:
            answers = [Stopped(t), Stopped(t), Sent(t), Failed(t, "f")]
        return rng.choice(answers)

    async def query(self, bootstrap: str) -> Mapping[str, Prefill]:  # noqa: ARG002 - there is one
        await asyncio.sleep(self._rng.random() * 0.3)
        draw = self._rng.random()
        if draw < 0.1:
            raise self._rng.choice([PeerGoneError, WireError])("drawn")
        if draw < 0.2:
            return {}
        return {"P": Prefill("P", 1, self.stages, {Worker(stage, 0): f"p{stage}" for stage in range(self.stages)})}

    async def disaster(self) -> None:
        rng, network = self._rng, self._network
        draw, links = rng.random(), network.links("d")
        if draw < 0.1 and links:
            network.cut(rng.choice(links))
        elif draw > 0.97:
            stage = rng.randrange(self.stages)
            network.kill(f"p{stage}")
            if rng.random() < 0.7:
                await asyncio.sleep(rng.random() * 0.2)
                self.listen(stage)


async def fuzz_receiver(loop: VirtualLoop, rng: random.Random) -> list[str]:
    network = MemoryNetwork(rng, most_delay_s=0.01)
    prefills = Prefills(rng, network, rng.choice([1, 2]), nonsense=rng.random() < 0.5)
    told: dict[str, list[Outcome]] = {}
    wanted: dict[str, RequestBlocks] = {}

    def tell(outcome: Outcome) -> None:
        told.setdefault(outcome.request_id, []).append(outcome)

    hello = Hello(engine_id="D", process="d", memory="dm", geometry=gqa(2, 1))
    deadline_s = rng.choice([2.0, 30.0])
    actor = ReceiverActor(hello, network.connector("d"), prefills.query, loop, tell, deadline_s)
    actor.mailbox.bind(loop)
    task = asyncio.ensure_future(actor.run())
    for i in range(rng.randrange(1, 25)):
        transfer_id = f"t{i if rng.random() < 0.9 else rng.randrange(8)}"
        wanted[f"r{i}"] = HELD if rng.random() < 0.8 else RequestBlocks(48)
        source = Source(transfer_id, rng.choice(["P"] * 9 + ["Z"]), "bootstrap")
        actor.mailbox.post(Receive(f"r{i}", source, wanted[f"r{i}"]))
        if rng.random() < 0.3:
            actor.mailbox.post(GiveUp(f"r{rng.randrange(i + 1)}", "x"))
        await asyncio.sleep(a_while(rng) / 2)
        await prefills.disaster()
    await asyncio.sleep(SETTLED_S)
    for stage in range(prefills.stages):
        network.kill(f"p{stage}")
    await asyncio.sleep(SETTLED_S)
    if task.done():
        return [f"it died of {task.exception()!r} at {actor.current!r}"]
    problems = [f"{request_id}: {p}" for request_id, of in wanted.items() for p in wrong(of, told.get(request_id, []))]
    kept = {
        "requests": actor._handoffs or actor._by_request,
        "remotes": [r for r in actor._remotes.values() if r.handoffs or r.opening or r.unsaid],
        "timers": [timer for timer in actor._timers if not timer.cancelled()],
        "tasks": actor._tasks,
    }
    problems += [f"{what} are left: {left}" for what, left in kept.items() if left]
    await actor.close()
    task.cancel()
    await network.stop()
    return problems


def wrong(wanted: RequestBlocks, outcomes: list[Outcome]) -> list[str]:
    """What is wrong with all that was told of a request."""
    kinds = [outcome.kind for outcome in outcomes]
    returned = kinds.count(OutcomeKind.RETURNED)
    if wanted.empty:
        return [f"{kinds} of an empty pull"] if kinds else []
    once = [] if len(kinds) - returned == 1 else [f"told {kinds}"]
    fences = [] if returned == sum(outcome.fenced for outcome in outcomes) else [f"fences of {outcomes}"]
    return once + fences


def test_any_words_to_the_receiver() -> None:
    play(fuzz_receiver, RECEIVER_SEEDS)
