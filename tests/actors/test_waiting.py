"""Latches, gates, mailboxes: how threads and tasks wait for each other without polling."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvactors.actors.fences import Fences
from kvactors.actors.latch import Latch, SaveGate
from kvactors.actors.mailbox import Mailbox
from kvactors.actors.step_state import LayerTask, StepState
from kvactors.core.steps import GroupBlocks, StepRequest
from kvactors.errors import MailboxOverflowError


def test_a_latch_lets_a_blocked_thread_go() -> None:
    latch, seen = Latch(), []
    thread = threading.Thread(target=lambda: seen.append(latch.wait(30)))
    thread.start()
    latch.open()
    thread.join(30)
    assert seen == [True]
    assert latch.wait(0)


def test_a_latch_that_stays_shut_times_out() -> None:
    assert not Latch().wait(0.001)


async def test_a_latch_opened_by_a_thread_wakes_a_task() -> None:
    asyncio.get_running_loop().set_debug(True)  # a wake-up from the wrong thread raises
    latch = Latch()
    waiting = asyncio.create_task(latch.wait_async(30))
    await asyncio.sleep(0)
    await asyncio.to_thread(latch.open)
    assert await waiting
    assert await latch.wait_async(0)
    assert not await Latch().wait_async(0.001)


async def test_a_waiter_that_was_cancelled_costs_nothing() -> None:
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(context))
    latch = Latch()
    waiting = asyncio.create_task(latch.wait_async(30))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    latch.open()
    for _ in range(3):
        await asyncio.sleep(0)
    assert raised == []


def test_a_gate_blocks_above_its_limit_and_opens_below() -> None:
    gate = SaveGate(2)
    for _ in range(4):
        gate.add()
    latch = gate.blocked()
    assert latch is not None
    gate.done()
    assert not latch.is_open, "three are still more than two"
    gate.done()
    assert latch.is_open
    assert gate.blocked() is None
    assert gate.peak == 4


def test_a_dead_gate_blocks_nobody() -> None:
    gate = SaveGate(0)
    gate.add()
    latch = gate.blocked()
    gate.release_all()
    assert latch is not None
    assert latch.is_open
    assert gate.blocked() is None


def test_a_block_that_two_late_calls_may_write_is_fenced_until_both_returned() -> None:
    """Also if nobody was to say so any more."""
    fences, place = Fences(), (0, 7)
    for _ in range(2):
        fences.add([place], 1)
    fences.keep([place])
    fences.add([place], -1)
    assert fences.blocks() == {place}
    fences.add([place], -1)
    assert not fences.blocks()


def test_a_layer_task_ends_once_when_all_planned_and_done() -> None:
    ends = []
    task = LayerTask(0, [1, 2], lambda: ends.append(1))
    assert task.plan(1, 2)
    assert not task.plan(1, 5), "only the first answer counts"
    task.job_done()
    assert task.waits_for(2)
    task.job_done()
    assert not task.ended
    task.plan(2, 0)
    assert task.ended
    assert ends == [1]


def test_a_save_that_is_signalled_while_its_step_is_closed_ends_at_once() -> None:
    """A compute thread may look just before that; the gate would count the task for good."""
    request = StepRequest("a", [], {0: GroupBlocks([1], save=[0])})
    state = StepState(1, {"a": request}, {}, (), {0: [0]}, {0: 16})
    gate = SaveGate(1)
    state.close()
    gate.add()
    state.begin_save(0, gate.done)
    assert gate.pending == 0


async def test_a_mailbox_keeps_the_order_and_wakes_its_reader() -> None:
    box: Mailbox[int] = Mailbox("box")
    loop = asyncio.get_running_loop()
    loop.set_debug(True)  # a wake-up from the wrong thread raises
    box.bind(loop)
    reading = asyncio.create_task(read(box, 4))
    await asyncio.sleep(0)
    threading.Thread(target=lambda: [box.post(n) for n in (1, 2, 3, 4)]).start()
    assert await asyncio.wait_for(reading, 10) == [1, 2, 3, 4]
    last = asyncio.create_task(read(box, 1))
    await asyncio.sleep(0)
    box.post(5)
    assert await asyncio.wait_for(last, 10) == [5]


async def read(box: Mailbox[int], count: int) -> list[int]:
    return [await box.receive() for _ in range(count)]


async def test_send_waits_for_room_and_post_beyond_it_is_a_bug() -> None:
    box: Mailbox[int] = Mailbox("box", limit=2)
    box.bind(asyncio.get_running_loop())
    await box.send(1)
    await box.send(2)
    third = asyncio.create_task(box.send(3))
    await asyncio.sleep(0)
    assert not third.done()
    with pytest.raises(MailboxOverflowError, match="box"):
        box.post(9)
    assert await box.receive() == 1
    await third
    assert [await box.receive() for _ in range(2)] == [2, 3]


async def test_a_reserved_reply_always_has_its_slot() -> None:
    box: Mailbox[int] = Mailbox("box", limit=1)
    box.bind(asyncio.get_running_loop())
    box.reserve()
    box.post(1)
    box.post(2)  # the reply
    with pytest.raises(MailboxOverflowError):
        box.post(3)
    assert box.take_all() == [1, 2]
    box.replied()
    box.post(4)
    assert await box.receive() == 4
