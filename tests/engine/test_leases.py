"""Many reads that together take longer than a lease: 6,722 keys in calls of 64, 10 s (Mooncake#3076, #4239)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.steps import FailedLoad, GroupBlocks, StepRequest
from kvactors.core.store import Outcome, RangeBatch
from kvactors.engine import Engine, EngineConfig
from kvactors.simulate.loop import VirtualLoop, run_virtual
from kvactors.simulate.workers import SimulatedWorkers, Speed
from kvactors.stores import MemoryStore

KEYS, KEYS_A_CALL, LEASE_S, BYTES = 6722, 64, 10.0, 16
CALLS = 106
READERS = 3
"""Two workers, and one that takes loads only."""


class CountedReads(MemoryStore):
    reads = 0

    def get_ranges(self, batch: RangeBatch) -> list[Outcome]:
        self.reads += 1
        return super().get_ranges(batch)


async def load(engine: Engine, blocks: GroupBlocks, hashes: list[bytes], in_step: bool) -> FailedLoad | None:
    if not in_step:
        return (await engine.load("r", {0: blocks}, hashes)).failure
    step = engine.begin_step([StepRequest("r", hashes, {0: blocks})])
    await step.wait_layer(0)
    await step.end()
    return step.failures.get("r")


@pytest.mark.parametrize("in_step", [True, False], ids=["step", "load"])
@pytest.mark.parametrize("call_s", [0.1, 6.0])
def test_leases_are_renewed(call_s: float, in_step: bool) -> None:
    layout = KVLayout("m", [Group(0, GroupKind.FULL, 16, {0: [CacheEntry("k", BYTES)]})])
    memory: np.ndarray[Any, Any] = np.zeros((2 * KEYS, BYTES), np.uint8)
    saved, loaded = memory[:KEYS], memory[KEYS:]
    saved[:] = np.random.default_rng(0).integers(1, 255, saved.shape, dtype=np.uint8)
    hashes = [i.to_bytes(8, "big") for i in range(KEYS)]
    loop = VirtualLoop()
    store = CountedReads(clock=loop, lease_s=LEASE_S)
    store.register(memory.ctypes.data, memory.nbytes)
    config = EngineConfig(max_transfer_blocks=KEYS_A_CALL, audit=True, step_deadline_s=1e4)
    bases = {(0, 0, "k"): memory.ctypes.data}

    async def play() -> float:
        fast = SimulatedWorkers(loop, Speed(0.0, 1e12))
        async with Engine(layout, store, bases, config, clock=loop, executor=fast) as writer:
            step = writer.begin_step([StepRequest("w", hashes, {0: GroupBlocks(range(KEYS), save=range(KEYS))})])
            step.layer_ready(0)
            await step.end()
            await step.settled()
        slow = SimulatedWorkers(loop, Speed(call_s, 1e12))
        async with Engine(layout, store, bases, config, clock=loop, executor=slow) as reader:
            began = loop.now()
            failure = await load(reader, GroupBlocks(range(KEYS, 2 * KEYS), load=range(KEYS)), hashes, in_step)
            assert failure is None
            assert reader.violations() == []
            return loop.now() - began

    taken_s = run_virtual(play(), loop)
    assert (loaded == saved).all()
    assert store.reads == CALLS
    assert taken_s > CALLS * call_s / READERS
    store.close()
