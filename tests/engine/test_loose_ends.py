"""What has ended, or was given up, stays so: late opens, later closes, revokes and workers that come back."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.core.store import Outcome
from kvactors.errors import DrainTimeout
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import Rig, arrived, full_layout, hashes, quiet
from tests.engine.test_late_answers import SHORT, SOON_S, until


async def test_what_a_put_open_that_returns_late_has_opened_is_revoked() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="put_open", nth=1)], config=SHORT) as rig:
        fine = hashes(1)
        await rig.run(rig.request("a", fine, save={0: [0]}), settle=False)
        assert rig.engine.stats().abandoned_keys == [rig.key(0, 0, fine)]
        rig.store.release()
        await rig.calls_returned()
        assert rig.memory.stats()["open_puts"] == 0


async def test_an_abort_takes_back_questions_and_opens_that_did_not_start() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="put_commit", nth=1)], config={"workers": 1}) as rig:
        await rig.run(rig.request("a", hashes(1), save={0: [0]}), settle=False)
        await arrived(rig.store.gates["gate"])
        step = rig.engine.begin_step([rig.request("b", hashes(1, "other"), save={0: [0]}, first_id=5)])
        await until_queued(rig)
        asked = rig.store._calls["readable"]
        await step.abort()
        await asyncio.wait_for(step.settled(), SOON_S)
        rig.store.release()
        await rig.engine.drain()
        assert rig.store._calls["readable"] == asked


async def until_queued(rig: Rig) -> None:
    """Lets the loop run until a job waits for a worker. (A lookup would wait behind it.)"""

    async def look() -> None:
        while not rig.engine.crew.pool.queued:  # noqa: ASYNC110 - a lookup would wait behind it
            await asyncio.sleep(0)

    await asyncio.wait_for(look(), SOON_S)


async def test_a_revoke_of_a_put_that_the_store_does_not_know_voids_all_sessions() -> None:
    async with Rig(full_layout(), [Fault(what="outcome", call="put_revoke", nth=1, outcome=Outcome.NOT_FOUND)]) as rig:
        step = rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        await until(rig, lambda: rig.memory.stats()["open_puts"] == 1)
        await step.abort()
        await step.settled()
        assert rig.engine.crew.pool.epoch == 1


async def test_a_signal_of_a_step_that_was_overtaken_counts_no_save() -> None:
    async with Rig(full_layout()) as rig:
        first = rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        second = rig.engine.begin_step([rig.request("b", hashes(1, "other"), save={0: [0]}, first_id=5)])
        first.layer_ready(0)
        assert rig.engine.pending_saves == 0
        await second.end()
        await first.end()


async def test_a_worker_that_comes_back_works_again() -> None:
    config = {**SHORT, "workers": 1, "max_lost_workers": 0}
    async with Rig(full_layout(), [Fault(what="freeze", call="put_ranges", nth=1)], config=config) as rig:
        fine, other = hashes(1), hashes(1, "other")
        await rig.run(rig.request("a", fine, save={0: [0]}), settle=False)
        assert rig.engine.crew.pool.glance().missing == 1
        rig.store.release()
        await until(rig, lambda: not rig.engine.crew.pool.lost_of(0))
        await rig.save("b", other, first_id=5)
        assert rig.committed(0, other) == [0]


async def test_a_close_does_not_wait_behind_saves() -> None:
    faults = [Fault(what="freeze", call="put_ranges", nth=2)]
    async with Rig(full_layout(1), faults, config={"workers": 1}) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        step = rig.engine.begin_step([rig.request("a", hashes(1, "other"), save={0: [0]})])
        step.layer_ready(0)
        await arrived(rig.store.gates["gate"])
        for n, first_id in (("b", 5), ("c", 9)):  # the second opens the key again, once it was closed
            loading = rig.request(n, fine, load={0: [0]}, first_id=first_id)
            done = await asyncio.wait_for(rig.engine.load(n, loading.groups, fine), SOON_S)
            assert done.failure is None
            assert rig.loaded_right(loading)
        rig.store.release()
        await step.end()


async def test_a_step_settles_when_the_revoke_of_a_late_space_has_ended() -> None:
    faults = [
        Fault(what="outcome", call="put_open", nth=1, outcome=Outcome.NO_SPACE),
        Fault(what="outcome", call="put_open", nth=2, outcome=Outcome.NO_SPACE),
        Fault(what="freeze", call="put_open", nth=3, gate="open"),
        Fault(what="freeze", call="put_revoke", nth=1, gate="revoke"),
    ]
    async with Rig(full_layout(), faults) as rig:
        request = rig.request("a", hashes(1), save={0: [0]})
        step = rig.engine.begin_step([request])
        await arrived(rig.store.gates["open"])
        step.layer_ready(0)
        await until(rig, lambda: all(gs.saves and gs.saves.signalled for gs in rig.engine.crew.groups[0].steps.values()))
        rig.store.release("open")
        await arrived(rig.store.gates["revoke"])
        step.layer_ready(1)
        await step.end()
        settling = asyncio.create_task(step.settled())
        await rig.engine.lookup(hashes(1, "x"), 17)
        assert not settling.done()
        rig.store.release("revoke")
        await asyncio.wait_for(settling, SOON_S)
        assert rig.memory.stats()["open_puts"] == 0


async def test_a_message_that_is_handled_as_the_coordinator_crashes_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(full_layout()) as rig:

        async def crash(*_: object) -> None:
            raise RuntimeError("crashed by the test")

        monkeypatch.setattr(rig.engine.crew.coordinator, "_release", crash)
        await asyncio.wait_for(rig.engine.release("a"), SOON_S)
        assert rig.engine.stats().state == "dead"


async def test_what_a_drain_abandoned_is_not_committed_when_its_write_returns() -> None:
    async with Rig(full_layout(1), [Fault(what="freeze", call="put_ranges", nth=1)]) as rig:
        fine = hashes(1)
        request = rig.request("a", fine, save={0: [0]})
        step = rig.engine.begin_step([request])
        rig.compute(0, request)
        step.layer_ready(0)
        await arrived(rig.store.gates["gate"])
        with pytest.raises(DrainTimeout):
            await rig.engine.drain(0.05)
        rig.store.release()
        await quiet(rig)
        assert rig.committed(0, fine) == []
        assert rig.engine.stats().state == "drained"
        assert rig.engine.crew.coordinator._degraded == "", "no actor crashed"
        assert rig.engine.stats().abandoned_keys == [rig.key(0, 0, fine)]
