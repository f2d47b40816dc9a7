"""What `Engine.stats` says beyond the counters that other tests look at."""

from __future__ import annotations

from kvactors.core.store import Outcome
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import Rig, arrived, full_layout, hashes
from tests.engine.test_late_answers import until


async def test_a_snapshot_has_the_causes_of_revokes_and_stays_as_it_is() -> None:
    faults = [Fault(what="outcome", call="put_ranges", outcome=Outcome.TRANSFER_FAILED, times=1)]
    async with Rig(full_layout(), faults) as rig:
        before = rig.engine.stats()
        await rig.save("a", hashes(1))
        step = rig.engine.begin_step([rig.request("b", hashes(2, "other"), save={0: [0, 1]})])
        await until(rig, lambda: rig.engine.stats().sessions.put_opened == 3)
        await step.abort()
        await step.settled()
        sessions = rig.engine.stats().sessions
        assert sessions.revoked_by == {"transfer failed": 1, "aborted": 2}
        assert sum(sessions.revoked_by.values()) == sessions.put_revoked
        assert before.sessions.revoked_by == {}


async def test_jobs_that_wait_for_a_worker_are_counted() -> None:
    faults = [Fault(what="freeze", call="put_ranges", nth=1)]
    async with Rig(full_layout(layers=4), faults, config={"workers": 1}) as rig:
        request = rig.request("a", hashes(1), save={0: [0]})
        step = rig.engine.begin_step([request])
        for layer in range(4):
            await step.wait_layer(layer)
            rig.compute(layer, request)
            step.layer_ready(layer)
        await arrived(rig.store.gates["gate"])
        await rig.engine.lookup(hashes(1, "nothing"), 17)  # the messages before it were read
        assert rig.engine.stats().queued == 3
        rig.store.release()
        await step.end()
        await step.settled()
        assert rig.engine.stats().queued == 0
