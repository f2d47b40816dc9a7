"""Layers that waited for a worker are saved in one store call, and load again as they were."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvactors.core.loads import StepLoads
from kvactors.core.store import RangeBatch
from kvactors.stores.fault_plan import Fault
from kvactors.stores.memory import MemoryStore
from tests.engine.rig import Rig, arrived, full_layout, hashes
from tests.engine.test_late_answers import SOON_S, until

LAYERS = 6


class Coarse(MemoryStore):
    """A store for which short ranges are dear."""

    good_range_bytes = 1 << 20

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranges_put: list[int] = []
        self.ranges_got: list[int] = []

    def put_ranges(self, batch: RangeBatch) -> Any:
        self.ranges_put.append(len(batch.sizes))
        return super().put_ranges(batch)

    def get_ranges(self, batch: RangeBatch) -> Any:
        self.ranges_got.append(len(batch.sizes))
        return super().get_ranges(batch)


async def test_layers_that_wait_for_a_busy_store_are_saved_in_one_call() -> None:
    store = Coarse()
    faults = [Fault(what="freeze", call="put_ranges", nth=1)]
    async with Rig(full_layout(layers=LAYERS), faults, config={"workers": 1}, inner=store) as rig:
        fine = hashes(3)
        request = rig.request("a", fine, save={0: [0, 1, 2]})
        step = rig.engine.begin_step([request])
        for layer in range(LAYERS):
            rig.compute(layer, request)
            step.layer_ready(layer)
            if layer == 0:
                await arrived(rig.store.gates["gate"])
        await until(rig, lambda: len(rig.engine.crew.pool.jobs_of(0)) == LAYERS)
        rig.store.release()
        await step.end()
        await step.settled()
        assert rig.committed(0, fine) == [0, 1, 2]
        assert store.ranges_put == [2, 2 * (LAYERS - 1)]
        assert rig.engine.stats().joined_transfers == LAYERS - 2
        again = rig.request("b", fine, load={0: [0, 1, 2]}, first_id=9)
        await rig.run(again)
        assert rig.loaded_right(again)


async def stored(rig: Rig, count: int = 3) -> list[bytes]:
    fine = hashes(count)
    await rig.save("w", fine)
    return fine


LESS_THAN_AN_OBJECT = 32 * LAYERS - 1


async def test_the_layers_of_a_run_are_loaded_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coarse, "good_range_bytes", LESS_THAN_AN_OBJECT)
    store = Coarse()
    async with Rig(full_layout(layers=LAYERS), inner=store) as rig:
        request = rig.request("r", await stored(rig), load={0: [0, 1, 2]}, first_id=9)
        await rig.run(request)
        assert rig.loaded_right(request)
        assert sorted(store.ranges_got) == [2, 4, 6]  # one layer, two, and the rest


async def test_an_object_that_is_no_longer_than_a_good_range_is_loaded_at_once() -> None:
    store = Coarse()
    async with Rig(full_layout(layers=LAYERS), inner=store) as rig:
        request = rig.request("r", await stored(rig), load={0: [0, 1, 2]}, first_id=9)
        await rig.run(request)
        assert rig.loaded_right(request)
        assert store.ranges_got == [2 * LAYERS]


@pytest.mark.parametrize(("whole", "most_bytes", "calls"), [(True, 0, [12]), (True, 400, [12, 12]), (False, 0, [2] * 6)])
async def test_a_load_outside_a_step_reads_whole_objects_where_that_pays(
    monkeypatch: pytest.MonkeyPatch, whole: bool, most_bytes: int, calls: list[int]
) -> None:
    """Three objects of 192 bytes; two of them fit into 400."""
    monkeypatch.setattr(Coarse, "good_range_bytes", 1)
    monkeypatch.setattr(Coarse, "reads_whole_objects", whole, raising=False)
    store = Coarse()
    async with Rig(full_layout(layers=LAYERS), inner=store, config={"max_transfer_bytes": most_bytes}) as rig:
        request = rig.request("r", await stored(rig), load={0: [0, 1, 2]}, first_id=9)
        assert (await rig.engine.load("r", request.groups, request.hashes)).failure is None
        assert rig.loaded_right(request)
        assert store.ranges_got == calls


async def test_the_next_run_is_on_its_way_while_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coarse, "good_range_bytes", LESS_THAN_AN_OBJECT)
    store = Coarse()
    async with Rig(full_layout(layers=LAYERS), inner=store, config={"prefetch_layers": 1}) as rig:
        request = rig.request("r", await stored(rig), load={0: [0, 1, 2]}, first_id=9)
        step = rig.engine.begin_step([request])
        await until(rig, lambda: sorted(store.ranges_got) == [2, 4])  # nothing of layer 0 is computed yet
        for layer in range(LAYERS):
            assert await step.wait_layer(layer) == frozenset()
            step.layer_ready(layer)
        await step.end()
        assert rig.loaded_right(request)


async def test_without_prefetch_every_layer_is_loaded_when_it_is_wanted() -> None:
    store = Coarse()
    async with Rig(full_layout(layers=LAYERS), inner=store, config={"prefetch_layers": 0}) as rig:
        request = rig.request("r", await stored(rig), load={0: [0, 1, 2]}, first_id=9)
        await rig.run(request)
        assert rig.loaded_right(request)
        assert store.ranges_got == [2] * LAYERS


async def test_a_crash_in_the_middle_of_a_run_answers_every_layer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StepLoads.start

    def start(self: StepLoads, layer: int, failed: Any) -> Any:
        if layer == 2:
            raise RuntimeError("injected by the test")
        return real(self, layer, failed)

    async with Rig(full_layout(layers=LAYERS), inner=Coarse()) as rig:
        request = rig.request("r", await stored(rig), load={0: [0, 1, 2]}, first_id=9)
        monkeypatch.setattr(StepLoads, "start", start)
        step = rig.engine.begin_step([request])
        for layer in range(LAYERS):
            await asyncio.wait_for(step.wait_layer(layer), SOON_S)
            step.layer_ready(layer)
        await step.end()
        assert set(step.failures) == {"r"}


async def test_a_load_outside_a_step_has_no_first_layer() -> None:
    store = Coarse()
    async with Rig(full_layout(layers=LAYERS), inner=store) as rig:
        request = rig.request("r", await stored(rig), load={0: [0, 1, 2]}, first_id=9)
        assert (await rig.engine.load("r", request.groups, request.hashes)).failure is None
        assert rig.loaded_right(request)
        assert store.ranges_got == [2 * LAYERS]


async def test_the_runs_of_a_step_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coarse, "good_range_bytes", 64)  # two layers of K and V, 16 bytes each
    store = Coarse()
    faults = [Fault(what="freeze", call="get_ranges", nth=1)]
    async with Rig(full_layout(layers=LAYERS), faults, config={"workers": 1}, inner=store) as rig:
        request = rig.request("r", await stored(rig), load={0: [0, 1, 2]}, first_id=9)
        step = rig.engine.begin_step([request])
        await arrived(rig.store.gates["gate"])
        rig.store.release()
        for layer in range(LAYERS):
            assert await step.wait_layer(layer) == frozenset()
            step.layer_ready(layer)
        await step.end()
        assert rig.loaded_right(request)
        assert sorted(store.ranges_got) == [2, 2, 4, 4]  # the first alone, twice a good range, and the last
