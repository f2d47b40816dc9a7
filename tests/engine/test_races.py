"""Interleavings that went wrong once: each was found by simulation or by review, and stays as a test."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvactors.actors.threads import WorkerThreads
from kvactors.actors.workers import Worker
from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.steps import NULL_BLOCK, GroupBlocks, Phase, ReleaseReason, StepRequest
from kvactors.core.store import Outcome
from kvactors.devices import CpuEvent, ManualEvent
from kvactors.engine import crew
from kvactors.errors import ConfigError, DrainTimeout, EngineClosedError, EngineError, StepError
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import COMPRESSED, FULL, PATIENCE_S, STATE, Rig, arrived, full_layout, hashes, quiet

SHORT = {"call_deadline_s": 0.2, "step_deadline_s": 1.0}


class BrokenEvent:
    """What a device error looks like."""

    def fired(self) -> bool:
        raise RuntimeError("CUDA error")

    def on_fire(self, callback: Any) -> None:  # noqa: ARG002 - part of the protocol
        raise RuntimeError("CUDA error")


# -- wrong bytes -------------------------------------------------------------------------------------------------------


async def test_state_is_never_saved_under_its_entry_event() -> None:
    """The exit follows the entry before the group handled the entry: the state is put once its own event fired."""
    async with Rig() as rig:
        fine = hashes(2)
        request = rig.request("a", fine, load=None, save={STATE: [1]})
        step = rig.engine.begin_step([request])
        computed = ManualEvent()
        step.layer_ready(0, CpuEvent(), Phase.ENTRY)
        step.layer_ready(0, computed, Phase.EXIT)
        await rig.engine.lookup(hashes(4, "x"), 64)
        assert rig.memory.stats()["written_bytes"] == 0
        rig.compute(0, request)
        computed.fire()
        for layer in (1, 2, 3):
            rig.compute(layer, request)
            step.layer_ready(layer)
        await step.end()
        await step.settled()
        rig.wipe()
        loading = rig.request("b", fine, load={STATE: [1]}, first_id=9)
        await rig.run(loading)
        assert rig.loaded_right(loading)


async def test_a_layer_that_is_skipped_because_of_a_later_one_has_failed() -> None:
    e = CacheEntry
    layout = KVLayout("m", [Group(0, GroupKind.FULL, 16, {0: [e("k", 8)]}), Group(1, GroupKind.FULL, 16, {1: [e("k", 8)]})])
    fine = hashes(2)
    async with Rig(layout) as writer:
        await writer.run(writer.request("w", fine, save={0: [0], 1: [0]}))
        writer.memory.remove(writer.key(1, 0, fine), force=True)
        slow = Fault(what="freeze", call="get_open", key=writer.layout.key_parts(0)[0])
        async with Rig(layout, [slow], inner=writer.memory) as rig:
            step = rig.engine.begin_step([rig.request("a", fine, load={0: [0], 1: [0]}, save={0: [1]}, first_id=9)])
            await arrived(rig.store.gates["gate"])
            waiting = asyncio.create_task(step.wait_layer(0))
            await quiet_but_for_gets(rig)
            rig.store.release()
            assert await waiting == {"a"}
            step.layer_ready(0)
            await step.wait_layer(1)
            step.layer_ready(1)
            await step.end()
            await step.settled()
            assert rig.committed(0, fine) == [0], "block 1 was computed from missing KV"


async def quiet_but_for_gets(rig: Rig) -> None:
    """Lets the other group's get open come back; lookups go through the same queues, one worker is held."""
    for _ in range(4):
        await rig.engine.lookup(hashes(2, "nothing"), 33)


async def test_a_request_left_out_with_loads_has_failed_and_is_tainted() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(4)
        await rig.run(rig.request("w", fine, save={0: [0, 1]}))
        bad = StepRequest("a", fine, {0: GroupBlocks([10, 11, 12], (0, 1), (3,))})
        step = rig.engine.begin_step([bad])
        assert await step.wait_layer(0) == {"a"}
        assert "3 block ids" in step.failures["a"].reason
        await step.end()
        await rig.run(rig.request("a", fine, save={0: [2]}, first_id=10))
        assert rig.committed(0, fine) == [0, 1]


async def test_a_restart_is_not_verified_by_loads_of_null_blocks() -> None:
    faults = [Fault(what="outcome", call="get_ranges", outcome=Outcome.TRANSFER_FAILED, nth=1)]
    async with Rig(full_layout(), faults) as rig:
        fine = hashes(3)
        await rig.run(rig.request("w", fine, save={0: [0, 1]}))
        await rig.run(rig.request("a", fine, load={0: [0, 1]}, first_id=10))
        await rig.run(StepRequest("a", fine, {0: GroupBlocks([NULL_BLOCK, NULL_BLOCK, 12], (0, 1), (2,))}, 32))
        assert rig.committed(0, fine) == [0, 1]


async def test_a_load_outside_steps_verifies_a_restart() -> None:
    faults = [Fault(what="outcome", call="get_ranges", outcome=Outcome.TRANSFER_FAILED, nth=1)]
    async with Rig(full_layout(), faults) as rig:
        fine = hashes(3)
        await rig.run(rig.request("w", fine, save={0: [0, 1]}))
        request = rig.request("a", fine, load={0: [0, 1]}, first_id=10)
        await rig.run(request)
        assert (await rig.engine.load("a", request.groups, fine)).failure is None
        await rig.run(rig.request("a", fine, save={0: [2]}, first_id=10, restarted_at=32))
        assert rig.committed(0, fine) == [0, 1, 2]


async def test_a_load_outside_steps_that_fails_verifies_no_restart() -> None:
    """I12: neither what it was to bring in, nor what came in before it."""
    faults = [Fault(what="outcome", call="get_ranges", outcome=Outcome.TRANSFER_FAILED, nth=n) for n in (1, 3)]
    async with Rig(full_layout(), faults) as rig:
        fine = hashes(3)
        await rig.run(rig.request("w", fine, save={0: [0, 1]}))
        request = rig.request("a", fine, load={0: [0, 1]}, first_id=10)
        await rig.run(request)
        assert (await rig.engine.load("a", request.groups, fine)).failure is not None
        await rig.run(rig.request("a", fine, save={0: [2]}, first_id=10, restarted_at=32))
        assert rig.committed(0, fine) == [0, 1]


async def test_a_preemption_clears_no_taint() -> None:
    async with Rig(full_layout(), [Fault(what="outcome", call="get_ranges", outcome=Outcome.TRANSFER_FAILED, nth=1)]) as rig:
        fine = hashes(3)
        await rig.run(rig.request("w", fine, save={0: [0, 1]}))
        await rig.run(rig.request("a", fine, load={0: [0, 1]}, first_id=10))
        await rig.engine.release("a", ReleaseReason.PREEMPTED)
        await rig.run(rig.request("a", fine, save={0: [2]}, first_id=10))
        assert rig.committed(0, fine) == [0, 1]


async def test_what_another_rank_failed_to_load_is_not_published_here() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(2)
        request = rig.request("a", fine, save={0: [0, 1]})
        step = rig.engine.begin_step([request])
        step.fail("a", 1, "rank 1: lease expired")
        for layer in (0, 1):
            rig.compute(layer, request)
            step.layer_ready(layer)
        await step.end()
        await step.settled()
        assert rig.committed(0, fine) == []


# -- hangs -------------------------------------------------------------------------------------------------------------


async def test_a_search_for_space_that_ends_before_the_loads_are_open() -> None:
    fine = hashes(2)
    faults = [
        Fault(what="outcome", call="put_open", outcome=Outcome.NO_SPACE, times=2),
        Fault(what="freeze", call="get_open", nth=1),
    ]
    async with Rig(full_layout()) as writer:
        await writer.run(writer.request("w", fine, save={0: [0]}))
        async with Rig(full_layout(), faults, inner=writer.memory) as rig:
            request = rig.request("a", fine, load={0: [0]}, save={0: [1]}, first_id=10)
            step = rig.engine.begin_step([request])
            await arrived(rig.store.gates["gate"])
            while rig.memory.stats()["open_puts"] == 0:  # the retry in the background finds space
                await rig.engine.lookup(hashes(2, "x"), 33)
            rig.store.release()
            for layer in (0, 1):
                assert await step.wait_layer(layer) == frozenset()
                rig.compute(layer, request)
                step.layer_ready(layer)
            await step.end()
            await step.settled()
            await rig.saves_counted()
            assert rig.committed(0, fine) == [0, 1]


async def test_an_abort_of_a_step_that_has_not_begun() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="put_ranges", nth=1)]) as rig:
        first = rig.engine.begin_step([rig.request("a", hashes(1, "1"), save={0: [0]})])
        first.layer_ready(0)
        await arrived(rig.store.gates["gate"])
        second = rig.engine.begin_step([rig.request("b", hashes(1, "2"), load={0: [0]}, save={0: [0]}, first_id=5)])
        second.layer_ready(0)
        await second.abort()
        await second.settled()
        assert set(second.failures) == {"b"}
        rig.store.release()
        await first.settled()
        await rig.saves_counted()
        later = hashes(2, "2")
        await rig.run(rig.request("b", later, save={0: [1]}, first_id=5))
        assert rig.committed(0, later) == [], "it was computed from missing KV"


async def test_a_release_of_a_request_whose_step_has_not_begun_waits_for_it() -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="put_ranges", nth=1)]) as rig:
        first = rig.engine.begin_step([rig.request("z", hashes(1, "1"), save={0: [0]})])
        first.layer_ready(0)
        await arrived(rig.store.gates["gate"])
        second = rig.engine.begin_step([rig.request("a", hashes(1, "none"), load={0: [0]}, first_id=5)])
        await rig.engine.release("a", ReleaseReason.FINISHED)
        rig.engine.forget("a")
        rig.store.release()
        for layer in (0, 1):
            await second.wait_layer(layer)
            second.layer_ready(layer)
        await second.end()
        await second.settled()
        fresh = hashes(1, "fresh")
        await rig.save("a", fresh, first_id=7)
        assert rig.committed(0, fresh) == [0], "the id is used again, and is not tainted"


async def test_an_abort_overtakes_signals_that_wait_in_a_mailbox() -> None:
    async with Rig(full_layout()) as rig:
        step = rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        await quiet(rig)
        step.layer_ready(0, ManualEvent())
        await step.abort()
        await step.settled()


async def test_a_drain_can_be_asked_for_again() -> None:
    async with Rig(full_layout()) as rig:
        await rig.save("a", hashes(1))
        await rig.engine.drain()
        await rig.engine.drain()


async def test_steps_after_a_drains_deadline_pass_through() -> None:
    async with Rig(full_layout()) as rig:
        rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        with pytest.raises(DrainTimeout):
            await rig.engine.drain(0.05)
        with pytest.raises(DrainTimeout):
            await rig.engine.drain(0.05)
        step, failed = await rig.run(rig.request("b", hashes(1, "b"), load={0: [0]}, first_id=5), settle=False)
        assert step.passed_through
        assert failed[0] == {"b"}


@pytest.mark.parametrize("call", ["get_open", "readable", "get_ranges", "put_open", "put_commit", "get_close"])
async def test_answers_after_a_drains_deadline_find_their_sessions_gone(call: str) -> None:
    fine = hashes(2)
    async with Rig(full_layout()) as writer:
        await writer.run(writer.request("w", fine, save={0: [0]}))
        async with Rig(full_layout(), [Fault(what="freeze", call=call, nth=1)], inner=writer.memory) as rig:
            request = rig.request("a", fine, load={0: [0]}, save={0: [1]}, first_id=5)
            step = rig.engine.begin_step([request])
            if call in ("put_commit", "get_close"):
                for layer in (0, 1):
                    await step.wait_layer(layer)
                    rig.compute(layer, request)
                    step.layer_ready(layer)
                await step.end()
            await arrived(rig.store.gates["gate"])
            with pytest.raises(DrainTimeout):
                await rig.engine.drain(0.05)
            await step.end()
            if call == "get_ranges":
                assert (0, 5) in rig.engine.fenced_blocks, "the read may still write its destination"
            rig.store.release()
            await quiet(rig)
            assert rig.engine.stats().state == "drained"
            assert rig.engine.crew.coordinator._degraded == "", "no actor crashed"


async def test_two_who_drain_at_once_are_both_answered() -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(1)
        request = rig.request("a", fine, save={0: [0]})
        step = rig.engine.begin_step([request])
        drains = [asyncio.create_task(rig.engine.drain()) for _ in range(3)]
        await asyncio.sleep(0)
        for layer in (0, 1):
            rig.compute(layer, request)
            step.layer_ready(layer)
        await step.end()
        await asyncio.gather(*drains)


async def test_who_drains_while_the_engine_is_closed_is_answered() -> None:
    async with Rig(full_layout()) as rig:
        rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        draining = asyncio.create_task(rig.engine.drain())
        await quiet(rig)
        await rig.engine.close()
        with pytest.raises(DrainTimeout, match="ended before"):
            await draining


async def test_close_waits_for_store_calls_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "CLOSE_GRACE_S", PATIENCE_S)
    async with Rig(full_layout(), [Fault(what="freeze", call="get_ranges", nth=1)]) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, first_id=5)])
        await arrived(rig.store.gates["gate"])
        closing = asyncio.create_task(rig.engine.close())
        for _ in range(200):
            await asyncio.sleep(0)
        assert rig.engine.stats().state == "closed"
        assert not closing.done()
        rig.store.release()
        await closing


async def test_a_close_that_raises_is_tried_again() -> None:
    async with Rig(full_layout(), [Fault(what="raise", call="get_close", times=2)]) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        await rig.run(rig.request("a", fine, load={0: [0]}, first_id=5), settle=False)
        await rig.engine.drain()
        assert rig.memory.stats()["open_gets"] == 0
        assert rig.store._calls["get_close"] == 3


async def test_a_key_is_not_opened_again_before_its_close_returned() -> None:
    """The step that waits for it is aborted, another one loads it afterwards."""
    async with Rig(full_layout(), [Fault(what="freeze", call="get_close", nth=1)]) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        await rig.run(rig.request("a", fine, load={0: [0]}, first_id=5), settle=False)
        await arrived(rig.store.gates["gate"])
        gone = rig.engine.begin_step([rig.request("b", fine, load={0: [0]}, first_id=6)])
        waiting = asyncio.create_task(rig.engine.load("d", rig.request("d", fine, load={0: [0]}, first_id=8).groups, fine))
        await quiet_but_for_gets(rig)
        await gone.abort()
        assert rig.store._calls["get_open"] == 1
        rig.store.release()
        assert (await waiting).failure is None
        assert rig.holds(0, fine[0], 8)


async def test_checkpoint_of_a_dead_engine_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(full_layout(layers=4), config={"max_pending_saves": 1}) as rig:

        async def crash(*_: object) -> None:
            raise RuntimeError("crashed by the test")

        step = rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        await quiet(rig)
        monkeypatch.setattr(rig.engine.crew.coordinator, "_of_step", crash)
        for layer in range(4):
            step.layer_ready(layer, ManualEvent())
        await step.checkpoint(3)
        await step.end()


async def test_messages_to_a_dead_coordinator_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(full_layout()) as rig:

        async def crash(*_: object) -> None:
            raise RuntimeError("crashed by the test")

        monkeypatch.setattr(rig.engine.crew.coordinator, "_of_step", crash)
        step = rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        step.layer_ready(0)
        looking = asyncio.create_task(rig.engine.lookup(hashes(1), 17))
        releasing = asyncio.create_task(rig.engine.release("q"))
        assert (await looking).tokens == 0
        await releasing
        assert rig.engine.stats().state == "dead"
        assert (await rig.engine.lookup(hashes(1), 17)).tokens == 0
        await rig.engine.release("q")


@pytest.mark.parametrize("what", ["load", "save"])
async def test_a_device_error_fails_its_transfers_and_nothing_else(what: str) -> None:
    async with Rig(full_layout()) as rig:
        fine = hashes(1)
        await rig.save("w", fine)
        if what == "load":
            step = rig.engine.begin_step([rig.request("a", fine, load={0: [0]}, first_id=5)], BrokenEvent())
            assert await step.wait_layer(0) == {"a"}
        else:
            step = rig.engine.begin_step([rig.request("a", hashes(1, "x"), save={0: [0]}, first_id=5)])
            step.layer_ready(0, BrokenEvent())
            step.layer_ready(1)
        await step.end()
        await step.settled()
        await rig.saves_counted()
        assert rig.engine.stats().state == "running"


async def test_a_key_that_only_a_lost_read_holds_fails_at_once() -> None:
    config = {**SHORT, "probe_interval_s": 0.01}
    async with Rig(full_layout(), [Fault(what="freeze", call="get_ranges", nth=1)], config=config) as rig:
        fine, other = hashes(1), hashes(1, "other")
        await rig.save("w", fine)
        await rig.run(rig.request("a", fine, load={0: [0]}, first_id=5), settle=False)
        closed = threading.Event()
        rig.engine.crew.coordinator.watch.circuit.on_close = closed.set
        rig.store.kill()
        await rig.engine.lookup(hashes(2, "q"), 33)
        await quiet(rig)
        rig.store.revive()
        assert await asyncio.to_thread(closed.wait, PATIENCE_S)
        await rig.save("w2", other, first_id=9)
        b = rig.request("b", fine, load={0: [0]}, first_id=6)
        c = rig.request("c", other, load={0: [0]}, first_id=12)
        step = rig.engine.begin_step([b, c])
        assert await step.wait_layer(0) == {"b"}
        for layer in (0, 1):
            await step.wait_layer(layer)
            step.layer_ready(layer)
        await step.end()
        assert rig.loaded_right(c), "no other request is touched (I8)"


async def test_the_answer_of_a_lost_call_stands_before_its_late_return() -> None:
    """The call returns while the watchdog is still replacing its worker: fence and session are given back."""

    class Slow(WorkerThreads):
        def replace(self, lost: Worker, fresh: Worker) -> None:
            gate.release()
            assert returned.wait(PATIENCE_S)
            super().replace(lost, fresh)

    returned = threading.Event()
    rig = Rig(full_layout(), [Fault(what="freeze", call="get_ranges", nth=1)], config=SHORT, executor=Slow())
    gate = rig.store.gates["gate"]
    real = rig.engine.crew.pool.finish

    def finish(worker: Worker, done: Any) -> None:
        real(worker, done)
        if gate.arrived.is_set():
            returned.set()

    rig.engine.crew.pool.finish = finish  # type: ignore[method-assign]  # a stand-in for one call
    async with rig:
        fine = hashes(1)
        await rig.save("w", fine)
        await rig.run(rig.request("a", fine, load={0: [0]}, first_id=5))
        await rig.calls_returned()
        assert rig.engine.fenced_blocks == frozenset()
        await rig.engine.drain()
        assert rig.engine.stats().sessions.open_now == 0


async def test_a_second_load_of_a_key_does_not_wait_behind_saves() -> None:
    faults = [Fault(what="freeze", call="put_ranges", key=hashes(1, "slow")[0].hex())]
    async with Rig(full_layout(layers=4), faults) as rig:
        fine = hashes(1, "fast")
        await rig.save("w", fine)
        step = rig.engine.begin_step([rig.request("a", hashes(1, "slow"), save={0: [0]})])
        for layer in range(4):
            step.layer_ready(layer)
        await arrived(rig.store.gates["gate"])
        blocks = rig.request("b", fine, load={0: [0]}, first_id=9).groups
        assert (await rig.engine.load("b", blocks, fine)).failure is None
        assert (await rig.engine.load("c", blocks, fine)).failure is None
        rig.store.release()
        await step.end()


# -- crashes -----------------------------------------------------------------------------------------------------------


async def test_a_group_that_crashes_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig() as rig:
        fine = hashes(4)
        request = rig.request("a", fine, save=rig.all_blocks(fine))
        step = rig.engine.begin_step([request])
        await quiet(rig)
        ready = ManualEvent()
        rig.compute(0, request)
        step.layer_ready(0, ready)  # full attention and state wait for the event

        def crash(*_: object) -> None:
            raise RuntimeError("crashed by the test")

        monkeypatch.setattr(rig.engine.crew.groups[COMPRESSED]._saver, "layer_ready", crash)
        step.layer_ready(1)
        while rig.engine.stats().state != "degraded":
            await rig.engine.lookup(fine, 65)
        ready.fire()
        for layer in (2, 3):
            rig.compute(layer, request)
            step.layer_ready(layer)
        await step.end()
        await step.settled()
        assert rig.committed(FULL, fine) == [0, 1, 2, 3]
        assert rig.committed(STATE, fine) == [3]
        assert rig.committed(COMPRESSED, fine) == []


async def test_the_last_reply_to_a_crashed_group_ends_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(full_layout(), [Fault(what="freeze", call="put_ranges", nth=1)]) as rig:
        step = rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        step.layer_ready(0)
        await arrived(rig.store.gates["gate"])

        def crash(*_: object, **__: object) -> None:
            raise RuntimeError("crashed by the test")

        monkeypatch.setattr(rig.engine.crew.groups[0]._saver, "end", crash)
        ending = asyncio.create_task(step.end())
        while rig.engine.stats().state != "degraded":
            await rig.engine.lookup(hashes(1), 17)
        rig.store.release()
        await ending
        await step.settled()


async def test_an_observer_that_raises_is_not_asked_again() -> None:
    class Observer:
        calls = 0

        def span(self, span: Any) -> None:
            if span.track.startswith("worker"):
                self.calls += 1
                raise RuntimeError("observer")

    observer = Observer()
    async with Rig(full_layout(), observer=observer) as rig:
        await rig.save("a", hashes(2))
        assert rig.committed(0, hashes(2)) == [0, 1]
        assert 1 <= observer.calls <= 3


async def test_one_failed_open_is_cleaned_up_by_one_call() -> None:
    async with Rig(full_layout(), [Fault(what="raise", call="put_open", nth=1)], blocks=400) as rig:
        fine = hashes(300)
        await rig.run(rig.request("a", fine, save={0: range(300)}))
        assert rig.store._calls["put_revoke"] == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        StepRequest("a", "not hashes", {}),  # type: ignore[arg-type]  # what is wrong with it is the point
        StepRequest("a", [1, 2], {}),  # type: ignore[list-item]  # what is wrong with it is the point
        StepRequest("a", hashes(2), {0: GroupBlocks(["7", 1], (), (0,))}),  # type: ignore[list-item]  # what is wrong with it is the point
        StepRequest("a", hashes(2), {0: GroupBlocks([None, 1], (), (0,))}),  # type: ignore[list-item]  # what is wrong with it is the point
        StepRequest("a", hashes(2), {0: GroupBlocks([1.7, 1], (), (0,))}),  # type: ignore[list-item]  # what is wrong with it is the point
        StepRequest("a", hashes(2), {0: GroupBlocks([2**70, 1], (), (0,))}),
        StepRequest("a", hashes(2), {0: GroupBlocks([-5, 1], (), (0, 1))}),
        StepRequest("a", hashes(2), {0: (1, 2)}),  # type: ignore[dict-item]  # what is wrong with it is the point
        StepRequest("a", hashes(2), {0: GroupBlocks([1, 2], (), (0,))}, "soon"),  # type: ignore[arg-type]  # what is wrong with it is the point
        StepRequest("a", hashes(2), {9: GroupBlocks([1, 2])}),
    ],
)
async def test_a_request_that_makes_no_sense_harms_nobody(request_: StepRequest) -> None:
    async with Rig(full_layout()) as rig:
        good = rig.request("good", hashes(2), save={0: [0]}, first_id=5)
        step = rig.engine.begin_step([request_, good])
        assert "a" in step.problems
        for layer in (0, 1):
            rig.compute(layer, good)
            step.layer_ready(layer)
        await step.end()
        await step.settled()
        assert rig.committed(0, hashes(2)) == [0]
        assert rig.engine.stats().state == "running"


async def test_calls_with_arguments_that_make_no_sense_are_refused() -> None:
    async with Rig(full_layout()) as rig:
        step = rig.engine.begin_step([])
        for layer in (-1, 2, 99, "x", None, 1.5):
            with pytest.raises(StepError):
                await step.wait_layer(layer)  # type: ignore[arg-type]  # what is wrong with it is the point
            with pytest.raises(StepError):
                step.layer_ready(layer)  # type: ignore[arg-type]  # what is wrong with it is the point
        for bad in (float("nan"), float("inf"), 0, "soon"):
            with pytest.raises(ConfigError):
                await rig.engine.lookup(hashes(1), 17, bad)  # type: ignore[arg-type]  # what is wrong with it is the point
            with pytest.raises(ConfigError):
                await rig.engine.drain(bad)  # type: ignore[arg-type]  # what is wrong with it is the point
        for tokens in (-1, None, "64", 1.5):
            with pytest.raises(ConfigError):
                await rig.engine.lookup(hashes(1), tokens)  # type: ignore[arg-type]  # what is wrong with it is the point
        with pytest.raises(ConfigError):
            await rig.engine.release("a", "weird")  # type: ignore[arg-type]  # what is wrong with it is the point
        with pytest.raises(StepError):
            await rig.engine.load("a", {0: GroupBlocks([-7], (0,))}, hashes(1))
        await step.end()


async def test_an_engine_is_started_once() -> None:
    rig = Rig(full_layout())
    with pytest.raises(EngineError, match="not started"):
        await rig.engine.lookup(hashes(1), 17)
    async with rig:
        pass
    with pytest.raises(EngineClosedError):
        await rig.engine.start()


async def test_a_group_without_layers_on_this_stage_has_nothing_to_do() -> None:
    e = CacheEntry
    groups = [Group(0, GroupKind.FULL, 16, {0: [e("k", 8)]}), Group(1, GroupKind.FULL, 16, {})]
    async with Rig(KVLayout("m", groups, pp_size=2, pp_rank=0)) as rig:
        fine = hashes(1)
        await rig.run(StepRequest("w", fine, {0: GroupBlocks([1], (), (0,))}))
        step = rig.engine.begin_step([StepRequest("a", fine, {0: GroupBlocks([2], (0,)), 1: GroupBlocks([2], (0,))})])
        assert await step.wait_layer(0) == frozenset()
        assert rig.holds(0, fine[0], 2)
        step.layer_ready(0)
        await step.end()
        with pytest.raises(ConfigError, match="stages"):
            await rig.engine.lookup(fine, 17)
