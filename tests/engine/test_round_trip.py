"""Saving and loading, without trouble: bytes, block sizes, masks, commit layers, ownership, continuation."""

from __future__ import annotations

import pytest

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.steps import NULL_BLOCK, GroupBlocks, Phase, ReleaseReason, StepRequest
from tests.engine.rig import COMPRESSED, FULL, STATE, Rig, full_layout, hashes, quiet, seed_layout


async def test_group_byte_round_trip() -> None:
    async with Rig() as rig:
        fine = hashes(4)
        await rig.save("a", fine)
        rig.wipe()
        request = rig.request("b", fine, load=rig.all_blocks(fine), first_id=20)
        _, failed = await rig.run(request)
        assert not any(failed.values())
        assert rig.loaded_right(request)
        stats = rig.engine.stats()
        assert [stats.groups[g].loaded for g in (FULL, COMPRESSED, STATE)] == [4, 2, 1]
        assert sum(g.bytes_loaded for g in stats.groups.values()) == 4 * 16 + 2 * 32 + 36
        assert stats.sessions.open_now == 0


async def test_different_block_sizes_hit_at_their_common_boundary() -> None:
    async with Rig() as rig:
        fine = hashes(5)
        await rig.save("a", fine[:4])
        assert (await rig.engine.lookup(fine, 80)).tokens == 64
        assert (await rig.engine.lookup(fine[:4], 64)).tokens == 0, "one token must be computed, and 32 has no state"


async def test_unequal_entry_counts_tile_each_object() -> None:
    e = CacheEntry
    layout = KVLayout(
        "m",
        [
            Group(0, GroupKind.FULL, 16, {0: [e("k", 3), e("v", 5, 64)], 1: [e("kv", 7)]}),
            Group(1, GroupKind.MLA, 16, {0: [e("c", 1000)], 1: [e("c", 1), e("rope", 2), e("scale", 4, 7)]}),
        ],
    )
    async with Rig(layout) as rig:
        fine = hashes(3)
        await rig.save("a", fine)
        rig.wipe()
        request = rig.request("b", fine, load=rig.all_blocks(fine), first_id=30)
        await rig.run(request)
        assert rig.loaded_right(request)


async def test_padding_is_never_transferred() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(2)
        await rig.save("a", fine)
        rig.wipe()
        for array in rig.local.values():
            array[:] = 0xEE
        await rig.run(rig.request("b", fine, load=rig.all_blocks(fine), first_id=10))
        padding = rig.local[0, 0, "v"][10:12, 16:]
        assert (padding == 0xEE).all()


async def test_sparse_masks_make_seven_objects() -> None:
    async with Rig() as rig:
        fine = hashes(4)
        await rig.save("a", fine)
        assert [rig.committed(g, fine) for g in (FULL, COMPRESSED, STATE)] == [[0, 1, 2, 3], [0, 1], [3]]
        assert rig.objects(fine) == 7


async def test_null_blocks_are_never_transferred() -> None:
    async with Rig() as rig:
        fine = hashes(4)
        blocks = GroupBlocks([NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 5], (), (0, 1, 2, 3))
        request = StepRequest("a", fine, {STATE: blocks})
        step = rig.engine.begin_step([request])
        for layer in range(4):
            if layer in (0, 3):
                rig.fill(STATE, fine[3], 5, layer)
            step.layer_ready(layer)
        await step.end()
        await step.settled()
        assert rig.committed(STATE, fine) == [3]


async def test_each_group_commits_after_its_own_last_layer() -> None:
    """0 objects after layers 0 and 1, 4 after layer 2 (full attention), 7 at the end."""
    async with Rig() as rig:
        fine = hashes(4)
        request = rig.request("a", fine, save=rig.all_blocks(fine))
        step = rig.engine.begin_step([request])
        for layer, complete in ((0, 0), (1, 0), (2, 4), (3, 7)):
            rig.compute(layer, request)
            step.layer_ready(layer)
            await quiet(rig)
            assert rig.objects(fine) == complete, f"after layer {layer}"
        await step.end()
        await step.settled()


async def test_session_ownership_by_group() -> None:
    """Block 0 of one group is not block 0 of another (I3)."""
    async with Rig() as rig:
        fine = hashes(2)
        request = StepRequest("a", fine, {FULL: GroupBlocks([3], (), (0,)), STATE: GroupBlocks([NULL_BLOCK, 3], (), (1,))})
        step = rig.engine.begin_step([request])
        rig.compute(0, request)
        step.layer_ready(0)
        await quiet(rig)
        tables = {g: rig.engine.crew.groups[g].table for g in (FULL, STATE)}
        assert {tuple(o) for o in tables[FULL].puts} == {("a", FULL, 0)}
        assert {tuple(o) for o in tables[STATE].puts} == {("a", STATE, 1)}
        for layer in (1, 2, 3):
            rig.compute(layer, request)
            step.layer_ready(layer)
        await step.end()
        await step.settled()
        assert rig.committed(FULL, fine) == [0]
        assert rig.committed(STATE, fine) == [1]


async def test_continuation_with_remapped_block_ids() -> None:
    """After a preemption the keys can come from memory, without any hash; the addresses come from the current block ids."""
    async with Rig(full_layout()) as rig:
        fine = hashes(4)
        await rig.run(rig.request("a", fine, save={0: [0, 1, 2, 3]}))
        await rig.engine.release("a", ReleaseReason.PREEMPTED)
        rig.wipe()
        resumed = StepRequest("a", [], {0: GroupBlocks([40, 30, 20, 10], (0, 1, 2, 3))})
        await rig.run(resumed)
        assert all(rig.holds(0, h, b) for h, b in zip(fine, (40, 30, 20, 10), strict=True))


async def test_hashes_that_are_given_decide_even_if_an_id_is_used_again() -> None:
    async with Rig(full_layout()) as rig:
        one, two = hashes(2, "one"), hashes(2, "two")
        await rig.run(rig.request("a", one, save={0: [0, 1]}))
        await rig.run(rig.request("w", two, save={0: [0, 1]}, first_id=5))
        again = rig.request("a", two, load={0: [0, 1]}, first_id=9)
        await rig.run(again)
        assert rig.loaded_right(again)


async def test_memory_of_committed_keys_ends_with_forget() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(2)
        await rig.run(rig.request("a", fine, save={0: [0, 1]}))
        await rig.engine.release("a", ReleaseReason.FINISHED)
        rig.engine.forget("a")
        step, _ = await rig.run(StepRequest("a", [], {0: GroupBlocks([9, 10], (0, 1))}))
        assert set(step.failures) == {"a"}
        assert "neither its hash nor a memory" in step.failures["a"].reason


@pytest.mark.parametrize("chunks", [[4], [1, 3], [2, 1, 1]])
async def test_every_chunk_is_saved_once(chunks: list[int]) -> None:
    async with Rig(full_layout()) as rig:
        fine, done = hashes(4), 0
        for chunk in chunks:
            await rig.run(rig.request("a", fine, save={0: range(done, done + chunk)}))
            done += chunk
        assert rig.committed(0, fine) == [0, 1, 2, 3]
        assert rig.engine.stats().sessions.put_opened == 4


async def test_state_layers_save_everything_after_compute() -> None:
    """A layer with any recurrent state saves nothing at its entry: the state there is the previous step's."""
    async with Rig() as rig:
        fine = hashes(2)
        request = rig.request("a", fine, save={FULL: [0], STATE: [1]})
        step = rig.engine.begin_step([request])
        step.layer_ready(0, phase=Phase.ENTRY)
        await quiet(rig)
        assert rig.store._calls["put_ranges"] == 0
        assert rig.engine.pending_saves == 0
        rig.compute(0, request)  # the state is updated by the compute, after the entry
        step.layer_ready(0, phase=Phase.EXIT)
        rig.compute(2, request)
        step.layer_ready(2, phase=Phase.ENTRY)
        step.layer_ready(2, phase=Phase.EXIT)
        rig.compute(3, request)
        step.layer_ready(3, phase=Phase.EXIT)
        await step.end()
        await step.settled()
        rig.wipe()
        loading = rig.request("b", fine, load={FULL: [0], STATE: [1]}, first_id=9)
        await rig.run(loading)
        assert rig.loaded_right(loading)


async def test_end_stands_for_hookless_layers_and_for_no_others() -> None:
    async with Rig(hookless_layers=(0, 3)) as rig:
        fine = hashes(2)
        request = rig.request("a", fine, save=rig.all_blocks(fine))
        for layer in range(4):
            rig.compute(layer, request)
        step = rig.engine.begin_step([request])
        step.layer_ready(2)  # layer 1 of the compressed group is never signalled
        await step.end()
        await step.settled()
        assert rig.committed(FULL, fine) == [0, 1]
        assert rig.committed(STATE, fine) == [1]
        assert rig.committed(COMPRESSED, fine) == []


async def test_last_layer_without_saves_still_ends_after_earlier_saves() -> None:
    layout = KVLayout("m", [*seed_layout().groups[:1], Group(9, GroupKind.FULL, 16, {5: [CacheEntry("kv", 4)]})])
    async with Rig(layout) as rig:
        fine = hashes(2)
        await rig.run(rig.request("a", fine, save={0: [0, 1]}), settle=False)
        await rig.saves_counted()
        await quiet(rig)
        assert rig.committed(0, fine) == [0, 1]


async def test_a_step_with_nothing_to_do_ends_at_once() -> None:
    async with Rig() as rig:
        step, failed = await rig.run(rig.request("a", hashes(4)))
        assert not any(failed.values())
        assert rig.engine.stats().sessions.put_opened == 0
        assert not step.passed_through


async def test_nothing_to_save_because_everything_exists() -> None:
    async with Rig() as rig:
        fine = hashes(4)
        await rig.save("a", fine)
        opened = rig.engine.stats().sessions.put_opened
        await rig.save("b", fine)
        stats = rig.engine.stats()
        assert stats.sessions.put_opened == opened
        assert sum(g.skipped_existing for g in stats.groups.values()) == 7


async def test_only_missing_keys_are_opened() -> None:
    """The store has blocks 0, 1 and 3 of 5: 2 and 4 are opened, three are skipped."""
    async with Rig(full_layout()) as rig:
        fine = hashes(5)
        await rig.run(rig.request("a", fine, save={0: [0, 1, 3]}))
        before = rig.engine.stats()
        await rig.run(rig.request("b", fine, save={0: [0, 1, 2, 3, 4]}))
        after = rig.engine.stats()
        assert after.sessions.put_opened - before.sessions.put_opened == 2
        assert after.groups[0].skipped_existing - before.groups[0].skipped_existing == 3
        assert rig.committed(0, fine) == [0, 1, 2, 3, 4]


async def test_shared_prefix_requests_share_their_get_sessions() -> None:
    """50 requests that share 20 blocks in one step: 20 get sessions, opened and closed once, and all 50 verify."""
    async with Rig(full_layout(), blocks=1100) as rig:
        fine = hashes(20)
        await rig.save("writer", fine)
        rig.wipe()
        requests = [rig.request(f"r{n}", fine, load={0: range(20)}, first_id=1 + 20 * n) for n in range(50)]
        _, failed = await rig.run(*requests)
        assert not any(failed.values())
        assert all(rig.loaded_right(r) for r in requests)
        sessions = rig.engine.stats().sessions
        assert (sessions.get_opened, sessions.get_closed) == (20, 20)


async def test_duplicate_keys_in_one_step_have_one_writer() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(2)
        a, b = (rig.request(r, fine, save={0: [0, 1]}, first_id=i) for r, i in (("a", 1), ("b", 5)))
        await rig.run(a, b)
        assert rig.engine.stats().sessions.put_opened == 2
        assert rig.committed(0, fine) == [0, 1]


async def test_load_outside_a_step() -> None:
    async with Rig() as rig:
        fine = hashes(4)
        await rig.save("a", fine)
        rig.wipe()
        request = rig.request("b", fine, load=rig.all_blocks(fine), first_id=20)
        done = await rig.engine.load("b", request.groups, fine)
        assert done.failure is None
        assert rig.loaded_right(request)
        await rig.engine.drain()
        assert rig.engine.stats().sessions.open_now == 0


async def test_story_tells_what_happened_to_a_requests_sessions() -> None:
    async with Rig(full_layout()) as rig:
        await rig.run(rig.request("a", hashes(1), save={0: [0]}))
        told = [line.split(": ", 1)[1] for line in rig.engine.story("a")]
        assert told == [
            "step 1 begins: 0 blocks to load, 1 to save",
            "put opening -> open",
            "put open -> committing",
            "put committing -> committed",
        ]
        assert rig.engine.story("nobody") == []


async def test_tp_ranks_store_by_head() -> None:
    """Of 4 ranks with 2 KV heads only ranks 0 and 2 store; ranks 0 and 1 read head 0."""
    e = CacheEntry
    layout = KVLayout("m", [Group(0, GroupKind.FULL, 16, {0: [e("kv", 8)]}, kv_heads=2)], tp_size=4)
    fine = hashes(1)
    async with Rig(layout, tp_rank=1) as rig:
        await rig.run(rig.request("a", fine, save={0: [0]}))
        assert rig.engine.stats().sessions.put_opened == 0
    async with Rig(layout, tp_rank=2) as rig:
        await rig.run(rig.request("a", fine, save={0: [0]}))
        assert rig.memory.contains(layout.key(0, fine[0], head=1))
        assert not rig.memory.contains(layout.key(0, fine[0], head=0))


async def test_ids_beyond_32_bits_are_different_blocks() -> None:
    async with Rig(full_layout()) as rig:
        small, big = ([i.to_bytes(8, "big")] for i in (5, 4294967301))
        await rig.run(rig.request("a", small, save={0: [0]}))
        assert (await rig.engine.lookup(big, 17)).tokens == 0
        assert (await rig.engine.lookup(small, 17)).tokens == 16
