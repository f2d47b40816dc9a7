"""Prefill and decode workers of the simulated world: the product's actors, each with an engine, modelled by what it owns."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvactors.disagg import Descriptors, Worker
from kvactors.disagg.blocks import GroupBlocks, RequestBlocks
from kvactors.disagg.messages import Cancelled, GiveUp, Outcome, OutcomeKind, Prefilled, Receive, Requested, Source
from kvactors.disagg.receiver import GRACE_S, ReceiverActor
from kvactors.disagg.sender import SenderActor
from kvactors.disagg.sends import SendLimits
from kvactors.disagg.transports.writing import WriteCounts
from kvactors.disagg.wire import Hello
from kvactors.errors import TransferFailedError
from tests.disagg.sim.memory import ATTENTION, BLOCK_TOKENS, Memory

if TYPE_CHECKING:
    from tests.disagg.sim.world import World

SENDS, SENDS_TO_ONE = 4, 2
TOLD_S = 0.5
"""how much after its deadline a request may be told, for what the loop has to do"""


@dataclass(eq=False)
class Job:
    """A request on both sides. `local`: blocks that decode has already; `name` is its own, though its id is used again."""

    name: str
    transfer_id: str
    tokens: int
    local: int = 0
    empty: bool = False
    again: bool = False
    """its id was used before; decode workers that know it refuse it, and prefill is not told"""
    fetches: list[Fetch] = field(default_factory=list)
    held_at: dict[PrefillWorker, float] = field(default_factory=dict)
    freed_at: dict[PrefillWorker, float] = field(default_factory=dict)
    running: int = 0
    """what still happens to it in the history"""

    def settled_at(self) -> float | None:
        """When all who pulled it had settled; None if some have not, or nobody pulled."""
        times = [fetch.asked_at if fetch.empty else fetch.settled_at for fetch in self.fetches]
        known = [at for at in times if at is not None]
        return max(known) if known and len(known) == len(times) else None


@dataclass(eq=False)
class Fetch:
    """A pull of a job by one decode worker; empty without tables."""

    job: Job
    request_id: str
    asked_at: float
    tables: list[tuple[int, ...]]
    outcomes: list[Outcome] = field(default_factory=list)
    settled_at: float | None = None

    @property
    def empty(self) -> bool:
        return not self.tables


class SimTransport:
    """Copies after a while; fails, in part, as it likes. Bytes of a failed write may land a moment later."""

    def __init__(self, world: World, owner: PrefillWorker) -> None:
        self.memory = owner.address
        self.counts = WriteCounts()
        self.closed = False
        """its sender was closed: nothing is written, and nothing begins"""
        self.now: Counter[str] = Counter()
        self._world, self._owner = world, owner

    def register(self, address: int, nbytes: int) -> None: ...

    async def forget(self, memory: str) -> None: ...

    def close(self) -> None: ...

    async def write(self, memory: str, descriptors: Descriptors) -> None:
        self._check_bounds(memory)
        self.now[memory] += 1
        try:
            await asyncio.shield(asyncio.ensure_future(self._copy(memory, descriptors)))
        finally:
            self.now[memory] -= 1
        if self._world.rng.random() < 0.02:
            raise TransferFailedError("drawn after all of it had arrived")

    def _check_bounds(self, memory: str) -> None:
        if self.closed:
            self._world.problems.append(f"{self._owner.address} writes though its sender was closed")
        if self.now[memory] >= SENDS_TO_ONE or self.now.total() >= SENDS:
            self._world.problems.append(f"{self._owner.address} writes to {memory} beyond its bounds: {self.now}")

    async def _copy(self, memory: str, descriptors: Descriptors) -> None:
        world, rng = self._world, self._world.rng
        rows = list(zip(descriptors.src.tolist(), descriptors.dst.tolist(), descriptors.nbytes.tolist(), strict=True))
        fails = rng.random() < world.failing
        cut = rng.randrange(len(rows) + 1) if fails else len(rows)
        for row in rows[:cut]:
            await asyncio.sleep(rng.random() * world.write_s)
            if world.memories[memory].dead or self._owner.dead:
                fails = True
                break
            world.copy(self._owner, memory, *row)
        if not fails:
            return
        now = world.loop.now()
        for row in rows[cut : cut + 2]:  # on their way when it failed, or when its writer died
            late = rng.random() * GRACE_S * 0.9 - (now - self._owner.died_at if self._owner.dead else 0.0)
            if late > 0:
                asyncio.get_running_loop().call_later(late, world.copy, self._owner, memory, *row, True)
        raise TransferFailedError("drawn")


class PrefillWorker:
    """One process. Its engine frees blocks, and overwrites them, when it is told so."""

    def __init__(self, world: World, rank: Worker, memory: Memory, process: str, pp: int) -> None:
        self.world, self.rank, self.memory = world, rank, memory
        self.address = f"p{rank.pp_rank}.{rank.tp_rank}"
        self.dead, self.died_at = False, 0.0
        self.held: dict[str, tuple[Job, list[tuple[int, ...]]]] = {}
        """by transfer id"""
        self.transport = SimTransport(world, self)
        limits = SendLimits(
            abort_timeout_s=world.abort_s,
            orphan_s=world.abort_s,
            sends=SENDS,
            sends_to_one=SENDS_TO_ONE,
            batch=3,
        )
        self.sender = SenderActor("P", process, memory.geometry(pp), self.transport, world.loop, self._freed, limits)

    def requested(self, job: Job) -> None:
        self.sender.mailbox.post(Requested(job.transfer_id))

    def cancelled(self, job: Job) -> None:
        self.sender.mailbox.post(Cancelled(job.transfer_id, "the client went away"))

    def prefilled(self, job: Job) -> None:
        tables = self.memory.tables(job.name, job.tokens, 0, self.world.rng)
        if tables is None:
            self.sender.mailbox.post(Cancelled(job.transfer_id, "no blocks"))
            return
        self.memory.compute(job.name, tables)
        self.held[job.transfer_id] = job, tables
        job.held_at[self] = self.world.loop.now()
        blocks = RequestBlocks(job.tokens, tuple(GroupBlocks(0, ids) for ids in tables))
        self.sender.mailbox.post(Prefilled(job.transfer_id, blocks))

    def _freed(self, transfer_id: str) -> None:
        if transfer_id not in self.held:
            self.world.problems.append(f"{transfer_id} is freed on {self.address} though nothing of it is held")
            return
        job, tables = self.held.pop(transfer_id)
        job.freed_at[self] = self.world.loop.now()
        self.world.seen["freed"] += 1
        self.world.problems += self.memory.release(tables, self.world.rng)


class DecodeWorker:
    """One process. Its engine uses its blocks again as soon as it is told that it may."""

    def __init__(self, world: World, engine: str, memory: Memory, process: str, pp: int) -> None:
        self.world, self.engine, self.memory = world, engine, memory
        self.rank = memory.rank
        self.address = f"{engine.lower()}{self.rank.pp_rank}.{self.rank.tp_rank}"
        self.memory_name = f"memory of {process}"
        self.dead = False
        self.fetches: dict[str, Fetch] = {}
        hello = Hello(engine_id=engine, process=process, memory=self.memory_name, geometry=memory.geometry(pp))
        connect = world.network.connector(self.address)
        self.receiver = ReceiverActor(hello, connect, world.query, world.loop, self._told, world.deadline_s)

    def receive(self, job: Job, request_id: str) -> None:
        """Asks for the job's blocks; for none where it has no room for them."""
        first = self._first(job)
        tables = [] if job.empty else self.memory.tables(job.name, job.tokens, first, self.world.rng) or []
        self._ask(job, request_id, tables)

    def receive_again(self, before: Fetch) -> None:
        """A new process is asked what an earlier one was, and happens to take the same blocks."""
        self.memory.take_these(before.tables, before.job.name)
        self._ask(before.job, f"{before.request_id} again", before.tables)

    @staticmethod
    def _first(job: Job) -> int:
        return min(job.local, -(-job.tokens // BLOCK_TOKENS) - 1)

    def _ask(self, job: Job, request_id: str, tables: list[tuple[int, ...]]) -> None:
        fetch = self.fetches[request_id] = Fetch(job, request_id, self.world.loop.now(), tables)
        job.fetches.append(fetch)
        groups = [GroupBlocks(self._first(job) if g == ATTENTION else 0, ids) for g, ids in enumerate(tables)]
        source = Source(job.transfer_id, "P", "http://p")
        self.receiver.mailbox.post(Receive(request_id, source, RequestBlocks(job.tokens, tuple(groups))))

    def give_up(self, request_id: str) -> None:
        self.receiver.mailbox.post(GiveUp(request_id, "the client went away"))

    def _told(self, outcome: Outcome) -> None:
        world, fetch = self.world, self.fetches[outcome.request_id]
        world.seen[outcome.kind.value + (" fenced" if outcome.fenced else "")] += 1
        where = f"{outcome.request_id} on {self.address}"
        if fetch.empty:
            world.problems.append(f"{where} was told {outcome}, and its pull is empty")
            return
        after_s = world.loop.now() - fetch.asked_at
        if not fetch.outcomes and outcome.kind is not OutcomeKind.ABORTED and after_s > world.deadline_s + TOLD_S:
            world.problems.append(f"{where} was told {outcome.kind} after {after_s:.1f} s of {world.deadline_s:g}")
        fetch.outcomes.append(outcome)
        if outcome.kind is OutcomeKind.LOADED and not self.memory.holds(fetch.job.name, fetch.tables, fetch.job.tokens):
            world.problems.append(f"{where}: wrong bytes")
        if not outcome.fenced:
            fetch.settled_at = world.loop.now()
            world.problems += self.memory.release(fetch.tables, world.rng)

    def problems(self) -> list[str]:
        """What was not told, or is left, when all should be over."""
        found = []
        for fetch in self.fetches.values():
            kinds = [outcome.kind for outcome in fetch.outcomes]
            returned, fenced = kinds.count(OutcomeKind.RETURNED), sum(outcome.fenced for outcome in fetch.outcomes)
            if not fetch.empty and (len(kinds) - returned != 1 or returned != fenced):
                found.append(f"{fetch.request_id} on {self.address}: fenced {fenced}, told {kinds}")
        if self.memory.owner:
            found.append(f"decode {self.address} lost blocks {self.memory.owner}")
        if self.receiver.under_way:
            found.append(f"decode {self.address} still has {self.receiver.under_way} under way")
        return found
