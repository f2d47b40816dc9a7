"""Answers that come late, raise, or never come: nobody waits for longer than a deadline, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from kvactors.actors import put_opens
from kvactors.core.queue import Priority
from kvactors.core.sessions import GetState
from kvactors.core.steps import GroupBlocks, ReleaseReason, StepRequest
from kvactors.core.store import Outcome, RangeBatch
from kvactors.devices import ManualEvent
from kvactors.engine import crew
from kvactors.errors import DrainTimeout, StepError
from kvactors.messages import LoadDone, StoreLost
from kvactors.stores.fault_plan import Fault
from kvactors.stores.memory import MemoryStore
from tests.engine.rig import Rig, arrived, full_layout, hashes
from tests.engine.test_full_store import ShiftedClock
from tests.engine.test_undertaker import crashed

SOON_S = 8.0
"""Far more than the short deadline, far less than the others."""
SHORT = {"call_deadline_s": 0.2, "step_deadline_s": 60.0}


async def until(rig: Rig, holds: Callable[[], bool]) -> None:
    """Passes messages through the engine until something is so."""

    async def look() -> None:
        while not holds():
            await rig.engine.lookup(hashes(2, "nothing"), 33)
            await asyncio.sleep(0)

    await asyncio.wait_for(look(), SOON_S)


async def test_a_session_of_a_tainted_request_that_opens_late_is_not_committed() -> None:
    """I12, although the request's other keys were killed before."""
    fine = hashes(3)
    late = full_layout().key(0, fine[2])
    faults = [
        Fault(what="freeze", call="put_open", nth=3),
        Fault(what="outcome", call="put_open", key=late, outcome=Outcome.NO_SPACE, times=3),
    ]
    async with Rig(full_layout(), faults) as rig:
        request = rig.request("a", fine, load={0: [0]}, save={0: [1, 2]})  # nobody saved block 0
        step = rig.engine.begin_step([request])
        await arrived(rig.store.gates["gate"])
        rig.engine.crew.pool.epoch += 1
        rig.engine.crew.coordinator.mailbox.post(StoreLost(rig.engine.crew.pool.epoch, False, "the test"))
        await until(rig, lambda: any("the store lost its session" in line for line in rig.engine.story("a")))
        rig.store.release()
        await until(rig, lambda: any("block 2: put opening -> open" in line for line in rig.engine.story("a")))
        for layer in (0, 1):
            assert await step.wait_layer(layer) == {"a"}
            rig.compute(layer, request)
            step.layer_ready(layer)
        await step.end()
        await step.settled()
        assert rig.committed(0, fine) == []


async def test_a_call_is_given_up_in_time_while_others_wait_for_longer() -> None:
    faults = [Fault(what="freeze", call="get_ranges", nth=n, gate=gate) for n, gate in enumerate(("a", "a", "b", "b"), 1)]
    async with Rig(full_layout(), faults, config=SHORT) as rig:
        fine, event = hashes(2), ManualEvent()
        await rig.save("w", fine)
        step = rig.engine.begin_step([rig.request("s", hashes(1, "q"), save={0: [0]}, first_id=20)])
        step.layer_ready(0, event)
        for name, first in (("a", 30), ("b", 40)):
            request = rig.request(name, fine, load={0: [0]}, first_id=first)
            done = await asyncio.wait_for(rig.engine.load(name, request.groups, fine), SOON_S)
            assert done.failure is not None
            assert "call lost" in done.failure.reason
            rig.store.release(name)
            await until(rig, lambda: not rig.engine.crew.pool.lost_of(0))
        await step.abort()


@pytest.mark.parametrize("method", ["put_open", "put_ranges", "put_commit", "get_open", "get_ranges", "get_close"])
async def test_a_call_that_hangs_is_named(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call=method, nth=1)], config=SHORT) as rig:
        fine = hashes(2)
        await rig.save("w", fine)
        if method.startswith("get"):
            await rig.engine.load("a", rig.request("a", fine, load={0: [0]}, first_id=10).groups, fine)
        await until(rig, lambda: bool(rig.engine.crew.pool.lost_workers))
        rig.store.release()
        await rig.calls_returned()
    lines = [r.getMessage() for r in caplog.records if "passed its deadline" in r.getMessage()]
    assert lines == [f"event='a store call passed its deadline' store='memory' call='{method}' after_s=0.2"]


async def test_a_lookup_that_hangs_is_told_as_the_stores_call(caplog: pytest.LogCaptureFixture) -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="readable", nth=1)], config=SHORT) as rig:
        assert (await rig.engine.lookup(hashes(2), 33)).tokens == 0
        await until(rig, lambda: "a lookup failed" in caplog.text)
        rig.store.release()
    logged = [r.getMessage() for r in caplog.records]
    assert "event='a store call passed its deadline' store='memory' call='readable' after_s=0.2" in logged
    assert "event='a lookup failed; it counts as a miss' error='call lost'" in logged


async def test_a_lookup_that_raises_says_what(caplog: pytest.LogCaptureFixture) -> None:
    async with Rig(full_layout(), [Fault(what="raise", call="readable", nth=1)]) as rig:
        assert (await rig.engine.lookup(hashes(2), 33)).tokens == 0
    logged = [r.getMessage() for r in caplog.records]
    assert any("error='store memory: readable raised " in line for line in logged), logged


async def test_a_key_whose_close_hung_and_raised_can_be_loaded_again() -> None:
    faults = [Fault(what="freeze", call="get_close", nth=1), Fault(what="raise", call="get_close", nth=1)]
    async with Rig(full_layout(), faults, config=SHORT) as rig:
        fine = hashes(2)
        await rig.save("w", fine)
        request = rig.request("a", fine, load={0: [0]}, first_id=10)
        assert (await rig.engine.load("a", request.groups, fine)).failure is None
        await until(rig, lambda: bool(rig.engine.crew.pool.lost_of(0)))
        rig.store.release()
        await rig.calls_returned()
        assert (await rig.engine.load("b", request.groups, fine)).failure is None
        assert rig.loaded_right(request)


async def test_who_waits_for_a_key_that_a_lost_read_holds_is_told_at_once() -> None:
    faults = [
        Fault(what="freeze", call="get_ranges", nth=1),
        Fault(what="outcome", call="get_ranges", nth=2, outcome=Outcome.LEASE_EXPIRED),
    ]
    async with Rig(full_layout(), faults, config={**SHORT, "call_deadline_s": 1.0}) as rig:
        fine = hashes(2)
        await rig.save("w", fine)
        gets = rig.engine.crew.groups[0].table.gets
        one, other = (rig.request(n, fine, load={0: [0]}, first_id=f) for n, f in (("a", 10), ("b", 20)))
        first = asyncio.create_task(rig.engine.load("a", one.groups, fine))
        await until(rig, lambda: any(s.state is GetState.EXPIRED for s in gets.values()))
        second = asyncio.create_task(rig.engine.load("b", other.groups, fine))
        for done in await asyncio.wait_for(asyncio.gather(first, second), SOON_S):
            assert done.failure is not None
        rig.store.release()
        await rig.calls_returned()


async def test_a_drain_ends_when_the_close_after_a_late_open_has() -> None:
    faults = [Fault(what="freeze", call="get_open", nth=1), Fault(what="freeze", call="get_close", nth=1, gate="close")]
    async with Rig(full_layout(), faults, config=SHORT) as rig:
        fine = hashes(2)
        await rig.save("w", fine)
        request = rig.request("a", fine, load={0: [0]}, first_id=10)
        assert (await rig.engine.load("a", request.groups, fine)).failure is not None
        rig.store.release()
        await arrived(rig.store.gates["close"])
        draining = asyncio.create_task(rig.engine.drain(60.0))
        await until(rig, lambda: rig.engine.stats().state == "draining")
        rig.store.release("close")
        await asyncio.wait_for(draining, SOON_S)


@pytest.mark.parametrize("then", ["comes late", "raises"])
async def test_an_open_whose_group_crashed_leaves_nothing_at_the_store(then: str) -> None:
    raised = [Fault(what="raise", call="put_open", nth=1, applied=True)] if then == "raises" else []
    deadline = 60.0 if raised else 0.2
    async with Rig(
        full_layout(), [Fault(what="freeze", call="put_open", nth=1), *raised], config={**SHORT, "call_deadline_s": deadline}
    ) as rig:
        step = rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        await arrived(rig.store.gates["gate"])
        await crashed(rig)
        if not raised:
            await until(rig, lambda: bool(rig.engine.crew.pool.lost_of(0)))
        rig.store.release()
        await step.end()
        await rig.calls_returned()
        await rig.engine.drain()
        assert rig.memory.stats()["open_puts"] == 0
        assert rig.engine.stats().sessions.put_refused == 0, "nobody knows whether it was"
        assert len(rig.engine.stats().abandoned_keys) == 1


async def test_a_dead_engine_was_not_drained() -> None:
    async with Rig(full_layout()) as rig:
        rig.engine.crew.coordinator.mailbox.post("no message at all")
        await until(rig, lambda: rig.engine.stats().state == "dead")
        with pytest.raises(DrainTimeout, match="dead"):
            await rig.engine.drain(1.0)


async def test_forget_inside_a_step_clears_what_the_step_is_yet_to_find() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(2)
        step = rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, save={0: [1]})])
        assert await step.wait_layer(0) == {"a"}
        rig.engine.forget("a")
        await step.end()
        await step.settled()
        await rig.save("a", fine)
        assert rig.committed(0, fine) == [0, 1]


async def test_nothing_is_opened_after_the_first_save_was_due() -> None:
    faults = [
        Fault(what="freeze", call="put_open", nth=3),
        Fault(what="outcome", call="put_open", outcome=Outcome.NO_SPACE, times=3),
    ]
    async with Rig(full_layout(), faults) as rig:
        request = rig.request("a", hashes(1), save={0: [0]})
        step = rig.engine.begin_step([request])
        await arrived(rig.store.gates["gate"])
        step.layer_ready(0)
        await until(rig, lambda: not rig.engine.pending_saves)
        rig.store.release()
        await until(rig, lambda: len(rig.engine.story("a")) > 0)
        await step.end()
        await step.settled()
        assert rig.store._calls["put_open"] == 3
        assert rig.engine.stats().sessions.put_opened == 0


async def test_loads_that_wait_for_an_event_are_promoted_too() -> None:
    async with Rig(full_layout()) as rig:
        fine, event = hashes(2), ManualEvent()
        await rig.save("w", fine)
        step = rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, first_id=10)], event)
        gated = rig.engine.crew.pool._gated
        await until(rig, lambda: bool(gated))
        waiting = asyncio.create_task(step.wait_layer(0))
        await until(rig, lambda: any(j.layer == 0 and j.priority is Priority.DEMANDED for j in gated.values()))
        event.fire()
        assert await waiting == frozenset()
        await step.end()


async def frozen_load_and_release(rig: Rig) -> tuple[asyncio.Task[LoadDone], asyncio.Task[None]]:
    """A load of "a" outside steps whose read is frozen, and a release of "a" that has reached the coordinator."""
    fine = hashes(1)
    await rig.save("a", fine)
    groups = rig.request("a", fine, load={0: [0]}, first_id=10).groups
    loading = asyncio.create_task(rig.engine.load("a", groups, fine))
    await arrived(rig.store.gates["gate"])
    releasing = asyncio.create_task(rig.engine.release("a"))
    await until(rig, lambda: bool(rig.engine.crew.coordinator._releases))
    return loading, releasing


async def test_a_release_that_waits_is_answered_when_a_drain_gives_up() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="get_ranges", nth=1)]) as rig:
        loading, releasing = await frozen_load_and_release(rig)
        with pytest.raises(DrainTimeout):
            await rig.engine.drain(0.05)
        await asyncio.wait_for(releasing, SOON_S)
        assert (await loading).failure is not None


async def test_a_close_that_returns_late_while_its_step_is_open_lets_it_settle() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="get_close", nth=1)], config=SHORT) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        step = rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, first_id=10)])
        for layer in (0, 1):
            assert await step.wait_layer(layer) == frozenset()
            step.layer_ready(layer)
        await arrived(rig.store.gates["gate"])
        await until(rig, lambda: bool(rig.engine.crew.pool.lost_of(0)))
        rig.store.release()
        await rig.calls_returned()
        await step.end()
        await asyncio.wait_for(step.settled(), SOON_S)


@pytest.mark.parametrize("method", ["readable", "put_open", "put_ranges", "put_commit", "get_open", "get_ranges", "get_close"])
async def test_a_late_answer_frees_no_slot_twice(method: str) -> None:
    """A mailbox would have less room after each, and in the end none for what it has to take."""
    fine = hashes(2)
    async with Rig(full_layout()) as writer:
        await writer.run(writer.request("w", fine, save={0: [0]}))
        async with Rig(full_layout(), [Fault(what="freeze", call=method, times=2)], inner=writer.memory, config=SHORT) as rig:
            hit = asyncio.create_task(rig.engine.lookup(fine, 33))
            request = rig.request("a", fine, load={0: [0]}, save={0: [1]}, first_id=10)
            await rig.run(request, settle=False)
            await until(rig, lambda: bool(rig.engine.crew.pool.lost_workers))
            await hit
            rig.store.release()
            await rig.calls_returned()
            await rig.engine.drain()
            assert [box._reserved for box in rig.engine.crew.mailboxes] == [0, 0]


async def test_a_key_whose_lost_read_was_for_two_can_be_loaded_again() -> None:
    async with Rig(full_layout(1), [Fault(what="freeze", call="get_ranges", nth=1)], config=SHORT) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        done = await rig.engine.load_many([rig.request(n, fine, load={0: [0]}, first_id=f) for n, f in (("a", 10), ("b", 20))])
        assert all(d.failure is not None for d in done.values())
        rig.store.release()
        await rig.calls_returned()
        again = rig.request("c", fine, load={0: [0]}, first_id=30)
        assert (await rig.engine.load("c", again.groups, fine)).failure is None
        assert rig.loaded_right(again)
        await rig.engine.drain()
        assert rig.memory.stats()["open_gets"] == 0


async def test_a_step_whose_open_failed_gives_back_no_session_of_others() -> None:
    """I6: it has no share of the one that somebody else opened for the key since."""
    fine = hashes(1)
    async with Rig(full_layout(4), [Fault(what="freeze", call="get_ranges", nth=1)]) as rig:
        step = rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, first_id=10)])
        assert await step.wait_layer(0) == {"a"}
        async with Rig(full_layout(4), inner=rig.memory.client()) as writer:
            await writer.save("w", fine)
        other = rig.request("b", fine, load={0: [0]}, first_id=20)
        loading = asyncio.create_task(rig.engine.load("b", other.groups, fine))
        await arrived(rig.store.gates["gate"])
        await step.end()
        rig.store.release()
        assert (await loading).failure is None
        assert rig.loaded_right(other)


class SlowToAnswer(MemoryStore):
    """One call takes effect at once, and is answered only when some time has passed."""

    def __init__(self, clock: ShiftedClock, method: str, takes_s: float) -> None:
        super().__init__()
        self._shifted, self._method, self._takes_s = clock, method, takes_s

    def _answered(self, method: str, outcomes: list[Outcome]) -> list[Outcome]:
        if method == self._method:
            self._shifted.shift_s, self._takes_s = self._shifted.shift_s + self._takes_s, 0.0
        return outcomes

    def put_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        return self._answered("put_open", super().put_open(keys, sizes))

    def put_ranges(self, batch: RangeBatch) -> list[Outcome]:
        return self._answered("put_ranges", super().put_ranges(batch))

    def get_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        return self._answered("get_open", super().get_open(keys, sizes))


@pytest.mark.parametrize(
    ("method", "takes_s", "committed", "opens"),
    [("put_open", 16.0, [], 1), ("put_ranges", 16.0, [], 1), ("get_open", 11.0, [0], 2)],
)
async def test_a_session_is_as_old_as_the_call_that_opened_it(
    method: str, takes_s: float, committed: list[int], opens: int
) -> None:
    """I11: by the time of its answer the lease, or the age up to which it is safe to write, may be over."""
    clock, fine = ShiftedClock(), hashes(1)
    async with Rig(full_layout(1), inner=SlowToAnswer(clock, method, takes_s), clock=clock) as rig:
        await rig.save("w", fine)
        assert rig.committed(0, fine) == committed
        await rig.run(rig.request("a", fine, load={0: [0]}, first_id=10))
        assert rig.store._calls["get_open"] == opens


async def test_a_clean_up_that_always_fails_abandons_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_opens, "CLEAN_UP_RETRY_S", (0.001, 0.001, 0.001))
    async with Rig(full_layout(), [Fault(what="raise", call="put_open", nth=1), Fault(what="raise", call="put_revoke")]) as rig:
        fine = hashes(1)
        step, _ = await rig.run(rig.request("a", fine, save={0: [0]}), settle=False)
        await asyncio.wait_for(step.settled(), SOON_S)
        assert rig.store._calls["put_revoke"] == 4
        assert rig.engine.stats().abandoned_keys == [rig.key(0, 0, fine)]


async def test_nothing_is_opened_for_a_step_that_was_aborted_meanwhile() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="readable", nth=1)]) as rig:
        step = rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        await arrived(rig.store.gates["gate"])
        ending = asyncio.create_task(step.abort())
        await until(rig, lambda: all(gs.ending for gs in rig.engine.crew.groups[0].steps.values()))
        rig.store.release()
        await ending
        await step.settled()
        assert rig.store._calls["put_open"] == 0


async def test_a_block_that_is_still_being_saved_under_another_key_is_left_out() -> None:
    """Its request's id is used again before the end of a commit: that harms neither of them."""
    async with Rig(full_layout(), [Fault(what="freeze", call="put_commit", nth=1)]) as rig:
        fine, other = hashes(1), hashes(1, "other")
        await rig.run(rig.request("a", fine, save={0: [0]}), settle=False)
        await arrived(rig.store.gates["gate"])
        await rig.run(rig.request("a", other, save={0: [0]}, first_id=10))
        assert rig.engine.stats().groups[0].skipped_existing == 1
        assert rig.engine.stats().state == "running"
        rig.store.release()
        await rig.engine.drain()
        assert (rig.committed(0, fine), rig.committed(0, other)) == ([0], [])


async def test_what_was_readable_already_is_remembered_as_saved() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(2)
        await rig.save("w", fine)
        await rig.save("a", fine, first_id=10)
        rig.wipe()
        blocks = {0: GroupBlocks([20, 21], load=[0, 1])}
        assert (await rig.engine.load("a", blocks, [])).failure is None
        assert [rig.holds(0, fine[i], 20 + i) for i in (0, 1)] == [True, True]


async def test_a_probe_that_returns_late_is_no_second_one() -> None:
    config = {**SHORT, "probe_interval_s": 0.01}
    async with Rig(full_layout(), [Fault(what="freeze", call="health", nth=1)], config=config) as rig:
        pool, coordinator = rig.engine.crew.pool, rig.engine.crew.coordinator
        coordinator.mailbox.post(StoreLost(pool.epoch, True, "the test"))
        await until(rig, lambda: rig.engine.stats().circuit == "open" and bool(pool.lost_workers))
        await until(rig, lambda: rig.engine.stats().circuit == "closed")
        rig.store.release()
        await until(rig, lambda: not pool.glance().late)
        assert coordinator.mailbox._reserved == 0
        assert rig.store._calls["health"] == 2


async def test_a_step_with_nothing_to_do_ends_the_one_before_it() -> None:
    async with Rig(full_layout()) as rig:
        first = rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        await until(rig, lambda: rig.memory.stats()["open_puts"] == 1)
        await rig.run()
        await asyncio.wait_for(first.settled(), SOON_S)
        await first.end()
        assert rig.memory.stats()["open_puts"] == 0


async def test_what_a_closed_engine_may_still_write_stays_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "CLOSE_GRACE_S", 0.01)
    async with Rig(full_layout(), [Fault(what="freeze", call="get_ranges", nth=1)]) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, first_id=10)])
        await arrived(rig.store.gates["gate"])
        await rig.engine.close()
        assert rig.engine.fenced_blocks == {(0, 10)}


async def test_what_a_layer_that_was_not_waited_for_to_the_end_may_still_write_is_fenced() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        step = rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, first_id=10)], ManualEvent())
        assert rig.engine.driver.waited(step._state, 0, in_time=False) == {"a"}
        assert step.fenced_blocks == {(0, 10)}
        await step.abort()


async def test_a_release_after_its_step_waits_for_a_load_outside() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="get_ranges", nth=1)]) as rig:
        loading, releasing = await frozen_load_and_release(rig)
        assert not releasing.done(), "a call may still write its block"
        rig.store.release()
        await releasing
        assert (await loading).failure is None


# -- what a caller gets wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["1", None, 2, -1, 1.5, True])
async def test_a_failure_on_no_layer_of_the_stage_is_refused(layer: object) -> None:
    async with Rig(full_layout()) as rig:
        request = rig.request("a", hashes(1), save={0: [0]})
        step = rig.engine.begin_step([request])
        with pytest.raises(StepError, match="0 to 1"):
            step.fail("a", layer, "another rank's load failed")  # type: ignore[arg-type]  # what is wrong with it is the point
        with pytest.raises(StepError, match="Phase"):
            step.layer_ready(0, phase="exit")  # type: ignore[arg-type]  # what is wrong with it is the point
        await step.abort()
        await rig.engine.release("a", ReleaseReason.ABORTED)


async def test_two_requests_do_not_load_into_one_block() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(2)
        await rig.save("w", fine)
        one = StepRequest("a", fine, {0: GroupBlocks([9, 0], load=[0])})
        other = StepRequest("b", fine, {0: GroupBlocks([0, 9], load=[1])})
        step, failed = await rig.run(one, other)
        assert "local block 9" in step.problems["b"]
        assert failed[0] == {"b"}
        assert rig.holds(0, fine[0], 9)


async def test_a_request_that_is_named_again_loads_what_it_was_to_load_at_first() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        first, again = (rig.request("a", fine, load={0: [0]}, first_id=first_id) for first_id in (10, 20))
        step, failed = await rig.run(first, again)
        assert step.problems == {"a": "is named twice in one step"}
        assert set(failed.values()) == {frozenset()}
        assert rig.loaded_right(first)


async def test_the_reason_of_a_failed_load_is_that_of_its_layer() -> None:
    faults = [
        Fault(what="freeze", call="get_ranges", nth=1),
        Fault(what="outcome", call="get_ranges", nth=1, outcome=Outcome.TRANSFER_FAILED),
        Fault(what="outcome", call="get_ranges", nth=2, outcome=Outcome.INVALID),
    ]
    async with Rig(full_layout(), faults) as rig:
        fine = hashes(2)
        await rig.save("w", fine)
        step = rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, first_id=10)])
        await arrived(rig.store.gates["gate"])
        await until(rig, lambda: bool(step.failures))
        assert step.failures["a"].reason == "layer 1: invalid"
        rig.store.release()
        assert await step.wait_layer(0) == {"a"}
        assert (step.failures["a"].layer, step.failures["a"].reason) == (0, "layer 0: transfer failed")
        await step.abort()
