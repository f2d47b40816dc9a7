"""A prefill and a decode instance on virtual time, with everything that can happen to them; checks all that must hold.

The actors and the links are the product's. Memory is bytes, each worker's in an address range of its own; engines are modelled
by what they own: prefill frees its blocks and overwrites them when it is told so, decode uses its blocks again at once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from kvactors.core.layout import GroupKind
from kvactors.disagg import (
    Descriptors,
    EntryGeometry,
    GroupGeometry,
    TransferRegion,
    Worker,
    WorkerGeometry,
    rank_heads,
)
from kvactors.disagg.blocks import GroupBlocks, RequestBlocks
from kvactors.disagg.memory_links import MemoryNetwork
from kvactors.disagg.messages import Cancelled, GiveUp, Outcome, OutcomeKind, Prefilled, Receive, Requested, Source
from kvactors.disagg.receiver import GRACE_S, ReceiverActor
from kvactors.disagg.remotes import Prefill
from kvactors.disagg.sender import SenderActor
from kvactors.disagg.sends import SendLimits
from kvactors.disagg.wire import Hello
from kvactors.errors import PeerGoneError, TransferFailedError
from kvactors.simulate.loop import VirtualLoop

HEADS = 4
PIECE = 8
"""bytes of one head's K, or V, in a block"""
STATE = 24
BLOCKS = 48
BLOCK_TOKENS = 16
ATTENTION, RECURRENT = 0, 1


def content(transfer_id: str, *where: int) -> bytes:
    """What prefill computes, wherever it is kept."""
    return blake2b(repr((transfer_id, where)).encode(), digest_size=PIECE).digest()


@dataclass(eq=False)
class Memory:
    """One worker's caches: `owner` says whose each (group, block) is."""

    rank: Worker
    tp: int
    layers: list[int]
    state_layer: int | None
    base: int
    data: bytearray = field(default_factory=bytearray)
    owner: dict[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.heads = rank_heads(HEADS, self.tp, self.rank.tp_rank)
        self.block = 2 * PIECE * len(self.heads)
        self.data = bytearray(BLOCKS * (self.block * len(self.layers) + STATE))

    def geometry(self, pp: int, has_state: bool) -> WorkerGeometry:
        half = PIECE * len(self.heads)
        entries = {layer: (EntryGeometry("k", "bf16", half), EntryGeometry("v", "bf16", half)) for layer in self.layers}
        size = {"block_tokens": BLOCK_TOKENS, "blocks": BLOCKS}
        groups = [GroupGeometry(kind=GroupKind.FULL, layers=entries, kv_heads=HEADS, heads_first=True, **size)]
        regions = [
            TransferRegion(f"l{layer}", layer, self.base + self.attention(i, 0), self.block, half, ATTENTION, split_kv=True)
            for i, layer in enumerate(self.layers)
        ]
        if has_state:
            here = {} if self.state_layer is None else {self.state_layer: (EntryGeometry("ssm", "fp32", STATE),)}
            groups.append(GroupGeometry(kind=GroupKind.STATE, layers=here, **size))
            if self.state_layer is not None:
                at = self.base + self.state(0)
                regions.append(TransferRegion(f"l{self.state_layer}", self.state_layer, at, STATE, STATE, RECURRENT))
        return WorkerGeometry(
            layout_digest="sim",
            tp_rank=self.rank.tp_rank,
            tp_size=self.tp,
            pp_rank=self.rank.pp_rank,
            pp_size=pp,
            groups=tuple(groups),
            regions=tuple(regions),
        )

    def attention(self, index: int, block: int) -> int:
        return (index * BLOCKS + block) * self.block

    def state(self, block: int) -> int:
        return len(self.layers) * BLOCKS * self.block + block * STATE

    def pieces(self, group: int, position: int, block: int) -> list[tuple[int, tuple[int, ...]]]:
        """(offset, what is there) of every 8 bytes of a block."""
        if group == RECURRENT:
            if self.state_layer is None:
                return []
            at = self.state(block)
            return [(at + PIECE * i, (self.state_layer, self.rank.tp_rank, i, -1)) for i in range(STATE // PIECE)]
        found: list[tuple[int, tuple[int, ...]]] = []
        for i, layer in enumerate(self.layers):
            for kv in range(2):
                for h, head in enumerate(self.heads):
                    at = self.attention(i, block) + (kv * len(self.heads) + h) * PIECE
                    found.append((at, (layer, kv, head, position)))
        return found

    def block_of(self, offset: int) -> tuple[int, int]:
        end = len(self.layers) * BLOCKS * self.block
        return (ATTENTION, offset // self.block % BLOCKS) if offset < end else (RECURRENT, (offset - end) // STATE)


@dataclass(eq=False)
class Job:
    """A request on both sides."""

    transfer_id: str
    request_id: str
    tokens: int
    local: int
    """blocks that decode has already"""
    empty: bool = False
    prefill: dict[Worker, list[tuple[int, ...]]] = field(default_factory=dict)
    decode: dict[Worker, list[tuple[int, ...]]] = field(default_factory=dict)
    held: set[Worker] = field(default_factory=set)
    """prefill workers whose blocks are held"""
    prefilled: set[Worker] = field(default_factory=set)
    outcomes: dict[Worker, list[Outcome]] = field(default_factory=dict)
    asked: set[Worker] = field(default_factory=set)


class SimTransport:
    """Copies after a while; fails, in part, as it likes. Bytes of a failed write may land a moment later."""

    def __init__(self, world: World, owner: Worker, address: str) -> None:
        self.memory = address
        self._world, self._owner = world, owner

    def register(self, address: int, nbytes: int) -> None: ...

    async def forget(self, memory: str) -> None: ...

    def close(self) -> None: ...

    async def write(self, memory: str, descriptors: Descriptors) -> None:
        world, rng = self._world, self._world.rng
        work = asyncio.ensure_future(self._copy(memory, descriptors))
        world.writes.add(work)
        work.add_done_callback(world.writes.discard)
        await asyncio.shield(work)
        if rng.random() < 0.02:
            raise TransferFailedError("drawn after all of it had arrived")

    async def _copy(self, memory: str, descriptors: Descriptors) -> None:
        world, rng = self._world, self._world.rng
        rows = list(zip(descriptors.src.tolist(), descriptors.dst.tolist(), descriptors.nbytes.tolist(), strict=True))
        fails = rng.random() < world.failing
        cut = rng.randrange(len(rows) + 1) if fails else len(rows)
        for row in rows[:cut]:
            await asyncio.sleep(rng.random() * world.write_s)
            if memory in world.dead or self._owner in world.dead_prefill:
                fails = True
                break
            world.copy(self._owner, memory, *row)
        if not fails:
            return
        for row in rows[cut : cut + 2]:  # on their way when it failed, or when its writer died
            since = world.loop.now() - world.died_at.get(self._owner, world.loop.now())
            late = rng.random() * GRACE_S * 0.9 - since
            if late < 0:
                continue
            asyncio.get_running_loop().call_later(late, world.copy, self._owner, memory, *row, True)
        raise TransferFailedError("drawn")


class World:
    """See the module; `run` plays a seed."""

    def __init__(self, seed: int, loop: VirtualLoop) -> None:
        self.rng = rng = random.Random(seed)
        self.loop = loop
        self.failing = rng.choice([0.0, 0.0, 0.1, 0.4])
        self.write_s = rng.choice([0.001, 0.05, 1.0])
        self.p_tp, self.d_tp = rng.choice([(1, 1), (1, 1), (2, 2), (2, 1), (1, 2), (4, 2)])
        self.p_pp, self.d_pp = rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
        self.has_state = self.p_tp == self.d_tp and rng.random() < 0.5
        self.network = MemoryNetwork(rng, most_delay_s=rng.choice([0.001, 0.1]))
        self.dead: set[str] = set()
        self.dead_prefill: set[Worker] = set()
        self.died_at: dict[Worker, float] = {}
        self.writes: set[asyncio.Future[None]] = set()
        self.problems: list[str] = []
        self.jobs: dict[str, Job] = {}
        self.by_request: dict[str, Job] = {}
        self.deadline_s, self.abort_s = rng.choice([5.0, 60.0]), rng.choice([8.0, 120.0])
        self.seen: Counter[str] = Counter()
        self.prefill = {w: self._memory(w, self.p_tp, self.p_pp) for w in self._ranks(self.p_tp, self.p_pp)}
        self.decode = {w: self._memory(w, self.d_tp, self.d_pp) for w in self._ranks(self.d_tp, self.d_pp)}
        self.senders: dict[Worker, SenderActor] = {}
        self.receivers: dict[Worker, ReceiverActor] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self._counter = 0

    @staticmethod
    def _ranks(tp: int, pp: int) -> list[Worker]:
        return [Worker(s, r) for s in range(pp) for r in range(tp)]

    def _memory(self, w: Worker, tp: int, pp: int) -> Memory:
        layers = [w.pp_rank] if pp == 2 else [0, 1]
        state = 2 if self.has_state and w.pp_rank == pp - 1 else None
        self._bases = getattr(self, "_bases", 0) + 1
        return Memory(w, tp, layers, state, self._bases << 32)

    # -- actors --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for w, memory in self.prefill.items():
            sender = SenderActor(
                "P",
                f"p{w}",
                memory.geometry(self.p_pp, self.has_state),
                SimTransport(self, w, self.address("p", w)),
                self.loop,
                self._on_freed(w),
                SendLimits(abort_timeout_s=self.abort_s, orphan_s=self.abort_s, sends=4, sends_to_one=2, batch=3),
            )
            self.senders[w] = sender
            self.network.listen(self.address("p", w), sender.serve)
            self.go(self._run(sender))
        for w, memory in self.decode.items():
            hello = Hello(
                engine_id="D",
                process=f"d{w}",
                memory=self.address("d", w),
                geometry=memory.geometry(self.d_pp, self.has_state),
            )
            connect = self.network.connector(self.address("d", w))
            receiver = ReceiverActor(hello, connect, self._query, self.loop, self._on_outcome(w), self.deadline_s)
            self.receivers[w] = receiver
            self.go(self._run(receiver))

    def go(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def _run(self, actor: SenderActor | ReceiverActor) -> None:
        actor.mailbox.bind(self.loop)
        try:
            await actor.run()
        except Exception as error:
            self.problems.append(f"{actor.name} crashed on {actor.current}: {error!r}")
            raise

    @staticmethod
    def address(side: str, w: Worker) -> str:
        return f"{side}{w.pp_rank}.{w.tp_rank}"

    async def _query(self, bootstrap: str) -> Mapping[str, Prefill]:
        await asyncio.sleep(self.rng.random() * 0.1)
        if self.dead_prefill:
            raise PeerGoneError(f"no server at {bootstrap}")
        addresses = {w: self.address("p", w) for w in self.prefill}
        return {"P": Prefill("P", self.p_tp, self.p_pp, addresses)}

    # -- memory --------------------------------------------------------------------------------------------------------

    def copy(self, source: Worker, memory: str, src: int, dst: int, nbytes: int, late: bool = False) -> None:
        """Bytes land. Nobody but their own request may have the blocks that they come from and go to."""
        if memory in self.dead:
            return
        near = self.prefill[source]
        far = next(m for w, m in self.decode.items() if self.address("d", w) == memory)
        self.seen["late"] += late
        for at in range(0, nbytes, PIECE):
            a, b = near.block_of(src - near.base + at), far.block_of(dst - far.base + at)
            owner, user = near.owner.get(a), far.owner.get(b)
            if not late and owner is None:
                self.problems.append(f"{source} sends a block {a} that it has freed")
            if user is None or (owner is not None and not late and user != owner):
                self.problems.append(
                    f"a {'late ' if late else ''}write for {owner} into block {b} of {memory}, which is {user}'s"
                )
        far.data[dst - far.base : dst - far.base + nbytes] = near.data[src - near.base : src - near.base + nbytes]

    def _on_freed(self, w: Worker) -> Callable[[str], None]:
        def freed(transfer_id: str) -> None:
            job = self.jobs[transfer_id]
            if w not in job.held:
                self.problems.append(f"{transfer_id} is freed on {w} though nothing of it is held")
                return
            job.held.discard(w)
            self.seen["freed"] += 1
            self._release(self.prefill[w], job.prefill[w])

        return freed

    def _release(self, memory: Memory, tables: list[tuple[int, ...]]) -> None:
        """The engine takes the blocks back, and uses them for something else at once."""
        for group, ids in enumerate(tables):
            for block in ids:
                if block and memory.owner.pop((group, block), None) is None:
                    self.problems.append(f"block {block} of group {group} was not in use")
                elif block:
                    for at, _ in memory.pieces(group, 0, block):
                        memory.data[at : at + PIECE] = self.rng.randbytes(PIECE)

    def take(self, memory: Memory, group: int, count: int, owner: str) -> tuple[int, ...] | None:
        free = [b for b in range(1, BLOCKS) if (group, b) not in memory.owner]
        if len(free) < count:
            return None
        self.rng.shuffle(free)
        for block in free[:count]:
            memory.owner[group, block] = owner
        return tuple(free[:count])

    # -- engines -------------------------------------------------------------------------------------------------------

    def new_job(self) -> Job:
        self._counter += 1
        tokens = self.rng.randint(1, 5 * BLOCK_TOKENS)
        job = Job(f"t{self._counter}", f"r{self._counter}", tokens, self.rng.choice([0, 0, 1]))
        self.jobs[job.transfer_id] = self.by_request[job.request_id] = job
        return job

    def _tables(self, memory: Memory, job: Job, first: int) -> list[tuple[int, ...]] | None:
        blocks = -(-job.tokens // BLOCK_TOKENS)
        attention = self.take(memory, ATTENTION, max(0, blocks - first), job.transfer_id)
        if attention is None:
            return None
        if not self.has_state:
            return [attention]
        slot = self.take(memory, RECURRENT, 1, job.transfer_id)
        if slot is None:
            self._release(memory, [attention])
            return None
        return [attention, (0,) * (blocks - 1) + slot]

    def prefilled(self, job: Job, w: Worker) -> None:
        memory = self.prefill[w]
        tables = self._tables(memory, job, 0)
        if tables is None:
            self.senders[w].mailbox.post(Cancelled(job.transfer_id, "no blocks"))
            return
        for group, ids in enumerate(tables):
            for position, block in enumerate(ids):
                for at, what in memory.pieces(group, position, block) if block else ():
                    memory.data[at : at + PIECE] = content(job.transfer_id, *what)
        job.prefill[w] = tables
        job.held.add(w)
        job.prefilled.add(w)
        blocks = RequestBlocks(job.tokens, tuple(GroupBlocks(0, ids) for ids in tables))
        self.senders[w].mailbox.post(Prefilled(job.transfer_id, blocks))

    def receive(self, job: Job, w: Worker, request_id: str | None = None) -> None:
        request_id = request_id or job.request_id
        source = Source(job.transfer_id, "P", "http://p")
        job.asked.add(w)
        memory = self.decode[w]
        first = min(job.local, -(-job.tokens // BLOCK_TOKENS) - 1)
        tables = None if job.empty else self._tables(memory, job, first)
        if tables is None:
            job.decode[w] = []
            self.receivers[w].mailbox.post(Receive(request_id, source, RequestBlocks(job.tokens)))
            return
        job.decode[w] = tables
        groups = [GroupBlocks(first if g == ATTENTION else 0, ids) for g, ids in enumerate(tables)]
        self.receivers[w].mailbox.post(Receive(request_id, source, RequestBlocks(job.tokens, tuple(groups))))

    def _on_outcome(self, w: Worker) -> Callable[[Outcome], None]:
        def told(outcome: Outcome) -> None:
            job = self.by_request[outcome.request_id]
            self.seen[outcome.kind.value + (" fenced" if outcome.fenced else "")] += 1
            job.outcomes.setdefault(w, []).append(outcome)
            if not job.decode.get(w):
                self.problems.append(f"{outcome} of an empty pull on {w}")
                return
            if outcome.kind is OutcomeKind.LOADED:
                self._verify(job, w)
            if not outcome.fenced:
                self._release(self.decode[w], job.decode[w])

        return told

    def _verify(self, job: Job, w: Worker) -> None:
        memory, tables = self.decode[w], job.decode[w]
        blocks = -(-job.tokens // BLOCK_TOKENS)
        for group, ids in enumerate(tables):
            for i, block in enumerate(ids):
                position = blocks - len(ids) + i
                for at, what in memory.pieces(group, position, block) if block else ():
                    if memory.data[at : at + PIECE] != content(job.transfer_id, *what):
                        self.problems.append(f"{job.transfer_id} on {w}: wrong bytes at {what}")
                        return

    # -- the end -------------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """All is told, and all is free, on every worker that lives."""
        for job in self.jobs.values():
            for w, tables in job.decode.items():
                if self.address("d", w) in self.dead or not tables:
                    continue
                kinds = [o.kind for o in job.outcomes.get(w, [])]
                fenced = [o for o in job.outcomes.get(w, []) if o.fenced]
                if sum(k is not OutcomeKind.RETURNED for k in kinds) != 1:
                    self.problems.append(f"{job.request_id} on {w} was told {kinds}")
                if kinds.count(OutcomeKind.RETURNED) != len(fenced):
                    self.problems.append(f"{job.request_id} on {w}: fenced {len(fenced)}, told {kinds}")
            for w in job.held - self.dead_prefill:
                self.problems.append(f"{job.transfer_id} is still held on {w}")
        for w, memory in self.decode.items():
            if memory.owner and self.address("d", w) not in self.dead:
                self.problems.append(f"decode {w} lost blocks {memory.owner}")
        for w, receiver in self.receivers.items():
            if receiver.under_way and self.address("d", w) not in self.dead:
                self.problems.append(f"decode {w} still has {receiver.under_way} under way")
        for w, sender in self.senders.items():
            if sender.under_way and w not in self.dead_prefill:
                self.problems.append(f"prefill {w} still has {sender.under_way} under way")
        self.problems += [f"a link broke: {error!r}" for error in self.network.failures]


async def play(world: World) -> None:
    """Requests come, things happen, and in the end everything that is alive is well again."""
    rng = world.rng
    world.start()
    disasters = rng.random() < 0.6
    for _ in range(rng.randint(1, 12)):
        job = world.new_job()
        job.empty = rng.random() < 0.1
        world.go(_prefill(world, job))
        world.go(_decode(world, job))
        if disasters and rng.random() < 0.25:
            world.go(_disaster(world))
        await asyncio.sleep(rng.random() * 2)
    await asyncio.sleep(2 * (world.deadline_s + world.abort_s) + 120)
    world.check_end()
    for actor in (*world.senders.values(), *world.receivers.values()):
        await actor.close()
    for task in world.tasks:
        task.cancel()
    await world.network.stop()
    await asyncio.gather(*world.tasks, return_exceptions=True)


async def _prefill(world: World, job: Job) -> None:
    rng = world.rng
    fate = rng.choice(["computed"] * 6 + ["cancelled", "never"])
    for w in world.prefill:
        if fate != "never":
            world.senders[w].mailbox.post(Requested(job.transfer_id))
    await asyncio.sleep(rng.random() * rng.choice([0.1, 3.0]))
    for w in world.prefill:
        if w in world.dead_prefill:
            continue
        if fate == "cancelled":
            world.senders[w].mailbox.post(Cancelled(job.transfer_id, "the client went away"))
        elif fate == "computed":
            await asyncio.sleep(rng.random() * 0.1)
            world.prefilled(job, w)


async def _decode(world: World, job: Job) -> None:
    rng = world.rng
    if rng.random() < 0.05:
        return  # it never comes
    await asyncio.sleep(rng.random() * rng.choice([0.1, 3.0, 12.0]))
    gives_up = rng.random() < 0.2
    twin: Job | None = None
    if rng.random() < 0.1:  # a second request with the same transfer id
        twin = Job(job.transfer_id, f"{job.request_id}-twin", job.tokens, 0)
        world.by_request[twin.request_id] = world.jobs[f"{job.transfer_id}-twin"] = twin
    for w in world.decode:
        if world.address("d", w) in world.dead:
            continue
        world.receive(job, w)
        if twin is not None:
            world.receive(twin, w, twin.request_id)
    if gives_up:
        await asyncio.sleep(rng.random() * rng.choice([0.01, 1.0, 4.0]))
        for w in world.decode:
            world.receivers[w].mailbox.post(GiveUp(job.request_id, "the client went away"))


async def _disaster(world: World) -> None:
    rng, network = world.rng, world.network
    await asyncio.sleep(rng.random() * 3)
    what = rng.choice(["cut", "cut", "kill p", "kill d", "freeze p", "freeze d"])
    side, ranks = ("p", list(world.prefill)) if what.endswith("p") else ("d", list(world.decode))
    w = rng.choice(ranks)
    address = world.address(side, w)
    world.seen[what] += 1
    if what == "cut":
        links = network.links(world.address("d", rng.choice(list(world.decode))))
        if links:
            network.cut(rng.choice(links))
    elif what.startswith("freeze"):
        network.freeze(address)
        await asyncio.sleep(rng.random() * 3 * world.deadline_s)
        network.thaw(address)
    elif what == "kill p":
        world.dead_prefill.add(w)
        world.died_at[w] = world.loop.now()
        network.kill(address)
    else:
        world.dead.add(address)
        network.kill(address)
