"""What a replay that is given up says of the store's calls that have not returned."""

from __future__ import annotations

import re

from kvactors.replay.run import _calls_under_way
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import Rig, arrived, full_layout, hashes
from tests.engine.test_late_answers import SHORT, until


async def test_a_lookup_that_hangs_is_named_before_and_after_its_deadline() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="readable", nth=1)], config=SHORT) as rig:
        assert _calls_under_way(rig.engine) == []
        assert (await rig.engine.lookup(hashes(1), 17, deadline_s=0.01)).tokens == 0
        await arrived(rig.store.gates["gate"])
        await until(rig, lambda: bool(rig.engine.crew.pool.lost_workers))
        (call,) = _calls_under_way(rig.engine)
        assert re.fullmatch(r"readable for \d+\.\d s", call)


async def test_a_call_of_a_group_names_it() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="put_ranges", nth=1)]) as rig:
        step = rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        step.layer_ready(0)
        await arrived(rig.store.gates["gate"])
        (call,) = _calls_under_way(rig.engine)
        assert re.fullmatch(r"put ranges of group 0 for \d+\.\d s", call)
        rig.store.release()
        await step.abort()
