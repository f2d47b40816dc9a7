"""The blocking face: an engine on a thread of its own, driven by a compute thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvactors.actors.workers import Executor
from kvactors.core.steps import GroupBlocks, ReleaseReason
from kvactors.devices import ManualEvent
from kvactors.engine import BlockingEngine
from kvactors.errors import DrainTimeout, EngineClosedError, StepError
from kvactors.stores.fault_plan import Fault
from tests.engine.in_turn import InTurn
from tests.engine.rig import PATIENCE_S, Rig, full_layout, hashes


class BlockingRig(Rig):
    """A rig whose engine is a `BlockingEngine`."""

    def open(self, executor: Executor | None = None) -> BlockingEngine:
        bases = {where: array.ctypes.data for where, array in self.local.items()}
        executor = InTurn(self.store) if executor is None else executor
        self.blocking = BlockingEngine(self.layout, self.store, bases, self.config, executor=executor)
        self.blocking.keep_stories()
        return self.blocking

    def forward(self, *requests: Any) -> dict[int, frozenset[str]]:
        step = self.blocking.begin_step(requests)
        failed = {}
        for layer in range(self.layout.stage_layers):
            failed[layer] = step.wait_layer(layer)
            self.compute(layer, *requests)
            step.layer_ready(layer)
            step.checkpoint(layer)
        step.end()
        step.settled()
        return failed


@pytest.fixture
def rig() -> Iterator[BlockingRig]:
    rig = BlockingRig(full_layout())
    with rig.open() as engine:
        yield rig
        for gate in rig.store.gates.values():
            gate.release()
        assert engine.violations() == []
    rig.memory.close()


def test_round_trip(rig: BlockingRig) -> None:
    fine = hashes(4)
    rig.forward(rig.request("a", fine, save={0: [0, 1, 2, 3]}))
    assert rig.blocking.lookup(fine, 64).tokens == 48
    rig.wipe()
    loading = rig.request("b", fine, load={0: [0, 1, 2]}, first_id=9)
    assert not any(rig.forward(loading).values())
    assert rig.loaded_right(loading)
    rig.blocking.release("b", ReleaseReason.FINISHED)
    rig.blocking.forget("b")
    rig.blocking.drain()
    assert rig.blocking.stats().sessions.open_now == 0
    assert rig.blocking.story("a")
    assert rig.blocking.fenced_blocks == frozenset()


def test_load_outside_a_step(rig: BlockingRig) -> None:
    fine = hashes(2)
    rig.forward(rig.request("a", fine, save={0: [0, 1]}))
    rig.wipe()
    request = rig.request("b", fine, load={0: [0, 1]}, first_id=9)
    guard = ManualEvent()
    load = rig.blocking.load("b", request.groups, fine, guard)
    assert not load.done
    guard.fire()
    assert load.result().failure is None
    assert load.done
    assert rig.loaded_right(request)


def test_several_requests_in_one_load(rig: BlockingRig) -> None:
    fine = hashes(2)
    rig.forward(rig.request("a", fine, save={0: [0, 1]}))
    rig.wipe()
    requests = [rig.request(name, fine, load={0: [0, 1]}, first_id=at) for name, at in (("b", 9), ("c", 19))]
    guard, ended = ManualEvent(), threading.Event()
    load = rig.blocking.load_many([*requests, rig.request("d", fine, load={0: [0]}, first_id=9)], guard)
    load.on_done(ended.set)
    assert not load.done
    guard.fire()
    assert ended.wait(PATIENCE_S)
    assert load.done
    assert [load.result(name).failure is None for name in ("b", "c", "d")] == [True, True, False]
    assert all(map(rig.loaded_right, requests))
    for name in (None, "a"):
        with pytest.raises(StepError, match="the load is for"):
            load.result(name)


def test_forget_drops_the_memory_of_committed_keys(rig: BlockingRig) -> None:
    rig.forward(rig.request("a", hashes(1), save={0: [0]}))
    blocks = {0: GroupBlocks([9], (0,))}
    assert rig.blocking.load("a", blocks, []).result().failure is None
    rig.blocking.forget("a")
    failure = rig.blocking.load("a", blocks, []).result().failure
    assert failure is not None
    assert "neither its hash nor a memory" in failure.reason


def test_an_exception_in_the_forward_pass(rig: BlockingRig) -> None:
    fine = hashes(2)
    step = rig.blocking.begin_step([rig.request("a", fine, save={0: [0, 1]})])
    step.layer_ready(0)
    step.abort("the model raised")
    step.settled()
    rig.forward(rig.request("b", fine, save={0: [0, 1]}))
    assert rig.committed(0, fine) == [0, 1]


def test_drain_from_the_thread_that_has_a_step_open_aborts_it(rig: BlockingRig) -> None:
    fine = hashes(1)
    step = rig.blocking.begin_step([rig.request("a", fine, save={0: [0]})])
    for layer in (0, 1):
        step.layer_ready(layer, ManualEvent())
    rig.blocking.drain(5.0)
    assert rig.committed(0, fine) == []
    step.end()


def test_drain_from_another_thread_lets_the_step_finish(rig: BlockingRig) -> None:
    fine = hashes(1)
    request = rig.request("a", fine, save={0: [0]})
    step = rig.blocking.begin_step([request])
    draining = threading.Thread(target=rig.blocking.drain)
    draining.start()
    for layer in (0, 1):
        rig.compute(layer, request)
        step.layer_ready(layer)
    step.end()
    draining.join(PATIENCE_S)
    assert not draining.is_alive()
    assert rig.committed(0, fine) == [0]


def test_checkpoint_blocks_the_thread_until_saves_ended() -> None:
    rig = BlockingRig(full_layout(layers=3), [Fault(what="freeze", call="put_ranges")], config={"max_pending_saves": 1})
    with rig.open():
        step = rig.blocking.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        for layer in (0, 1):
            step.layer_ready(layer)
        blocked = threading.Thread(target=step.checkpoint, args=(1,))
        blocked.start()
        assert rig.store.gates["gate"].arrived.wait(PATIENCE_S)
        assert blocked.is_alive()
        rig.store.release()
        blocked.join(PATIENCE_S)
        assert not blocked.is_alive()
        step.layer_ready(2)
        step.end()
    rig.memory.close()


def test_drain_deadline(rig: BlockingRig) -> None:
    step = rig.blocking.begin_step([rig.request("a", hashes(1), save={0: [0]})])
    raised: list[DrainTimeout] = []

    def drain() -> None:
        try:
            rig.blocking.drain(0.05)
        except DrainTimeout as e:
            raised.append(e)

    other = threading.Thread(target=drain)
    other.start()
    other.join(PATIENCE_S)
    assert len(raised) == 1
    assert raised[0].left
    step.end()


def test_after_close_steps_pass_through_and_the_engine_is_not_opened_again(rig: BlockingRig) -> None:
    rig.blocking.close()
    rig.blocking.close()
    fine = hashes(1)
    assert rig.forward(rig.request("a", fine, load={0: [0]}))[0] == {"a"}
    assert rig.blocking.lookup(fine, 17).tokens == 0
    rig.blocking.release("a")
    with pytest.raises(EngineClosedError), rig.blocking:
        pass


def test_a_dead_loop_lets_every_waiter_go(rig: BlockingRig) -> None:
    fine = hashes(1)
    rig.forward(rig.request("w", fine, save={0: [0]}))
    step = rig.blocking.begin_step([rig.request("a", fine, load={0: [0]}, first_id=5)], ManualEvent())
    rig.blocking._loop.call_soon_threadsafe(rig.blocking._loop.stop)
    assert step.wait_layer(0) == {"a"}
    step.layer_ready(0)
    step.checkpoint(0)
    step.end()
    step.settled()
    assert rig.blocking.stats().state == "dead"


def test_misuse_is_harmless_or_typed(rig: BlockingRig) -> None:
    fine = hashes(1)
    request = rig.request("a", fine, save={0: [0]})
    step = rig.blocking.begin_step([request])
    rig.compute(0, request)
    rig.compute(1, request)
    step.layer_ready(0)
    step.layer_ready(0)
    step.layer_ready(1)
    step.end()
    step.end()
    step.abort()
    step.layer_ready(1)
    step.settled()
    assert rig.committed(0, fine) == [0]
    rig.blocking.release("nobody")
    rig.blocking.forget("nobody")
    with pytest.raises(StepError):
        rig.blocking.load("a", rig.request("a", fine, load={0: [0]}).groups, ["no bytes"])  # type: ignore[list-item]  # what is wrong with it is the point


def test_the_switch_interval_is_set_while_the_engine_runs_and_then_as_it_was() -> None:
    before = sys.getswitchinterval()
    for wanted, found in ((0.0005, 0.0005), (None, before)):
        rig = BlockingRig(full_layout(), config={"switch_interval_s": wanted})
        with rig.open():
            assert sys.getswitchinterval() == pytest.approx(found)
        assert sys.getswitchinterval() == before
        rig.memory.close()
