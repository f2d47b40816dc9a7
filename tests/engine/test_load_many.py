"""One load outside steps for several requests: they share the store's calls, and nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from kvactors.core.steps import GroupBlocks, ReleaseReason, StepRequest
from kvactors.core.store import Outcome
from kvactors.devices import ManualEvent
from kvactors.errors import StepError
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import FULL, PATIENCE_S, Rig, arrived, full_layout, hashes

NAMES = ("a", "b", "c")
EVERY_CALL = Fault(what="latency", latency_s=1e-6)
"""does next to nothing, and is noted for each call"""


async def three(rig: Rig) -> list[StepRequest]:
    """Three prompts in the store, and a request that loads each; local memory is empty."""
    loading = []
    for number, name in enumerate(NAMES):
        fine = hashes(4, name)
        await rig.save(f"w{name}", fine)
        loading.append(rig.request(name, fine, load=rig.all_blocks(fine), first_id=20 + 8 * number))
    rig.wipe()
    rig.store.injections.clear()
    return loading


def whole(rig: Rig, requests: Sequence[StepRequest]) -> list[bool]:
    return [rig.loaded_right(r) for r in requests]


async def at_rest(rig: Rig) -> None:
    await rig.engine.drain()
    assert rig.engine.stats().sessions.open_now == 0


async def test_requests_share_the_calls_of_their_groups() -> None:
    async with Rig(faults=[EVERY_CALL]) as rig:
        requests = await three(rig)
        done = await rig.engine.load_many(requests)
        assert [d.failure for d in done.values()] == [None] * 3
        assert list(done) == list(NAMES)
        assert whole(rig, requests) == [True] * 3
        await at_rest(rig)
        calls = Counter(i.call for i in rig.store.injections)
        layers = sum(len(g.layers) for g in rig.layout.groups)
        assert calls == {"get_open": 3, "get_ranges": layers, "get_close": 3}


async def test_a_key_that_several_want_is_read_for_each() -> None:
    async with Rig(full_layout(), [EVERY_CALL]) as rig:
        fine = hashes(3)
        await rig.save("w", fine)
        rig.wipe()
        rig.store.injections.clear()
        requests = [rig.request(r, fine, load={0: range(n)}, first_id=10 * n) for r, n in (("a", 2), ("b", 3))]
        done = await rig.engine.load_many(requests)
        assert not any(d.failure for d in done.values())
        assert whole(rig, requests) == [True, True]
        await at_rest(rig)
        assert [len(i.keys) for i in rig.store.injections if i.call == "get_open"] == [3]


async def test_a_missing_key_fails_its_request_alone() -> None:
    async with Rig() as rig:
        requests = await three(rig)
        rig.memory.remove(rig.key(FULL, 2, requests[1].hashes), force=True)
        done = await rig.engine.load_many(requests)
        failure = done["b"].failure
        assert failure is not None
        assert (failure.first_token, failure.reason) == (32, "get open: not found")
        assert done["a"].failure is None
        assert done["c"].failure is None
        assert whole(rig, requests) == [True, False, True]
        await at_rest(rig)


@pytest.mark.parametrize("reason", [ReleaseReason.ABORTED, ReleaseReason.PREEMPTED])
async def test_an_abort_of_one_leaves_the_others_whole(reason: ReleaseReason) -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="get_ranges", nth=1)]) as rig:
        requests = await three(rig)
        loading = asyncio.create_task(rig.engine.load_many(requests))
        await arrived(rig.store.gates["gate"])
        releasing = asyncio.create_task(rig.engine.release("b", reason))
        await rig.engine.lookup(hashes(1), 17)
        assert not releasing.done(), "a call may still write its blocks"
        rig.store.release()
        await releasing
        done = await loading
        assert done["b"].failure is not None
        assert done["b"].failure.reason == f"aborted: its request was {reason.value}"
        assert done["a"].failure is None
        assert done["c"].failure is None
        assert [whole(rig, requests)[i] for i in (0, 2)] == [True, True]
        await at_rest(rig)


async def test_what_did_not_start_of_an_aborted_request_is_not_read() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="get_open", nth=1)]) as rig:
        requests = await three(rig)
        loading = asyncio.create_task(rig.engine.load_many(requests))
        await arrived(rig.store.gates["gate"])
        releasing = [asyncio.create_task(rig.engine.release("b", ReleaseReason.ABORTED)) for _ in range(2)]
        await rig.engine.lookup(hashes(1), 17)
        rig.store.release()
        done = await loading
        await asyncio.gather(*releasing)
        assert [r for r, d in done.items() if d.failure is None] == ["a", "c"]
        assert whole(rig, requests) == [True, False, True]
        assert not any(array[28:36].any() for array in rig.local.values())
        await at_rest(rig)


async def test_the_abort_of_the_last_ends_the_load() -> None:
    async with Rig(full_layout()) as rig:
        requests = await three(rig)
        guard = ManualEvent()
        loading = asyncio.create_task(rig.engine.load_many(requests, guard))
        await asyncio.sleep(0)
        first = [asyncio.create_task(rig.engine.release(name, ReleaseReason.ABORTED)) for name in ("a", "b")]
        await rig.engine.lookup(hashes(1), 17)
        assert not loading.done()
        await rig.engine.release("c", ReleaseReason.ABORTED)  # its event never fires
        done = await loading
        await asyncio.gather(*first)
        assert all(d.failure is not None for d in done.values())
        assert whole(rig, requests) == [False] * 3
        await at_rest(rig)


async def test_a_release_after_the_end_changes_no_result() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="get_close", nth=1)]) as rig:
        requests = await three(rig)
        state = rig.engine.start_loads(requests, None)
        assert await state.ended.wait_async(PATIENCE_S)
        assert not state.settled.is_open
        await rig.engine.release("a", ReleaseReason.ABORTED)
        assert rig.engine.load_done(state, "a").failure is None
        rig.store.release()
        await at_rest(rig)


async def test_a_request_that_makes_no_sense_fails_alone() -> None:
    async with Rig(full_layout()) as rig:
        a, b, c = await three(rig)
        bad = [
            StepRequest("ids", b.hashes, {0: GroupBlocks([-7], (0,))}),
            StepRequest("groups", b.hashes, 5),  # type: ignore[arg-type]  # what is wrong with it is the point
            StepRequest("same", b.hashes, {0: GroupBlocks([20], (0,))}),
            c,
        ]
        done = await rig.engine.load_many([a, *bad, c])
        assert done["a"].failure is None
        assert rig.loaded_right(a)
        for name, reason in (
            ("ids", "local block -7"),
            ("groups", "groups is the number 5"),
            ("same", "block 20 is loaded by another"),
        ):
            failure = done[name].failure
            assert failure is not None
            assert reason in failure.reason
            assert failure.first_token == 0
        assert done["c"].failure is not None, "which of the two is meant?"
        assert not rig.loaded_right(c)
        await at_rest(rig)


async def test_nothing_but_requests_is_taken() -> None:
    async with Rig(full_layout()) as rig:
        assert await rig.engine.load_many([]) == {}
        for bad in (5, ["a"]):
            with pytest.raises(StepError, match="load: "):
                await rig.engine.load_many(bad)  # type: ignore[arg-type]  # what is wrong with it is the point
        await at_rest(rig)


async def test_what_is_to_be_saved_is_left_out() -> None:
    async with Rig(full_layout()) as rig:
        a, *_ = await three(rig)
        both = StepRequest("a", a.hashes, {0: GroupBlocks(a.groups[0].block_ids, a.groups[0].load, (99,))})
        assert (await rig.engine.load_many([both]))["a"].failure is None
        assert rig.engine.stats().sessions.put_opened == 12


async def test_a_failed_load_taints_its_request_alone() -> None:
    fault = Fault(what="outcome", call="get_ranges", outcome=Outcome.TRANSFER_FAILED, times=1, key=hashes(4, "b")[1].hex())
    async with Rig(full_layout(), [fault]) as rig:
        requests = await three(rig)
        done = await rig.engine.load_many(requests)
        assert [r for r, d in done.items() if d.failure is not None] == ["b"]
        fine = {r: hashes(5, r) for r in NAMES}
        saving = [rig.request(r, fine[r], save={0: [4]}, first_id=20 + 8 * n) for n, r in enumerate(NAMES)]
        await rig.run(*saving)
        assert [rig.committed(0, fine[r]) for r in NAMES] == [[0, 1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


async def test_fenced_blocks_are_those_of_the_request() -> None:
    """A call that does not return may write the blocks of all its requests; each is told of its own."""
    config = {"call_deadline_s": 0.3}
    async with Rig(full_layout(1), [Fault(what="freeze", call="get_ranges", times=1)], config=config) as rig:
        requests = await three(rig)
        rig.memory.remove(rig.key(FULL, 2, requests[1].hashes), force=True)
        done = await rig.engine.load_many(requests)
        assert [d.fenced_blocks for d in done.values()] == [{0: (20, 21, 22, 23)}, {0: (28, 29)}, {0: (36, 37, 38, 39)}]
        rig.store.release()
        await rig.calls_returned()
        assert not rig.engine.fenced_blocks
