"""What happens in the simulated world: requests that come and go, and disasters; all of it drawn from the world's seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from kvactors.disagg.receiver import MOST_GRACE_S
from kvactors.simulate.loop import VirtualLoop, run_virtual
from tests.disagg.sim.workers import Job
from tests.disagg.sim.world import World

DISASTERS = [
    "cut",
    "cut",
    "kill p",
    "kill d",
    "freeze p",
    "freeze d",
    "restart p",
    "restart d",
    "close p",
    "close and restart p",
]


def history(seed: int) -> World:
    """Plays a seed; the world's `problems` say what went wrong."""
    loop = VirtualLoop(random.Random(seed), most_events=2_000_000)
    made: list[World] = []

    async def main() -> None:
        world = World(seed, loop)
        made.append(world)
        await play(world)

    run_virtual(main(), loop)
    return made[0]


async def play(world: World) -> None:
    """Requests come, things happen, and in the end everything that is alive is well again."""
    rng = world.rng
    engines = "DE" if rng.random() < 0.25 else "D"
    world.start(engines)
    disasters = rng.random() < 0.6
    for _ in range(rng.randint(1, 12)):
        job = world.new_job()
        _begin(world, job, _prefill(world, job))
        _begin(world, job, _decode(world, job, "D"))
        if len(engines) > 1 and rng.random() < 0.3:
            world.seen["two instances"] += 1
            _begin(world, job, _decode(world, job, "E"))
        if disasters and rng.random() < 0.25:
            world.disasters += 1
            world.go(_disaster(world))
        await asyncio.sleep(rng.random() * rng.choice([2.0, 2.0, 8.0]))
    await asyncio.sleep(5 * world.deadline_s + 2 * world.abort_s + 2 * MOST_GRACE_S)  # as long as anything may take
    world.check_end()
    for decode in world.decode.values():
        await decode.receiver.close()
    for prefill in world.prefill.values():
        await prefill.sender.close()
    for task in world.tasks:
        task.cancel()
    await world.network.stop()
    await asyncio.gather(*world.tasks, return_exceptions=True)


def _begin(world: World, job: Job, work: Coroutine[Any, Any, None]) -> None:
    async def run() -> None:
        try:
            await work
        finally:
            job.running -= 1

    job.running += 1
    world.go(run())


async def _prefill(world: World, job: Job) -> None:
    rng = world.rng
    fate = rng.choice(["computed"] * 6 + ["cancelled", "never"])
    if fate == "never":
        return
    workers = [worker for worker in world.prefill.values() if not worker.dead]
    for worker in workers:
        worker.requested(job)
    await asyncio.sleep(rng.random() * rng.choice([0.1, 3.0]))
    for worker in workers:
        if worker.dead:  # and whoever has its address now knows nothing of the request
            continue
        if fate == "cancelled":
            worker.cancelled(job)
        else:
            await asyncio.sleep(rng.random() * 0.1)
            if not worker.dead:
                worker.prefilled(job)


async def _decode(world: World, job: Job, engine: str) -> None:
    rng = world.rng
    if rng.random() < 0.05:
        return  # it never comes
    await asyncio.sleep(rng.random() * rng.choice([0.1, 3.0, 12.0]))
    gives_up, twin = rng.random() < 0.2, rng.random() < 0.1
    request_id = f"{job.name} {engine}"
    workers = [worker for (of, _), worker in world.decode.items() if of == engine and not worker.dead]
    for worker in workers:
        worker.receive(job, request_id)
        if twin:  # a second request with the same transfer id
            worker.receive(job, f"{request_id} twin")
    if gives_up:
        await asyncio.sleep(rng.random() * rng.choice([0.01, 1.0, 4.0]))
        for worker in workers:
            worker.give_up(request_id)


async def _disaster(world: World) -> None:
    rng, network = world.rng, world.network
    await asyncio.sleep(rng.random() * 3)
    what = rng.choice(DISASTERS)
    world.seen[what] += 1
    workers: list[Any] = list(world.prefill.values()) if what.endswith("p") else list(world.decode.values())
    worker = rng.choice(workers)
    if what == "cut":
        links = network.links(worker.address)
        if links:
            network.cut(rng.choice(links))
    elif what.startswith("freeze"):
        network.freeze(worker.address)
        await asyncio.sleep(rng.random() * 3 * world.deadline_s)
        network.thaw(worker.address)
    elif worker.dead:
        pass
    elif what.startswith("close"):
        await _close(world, worker.rank, restarts="restart" in what)
    else:
        world.kill(worker)
        if what.startswith("restart"):
            await asyncio.sleep(rng.choice([0.0, rng.random() * 0.2, rng.random() * 5]))
            _restart(world, what, worker)


async def _close(world: World, rank: Any, *, restarts: bool) -> None:
    worker = world.prefill[rank]
    await world.close(worker)
    if restarts and world.prefill[rank] is worker:
        world.start_prefill(rank)


def _restart(world: World, what: str, worker: Any) -> None:
    """Another process takes the address; at decode it asks again for some of what was asked before, as a proxy does."""
    if what == "restart p":
        world.start_prefill(worker.rank)
        return
    started = world.start_decode(worker.engine, worker.rank)
    newest = {job.transfer_id: job for job in world.jobs}
    for fetch in list(worker.fetches.values()):
        again = newest[fetch.job.transfer_id] is fetch.job and not fetch.request_id.endswith("twin")
        if again and world.rng.random() < 0.5:
            world.seen["asked again"] += 1
            same = all(started.memory.free(group, ids) for group, ids in enumerate(fetch.tables))
            if same and world.rng.random() < 0.5:
                started.receive_again(fetch)
            else:
                started.receive(fetch.job, f"{fetch.request_id} again")
