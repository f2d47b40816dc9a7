"""The in-memory network under its faults, on virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from kvactors.disagg.links import Link
from kvactors.disagg.memory_links import MemoryLink, MemoryNetwork
from kvactors.disagg.wire import MAX_FRAME_BYTES, Problem, Sent
from kvactors.errors import ConfigError, LinkClosedError, PeerGoneError, PeerUnreachableError
from kvactors.simulate.loop import DeadlockError, VirtualLoop, run_virtual
from tests.disagg.links.both import Held, echo


def run(main: Coroutine[Any, Any, None], seed: int | None = None) -> VirtualLoop:
    loop = VirtualLoop(random.Random(seed) if seed is not None else None)
    run_virtual(main, loop)
    return loop


async def pair(network: MemoryNetwork) -> tuple[MemoryLink, MemoryLink, Held]:
    """Both ends of a link from "d0" to "p0"."""
    held = Held()
    network.listen("p0", held)
    near = await network.connect("p0", "d0")
    return near, await held.links.get(), held


@pytest.mark.parametrize("seed", range(20))
def test_order_is_kept_whatever_the_delays(seed: int) -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(seed), most_delay_s=0.5)
        network.listen("p0", echo)
        link = await network.connector("d0")("p0")
        for i in range(50):
            await link.send(Sent(str(i)))
        assert [await link.receive() for _ in range(50)] == [Sent(str(i)) for i in range(50)]
        assert asyncio.get_running_loop().time() > 0.0
        await network.stop()

    run(main(), seed)


def test_the_same_seed_gives_the_same_run() -> None:
    def trace(seed: int) -> list[tuple[float, str]]:
        seen: list[tuple[float, str]] = []

        async def talk(network: MemoryNetwork, name: str) -> None:
            link = await network.connect("p0", name)
            try:
                for i in range(20):
                    await link.send(Sent(f"{name}-{i}"))
                    seen.append((asyncio.get_running_loop().time(), (await link.receive()).transfer_id))  # type: ignore[union-attr]
            except LinkClosedError as error:
                seen.append((asyncio.get_running_loop().time(), str(error)))

        async def main() -> None:
            network = MemoryNetwork(random.Random(seed), most_delay_s=0.1)
            network.listen("p0", echo)
            tasks = [asyncio.create_task(talk(network, f"d{i}")) for i in range(8)]
            await asyncio.sleep(0.5)
            network.kill("p0")
            await asyncio.gather(*tasks)

        run(main(), seed)
        return seen

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)
    assert len([text for _, text in trace(1) if "reset by peer" in text]) == 8


def test_a_cut_link_ends_at_both_ends() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        near, far, _ = await pair(network)
        await far.send(Sent("arrived"))
        await asyncio.sleep(0.01)
        await far.send(Sent("under way"))
        network.cut(near)
        assert await near.receive() == Sent("arrived")
        for end in (near, far):
            with pytest.raises(LinkClosedError, match="connection was lost"):
                await end.receive()
            with pytest.raises(LinkClosedError):
                await end.send(Sent("a"))
        again = await network.connect("p0", "d0")
        assert network.links("d0") == [again]
        await network.stop()

    run(main())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("killed", ["p0", "d0"])
def test_a_killed_process(killed: str, frozen: bool) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        near, far, _ = await pair(network)
        dead, alive = (far, near) if killed == "p0" else (near, far)
        own, waiting = asyncio.create_task(dead.receive()), asyncio.create_task(alive.receive())
        await asyncio.sleep(0.01)
        if frozen:
            network.freeze(killed)
        network.kill(killed)
        with pytest.raises(LinkClosedError, match="reset by peer"):
            await waiting
        with pytest.raises(LinkClosedError, match="was killed"):
            await own
        with pytest.raises(PeerGoneError, match=killed):
            await network.connect(killed)
        assert network.links(killed) == []
        network.listen(killed, echo)
        link = await network.connect(killed)
        await link.send(Sent("a"))
        assert await link.receive() == Sent("a")
        await network.stop()

    run(main())


def test_killing_ends_the_tasks_that_serve() -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def serve(_link: Link) -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                ended.set()

        network = MemoryNetwork()
        network.listen("p0", serve)
        await network.connect("p0")
        await asyncio.sleep(1)
        network.kill("p0")
        network.kill("nobody")
        await ended.wait()
        assert asyncio.get_running_loop().time() < 2

    run(main())


def test_a_frozen_process_stands_still_and_nobody_is_told() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = MemoryNetwork(room=4)
        near, far, _ = await pair(network)
        await far.send(Sent("before"))
        network.freeze("p0")
        assert await near.receive() == Sent("before")
        sending = asyncio.create_task(far.send(Sent("from the ice")))
        receiving = asyncio.create_task(far.receive())
        for i in range(4):
            await near.send(Sent(str(i)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await near.send(Sent("no room"))
        with pytest.raises(TimeoutError):
            await near.receive(100)
        assert not sending.done()
        assert not receiving.done()
        began = loop.time()
        with pytest.raises(PeerUnreachableError, match="does not answer in 5 s") as caught:
            await network.connect("p0")
        assert not isinstance(caught.value, PeerGoneError)
        assert loop.time() - began == pytest.approx(5.0)
        opening = asyncio.create_task(network.connect("p0"))
        await asyncio.sleep(1)
        network.thaw("p0")
        assert [await receiving] + [await far.receive() for _ in range(3)] == [Sent(str(i)) for i in range(4)]
        assert await near.receive() == Sent("from the ice")
        await opening
        await network.stop()

    run(main())


def test_a_frozen_process_notices_an_end_when_it_thaws() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        near, far, _ = await pair(network)
        network.freeze("p0")
        waiting = asyncio.create_task(far.receive())
        await near.close("I leave")
        await asyncio.sleep(10)
        assert not waiting.done()
        network.thaw("p0")
        assert await waiting == Problem("I leave")
        with pytest.raises(LinkClosedError, match="closed by the peer"):
            await far.receive()
        await network.stop()

    run(main())


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_links_are_in_order_and_end(seed: int) -> None:
    """Each end gets a part of what was sent, from its start and in order; when nothing is frozen, everybody comes to an end."""
    rng = random.Random(seed)
    ends: list[str] = []

    async def talk(link: Link) -> None:
        async def say() -> None:
            for i in itertools.count():
                await link.send(Sent(str(i)))
                await asyncio.sleep(0.01)

        saying = asyncio.create_task(say())
        try:
            for i in itertools.count():
                assert await link.receive() == Sent(str(i))
        except LinkClosedError as error:
            ends.append(str(error))
        finally:
            saying.cancel()
            await asyncio.gather(saying, return_exceptions=True)

    async def main() -> None:
        network = MemoryNetwork(rng, most_delay_s=0.05, room=8)
        places = ["p0", "p1"]
        for place in places:
            network.listen(place, talk)
        links = [await network.connect(place, f"d{i}") for i in range(3) for place in places]
        talks = [asyncio.create_task(talk(link)) for link in links]
        for _ in range(30):
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            address = rng.choice(["p0", "p1", "d0", "d1", "d2"])
            fault = rng.choice([network.freeze, network.freeze, network.thaw, network.kill, "cut"])
            if fault == "cut":
                if network.links(address):
                    network.cut(rng.choice(network.links(address)))
            elif fault is not network.kill or rng.random() < 0.3:
                fault(address)  # type: ignore[operator]
        for address in ("p0", "p1", "d0", "d1", "d2"):
            network.thaw(address)
        await asyncio.sleep(1)
        for place in places:
            network.kill(place)
        await asyncio.gather(*talks)
        assert network.failures == []
        await network.stop()

    run(main(), seed)
    assert len(ends) >= 6


BAD = [
    ("no msgpack", b"\xc1", "no message"),
    ("too large", b"\x00" * (MAX_FRAME_BYTES + 1), "larger"),
    ("nothing", b"", "no message"),
]


@pytest.mark.parametrize(("frame", "says"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_frames_are_answered(frame: bytes, says: str) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        near, far, _ = await pair(network)
        await near.send_frame(frame)
        with pytest.raises(LinkClosedError, match=says):
            await far.receive()
        answer = await near.receive()
        assert isinstance(answer, Problem)
        assert says in answer.reason
        with pytest.raises(LinkClosedError):
            await near.receive()
        await network.stop()

    run(main())


def test_what_serve_raises_is_kept() -> None:
    async def main() -> None:
        async def serve(_link: Link) -> None:
            raise ValueError("a bug")

        network = MemoryNetwork()
        network.listen("p0", serve)
        link = await network.connect("p0")
        with pytest.raises(LinkClosedError):
            await link.receive()
        assert [str(error) for error in network.failures] == ["a bug"]

    run(main())


def test_addresses() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        with pytest.raises(PeerGoneError, match="nowhere"):
            await network.connect("nowhere")
        network.listen("p0", echo)
        with pytest.raises(ConfigError, match="p0"):
            network.listen("p0", echo)
        await network.stop()

    run(main())


def test_waiting_for_nothing_is_a_deadlock() -> None:
    async def main() -> None:
        near, _, _ = await pair(MemoryNetwork())
        await near.receive()

    with pytest.raises(DeadlockError):
        run(main())
