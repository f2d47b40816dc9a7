"""When a group's actor crashes: whatever its sessions were doing, each reaches an end, and every caller an answer."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import Any

import pytest

from kvactors.core.store import Outcome
from kvactors.errors import DrainTimeout
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import FULL, Rig, arrived, full_layout, hashes, quiet


def crash(*_: object, **__: object) -> None:
    raise RuntimeError("crashed by the test")


async def crashed(rig: Rig) -> None:
    """Makes the (first) group crash at its next message, and waits until it did."""
    actor = rig.engine.crew.groups[0]
    actor.handle = _crash_async  # type: ignore[method-assign]  # a stand-in for one call
    rig.engine.forget("nobody")
    while rig.engine.stats().state != "degraded":
        await rig.engine.lookup(hashes(2, "nothing"), 33)
        await asyncio.sleep(0)


async def _crash_async(_message: Any) -> None:
    raise RuntimeError("crashed by the test")


@pytest.mark.parametrize("call", ["put_open", "get_open", "readable", "put_ranges", "get_ranges", "put_commit", "get_close"])
async def test_a_crash_while_a_call_is_under_way(call: str) -> None:
    """The call comes back to the undertaker: its sessions are ended from where the call brought them."""
    fine = hashes(2)
    async with Rig(full_layout()) as writer:
        await writer.run(writer.request("w", fine, save={0: [0]}))
        async with Rig(full_layout(), [Fault(what="freeze", call=call, nth=1)], inner=writer.memory) as rig:
            request = rig.request("a", fine, load={0: [0]}, save={0: [1]}, first_id=5)
            step = rig.engine.begin_step([request])
            running = asyncio.create_task(forward(rig, step, request))
            await arrived(rig.store.gates["gate"])
            await crashed(rig)
            rig.store.release()
            await running
            await rig.engine.drain()
            sessions = rig.engine.stats().sessions
            assert sessions.open_now == 0
            assert rig.memory.stats()["open_puts"] == 0
            await rig.saves_counted()


async def forward(rig: Rig, step: Any, request: Any) -> None:
    for layer in (0, 1):
        await step.wait_layer(layer)
        rig.compute(layer, request)
        step.layer_ready(layer)
        await step.checkpoint(layer)
    await step.end()
    await step.settled()


@pytest.mark.parametrize("outcome", [Outcome.TRANSFER_FAILED, Outcome.NOT_OWNER])
async def test_a_revoke_that_fails_after_a_crash_poisons(outcome: Outcome) -> None:
    faults = [Fault(what="freeze", call="put_ranges", nth=1), Fault(what="outcome", call="put_revoke", outcome=outcome)]
    async with Rig(full_layout(), faults) as rig:
        fine = hashes(1)
        step = rig.engine.begin_step([rig.request("a", fine, save={0: [0]})])
        step.layer_ready(0)
        await arrived(rig.store.gates["gate"])
        await crashed(rig)
        rig.store.release()
        await step.end()
        await rig.engine.drain()
        assert rig.engine.stats().poisoned_keys == [rig.key(0, 0, fine)]


async def test_a_commit_that_fails_after_a_crash_abandons() -> None:
    faults = [
        Fault(what="freeze", call="put_commit", nth=1),
        Fault(what="outcome", call="put_commit", outcome=Outcome.TRANSFER_FAILED),
    ]
    async with Rig(full_layout(), faults) as rig:
        fine = hashes(1)
        await rig.run(rig.request("a", fine, save={0: [0]}), settle=False)
        await arrived(rig.store.gates["gate"])
        await crashed(rig)
        rig.store.release()
        await rig.engine.drain()
        assert rig.engine.stats().abandoned_keys == [rig.key(0, 0, fine)]


async def test_a_read_past_its_deadline_after_a_crash_is_fenced_until_it_returns() -> None:
    config = {"call_deadline_s": 0.2}
    async with Rig(full_layout(), [Fault(what="freeze", call="get_ranges", nth=1)], config=config) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        step = rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, first_id=7)])
        await arrived(rig.store.gates["gate"])
        await crashed(rig)
        assert await step.wait_layer(0) == {"a"}
        await step.end()
        assert rig.engine.fenced_blocks == {(0, 7)}
        rig.store.release()
        await rig.calls_returned()
        assert rig.engine.fenced_blocks == frozenset()


async def test_a_write_past_its_deadline_after_a_crash_is_abandoned() -> None:
    config = {"call_deadline_s": 0.2}
    async with Rig(full_layout(), [Fault(what="freeze", call="put_ranges", nth=1)], config=config) as rig:
        fine = hashes(1)
        step = rig.engine.begin_step([rig.request("a", fine, save={0: [0]})])
        step.layer_ready(0)
        await arrived(rig.store.gates["gate"])
        await crashed(rig)
        await step.end()
        await rig.engine.drain()
        assert rig.engine.stats().abandoned_keys == [rig.key(0, 0, fine)]
        rig.store.release()


@pytest.mark.parametrize("call", ["get_open", "get_close"])
async def test_a_lost_get_call_that_returns_after_a_crash(call: str) -> None:
    config = {"call_deadline_s": 0.2}
    async with Rig(full_layout(), [Fault(what="freeze", call=call, nth=1)], config=config) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        step = rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, first_id=7)])
        running = asyncio.create_task(step.wait_layer(0))
        await arrived(rig.store.gates["gate"])
        while not rig.engine.crew.pool.lost_of(0):
            await rig.engine.lookup(hashes(2, "nothing"), 33)
        await crashed(rig)
        await running
        await step.end()
        rig.store.release()
        await rig.calls_returned()
        await rig.engine.drain()
        assert rig.engine.stats().sessions.open_now == 0
        assert rig.memory.stats()["open_gets"] == 0


async def test_a_drain_past_its_deadline_is_answered_for_a_crashed_group() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="put_commit", nth=1)]) as rig:
        await rig.run(rig.request("a", hashes(1), save={0: [0]}), settle=False)
        await arrived(rig.store.gates["gate"])
        await crashed(rig)
        with pytest.raises(DrainTimeout, match="committing"):
            await rig.engine.drain(0.05)
        assert rig.engine.stats().sessions.open_now == 0
        rig.store.release()


async def test_a_crash_between_a_drains_deadline_and_its_grace() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="put_commit", nth=1)]) as rig:
        await rig.run(rig.request("a", hashes(1), save={0: [0]}), settle=False)
        await arrived(rig.store.gates["gate"])
        actor = rig.engine.crew.groups[0]
        actor._abandon_now = crash  # type: ignore[method-assign]  # a stand-in for one call
        with pytest.raises(DrainTimeout, match="committing"):
            await rig.engine.drain(0.05)
        assert rig.engine.stats().sessions.open_now == 0
        rig.store.release()


async def test_a_request_can_be_forgotten_after_a_crash() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(1)
        await rig.save("a", fine)
        await crashed(rig)
        table = rig.engine.crew.groups[0].table
        assert table.remembered("a", 0) == rig.key(0, 0, fine)
        rig.engine.forget("a")
        await quiet(rig)
        assert table.remembered("a", 0) is None


@pytest.mark.parametrize("part", ["_loader.opened", "_saver.opens.readable", "_saver.opens.opened", "_saver.transferred"])
async def test_a_crash_over_a_reply_leaves_no_slot_reserved(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot was freed before the actor looked at it; those of later replies are freed by the undertaker."""
    async with Rig(full_layout()) as rig:
        fine = hashes(3)
        await rig.run(rig.request("w", fine, save={0: [0]}))
        actor = rig.engine.crew.groups[0]
        request = rig.request("a", fine, load={0: [0]}, save={0: [1, 2]}, first_id=5)
        owner, _, name = part.rpartition(".")
        monkeypatch.setattr(attrgetter(owner)(actor), name, crash)
        await forward(rig, rig.engine.begin_step([request]), request)
        await rig.engine.drain()
        assert rig.engine.crew.coordinator._degraded != ""
        assert actor.mailbox._reserved == 0


async def test_steps_and_loads_after_a_crash_pass_through() -> None:
    async with Rig() as rig:
        fine = hashes(4)
        await rig.save("w", fine)
        await crashed(rig)
        step, failed = await rig.run(rig.request("a", fine, load=rig.all_blocks(fine), save={FULL: []}, first_id=9))
        assert step.passed_through
        assert failed[0] == {"a"}
        request = rig.request("b", fine, load=rig.all_blocks(fine), first_id=20)
        assert (await rig.engine.load("b", request.groups, fine)).failure is not None
        assert (await rig.engine.lookup(fine, 65)).tokens == 0
        await quiet(rig)


async def test_a_crash_during_a_drain_does_not_hide_it() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="put_commit", nth=1)]) as rig:
        await rig.run(rig.request("a", hashes(1), save={0: [0]}), settle=False)
        await arrived(rig.store.gates["gate"])
        draining = asyncio.create_task(rig.engine.drain())
        await rig.engine.lookup(hashes(2, "nothing"), 33)
        rig.engine.crew.groups[0].handle = _crash_async  # type: ignore[method-assign]  # a stand-in for one call
        rig.engine.forget("nobody")
        while not rig.engine.crew.coordinator._degraded:
            await rig.engine.lookup(hashes(2, "nothing"), 33)
            await asyncio.sleep(0)
        assert rig.engine.stats().state == "draining"
        rig.store.release()
        await draining
        assert rig.engine.stats().state == "drained"
