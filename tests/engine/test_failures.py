"""What fails, and what must happen then: the failure table of docs/architecture.md, row by row."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvactors.actors import saver
from kvactors.core.steps import GroupBlocks, ReleaseReason, StepRequest
from kvactors.core.store import Outcome
from kvactors.devices import ManualEvent
from kvactors.errors import DrainTimeout, LoadFailedError, StepError
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import COMPRESSED, FULL, PATIENCE_S, STATE, Rig, arrived, full_layout, hashes, quiet
from tests.engine.test_late_answers import until

FAIL = Outcome.TRANSFER_FAILED


# -- saves -------------------------------------------------------------------------------------------------------------


async def test_a_failed_range_revokes_its_key_and_nothing_else() -> None:
    fine = hashes(4)
    async with Rig() as probe:
        bad = probe.key(FULL, 1, fine)
    async with Rig(faults=[Fault(what="outcome", call="put_ranges", outcome=FAIL, key=bad, times=1)]) as rig:
        await rig.save("a", fine)
        assert rig.committed(FULL, fine) == [0, 2, 3]
        assert rig.committed(COMPRESSED, fine) == [0, 1]
        assert rig.committed(STATE, fine) == [3]
        assert rig.engine.stats().sessions.put_revoked == 1
        await rig.save("b", fine)
        assert rig.committed(FULL, fine) == [0, 1, 2, 3], "the next request that computes the block tries again (I10)"


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("what", ["raise", "short", "long"])
async def test_a_put_call_that_breaks_costs_only_its_keys(what: str, nth: int) -> None:
    async with Rig(faults=[Fault(what=what, call="put_ranges", nth=nth)]) as rig:
        fine = hashes(4)
        await rig.save("a", fine)
        sessions = rig.engine.stats().sessions
        assert sessions.put_committed + sessions.put_revoked == 7
        assert sessions.put_committed == rig.objects(fine) < 7


async def test_a_failed_commit_is_revoked() -> None:
    faults = [Fault(what="outcome", call="put_commit", outcome=FAIL, times=1)]
    async with Rig(full_layout(), faults) as rig:
        fine = hashes(2)
        await rig.save("a", fine)
        assert rig.committed(0, fine) == []
        assert rig.engine.stats().sessions.put_revoked == 2
        await rig.save("b", fine)
        assert rig.committed(0, fine) == [0, 1]


async def test_a_key_whose_revoke_is_not_ours_is_poisoned_and_never_opened_again() -> None:
    faults = [
        Fault(what="outcome", call="put_ranges", outcome=FAIL, times=1),
        Fault(what="outcome", call="put_revoke", outcome=Outcome.NOT_OWNER, times=1),
    ]
    async with Rig(full_layout(), faults) as rig:
        fine = hashes(1)
        await rig.save("a", fine)
        stats = rig.engine.stats()
        assert (stats.sessions.put_poisoned, stats.poisoned_keys) == (1, [rig.key(0, 0, fine)])
        await rig.save("b", fine)
        assert rig.engine.stats().sessions.put_opened == 1


async def test_a_failing_revoke_is_retried_a_bounded_number_of_times() -> None:
    faults = [
        Fault(what="outcome", call="put_ranges", outcome=FAIL, times=1),
        Fault(what="outcome", call="put_revoke", outcome=FAIL, times=2),
    ]
    async with Rig(full_layout(), faults) as rig:
        await rig.save("a", hashes(1))
        assert rig.store.counts["outcome"] == 3
        assert rig.engine.stats().sessions.put_revoked == 1


async def test_a_revoke_that_always_fails_poisons_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "REVOKE_RETRY_S", (0.0, 0.0, 0.0))
    faults = [
        Fault(what="outcome", call="put_ranges", outcome=FAIL, times=1),
        Fault(what="outcome", call="put_revoke", outcome=FAIL),
    ]
    async with Rig(full_layout(), faults) as rig:
        fine = hashes(1)
        await rig.save("a", fine)
        assert rig.engine.stats().poisoned_keys == [rig.key(0, 0, fine)]
        assert rig.store._calls["put_revoke"] == 4


async def test_a_key_without_space_is_skipped_after_a_bounded_search() -> None:
    """Twice at once, three times in the background; the first save is not due before that."""
    faults = [Fault(what="outcome", call="put_open", outcome=Outcome.NO_SPACE)]
    async with Rig(full_layout(), faults) as rig:
        step = rig.engine.begin_step([rig.request("a", hashes(2), save={0: [0, 1]})])
        await until(rig, lambda: rig.engine.stats().groups[0].skipped_no_space == 2)
        assert rig.store._calls["put_open"] == 5
        await step.end()
        await step.settled()
        stats = rig.engine.stats()
        assert stats.groups[0].skipped_no_space == 2
        assert stats.sessions.put_opened == 0


async def test_space_that_turns_up_before_the_first_save_is_used() -> None:
    faults = [Fault(what="outcome", call="put_open", outcome=Outcome.NO_SPACE, times=1)]
    async with Rig(full_layout(), faults) as rig:
        fine = hashes(2)
        await rig.save("a", fine)
        assert rig.committed(0, fine) == [0, 1]


async def test_eviction_makes_room_for_later_prompts() -> None:
    async with Rig(full_layout(), store={"capacity": 6 * 64}) as rig:
        for n in range(5):
            fine = hashes(4, f"prompt {n}")
            await rig.save(f"r{n}", fine)
            assert rig.committed(0, fine) == [0, 1, 2, 3]


# -- preparation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["put_open", "readable"])
@pytest.mark.parametrize("group", [FULL, COMPRESSED, STATE])
async def test_a_preparation_that_raises_leaves_no_object(call: str, group: int) -> None:
    async with Rig() as probe:
        prefix = probe.layout.key_parts(group)[0]
    async with Rig(faults=[Fault(what="raise", call=call, key=prefix, times=1)]) as rig:
        fine = hashes(4)
        step, _ = await rig.run(rig.request("a", fine, save=rig.all_blocks(fine)))
        assert rig.objects(fine) == 0
        assert step.passed_through
        sessions = rig.engine.stats().sessions
        assert sessions.put_opened == sessions.put_revoked
        await rig.save("b", fine)
        assert rig.objects(fine) == 7, "the next step is not disturbed"


async def test_a_put_open_whose_answer_is_lost_is_cleaned_up() -> None:
    """The store opened the sessions, but the call raised: they are revoked before anybody may write the keys again."""
    async with Rig(full_layout(), [Fault(what="raise", call="put_open", applied=True, times=1)]) as rig:
        fine = hashes(2)
        await rig.save("a", fine)
        assert rig.memory.stats()["open_puts"] == 0
        await rig.save("b", fine)
        assert rig.committed(0, fine) == [0, 1]


async def test_a_get_open_that_raises_fails_the_loads_and_only_them() -> None:
    async with Rig(faults=[Fault(what="raise", call="get_open", times=1)]) as rig:
        fine = hashes(4)
        await rig.save("w", fine)
        step, failed = await rig.run(rig.request("a", fine, load=rig.all_blocks(fine), first_id=20))
        assert failed[0] == {"a"}
        assert step.failures["a"].first_token == 0
        assert rig.engine.stats().sessions.open_now == 0


# -- loads -------------------------------------------------------------------------------------------------------------


async def test_a_failed_get_marks_all_groups_that_cover_its_tokens_and_no_other_request() -> None:
    fine, other = hashes(4), hashes(4, "other")
    async with Rig() as probe:
        bad = probe.key(FULL, 2, fine)
    async with Rig(faults=[Fault(what="outcome", call="get_ranges", outcome=FAIL, key=bad)]) as rig:
        await rig.save("w", fine)
        await rig.save("x", other)
        a = rig.request("a", fine, load=rig.all_blocks(fine), first_id=10)
        b = rig.request("b", other, load=rig.all_blocks(other), first_id=20)
        step, failed = await rig.run(a, b)
        assert failed[3] == {"a"}
        failure = step.failures["a"]
        assert failure.first_token == 32
        assert dict(failure.blocks) == {FULL: (2,), COMPRESSED: (1,)}
        assert rig.loaded_right(b)


@pytest.mark.parametrize("what", ["gone", "every layer", "a later layer"])
async def test_what_lies_before_a_failed_block_arrives_whole(what: str) -> None:
    """A request starts again from its first failed token: the blocks before it are used then."""
    fine = hashes(4)
    async with Rig(full_layout(layers=3)) as probe:
        bad = probe.key(0, 2, fine)
    nth = {"gone": None, "every layer": None, "a later layer": 2}[what]
    fault = Fault(what="outcome", call="get_ranges", outcome=FAIL, key=bad, nth=nth)
    config = {"prefetch_layers": 0}
    async with Rig(full_layout(layers=3), faults=[] if what == "gone" else [fault], config=config) as rig:
        await rig.save("w", fine)
        if what == "gone":
            rig.memory.remove(bad, force=True)
        rig.wipe()
        step, _ = await rig.run(rig.request("a", fine, load={0: range(4)}, first_id=10))
        assert step.failures["a"].first_token == 32
        assert all(rig.holds(0, fine[i], 10 + i) for i in range(2))
        rig.wipe()
        done = await rig.engine.load("b", rig.request("b", fine, load={0: range(4)}, first_id=20).groups, fine)
        if done.failure is not None:
            assert all(rig.holds(0, fine[i], 20 + i) for i in range(done.failure.first_token // 16))


async def test_a_missing_key_fails_its_request_at_the_groups_first_layer() -> None:
    async with Rig() as rig:
        fine = hashes(4)
        await rig.save("w", fine)
        rig.memory.remove(rig.key(COMPRESSED, 1, fine), force=True)
        step, failed = await rig.run(rig.request("a", fine, load=rig.all_blocks(fine), first_id=10))
        assert failed[1] == {"a"}
        assert "not found" in step.failures["a"].reason


async def test_an_object_of_another_size_is_a_miss() -> None:
    async with Rig(full_layout(entry=16)) as small, Rig(full_layout(entry=32), inner=small.memory) as large:
        fine = hashes(1)
        await small.save("w", fine)
        step, _ = await large.run(large.request("a", fine, load={0: [0]}, first_id=3))
        assert "size mismatch" in step.failures["a"].reason


async def test_strict_mode_raises_from_wait_layer() -> None:
    async with Rig(full_layout(), config={"strict": True}) as rig:
        step = rig.engine.begin_step([rig.request("a", hashes(1), load={0: [0]})])
        with pytest.raises(LoadFailedError, match="not found"):
            await step.wait_layer(0)
        await step.abort()


async def test_nothing_computed_after_a_failed_load_is_ever_published() -> None:
    """I12: in this step from the failing layer on, and in later steps, until a verified restart."""
    faults = [Fault(what="outcome", call="get_ranges", outcome=FAIL, nth=2)]
    async with Rig(full_layout(layers=3), faults, config={"prefetch_layers": 0}) as rig:
        fine, tail = hashes(4), {0: [2, 3]}
        await rig.run(rig.request("w", fine, save={0: [0, 1]}))
        _, failed = await rig.run(rig.request("a", fine, load={0: [0, 1]}, save=tail, first_id=10))
        assert [failed[layer] for layer in range(3)] == [frozenset(), {"a"}, {"a"}]
        assert rig.committed(0, fine) == [0, 1]
        await rig.run(rig.request("a", fine, save=tail, first_id=10))
        assert rig.committed(0, fine) == [0, 1], "a later step of the same request publishes nothing"
        await rig.run(rig.request("a", fine, save=tail, first_id=10, restarted_at=32))
        assert rig.committed(0, fine) == [0, 1], "a restart that loads nothing below its boundary is not verified"
        await rig.run(rig.request("a", fine, load={0: [0, 1]}, save=tail, first_id=10, restarted_at=32))
        assert rig.committed(0, fine) == [0, 1, 2, 3]


@pytest.mark.parametrize(("nth", "fails_on", "published"), [(1, 0, []), (2, 3, [2, 3])])
async def test_a_group_that_ended_before_the_failing_layer_still_commits(nth: int, fails_on: int, published: list[int]) -> None:
    """Full attention (layers 0 and 2) holds only what was computed before the load of layer 3 failed."""
    fine = hashes(4)
    faults = [Fault(what="outcome", call="get_ranges", outcome=FAIL, nth=nth)]
    async with Rig(faults=faults, config={"prefetch_layers": 0}) as rig:
        await rig.run(rig.request("w", fine, save={STATE: [1]}))
        request = rig.request("a", fine, load={STATE: [1]}, save={FULL: [2, 3], COMPRESSED: [1]}, first_id=10)
        step = rig.engine.begin_step([request])
        computed = ManualEvent()
        for layer in range(4):
            assert await step.wait_layer(layer) == ({"a"} if layer >= fails_on else set())
            rig.compute(layer, request)
            step.layer_ready(layer, computed if layer == 2 else None)  # full attention is not published before the failure
        computed.fire()
        await step.end()
        await step.settled()
        assert rig.committed(FULL, fine) == published
        assert rig.committed(COMPRESSED, fine) == []


async def test_a_layer_signalled_before_its_loads_were_waited_for_counts_as_failed() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="get_ranges")]) as rig:
        fine = hashes(2)
        await rig.run(rig.request("w", fine, save={0: [0]}))
        step = rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, save={0: [1]}, first_id=10)])
        await arrived(rig.store.gates["gate"])
        step.layer_ready(0)
        step.layer_ready(1)
        rig.store.release()
        await step.end()
        await step.settled()
        assert set(step.failures) == {"a"}
        assert rig.committed(0, fine) == [0]


# -- events ------------------------------------------------------------------------------------------------------------


async def test_no_byte_moves_before_its_event() -> None:
    async with Rig(full_layout(layers=1)) as rig:
        fine = hashes(1)
        request = rig.request("a", fine, save={0: [0]})
        step = rig.engine.begin_step([request])
        ready = ManualEvent()
        step.layer_ready(0, ready)
        ending = asyncio.create_task(step.end())
        await rig.engine.lookup(fine, 17)  # passes through the pool: an ungated save would have gone first
        assert rig.memory.stats()["written_bytes"] == 0
        rig.compute(0, request)
        ready.fire()
        await ending
        await step.settled()
        rig.wipe()
        loading = rig.request("b", fine, load={0: [0]}, first_id=5)
        guard = ManualEvent()
        step = rig.engine.begin_step([loading], guard)
        waiting = asyncio.create_task(step.wait_layer(0))
        await rig.engine.lookup(fine, 17)
        assert not waiting.done()
        assert not rig.loaded_right(loading)
        guard.fire()
        assert await waiting == frozenset()
        assert rig.loaded_right(loading)
        await step.end()


async def test_an_event_that_never_fires_fails_its_transfers_at_the_deadline() -> None:
    async with Rig(full_layout(layers=1), config={"step_deadline_s": 0.3}) as rig:
        fine = hashes(1)
        step = rig.engine.begin_step([rig.request("a", fine, save={0: [0]})])
        step.layer_ready(0, ManualEvent())
        await step.end()
        await step.settled()
        assert rig.committed(0, fine) == []
        assert rig.engine.stats().sessions.put_revoked == 1


# -- steps that do not end as planned ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers_done", [0, 1, 2, 3, 4])
async def test_a_forward_pass_aborted_half_way_leaves_no_session(layers_done: int) -> None:
    async with Rig() as rig:
        fine = hashes(4)
        request = rig.request("a", fine, save=rig.all_blocks(fine))
        step = rig.engine.begin_step([request])
        for layer in range(layers_done):
            rig.compute(layer, request)
            step.layer_ready(layer)
        await step.abort()
        await step.settled()
        assert rig.engine.stats().sessions.open_now == 0
        await rig.save("b", fine)
        assert rig.objects(fine) == 7


async def test_a_step_that_begins_while_another_is_open_aborts_it() -> None:
    async with Rig(full_layout()) as rig:
        one, two = hashes(1, "one"), hashes(1, "two")
        first = rig.engine.begin_step([rig.request("a", one, save={0: [0]})])
        first.layer_ready(0)
        await rig.run(rig.request("b", two, save={0: [0]}, first_id=5))
        assert rig.committed(0, one) == []
        assert rig.committed(0, two) == [0]
        first.layer_ready(1)
        await first.settled()


async def test_an_abort_does_not_wait_for_events() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(1)
        await rig.run(rig.request("w", fine, save={0: [0]}))
        step = rig.engine.begin_step([rig.request("a", hashes(2), load={0: [0]}, save={0: [1]}, first_id=5)], ManualEvent())
        step.layer_ready(0, ManualEvent())
        await step.abort()
        await step.settled()
        assert set(step.failures) == {"a"}
        assert rig.engine.stats().sessions.open_now == 0


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (GroupBlocks([1], (), (1,)), "only 1 block ids"),
        (GroupBlocks(list(range(73)), (), (72,)), "cover only 2 blocks"),
        (GroupBlocks([1, 2], (-1,)), "start at 0"),
        (GroupBlocks([1, 2], (), (0, 0)), "twice"),
        (GroupBlocks([3, 3], (), (0, 1)), "local block 3 is named for two blocks"),
        (GroupBlocks([1, 2], ("x",)), "something else"),  # type: ignore[arg-type]  # what is wrong with it is the point
    ],
)
async def test_a_request_with_bad_block_lists_is_left_out_and_the_others_go_on(blocks: GroupBlocks, said: str) -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(2)
        bad, good = StepRequest("bad", fine, {0: blocks}), rig.request("good", fine, save={0: [0, 1]}, first_id=5)
        step = rig.engine.begin_step([bad, good])
        for layer in (0, 1):
            rig.compute(layer, good)
            step.layer_ready(layer)
        await step.end()
        await step.settled()
        assert said in step.problems["bad"]
        assert rig.committed(0, fine) == [0, 1]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda e: e.begin_step(7), "begin_step: requests is the number 7; give a sequence of StepRequest"),
        (lambda e: e.begin_step(["a"]), "begin_step: item 0 of requests is the text 'a'; give a StepRequest"),
        (lambda e: e.start_loads([None], None), "load: item 0 of requests is None; give a StepRequest"),
        (
            lambda e: e.begin_step([StepRequest(["a"], [], {})]),
            "begin_step: the request_id of item 0 is a list of 1; give a text",
        ),
        (
            lambda e: e.begin_step([StepRequest((["a"],), [], {})]),
            "begin_step: the request_id of item 0 is a tuple of 1; give a text",
        ),
        (
            lambda e: e.start_load("a", [1], hashes(1), None),
            "load for 'a': groups is a list of 1; give a mapping of group id to GroupBlocks",
        ),
        (lambda e: e.start_load("a", {0: [1]}, hashes(1), None), "load for 'a': group 0 is a list of 1; give a GroupBlocks"),
    ],
)
async def test_what_is_no_request_is_refused_as_it_is_given(call: Callable[[Any], object], said: str) -> None:
    async with Rig(full_layout()) as rig:
        with pytest.raises(StepError) as refused:
            call(rig.engine)
        assert str(refused.value) == said


async def test_an_unknown_layer_is_refused() -> None:
    async with Rig() as rig:
        step = rig.engine.begin_step([])
        with pytest.raises(StepError, match="0 to 3"):
            step.layer_ready(4)
        await step.end()


# -- workers, actors, the store ----------------------------------------------------------------------------------------


async def test_a_fatal_error_in_a_worker_reaches_every_waiter_and_the_pool_keeps_its_size() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(2)
        await rig.save("w", fine)
        real, left = rig.memory.get_ranges, [4]

        def fatal(batch: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise SystemExit("a worker must survive this")
            return real(batch)

        rig.memory.get_ranges = fatal  # type: ignore[method-assign]  # a stand-in for one call
        requests = [rig.request(f"r{n}", fine, load={0: [0, 1]}, first_id=10 * n + 1) for n in range(3)]
        for _ in range(2):
            step, failed = await rig.run(*requests)
            assert failed[1] == {"r0", "r1", "r2"}
            assert len(step.failures) == 3
        _, failed = await rig.run(*requests)
        assert not any(failed.values())
        assert all(rig.loaded_right(r) for r in requests)


async def test_a_demanded_load_is_not_queued_behind_saves() -> None:
    """Puts are frozen and 8 saves are queued; one wanted load completes in its own time."""
    faults = [Fault(what="freeze", call="put_ranges", key=hashes(1, "slow")[0].hex())]
    async with Rig(full_layout(layers=8, entry=8), faults, config={"prefetch_layers": 0}) as rig:
        slow, fast = hashes(1, "slow"), hashes(1, "fast")
        await rig.save("w", fast)
        saving = rig.request("a", slow, save={0: [0]})
        loading = rig.request("b", fast, load={0: [0]}, first_id=9)
        step = rig.engine.begin_step([saving, loading])
        for layer in range(8):
            assert await step.wait_layer(layer) == frozenset()
            step.layer_ready(layer)
        assert rig.engine.pending_saves == 8
        assert rig.loaded_right(loading)
        rig.store.release()
        await step.end()


async def test_checkpoint_holds_the_compute_back_at_eight_pending_saves() -> None:
    async with Rig(full_layout(layers=12, entry=8), [Fault(what="freeze", call="put_ranges")]) as rig:
        step = rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        for layer in range(8):
            step.layer_ready(layer)
            await step.checkpoint(layer)
        step.layer_ready(8)
        held = asyncio.create_task(step.checkpoint(8))
        await arrived(rig.store.gates["gate"])
        assert not held.done()
        rig.store.release()
        await held
        assert rig.engine.stats().peak_pending_saves == 9
        for layer in range(9, 12):
            step.layer_ready(layer)
        await step.end()


async def test_a_frozen_load_is_answered_at_its_deadline_and_its_destination_is_fenced() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="get_ranges", nth=1)], config={"call_deadline_s": 0.3}) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        request = rig.request("a", fine, load={0: [0]}, first_id=7)
        step, failed = await rig.run(request, settle=False)
        assert failed[1] == {"a"}
        assert step.fenced_blocks == {(0, 7)}
        assert rig.engine.fenced_blocks == {(0, 7)}
        assert rig.engine.stats().lost_workers == 1
        rig.store.release()
        await step.settled()
        await rig.calls_returned()
        assert rig.engine.fenced_blocks == frozenset(), "the call returned: nothing writes there any more"
        await rig.engine.drain()
        assert rig.engine.stats().sessions.open_now == 0


async def test_a_frozen_save_abandons_its_key_and_a_late_write_is_never_published() -> None:
    """Puts freeze, the request is preempted, its block is overwritten after `release` returned, the put goes on."""
    async with Rig(full_layout(), [Fault(what="freeze", call="put_ranges", nth=1)], config={"call_deadline_s": 0.3}) as rig:
        fine = hashes(1)
        await rig.run(rig.request("a", fine, save={0: [0]}))
        await rig.engine.release("a", ReleaseReason.PREEMPTED)
        for array in rig.local.values():
            array[:] = 0xBB
        rig.store.release()
        await rig.engine.drain()
        stats = rig.engine.stats()
        assert stats.abandoned_keys == [rig.key(0, 0, fine)]
        assert rig.committed(0, fine) == []


async def test_workers_that_never_return_are_replaced_a_bounded_number_of_times() -> None:
    config = {"call_deadline_s": 0.2, "max_lost_workers": 2, "workers": 1, "prefetch_layers": 0}
    async with Rig(full_layout(layers=1), [Fault(what="freeze", call="get_ranges")], config=config) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        for n in range(6):
            _, failed = await rig.run(rig.request(f"r{n}", fine, load={0: [0]}, first_id=n + 2), settle=False)
            assert failed[0] == {f"r{n}"}
        assert rig.engine.stats().lost_workers == 4


async def test_a_lost_master_voids_every_session_and_the_circuit_opens_and_closes() -> None:
    config = {"probe_interval_s": 0.01}
    async with Rig(full_layout(), config=config) as rig:
        fine, later = hashes(2), hashes(2, "later")
        step = rig.engine.begin_step([rig.request("a", fine, save={0: [0, 1]})])
        step.layer_ready(0)
        await quiet(rig)
        rig.store.kill()
        step.layer_ready(1)
        await step.end()
        await step.settled()
        sessions = rig.engine.stats().sessions
        assert sessions.put_committed == 0
        assert sessions.put_abandoned + sessions.put_revoked == 2
        assert rig.engine.stats().circuit == "open"
        step, _ = await rig.run(rig.request("b", later, save={0: [0]}, first_id=5))
        assert step.passed_through
        assert (await rig.engine.lookup(later, 33)).tokens == 0
        step, failed = await rig.run(rig.request("c", later, load={0: [0]}, first_id=9))
        assert failed[0] == {"c"}, "loads fail fast while the circuit is open"
        closed = threading.Event()
        rig.engine.crew.coordinator.watch.circuit.on_close = closed.set
        rig.store.revive()
        await asyncio.to_thread(closed.wait, PATIENCE_S)
        await rig.run(rig.request("d", later, save={0: [0, 1]}, first_id=5))
        assert rig.committed(0, later) == [0, 1]


async def test_a_put_that_the_store_no_longer_knows_voids_the_other_sessions() -> None:
    faults = [Fault(what="outcome", call="put_ranges", outcome=Outcome.NOT_FOUND, nth=1)]
    async with Rig(faults=faults) as rig:
        fine = hashes(4)
        await rig.save("a", fine)
        assert rig.engine.stats().sessions.put_committed == 0
        assert rig.objects(fine) == 0
        await rig.save("b", fine)
        assert rig.objects(fine) == 7


async def test_a_lookup_error_is_a_miss() -> None:
    async with Rig(full_layout(), [Fault(what="raise", call="readable", nth=1)]) as rig:
        assert (await rig.engine.lookup(hashes(2), 33)).tokens == 0
        assert rig.engine.stats().lookup_errors == 1


async def test_a_lookup_past_its_deadline_is_a_miss() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="readable", nth=1)]) as rig:
        hit = await rig.engine.lookup(hashes(2), 33, deadline_s=0.01)
        assert hit.tokens == 0
        assert rig.engine.stats().lookup_errors == 1
        rig.store.release()


@pytest.mark.parametrize("handler", ["layer_ready", "transferred", "prepare", "opened", "committed"])
async def test_a_crashed_group_answers_every_waiter_and_leaves_no_session(
    handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig() as rig:
        fine = hashes(4)
        await rig.save("w", fine)
        saver = rig.engine.crew.groups[COMPRESSED]._saver
        half = saver.opens if handler in ("prepare", "opened") else saver
        more = hashes(8)
        request = rig.request(
            "a", more, load=rig.all_blocks(fine), save={FULL: [4, 5, 6, 7], COMPRESSED: [2, 3], STATE: [7]}, first_id=20
        )

        def crash(*_: object, **__: object) -> None:
            raise RuntimeError("crashed by the test")

        monkeypatch.setattr(half, handler, crash)
        step, _ = await rig.run(request, settle=False)
        await step.settled()
        await rig.engine.drain()
        stats = rig.engine.stats()
        assert stats.sessions.open_now == 0
        assert rig.committed(COMPRESSED, more) in ([0, 1], [0, 1, 2, 3])
        passed, _ = await rig.run(rig.request("b", hashes(2, "x"), save={FULL: [0]}))
        assert passed.passed_through


async def test_a_crashed_coordinator_lets_every_waiter_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(1)
        await rig.save("w", fine)

        async def crash(*_: object) -> None:
            raise RuntimeError("crashed by the test")

        monkeypatch.setattr(rig.engine.crew.coordinator, "_of_step", crash)
        step = rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, first_id=5)], ManualEvent())
        assert await step.wait_layer(0) == {"a"}
        step.layer_ready(0)
        await step.checkpoint(0)
        await step.end()
        await step.settled()
        assert rig.engine.stats().state == "dead"
        step, failed = await rig.run(rig.request("b", fine, load={0: [0]}, first_id=5))
        assert failed[0] == {"b"}
        assert (await rig.engine.lookup(fine, 17)).tokens == 0


# -- release and drain -------------------------------------------------------------------------------------------------


async def test_release_during_a_step_takes_effect_at_its_end_and_valid_saves_commit() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(2)
        request = rig.request("a", fine, save={0: [0, 1]})
        step = rig.engine.begin_step([request])
        rig.compute(0, request)
        step.layer_ready(0)
        await rig.engine.release("a", ReleaseReason.FINISHED)
        rig.compute(1, request)
        step.layer_ready(1)
        await step.end()
        await step.settled()
        assert rig.committed(0, fine) == [0, 1]


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_abort_of_an_async_load_completes_it_once(when: str) -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="get_ranges", nth=1)]) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        request = rig.request("a", fine, load={0: [0]}, first_id=5)
        guard = ManualEvent()
        loading = asyncio.create_task(rig.engine.load("a", request.groups, fine, guard))
        await asyncio.sleep(0)
        if when != "before":
            guard.fire()
            await arrived(rig.store.gates["gate"])
        if when == "after":
            rig.store.release()
            assert (await loading).failure is None
            await rig.engine.release("a", ReleaseReason.ABORTED)
            return
        releasing = asyncio.create_task(rig.engine.release("a", ReleaseReason.ABORTED))
        await asyncio.sleep(0)
        rig.store.release()
        done = await loading
        await releasing
        assert (done.failure is not None) == (when == "before" or not rig.loaded_right(request))
        await rig.engine.drain()
        assert rig.engine.stats().sessions.open_now == 0


async def test_drain_lets_an_accepted_step_finish_and_passes_new_ones_through() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(1)
        request = rig.request("a", fine, save={0: [0]})
        step = rig.engine.begin_step([request])
        draining = asyncio.create_task(rig.engine.drain())
        for layer in (0, 1):
            await asyncio.sleep(0)
            rig.compute(layer, request)
            step.layer_ready(layer)
        await step.end()
        await draining
        assert rig.committed(0, fine) == [0]
        passed, failed = await rig.run(rig.request("b", fine, load={0: [0]}, first_id=5))
        assert passed.passed_through
        assert failed[0] == {"b"}
        assert rig.engine.stats().state == "drained"


async def test_drain_past_its_deadline_lists_what_is_left_and_abandons_it() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="put_commit", nth=1)]) as rig:
        fine = hashes(1)
        await rig.run(rig.request("a", fine, save={0: [0]}), settle=False)
        await arrived(rig.store.gates["gate"])
        with pytest.raises(DrainTimeout, match="committing"):
            await rig.engine.drain(0.05)
        stats = rig.engine.stats()
        assert stats.abandoned_keys == [rig.key(0, 0, fine)]
        assert stats.sessions.open_now == 0
        rig.store.release()


async def test_close_answers_whoever_waits() -> None:
    rig = Rig(full_layout())
    await rig.engine.start()
    fine = hashes(1)
    await rig.save("w", fine)
    step = rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, first_id=5)], ManualEvent())
    waiting = asyncio.create_task(step.wait_layer(0))
    await asyncio.sleep(0)
    await rig.engine.close()
    assert await waiting == {"a"}
    await rig.engine.close()


async def test_a_put_that_the_store_calls_invalid_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Else memory that was never registered shows in nothing but revokes."""
    async with Rig(full_layout(), [Fault(what="outcome", call="put_ranges", outcome=Outcome.INVALID)]) as rig:
        for name in ("a", "b"):
            await rig.save(name, hashes(3, name))
            assert rig.committed(0, hashes(3, name)) == []
    (said,) = [r.getMessage() for r in caplog.records if "invalid" in r.getMessage()]
    assert "was the local memory registered with it (store.register)?" in said
    assert "store='memory' group=0 layer=0" in said
