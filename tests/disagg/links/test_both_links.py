"""What links promise, whichever kind they are."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from kvactors.disagg.links import Link
from kvactors.disagg.wire import MAX_FRAME_BYTES, Abort, Message, Problem, Refused, Sent, Stopped
from kvactors.errors import LinkClosedError, WireError
from tests.disagg.links.both import LIMIT_S, PLACES, Held, echo

pytestmark = pytest.mark.parametrize("kind", sorted(PLACES))


async def test_messages_come_back_in_order(kind: str) -> None:
    messages: list[Message] = [Sent("a"), Refused("b", "no"), Abort("c", 2), Problem("d"), Stopped("e")]
    async with PLACES[kind](echo) as place:
        link = await place.connect()
        assert place.address in link.peer
        for message in messages:
            await link.send(message)
        assert [await link.receive() for _ in messages] == messages
        await link.close()


async def test_concurrent_sends_are_in_order(kind: str) -> None:
    async with PLACES[kind](echo) as place:
        link = await place.connect()
        sends = [asyncio.create_task(link.send(Refused(str(i), "x" * 3000))) for i in range(300)]
        assert [(await link.receive()).transfer_id for _ in sends] == [str(i) for i in range(300)]
        await asyncio.gather(*sends)
        await link.close()


@pytest.mark.parametrize("reason", ["", "the worker is drained"])
async def test_closing_ends_both_sides(kind: str, reason: str) -> None:
    held = Held()
    async with PLACES[kind](held) as place:
        link = await place.connect()
        far = await held.links.get()
        await link.send(Sent("a"))
        assert await far.receive() == Sent("a")
        waiting = asyncio.create_task(far.receive())
        own = asyncio.create_task(link.receive())
        await asyncio.sleep(0)
        await link.close(reason)
        await link.close("again")
        if reason:
            assert await waiting == Problem(reason)
        with pytest.raises(LinkClosedError, match="closed by the peer"):
            await (far.receive() if reason else waiting)
        with pytest.raises(LinkClosedError, match=f"closed on this side.*{reason}"):
            await own
        for end in (link, far):
            with pytest.raises(LinkClosedError):
                await end.send(Sent("b"))
            with pytest.raises(LinkClosedError):
                await end.receive()
        held.release.set()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_link_ends_when_serve_does(kind: str, fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def serve(link: Link) -> None:
        await link.send(Sent("last"))
        if fails:
            raise LinkClosedError("as if")

    async with PLACES[kind](serve) as place:
        link = await place.connect()
        assert await link.receive() == Sent("last")
        with pytest.raises(LinkClosedError, match="closed by the peer"):
            await link.receive()
    assert not caplog.records


async def test_stopping_ends_links(kind: str) -> None:
    async with PLACES[kind](echo) as place:
        links = [await place.connect() for _ in range(5)]
        waiting = [asyncio.create_task(link.receive()) for link in links]
        await asyncio.sleep(0)
        await place.stop()
        for task in waiting:
            with pytest.raises(LinkClosedError):
                await asyncio.wait_for(task, LIMIT_S)


async def test_a_message_that_is_too_large_is_not_sent(kind: str) -> None:
    async with PLACES[kind](echo) as place:
        link = await place.connect()
        with pytest.raises(WireError, match=f"{MAX_FRAME_BYTES}"):
            await link.send(Refused("a", "x" * MAX_FRAME_BYTES))
        await link.send(Sent("a"))
        assert await link.receive() == Sent("a")
        await link.close()


async def test_giving_up_loses_nothing(kind: str) -> None:
    async with PLACES[kind](echo) as place:
        link = await place.connect()
        got: list[Message] = []
        for i in range(50):
            await link.send(Sent(str(i)))
            with suppress(TimeoutError):
                got.append(await link.receive(0.0001 * (i % 3)))
            waiting = asyncio.create_task(link.receive())
            for _ in range(i % 5):
                await asyncio.sleep(0)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                got.append(await waiting)
        while len(got) < 50:
            got.append(await link.receive(LIMIT_S))
        assert got == [Sent(str(i)) for i in range(50)]
        await link.close()


async def test_a_peer_that_does_not_read_holds_up_send(kind: str) -> None:
    held = Held()
    async with PLACES[kind](held) as place:
        link = await place.connect()
        far = await held.links.get()
        message = Refused("a", "x" * 60_000)
        taken = 0
        with suppress(TimeoutError):
            for taken in range(10_000):  # noqa: B007
                async with asyncio.timeout(0.5):  # of each: only one that is held up takes that long
                    await link.send(message)
        assert 10 < taken < 1000, "60 MB at most"
        for _ in range(3):  # each gives up, and none piles up
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await link.send(message)
        reading = asyncio.create_task(count(far))
        await link.send(Sent("last"))
        assert taken <= await reading <= taken + 4
        await link.send(message)
        await link.close()
        held.release.set()


async def count(link: Link) -> int:
    """The messages until `Sent`."""
    seen = 0
    while not isinstance(await link.receive(), Sent):
        seen += 1
    return seen


async def test_many_links(kind: str) -> None:
    async with PLACES[kind](echo) as place:

        async def talk(i: int) -> None:
            link = await place.connect()
            for j in range(3):
                await link.send(Sent(f"{i}-{j}"))
            assert [(await link.receive()).transfer_id for _ in range(3)] == [f"{i}-{j}" for j in range(3)]
            await link.close()

        await asyncio.gather(*(talk(i) for i in range(200)))
