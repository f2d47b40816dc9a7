"""A request that is preempted or aborted while its step is open: its blocks are free once `release` returned, and the step goes
on for the others."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.core.steps import ReleaseReason
from kvactors.devices import ManualEvent
from kvactors.engine import Step
from kvactors.messages import Transfer
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import PATIENCE_S, Rig, arrived, full_layout, hashes, quiet

LEAVING = [ReleaseReason.PREEMPTED, ReleaseReason.ABORTED]
FROZEN_PUT = Fault(what="freeze", call="put_ranges", nth=1)
FROZEN_GET = Fault(what="freeze", call="get_ranges", nth=1)
ONE_LAYER_A_CALL = {"prefetch_layers": 0}


def reuse(rig: Rig, *blocks: int) -> None:
    """Somebody else writes these local blocks."""
    for array in rig.local.values():
        array[list(blocks)] = 0xBB


def untouched(rig: Rig, *blocks: int) -> bool:
    return all((array[list(blocks)] == 0xBB).all() for array in rig.local.values())


async def quiet_but(rig: Rig, jobs: int) -> None:
    """Waits until so many jobs are left."""
    while len(rig.engine.crew.pool.jobs_of(0)) != jobs:
        await rig.engine.lookup(hashes(1, "x"), 17)


async def ended(step: Step) -> None:
    await step.end()
    await step.settled()


@pytest.mark.parametrize("reason", LEAVING)
async def test_what_was_signalled_whole_is_awaited_and_right(reason: ReleaseReason) -> None:
    async with Rig(full_layout(), [FROZEN_PUT]) as rig:
        fine = hashes(2)
        request = rig.request("a", fine, save={0: [0, 1]})
        step = rig.engine.begin_step([request])
        for layer in range(2):
            rig.compute(layer, request)
            step.layer_ready(layer)
        await arrived(rig.store.gates["gate"])
        await quiet_but(rig, 1)
        releasing = asyncio.create_task(rig.engine.release("a", reason))
        assert (await rig.engine.lookup(hashes(1, "x"), 17)).tokens == 0, "the coordinator has seen the release by now"
        assert not releasing.done(), "the frozen put still reads the blocks"
        rig.store.release()
        await releasing
        reuse(rig, 1, 2)
        await ended(step)
        assert rig.committed(0, fine) == [0, 1]
        await rig.run(again := rig.request("b", fine, load={0: [0, 1]}, first_id=9))
        assert rig.loaded_right(again)


@pytest.mark.parametrize("reason", LEAVING)
async def test_a_put_that_never_returns_publishes_nothing(reason: ReleaseReason) -> None:
    async with Rig(full_layout(), [FROZEN_PUT], config={"call_deadline_s": 0.3}) as rig:
        fine = hashes(1)
        request = rig.request("a", fine, save={0: [0]})
        step = rig.engine.begin_step([request])
        for layer in range(2):
            rig.compute(layer, request)
            step.layer_ready(layer)
        await arrived(rig.store.gates["gate"])
        await rig.engine.release("a", reason)
        reuse(rig, 1)
        rig.store.release()
        await ended(step)
        await rig.engine.drain()
        assert rig.committed(0, fine) == []
        assert rig.engine.stats().abandoned_keys == [rig.key(0, 0, fine)]


@pytest.mark.parametrize("reason", LEAVING)
@pytest.mark.parametrize("signalled", [0, 1])
async def test_half_a_save_is_revoked_and_the_others_commit(reason: ReleaseReason, signalled: int) -> None:
    async with Rig(full_layout()) as rig:
        fine, other = hashes(2), hashes(2, "other")
        gone, stays = rig.request("a", fine, save={0: [0, 1]}), rig.request("b", other, save={0: [0, 1]}, first_id=5)
        step = rig.engine.begin_step([gone, stays])
        for layer in range(2):
            if layer == signalled:
                await rig.engine.release("a", reason)
                reuse(rig, 1, 2)
            rig.compute(layer, stays, *([gone] if layer < signalled else []))
            step.layer_ready(layer)
        await ended(step)
        assert (rig.committed(0, fine), rig.committed(0, other)) == ([], [0, 1])
        assert step.failures == {}
        sessions = rig.engine.stats().sessions
        assert (sessions.put_committed, sessions.put_revoked, sessions.open_now) == (2, 2, 0)
        assert "its request was released inside the step" in "\n".join(rig.engine.story("a"))
        await rig.save("c", fine, first_id=20)
        assert rig.committed(0, fine) == [0, 1], "the next one that computes it saves it"


@pytest.mark.parametrize("reason", LEAVING)
async def test_a_read_on_its_way_is_awaited_and_no_later_one_starts(reason: ReleaseReason) -> None:
    async with Rig(full_layout(layers=3), [FROZEN_GET], config=ONE_LAYER_A_CALL) as rig:
        fine, other = hashes(2), hashes(2, "other")
        await rig.save("w", fine)
        await rig.save("x", other)
        rig.wipe()
        gone = rig.request("a", fine, load={0: [0, 1]}, first_id=5)
        stays = rig.request("b", other, load={0: [0, 1]}, first_id=9)
        step = rig.engine.begin_step([gone, stays])
        waiting = asyncio.create_task(step.wait_layer(0))
        await arrived(rig.store.gates["gate"])
        releasing = asyncio.create_task(rig.engine.release("a", reason))
        assert (await rig.engine.lookup(hashes(1, "x"), 17)).tokens == 0
        assert not releasing.done(), "the frozen get still writes the blocks"
        rig.store.release()
        await releasing
        reuse(rig, 5, 6)
        assert "a" in await waiting
        step.layer_ready(0)
        for layer in (1, 2):
            assert await step.wait_layer(layer) == {"a"}
            step.layer_ready(layer)
        await ended(step)
        assert untouched(rig, 5, 6)
        assert rig.loaded_right(stays)
        assert set(step.failures) == {"a"}
        assert step.failures["a"].reason == f"aborted: its request was {reason.value}"


async def test_one_that_comes_back_is_clean_again_at_a_verified_boundary() -> None:
    async with Rig(full_layout(layers=3), [FROZEN_GET], config=ONE_LAYER_A_CALL) as rig:
        fine = hashes(4)
        await rig.save("w", fine[:2])
        step = rig.engine.begin_step([rig.request("a", fine, load={0: [0, 1]}, save={0: [2, 3]}, first_id=5)])
        waiting = asyncio.create_task(step.wait_layer(0))
        await arrived(rig.store.gates["gate"])
        releasing = asyncio.create_task(rig.engine.release("a", ReleaseReason.PREEMPTED))
        await rig.engine.lookup(hashes(1, "x"), 17)
        rig.store.release()
        await releasing
        await waiting
        await ended(step)
        assert rig.committed(0, fine) == [0, 1]
        again = rig.request("a", fine, load={0: [0, 1]}, save={0: [2, 3]}, first_id=15, restarted_at=32)
        await rig.run(again)
        assert rig.loaded_right(again)
        assert rig.committed(0, fine) == [0, 1, 2, 3]


async def test_before_the_step_is_prepared() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="put_open", nth=1)]) as rig:
        fine = hashes(1)
        step = rig.engine.begin_step([rig.request("a", fine, save={0: [0]})])
        await arrived(rig.store.gates["gate"])
        await rig.engine.release("a", ReleaseReason.PREEMPTED)
        rig.store.release()
        for layer in range(2):
            step.layer_ready(layer)
        await ended(step)
        assert rig.committed(0, fine) == []
        assert rig.engine.stats().sessions.put_revoked == 1


async def test_a_save_that_waits_for_its_event_is_awaited() -> None:
    async with Rig(full_layout(layers=1)) as rig:
        fine = hashes(1)
        request, event = rig.request("a", fine, save={0: [0]}), ManualEvent()
        step = rig.engine.begin_step([request])
        step.layer_ready(0, event)
        while not any(isinstance(job, Transfer) for job in rig.engine.crew.pool.jobs_of(0)):
            await rig.engine.lookup(hashes(1, "x"), 17)
        releasing = asyncio.create_task(rig.engine.release("a", ReleaseReason.PREEMPTED))
        await rig.engine.lookup(hashes(1, "x"), 17)
        assert not releasing.done()
        rig.compute(0, request)
        event.fire()
        await asyncio.wait_for(releasing, PATIENCE_S)
        reuse(rig, 1)
        await ended(step)
        await quiet(rig)
        assert rig.committed(0, fine) == [0]


async def test_the_engine_ends_meanwhile() -> None:
    async with Rig(full_layout(), [FROZEN_PUT]) as rig:
        request = rig.request("a", hashes(1), save={0: [0]})
        step = rig.engine.begin_step([request])
        step.layer_ready(0)
        await arrived(rig.store.gates["gate"])
        releasing = asyncio.create_task(rig.engine.release("a", ReleaseReason.PREEMPTED))
        await rig.engine.lookup(hashes(1, "x"), 17)
        rig.engine.crew.give_up("the test")
        rig.store.release()
        await asyncio.wait_for(releasing, PATIENCE_S)


async def test_a_load_outside_the_step_is_given_up_and_awaited_too() -> None:
    async with Rig(full_layout(), [FROZEN_GET]) as rig:
        fine = hashes(2)
        await rig.save("w", fine)
        groups = rig.request("a", fine, load={0: [0, 1]}, first_id=10).groups
        loading = asyncio.create_task(rig.engine.load("a", groups, fine))
        await arrived(rig.store.gates["gate"])
        step = rig.engine.begin_step([rig.request("a", hashes(2, "other"), save={0: [0]}, first_id=20)])
        releasing = asyncio.create_task(rig.engine.release("a", ReleaseReason.ABORTED))
        assert (await rig.engine.lookup(hashes(1, "x"), 17)).tokens == 0
        assert not releasing.done(), "the frozen get still writes the blocks"
        rig.store.release()
        await releasing
        reuse(rig, 10, 11)
        await loading
        await ended(step)
        assert untouched(rig, 10, 11)


async def test_who_leaves_is_no_failure_of_a_strict_step() -> None:
    async with Rig(full_layout(), config={"strict": True, **ONE_LAYER_A_CALL}) as rig:
        fine, other = hashes(1), hashes(1, "other")
        await rig.save("w", fine)
        await rig.save("x", other)
        rig.wipe()
        gone, stays = (rig.request(n, f, load={0: [0]}, first_id=i) for n, f, i in (("a", fine, 5), ("b", other, 9)))
        step = rig.engine.begin_step([gone, stays])
        assert await step.wait_layer(0) == frozenset()
        await rig.engine.release("a", ReleaseReason.PREEMPTED)
        step.layer_ready(0)
        assert await step.wait_layer(1) == {"a"}
        step.layer_ready(1)
        await ended(step)
        assert rig.loaded_right(stays)
