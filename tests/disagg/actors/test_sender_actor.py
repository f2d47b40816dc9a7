"""The sender alone: links that end, sends that are stopped and bounded, ids used again, orphans, and its own end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvactors.disagg import sender, sends
from kvactors.disagg.blocks import RequestBlocks
from kvactors.disagg.links import ROOM
from kvactors.disagg.messages import Cancelled, Heard, Prefilled, Requested, TimeUp
from kvactors.disagg.outbox import Outbox
from kvactors.disagg.wire import Abort, Pull, Refused, Sent, Stopped
from kvactors.errors import LinkClosedError
from kvactors.simulate.loop import VirtualLoop
from tests.disagg.actors.rig import HELD, SenderRig, Transport, blocks, heard, on_virtual_time, say
from tests.disagg.shapes import BLOCKS

WANTED = blocks(4, 5, 6)
APART = blocks(2, 4, 6)
"""one descriptor for each block"""


# -- sends -------------------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_a_link_that_ends_stops_its_send_after_the_batch_in_hand(loop: VirtualLoop) -> None:
    p = SenderRig(loop, Transport(1.0), batch=1)
    p.compute("t")
    link = await p.link()
    await link.send(Pull("t", 1, APART))
    await asyncio.sleep(0.5)
    await link.close()
    await asyncio.sleep(2.0)
    assert len(p.transport.begun) == 1
    assert p.freed_ids == ["t"]
    assert p.freed[0][1] < 2.0


@on_virtual_time
async def test_an_abort_stops_its_send_after_the_batch_in_hand(loop: VirtualLoop) -> None:
    p = SenderRig(loop, Transport(1.0), batch=1)
    p.compute("t")
    link = await p.link()
    await link.send(Pull("t", 1, APART))
    await asyncio.sleep(0.5)
    assert await say(link, Abort("t", 1), 5.0) == Stopped("t")
    assert len(p.transport.begun) == 1


@on_virtual_time
async def test_a_send_that_waits_for_its_turn_is_stopped_at_once(loop: VirtualLoop) -> None:
    p = SenderRig(loop, Transport(100.0), sends_to_one=1)
    p.compute("a", "b")
    link = await p.link()
    await link.send(Pull("a", 1, WANTED))
    await link.send(Pull("b", 1, blocks(7, 8, 9)))
    await asyncio.sleep(0.1)
    assert await say(link, Abort("b", 1)) == Stopped("b")
    assert p.freed_ids == ["b"]


@on_virtual_time
async def test_sends_are_bounded_in_all_and_to_one(loop: VirtualLoop) -> None:
    p = SenderRig(loop, Transport(1.0), sends=3, sends_to_one=2)
    for d in range(3):
        link = await p.link(engine=f"D{d}", process=f"d{d}", memory=f"m{d}")
        for i in range(4):
            p.compute(f"t{d}{i}")
            await link.send(Pull(f"t{d}{i}", 1, WANTED))
    await asyncio.sleep(60.0)
    assert (p.transport.most, p.transport.most_to_one, len(p.freed)) == (3, 2, 12)
    assert p.actor.mailbox._reserved == 0


@on_virtual_time
async def test_the_bound_to_one_outlives_its_link(loop: VirtualLoop) -> None:
    p = SenderRig(loop, Transport(30.0), sends_to_one=1)
    for i in range(3):
        p.compute(f"t{i}")
        link = await p.link()
        await link.send(Pull(f"t{i}", 1, WANTED))
        await asyncio.sleep(1.0)
    assert p.transport.most == 1


@on_virtual_time
async def test_a_frozen_peer_does_not_hold_blocks_that_only_wait_for_their_turn(loop: VirtualLoop) -> None:
    p = SenderRig(loop, Transport(60.0, fails=True), abort_timeout_s=100.0, sends_to_one=2)
    link = await p.link()
    for i in range(40):
        p.compute(f"t{i}")
        await link.send(Pull(f"t{i}", 1, WANTED))
    await asyncio.sleep(170.0)
    assert len(p.freed) == 40


@on_virtual_time
async def test_an_expiry_that_falls_into_a_send_comes_after_it(loop: VirtualLoop) -> None:
    """The other decode worker never comes."""
    p = SenderRig(loop, Transport(30.0), abort_timeout_s=10.0)
    p.compute("t")
    link = await p.link()
    assert await say(link, Pull("t", 2, WANTED), 40.0) == Sent("t")
    assert not p.freed
    await asyncio.sleep(2.0)
    assert p.freed_ids == ["t"]


@on_virtual_time
async def test_a_pull_of_more_blocks_than_there_are_is_refused_unplanned(loop: VirtualLoop) -> None:
    def planned(*_: Any) -> None:
        raise AssertionError("it was planned")

    p = SenderRig(loop)
    p.compute("t")
    link = await p.link()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sends, "plan_blocks", planned)
        answer = await say(link, Pull("t", 1, blocks(*[1] * (BLOCKS + 1))))
    assert isinstance(answer, Refused)
    assert f"{BLOCKS + 1} blocks" in answer.reason
    assert p.freed_ids == ["t"]


# -- links -------------------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_a_new_link_takes_the_place_of_the_earlier(loop: VirtualLoop) -> None:
    p = SenderRig(loop, Transport(5.0))
    p.compute("t", "u")
    earlier = await p.link()
    await earlier.send(Pull("t", 1, WANTED))
    await asyncio.sleep(1.0)
    later = await p.link()
    await asyncio.sleep(0.1)
    puller = next(iter(p.actor._known.values()))
    p.post(Heard(puller, earlier, Pull("u", 1, blocks(7, 8, 9))))  # what an earlier link said died with it
    await asyncio.sleep(0.1)
    assert len(p.transport.begun) == 1
    assert await say(later, Abort("t", 1), 10.0) == Stopped("t")
    assert loop.now() >= 5.0
    with pytest.raises(LinkClosedError):
        await earlier.receive(1.0)


@on_virtual_time
async def test_the_transport_forgets_a_worker_that_was_started_again(loop: VirtualLoop) -> None:
    p = SenderRig(loop)
    await p.link(memory="m1")
    await p.link(process="d2", memory="m2")
    await asyncio.sleep(0.1)
    assert p.transport.forgot == ["m1"]


@on_virtual_time
async def test_links_do_not_fill_the_mailbox(loop: VirtualLoop) -> None:
    """The actor stands still while 24 peers say as much as they can; what the engine posts always finds room."""
    links = 24
    p = SenderRig(loop, runs=False)
    p.actor.mailbox.limit = links * (ROOM + 1) + 200

    async def flood(number: int) -> None:
        link = await p.link(engine=f"D{number}", process=f"d{number}", memory=f"m{number}")
        for _ in range(300):
            await link.send(Abort("t", 1))

    floods = [asyncio.ensure_future(flood(number)) for number in range(links)]
    await asyncio.sleep(10.0)
    assert len(p.actor.mailbox) == links * (ROOM + 1)  # of each its LinkUp, and its ROOM
    p.compute(*(f"e{i}" for i in range(100)))
    p.run()
    await asyncio.sleep(10.0)
    assert all(flood.done() for flood in floods)
    assert not p.task.done()
    assert p.actor.under_way == 101


@on_virtual_time
async def test_a_message_that_cannot_be_written_harms_no_other(loop: VirtualLoop) -> None:
    p = SenderRig(loop)
    theirs = await p.network.connect("p")
    outbox = Outbox(theirs.other)
    for transfer_id in ("t\ud800", "u"):
        outbox.send(Sent(transfer_id))
    assert await heard(theirs) == Sent("u")
    outbox.close()


# -- whose request it is -----------------------------------------------------------------------------------------------

SECONDS: dict[str, tuple[dict[str, Any], RequestBlocks]] = {
    "a twin": ({}, blocks(7, 8, 9)),
    "another instance": ({"engine": "E", "process": "e", "memory": "em"}, WANTED),
    "another worker of another instance": ({"engine": "E", "process": "e", "memory": "em", "rank": 1, "tp": 2}, WANTED),
    "the same worker, started again, and the same blocks": ({"process": "d2", "memory": "dm2"}, WANTED),
}


@pytest.mark.parametrize("second", SECONDS)
@pytest.mark.parametrize("pullers", [1, 2])
@on_virtual_time
async def test_what_was_written_for_one_is_not_reported_to_another(loop: VirtualLoop, second: str, pullers: int) -> None:
    who, wanted = SECONDS[second]
    p = SenderRig(loop)
    p.compute("t")
    link = await p.link()
    assert await say(link, Pull("t", pullers, WANTED)) == Sent("t")
    again = await p.link(**who) if who else link
    assert isinstance(await say(again, Pull("t", pullers, wanted)), Refused)
    assert len(p.transport.begun) == 1


@on_virtual_time
async def test_an_id_that_is_used_again(loop: VirtualLoop) -> None:
    p = SenderRig(loop)
    link = await p.link()
    for wanted in (WANTED, blocks(7, 8, 9)):
        p.compute("t")
        assert await say(link, Pull("t", 1, wanted)) == Sent("t")
    assert p.freed_ids == ["t", "t"]


# -- what is kept ------------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_what_has_ended_keeps_no_blocks(loop: VirtualLoop) -> None:
    p = SenderRig(loop)
    p.compute("t")
    for rank in range(2):
        link = await p.link(process=f"d{rank}", memory=f"m{rank}", rank=rank, tp=2)
        assert await say(link, Pull("t", 2, WANTED)) == Sent("t")
    request = p.actor._requests["t"]
    assert len(request.pulls) == 2
    assert request.blocks is None
    assert all(asked.blocks is None for asked in request.pulls.values())


@on_virtual_time
async def test_what_has_ended_is_known_up_to_a_number(loop: VirtualLoop) -> None:
    p = SenderRig(loop)
    link = await p.link()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sender, "REMEMBERED", 3)
        for i in range(10):
            p.compute(f"t{i}")
            await say(link, Pull(f"t{i}", 1, WANTED))
    assert len(p.actor._requests) == len(p.actor._ended) == 3


def test_any_thread_may_ask_what_is_under_way() -> None:
    failures: list[Exception] = []
    over = threading.Event()

    @on_virtual_time
    async def come_and_go(loop: VirtualLoop) -> None:
        p = SenderRig(loop)

        def asks() -> None:
            while not over.wait(1e-6):
                try:
                    assert p.actor.under_way >= 0
                except Exception as error:
                    failures.append(error)
                    return

        asker = threading.Thread(target=asks)
        asker.start()
        try:
            for i in range(3000):
                p.post(Requested(f"t{i}"), Cancelled(f"t{i}", "the client went away"))
                await asyncio.sleep(0.0)
            await asyncio.sleep(1.0)
        finally:
            over.set()
            asker.join()
        assert p.actor.under_way == 0

    come_and_go()
    assert failures == []


# -- orphans -----------------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_orphans_are_bounded_and_make_room(loop: VirtualLoop) -> None:
    p = SenderRig(loop, orphans=2, orphan_s=10.0)
    link = await p.link()
    assert await say(link, Pull("a", 1, blocks(4))) is None
    assert await say(link, Pull("b", 1, blocks(4))) is None
    refused = await say(link, Pull("c", 1, blocks(4)))
    assert isinstance(refused, Refused)
    assert "too many" in refused.reason
    p.post(Requested("a"))
    assert await say(link, Pull("d", 1, blocks(4))) is None
    assert [type(await heard(link, 20.0)) for _ in "bd"] == [Refused, Refused]  # their time is up
    for transfer_id in "ef":
        assert await say(link, Pull(transfer_id, 1, blocks(4))) is None
    assert p.actor._orphans == 2


@on_virtual_time
async def test_orphans_of_one_peer_are_bounded(loop: VirtualLoop) -> None:
    p = SenderRig(loop, orphans=100, orphans_of_one=2)
    greedy, other = await p.link(), await p.link(engine="E", process="e", memory="em")
    for transfer_id in "ab":
        assert await say(greedy, Pull(transfer_id, 1, blocks(4))) is None
    assert isinstance(await say(greedy, Pull("c", 1, blocks(4))), Refused)
    assert await say(greedy, Abort("c", 1)) == Stopped("c")
    assert await say(other, Pull("d", 1, blocks(4))) is None


@on_virtual_time
async def test_orphans_of_one_peer_are_counted_across_its_links(loop: VirtualLoop) -> None:
    p = SenderRig(loop, orphans_of_one=2, orphan_s=10.0)
    first = await p.link()
    for transfer_id in "ab":
        assert await say(first, Pull(transfer_id, 1, blocks(4))) is None
    second = await p.link()
    assert isinstance(await say(second, Pull("c", 1, blocks(4))), Refused)
    await asyncio.sleep(20.0)  # a and b are known no more
    for transfer_id in "de":
        assert await say(second, Pull(transfer_id, 1, blocks(4))) is None


@on_virtual_time
async def test_a_timer_that_is_late_does_nothing(loop: VirtualLoop) -> None:
    """An orphan's time is up in the turn in which its request comes."""
    p = SenderRig(loop, abort_timeout_s=480.0)
    link = await p.link()
    assert await say(link, Pull("t", 2, WANTED)) is None
    p.post(Requested("t"), TimeUp(p.actor._requests["t"]))
    await asyncio.sleep(0.5)
    p.post(Prefilled("t", HELD))
    await asyncio.sleep(100.0)
    assert not p.freed


# -- its end -----------------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_closing_waits_for_sends_and_begins_none(loop: VirtualLoop) -> None:
    p = SenderRig(loop, Transport(5.0))
    p.compute("t", "u")
    link = await p.link()
    await link.send(Pull("t", 1, WANTED))
    await asyncio.sleep(1.0)
    closing = asyncio.ensure_future(p.actor.close())
    await asyncio.sleep(1.0)
    assert isinstance(await say(link, Pull("u", 1, blocks(7, 8, 9))), Refused)
    await closing
    assert p.transport.now.total() == 0
    assert loop.now() >= 5.0
    await asyncio.sleep(1.0)
    assert len(p.transport.begun) == 1


@on_virtual_time
async def test_a_send_that_ends_while_it_closes_is_reported(loop: VirtualLoop) -> None:
    p = SenderRig(loop, Transport(5.0))
    p.compute("t")
    link = await p.link()
    await link.send(Pull("t", 1, WANTED))
    await asyncio.sleep(1.0)
    await p.actor.close()
    assert await heard(link) == Sent("t")
    assert p.freed_ids == ["t"]
    with pytest.raises(LinkClosedError):
        await link.receive(1.0)


@on_virtual_time
async def test_closing_waits_a_moment_for_what_it_says(loop: VirtualLoop) -> None:
    """Nothing can be sent for half a second."""
    p = SenderRig(loop, Transport(5.0))
    p.compute("t")
    link = await p.link()
    await link.send(Pull("t", 1, WANTED))
    await asyncio.sleep(4.9)
    p.network.freeze("p")
    loop.call_later(0.6, p.network.thaw, "p")
    await p.actor.close()
    assert await heard(link) == Sent("t")


@on_virtual_time
async def test_what_is_computed_while_it_closes_is_freed(loop: VirtualLoop) -> None:
    p = SenderRig(loop, Transport(5.0))
    p.compute("t")
    link = await p.link()
    await link.send(Pull("t", 1, WANTED))
    await asyncio.sleep(1.0)
    closing = asyncio.ensure_future(p.actor.close())
    await asyncio.sleep(1.0)
    p.compute("u")
    await asyncio.sleep(0.1)
    assert p.freed_ids == ["u"]
    await closing
