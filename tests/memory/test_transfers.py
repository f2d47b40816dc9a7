"""From padded, interleaved views through the engine and a store into views padded otherwise: payload, and nothing but payload.

Stride and padding are no part of a layout's digest, so that workers with other memory share their objects.
"""

from __future__ import annotations

import itertools

import pytest

from kvactors.memory import registered_regions
from kvactors.stores.memory import MemoryStore
from tests.memory.worker import FULL, STATE, WINDOW, Worker, fine_hashes

FORMS = ["pages", "apart", "lanes", "pool"]
PAIRS = [*itertools.product(FORMS, FORMS)]


@pytest.mark.parametrize(("source", "destination"), PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
async def test_every_payload_byte_and_no_padding_byte(source: str, destination: str) -> None:
    store = MemoryStore()
    seed = PAIRS.index((source, destination))
    async with Worker(store, source, 2 * seed) as one, Worker(store, destination, 2 * seed + 1) as two:
        assert one.layout.digest == two.layout.digest
        fine = fine_hashes(8, f"{source} to {destination}")
        blocks = {FULL: range(8), STATE: range(3, 4), WINDOW: range(6, 8)}

        ids = one.ids({FULL: 8, STATE: 1, WINDOW: 2})
        at = {group: dict(zip(indices, ids[group], strict=True)) for group, indices in blocks.items()}
        before = one.memory.contents()
        assert await one.step(one.request("save", fine, at, load=False), fine) == {}
        saved = {g: {at[g][i]: one.block_hash(g, i, fine) for i in indices} for g, indices in blocks.items()}
        assert one.memory.contents() == one.memory.expected(before, saved), "the source is as the compute left it"

        hit = await two.engine.lookup(fine, 33)
        assert hit.tokens == 32
        ids = two.ids({FULL: 8, STATE: 1, WINDOW: 2})
        at = {group: dict(zip(indices, ids[group], strict=True)) for group, indices in blocks.items()}
        before = two.memory.contents()
        assert await two.step(two.request("load", fine, at, load=True), fine) == {}
        loaded = {g: {at[g][i]: two.block_hash(g, i, fine) for i in indices} for g, indices in blocks.items()}
        assert two.memory.contents() == two.memory.expected(before, loaded)
    store.close()


async def test_blocks_go_to_and_fro_until_every_id_was_used() -> None:
    """Several prompts, each saved by one worker and loaded by the other into blocks that held something else."""
    store = MemoryStore()
    async with Worker(store, "pages", 100) as one, Worker(store, "pool", 101) as two:
        for number in range(6):
            source, destination = (one, two) if number % 2 else (two, one)
            fine = fine_hashes(4, f"prompt {number}")
            counts = {FULL: 4, STATE: 1, WINDOW: 2}
            first = {FULL: 0, STATE: 1, WINDOW: 2}
            for worker, load in ((source, False), (destination, True)):
                at = {g: {first[g] + i: block for i, block in enumerate(ids)} for g, ids in worker.ids(counts).items()}
                before = worker.memory.contents()
                name = f"{number}.{load}"
                assert await worker.step(worker.request(name, fine, at, load=load), fine) == {}
                await worker.engine.release(name)
                worker.engine.forget(name)
                moved = {g: {b: worker.block_hash(g, i, fine) for i, b in found.items()} for g, found in at.items()}
                assert worker.memory.contents() == worker.memory.expected(before, moved)
    store.close()


@pytest.mark.parametrize("form", FORMS)
def test_registered_regions_are_what_the_store_needs_to_know(form: str) -> None:
    """Each storage once, whatever lies in it; without them the store refuses, as RDMA would."""
    store = MemoryStore()
    worker = Worker(store, form, 7)
    regions = registered_regions(p.view for p in worker.memory.placed.values())
    assert len(regions) == len(worker.memory.storages)
    for _, nbytes in regions:
        assert nbytes <= max(s.numel() for s in worker.memory.storages)
    for (group, layer, name), placed in worker.memory.placed.items():
        start = placed.memory.data_ptr()
        for block in range(placed.view.shape[0]):
            low, high = start + placed.rows.of(block)[0], start + placed.rows.of(block)[-1]
            assert any(a <= low and high < a + n for a, n in regions), (group, layer, name, block)
    worker.store.close()
    store.close()
