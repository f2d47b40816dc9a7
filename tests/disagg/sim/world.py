"""A prefill instance and two decode instances on virtual time; checks all that must hold, whatever happens to them.

The actors and the links are the product's. Memory is bytes (`memory.py`), engines are modelled by what they own (`workers.py`),
and what happens is drawn from a seed (`histories.py`). The rules:

* bytes come from blocks that their request holds and go to blocks that their request has, and what was loaded is right;
* a block is freed once, and given back once; in the end none is lost, and nothing is under way;
* decode is told once, by its deadline, and once more when a fence falls;
* prefill frees what all have settled within a moment, keeps its bounds on sends, and writes nothing once it is closed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any

from kvactors.disagg import Worker
from kvactors.disagg.memory_links import MemoryNetwork
from kvactors.disagg.receiver import ReceiverActor
from kvactors.disagg.remotes import Prefill
from kvactors.disagg.sender import SenderActor
from kvactors.errors import PeerGoneError
from kvactors.simulate.loop import VirtualLoop
from tests.disagg.sim.memory import BLOCK_TOKENS, PIECE, Memory
from tests.disagg.sim.workers import DecodeWorker, Job, PrefillWorker

PROMPT_S = 8.0
"""how long after all have settled prefill may hold blocks, where nothing is broken: a link is tried again after 5 s at most"""


class World:
    """See the module; `histories.play` plays a seed."""

    def __init__(self, seed: int, loop: VirtualLoop) -> None:
        self.rng = rng = random.Random(seed)
        self.loop = loop
        self.failing = rng.choice([0.0, 0.0, 0.1, 0.4])
        self.write_s = rng.choice([0.001, 0.05, 1.0])
        self.p_tp, self.d_tp = rng.choice([(1, 1), (1, 1), (2, 2), (2, 1), (1, 2), (4, 2)])
        self.p_pp, self.d_pp = rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
        self.has_state = self.p_tp == self.d_tp and rng.random() < 0.5
        self.network = MemoryNetwork(rng, most_delay_s=rng.choice([0.001, 0.1]))
        self.deadline_s, self.abort_s = rng.choice([5.0, 60.0]), rng.choice([8.0, 120.0])
        self.problems: list[str] = []
        self.seen: Counter[str] = Counter()
        self.jobs: list[Job] = []
        self.prefill: dict[Worker, PrefillWorker] = {}
        self.decode: dict[tuple[str, Worker], DecodeWorker] = {}
        """by instance and rank: those that live there now, or died there last"""
        self.memories: dict[str, DecodeWorker] = {}
        """all decode workers that ever were"""
        self.disasters = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._memories = self._jobs = self._processes = 0

    # -- processes -----------------------------------------------------------------------------------------------------

    def start(self, engines: str) -> None:
        """Starts prefill, and a decode instance of each name."""
        for rank in _ranks(self.p_tp, self.p_pp):
            self.start_prefill(rank)
        for engine in engines:
            for rank in _ranks(self.d_tp, self.d_pp):
                self.start_decode(engine, rank)

    def start_prefill(self, rank: Worker) -> None:
        """Starts a process at the address of its rank."""
        self._processes += 1
        memory = self._memory(rank, self.p_tp, self.p_pp)
        worker = self.prefill[rank] = PrefillWorker(self, rank, memory, f"p{rank}, {self._processes}", self.p_pp)
        self.network.listen(worker.address, worker.sender.serve)
        self.go(self._run(worker.sender))

    def start_decode(self, engine: str, rank: Worker) -> DecodeWorker:
        self._processes += 1
        memory = self._memory(rank, self.d_tp, self.d_pp)
        worker = DecodeWorker(self, engine, memory, f"{engine}{rank}, {self._processes}", self.d_pp)
        self.decode[engine, rank] = self.memories[worker.memory_name] = worker
        self.go(self._run(worker.receiver))
        return worker

    def kill(self, worker: PrefillWorker | DecodeWorker) -> None:
        worker.dead = True
        if isinstance(worker, PrefillWorker):
            worker.died_at = self.loop.now()
        self.network.kill(worker.address)

    async def close(self, worker: PrefillWorker) -> None:
        """Its sender is closed, whatever it has to do, and the process ends."""
        await worker.sender.close()
        worker.transport.closed = True
        if worker.transport.now.total():
            self.problems.append(f"{worker.address} is closed and still writes")
        if not worker.dead:
            self.kill(worker)

    def _memory(self, rank: Worker, tp: int, pp: int) -> Memory:
        self._memories += 1
        layers = [rank.pp_rank] if pp == 2 else [0, 1]
        state = 2 if self.has_state and rank.pp_rank == pp - 1 else None
        return Memory(rank, tp, layers, state, self._memories << 32, self.has_state)

    def go(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def _run(self, actor: SenderActor | ReceiverActor) -> None:
        actor.mailbox.bind(self.loop)
        try:
            await actor.run()
        except Exception as error:
            self.problems.append(f"{actor.name} crashed on {actor.current}: {error!r}")
            raise

    async def query(self, bootstrap: str) -> Mapping[str, Prefill]:
        await asyncio.sleep(self.rng.random() * 0.1)
        if any(worker.dead for worker in self.prefill.values()):
            raise PeerGoneError(f"no server at {bootstrap}")
        addresses = {rank: worker.address for rank, worker in self.prefill.items()}
        return {"P": Prefill("P", self.p_tp, self.p_pp, addresses)}

    # -- requests ------------------------------------------------------------------------------------------------------

    def new_job(self) -> Job:
        """A new request; sometimes with the id of one that is over."""
        rng = self.rng
        self._jobs += 1
        over = [job for job in self.jobs if self._over(job)]
        again = bool(over) and rng.random() < 0.15
        transfer_id = rng.choice(over).transfer_id if again else f"t{self._jobs}"
        self.seen["id used again"] += again
        job = Job(f"r{self._jobs}", transfer_id, rng.randint(1, 5 * BLOCK_TOKENS), rng.choice([0, 0, 1]), again=again)
        job.empty = rng.random() < 0.1
        self.jobs.append(job)
        return job

    def _over(self, job: Job) -> bool:
        """Nothing happens any more to a request, nor to another one of its id."""
        of = [other for other in self.jobs if other.transfer_id == job.transfer_id]
        held = any(job.transfer_id in worker.held for worker in self.prefill.values())
        return not held and all(not other.running and other.settled_at() is not None for other in of)

    def copy(self, source: PrefillWorker, name: str, src: int, dst: int, nbytes: int, late: bool = False) -> None:
        """Bytes land. Nobody but their own request may have the blocks that they come from and go to."""
        if self.memories[name].dead:
            return
        near, far = source.memory, self.memories[name].memory
        self.seen["late"] += late
        for at in range(0, nbytes, PIECE):
            a, b = near.block_of(src - near.base + at), far.block_of(dst - far.base + at)
            owner, user = near.owner.get(a), far.owner.get(b)
            if not late and owner is None:
                self.problems.append(f"{source.address} sends a block {a} that it has freed")
            if user is None or (owner is not None and not late and user != owner):
                what = f"a {'late ' if late else ''}write for {owner}"
                self.problems.append(f"{what} into block {b} of {name}, which is {user}'s")
        far.data[dst - far.base : dst - far.base + nbytes] = near.data[src - near.base : src - near.base + nbytes]

    # -- the end -------------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """All is told, and all is free, on every worker that lives."""
        for decode in self.decode.values():
            if not decode.dead:
                self.problems += decode.problems()
        for prefill in self.prefill.values():
            if prefill.dead:
                continue
            self.problems += [f"{transfer_id} is still held on {prefill.address}" for transfer_id in prefill.held]
            if prefill.sender.under_way:
                self.problems.append(f"prefill {prefill.address} still has {prefill.sender.under_way} under way")
        for job in self.jobs:
            if not self.disasters and not job.again:
                self._check_prompt(job)
        self.problems += [f"a link broke: {error!r}" for error in self.network.failures]

    def _check_prompt(self, job: Job) -> None:
        """Blocks that all have settled are free soon."""
        settled_at = job.settled_at()
        for worker, freed_at in job.freed_at.items():
            since = max(settled_at or freed_at, job.held_at[worker])
            if freed_at > since + PROMPT_S:
                self.problems.append(
                    f"{job.name} was held on {worker.address} for {freed_at - since:.1f} s after the last pull"
                )


def _ranks(tp: int, pp: int) -> list[Worker]:
    return [Worker(stage, rank) for stage in range(pp) for rank in range(tp)]
