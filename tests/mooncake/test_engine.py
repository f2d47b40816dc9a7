"""The engine on a real master: what it promises holds over real sessions, real ranges and real bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvactors.core.layout import KVLayout
from kvactors.core.steps import GroupBlocks, ReleaseReason, StepRequest
from kvactors.engine import BlockingEngine
from kvactors.stores import MooncakeStore
from tests.engine.rig import COMPRESSED, FULL, STATE, full_layout, hashes, seed_layout
from tests.mooncake.rig import MooncakeRig, hybrid_layout

LAYOUTS = {
    "seed": seed_layout(),
    "hybrid": hybrid_layout(),
    "padded": full_layout(4, 16 << 10),
    "wide": full_layout(2, 256 << 10),
}


@pytest.fixture
def fine(request: pytest.FixtureRequest) -> list[bytes]:
    """A prompt of 64 tokens that only this test knows: tests share a pool."""
    return hashes(4, request.node.name)


@pytest.mark.parametrize("name", LAYOUTS)
async def test_what_one_prompt_saved_another_finds_and_loads(
    name: str, owner: MooncakeStore, reader: MooncakeStore, fine: list[bytes]
) -> None:
    layout = LAYOUTS[name]
    prompt = fine + hashes(1, "question")
    async with MooncakeRig(owner, layout) as writer, MooncakeRig(reader, layout) as other:
        assert (await other.engine.lookup(prompt, 80)).tokens == 0
        await writer.save("w", fine)
        assert (await other.engine.lookup(prompt, 80)).tokens == 64
        loading = other.request("r", fine, load=other.all_blocks(fine), first_id=9)
        _, failed = await other.play(loading)
        assert not any(failed.values())
        assert other.loaded_right(loading)
        for rig in (writer, other):
            await rig.engine.drain()
            assert rig.engine.stats().sessions.open_now == 0


async def test_padding_between_blocks_is_neither_read_nor_written(owner: MooncakeStore, fine: list[bytes]) -> None:
    async with MooncakeRig(owner, hybrid_layout()) as rig:
        await rig.save("w", fine)
        for array in rig.local.values():
            array[:] = 0xEE
        loading = rig.request("r", fine, load=rig.all_blocks(fine), first_id=9)
        await rig.play(loading)
        for where, array in rig.local.items():
            assert (array[:, len(rig.right(where, b"")) :] == 0xEE).all()
            assert (array[:9] == 0xEE).all(), "no other block is touched"


async def test_requests_that_share_a_prefix_share_its_get_sessions(owner: MooncakeStore, fine: list[bytes]) -> None:
    async with MooncakeRig(owner) as rig:
        await rig.save("w", fine)
        loads = [rig.request(f"r{i}", fine, load=rig.all_blocks(fine), first_id=10 * i + 10) for i in range(3)]
        await rig.play(*loads)
        assert all(rig.loaded_right(request) for request in loads)
        sessions = rig.engine.stats().sessions
        assert (sessions.get_opened, sessions.get_closed) == (7, 7), "one per key, whoever shares it (I6)"
        assert rig.mooncake.stats()["gets_open"] == 0


async def test_a_prompt_computed_in_chunks_is_published_whole(owner: MooncakeStore, fine: list[bytes]) -> None:
    async with MooncakeRig(owner) as rig:
        await rig.run(rig.request("a", fine[:2], save={FULL: [0, 1], COMPRESSED: [0]}))
        assert (rig.committed(FULL, fine), rig.committed(COMPRESSED, fine)) == ([0, 1], [0])
        await rig.run(rig.request("a", fine, save={FULL: [2, 3], COMPRESSED: [1], STATE: [3]}))
        assert (rig.committed(FULL, fine), rig.committed(COMPRESSED, fine)) == ([0, 1, 2, 3], [0, 1])
        assert (await rig.engine.lookup(fine + hashes(1), 80)).tokens == 64


async def test_a_step_loads_the_prefix_and_saves_the_rest(owner: MooncakeStore, fine: list[bytes]) -> None:
    longer = fine + hashes(4, "the rest")
    async with MooncakeRig(owner) as rig:
        await rig.save("w", fine)
        both = rig.request(
            "a", longer, load=rig.all_blocks(fine), save={FULL: [4, 5, 6, 7], COMPRESSED: [2, 3], STATE: [7]}, first_id=9
        )
        _, failed = await rig.play(both)
        assert not any(failed.values())
        assert rig.loaded_right(both)
        assert (await rig.engine.lookup(longer + hashes(1), 144)).tokens == 128


async def test_a_load_outside_any_step(owner: MooncakeStore, fine: list[bytes]) -> None:
    async with MooncakeRig(owner) as rig:
        await rig.save("w", fine)
        loading = rig.request("r", fine, load=rig.all_blocks(fine), first_id=9)
        done = await rig.engine.load("r", loading.groups, fine)
        assert done.failure is None
        assert rig.loaded_right(loading)


async def test_an_aborted_step_publishes_nothing_and_leaves_its_keys_free(owner: MooncakeStore, fine: list[bytes]) -> None:
    async with MooncakeRig(owner) as rig:
        request = rig.request("a", fine, save=rig.all_blocks(fine))
        step = rig.engine.begin_step([request])
        rig.compute(0, request)
        step.layer_ready(0)
        await step.checkpoint(0)
        await step.abort()
        await step.settled()
        assert not any(rig.mooncake.readable(rig.keys(fine)))
        await rig.save("b", fine)
        assert all(rig.mooncake.readable(rig.keys(fine)))


async def test_two_engines_that_compute_the_same_blocks_write_each_once(
    owner: MooncakeStore, reader: MooncakeStore, fine: list[bytes]
) -> None:
    """I10 across clients: the master lets one of them open a key, the other skips the block."""
    async with MooncakeRig(owner) as a, MooncakeRig(reader) as b:
        await asyncio.gather(a.save("a", fine), b.save("b", fine))
        of_a, of_b = a.engine.stats().sessions, b.engine.stats().sessions
        assert of_a.put_committed + of_b.put_committed == 7
        assert of_a.put_opened == of_a.put_committed
        assert of_b.put_opened == of_b.put_committed
        loading = b.request("r", fine, load=b.all_blocks(fine), first_id=9)
        await b.play(loading)
        assert b.loaded_right(loading)


async def test_two_requests_of_a_step_that_compute_the_same_blocks_write_each_once(
    owner: MooncakeStore, fine: list[bytes]
) -> None:
    async with MooncakeRig(owner) as rig:
        same = [rig.request(f"r{i}", fine, save=rig.all_blocks(fine), first_id=10 * i + 1) for i in range(3)]
        await rig.run(*same)
        sessions = rig.engine.stats().sessions
        assert (sessions.put_opened, sessions.put_committed) == (7, 7)


async def test_an_object_of_another_layout_under_the_same_key_is_a_miss(owner: MooncakeStore, fine: list[bytes]) -> None:
    """The key of a single group carries no layout."""
    async with MooncakeRig(owner, full_layout(entry=4096)) as small, MooncakeRig(owner, full_layout(entry=8192)) as large:
        await small.save("w", fine)
        loading = large.request("r", fine, load={0: [0, 1, 2, 3]}, first_id=9)
        step, _ = await large.play(loading)
        assert "size" in step.failures["r"].reason


# -- fewer, bigger ranges ----------------------------------------------------------------------------------------------


async def _ranges_of_a_round_trip(store: MooncakeStore, fine: list[bytes], layout: KVLayout, host: bool) -> dict[str, int]:
    before = dict(store.stats())
    async with MooncakeRig(store, layout, host=host) as rig:
        await rig.save("w", fine)
        rig.wipe()
        loading = rig.request("r", fine, load=rig.all_blocks(fine), first_id=9)
        _, failed = await rig.play(loading)
        assert not any(failed.values())
        assert rig.loaded_right(loading)
    return {name: count - before[name] for name, count in store.stats().items()}


async def test_small_entries_are_staged(owner: MooncakeStore, fine: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "reads_whole_objects", False)
    made = await _ranges_of_a_round_trip(owner, fine, full_layout(4, 4096), host=True)
    assert made["ranges"] == 2 * 4 * 8, "to the store and back, 4 blocks of 4 layers with 2 entries"
    assert made["ranges_sent"] <= made["ranges"] // 2
    assert made["staged_bytes"] == made["written_bytes"] + made["read_bytes"]


async def test_small_objects_are_read_whole(owner: MooncakeStore, fine: list[bytes]) -> None:
    made = await _ranges_of_a_round_trip(owner, fine, full_layout(4, 4096), host=True)
    assert made["whole_objects"] == 4
    assert made["staged_bytes"] == made["written_bytes"]


async def test_large_entries_are_not_staged(owner: MooncakeStore, fine: list[bytes]) -> None:
    made = await _ranges_of_a_round_trip(owner, fine, full_layout(2, 256 << 10), host=True)
    assert made["staged_bytes"] == 0


async def test_device_memory_is_not_staged(owner: MooncakeStore, fine: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "reads_whole_objects", False)
    made = await _ranges_of_a_round_trip(owner, fine, full_layout(4, 4096), host=False)
    assert made["staged_bytes"] == 0
    assert made["ranges_sent"] == made["ranges"]


# -- the blocking face -------------------------------------------------------------------------------------------------


class BlockingRig(MooncakeRig):
    """A rig whose engine is a `BlockingEngine`, driven by this thread."""

    blocking: BlockingEngine

    def forward(self, *requests: StepRequest) -> frozenset[str]:
        step = self.blocking.begin_step(requests)
        failed: frozenset[str] = frozenset()
        for layer in range(self.layout.stage_layers):
            failed |= step.wait_layer(layer)
            self.compute(layer, *requests)
            step.layer_ready(layer)
            step.checkpoint(layer)
        step.end()
        step.settled()
        return failed


@pytest.fixture
def blocking(owner: MooncakeStore) -> Iterator[BlockingRig]:
    rig = BlockingRig(owner, hybrid_layout())
    bases = {where: array.ctypes.data for where, array in rig.local.items()}
    with BlockingEngine(rig.layout, rig.store, bases, rig.config) as rig.blocking:
        yield rig
        assert rig.blocking.violations() == []
    for array in rig.local.values():
        owner.unregister(array.ctypes.data)


def test_the_blocking_engine_saves_finds_loads_and_drains(blocking: BlockingRig, fine: list[bytes]) -> None:
    rig = blocking
    assert not rig.forward(rig.request("a", fine, save=rig.all_blocks(fine)))
    assert rig.blocking.lookup(fine + hashes(1), 80).tokens == 64
    rig.wipe()
    loading = rig.request("b", fine, load=rig.all_blocks(fine), first_id=9)
    assert not rig.forward(loading)
    assert rig.loaded_right(loading)
    rig.wipe()
    again = rig.blocking.load("c", {g: GroupBlocks(b.block_ids, b.load) for g, b in loading.groups.items()}, fine)
    assert again.result().failure is None
    assert rig.loaded_right(loading)
    rig.blocking.release("b", ReleaseReason.FINISHED)
    rig.blocking.forget("b")
    rig.blocking.drain()
    sessions = rig.blocking.stats().sessions
    assert (sessions.open_now, sessions.put_committed) == (0, 7)
