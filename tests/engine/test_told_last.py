"""Whoever is told that something ended finds everything written that belongs to it: told last, on whatever thread."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping

import pytest

from kvactors.actors import saver
from kvactors.actors.coordinator import Coordinator
from kvactors.actors.loops import call_on
from kvactors.engine import BlockingEngine
from kvactors.engine.intake import Answer
from kvactors.errors import DrainTimeout
from kvactors.messages import Abandon
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import PATIENCE_S, Rig, full_layout, hashes
from tests.engine.test_blocking import BlockingRig

FROZEN_READ = Fault(what="freeze", call="get_ranges", nth=1)


def crash_coordinator(engine: BlockingEngine) -> None:
    async def crash(_: object) -> None:
        raise RuntimeError("planted")

    engine._engine.crew.coordinator.handle = crash  # type: ignore[method-assign]  # at its next message
    engine.forget("nobody")


ENDS: Mapping[str, Callable[[BlockingEngine], object]] = {
    "closed": lambda engine: engine.close(),
    "drained too long": lambda engine: engine._engine.start_drain(0.01),
    "without a loop": lambda engine: call_on(engine._loop, engine._loop.stop),
    "crashed": crash_coordinator,
}


@pytest.mark.parametrize("how", ENDS)
def test_blocks_are_fenced_when_a_load_that_is_given_up_ends(how: str) -> None:
    rig, seen = BlockingRig(full_layout(), [FROZEN_READ], config={"workers": 1}), list[frozenset[tuple[int, int]]]()
    with rig.open() as engine:
        fine = hashes(2)
        rig.forward(rig.request("a", fine, save={0: [0, 1]}))
        load = engine.load("b", rig.request("b", fine, load={0: [0, 1]}, first_id=9).groups, fine)
        load.on_done(lambda: seen.append(engine.fenced_blocks))
        assert rig.store.gates["gate"].arrived.wait(PATIENCE_S)
        ending = threading.Thread(target=ENDS[how], args=(engine,))
        ending.start()
        assert load.wait(PATIENCE_S)
        rig.store.release()
        ending.join(PATIENCE_S)
    assert seen == [{(0, 9), (0, 10)}]
    rig.memory.close()


def test_blocks_are_fenced_when_an_engine_is_called_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """For then a release returns at once."""
    rig, seen = BlockingRig(full_layout(), [FROZEN_READ], config={"workers": 1}), list[frozenset[tuple[int, int]]]()
    with rig.open() as engine:
        fine, stop_timers = hashes(2), Coordinator.stop_timers
        rig.forward(rig.request("a", fine, save={0: [0, 1]}))
        engine.load("b", rig.request("b", fine, load={0: [0, 1]}, first_id=9).groups, fine)
        assert rig.store.gates["gate"].arrived.wait(PATIENCE_S)

        def stopping(coordinator: Coordinator) -> None:
            if not seen:
                assert engine._engine.crew.dead
                engine.release("b")
                seen.append(engine.fenced_blocks)
                rig.store.release()
            stop_timers(coordinator)

        monkeypatch.setattr(Coordinator, "stop_timers", stopping)
    assert seen == [{(0, 9), (0, 10)}]
    rig.memory.close()


async def test_a_commit_is_of_the_epoch_that_its_sessions_were_looked_at_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker hears that the master is gone between the look and the commit."""
    per_call = saver.per_call
    async with Rig(full_layout()) as rig:

        def lost_now(sessions: list[saver.PutSession]) -> object:
            if sessions and sessions[0].state is saver.PutState.COMMITTING and not rig.engine.crew.pool.epoch:
                rig.engine.crew.pool.epoch += 1
            return per_call(sessions)

        monkeypatch.setattr(saver, "per_call", lost_now)
        fine = hashes(2)
        await rig.save("a", fine)
        assert rig.engine.crew.pool.epoch == 1
        assert rig.committed(0, fine) == []


async def test_saves_that_are_signalled_as_a_drain_gives_up_are_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(full_layout(layers=8), config={"max_pending_saves": 1}) as rig:
        step = rig.engine.begin_step([rig.request("a", hashes(1), save={0: [0]})])
        group, abandoning = rig.engine.crew.groups[0], asyncio.Event()
        abandon = group._abandon

        def abandoned(message: Abandon) -> None:
            abandon(message)
            abandoning.set()

        monkeypatch.setattr(group, "_abandon", abandoned)
        drain = asyncio.ensure_future(rig.engine.drain(0.01))
        await abandoning.wait()
        for layer in range(8):
            step.layer_ready(layer)
            await asyncio.wait_for(step.checkpoint(layer), PATIENCE_S)
        with pytest.raises(DrainTimeout):
            await drain
        await rig.saves_counted()
        await step.end()


async def test_an_engine_is_drained_when_its_drain_is_answered() -> None:
    async with Rig(full_layout()) as rig:
        seen: list[str] = []
        answer = rig.engine.start_drain(None)
        answer.latch.on_open(lambda: seen.append(rig.engine.stats().state))
        await answer.latch.wait_async(PATIENCE_S)
        assert seen == ["drained"]
        assert rig.engine.crew.coordinator.current is None, "what was handled would be answered again"


def test_the_first_answer_counts() -> None:
    answer = Answer(0)
    answer.give(1)
    answer.give(2)
    assert answer.value == 1


def test_engines_that_end_in_the_order_of_their_begin_leave_the_switch_interval_as_it_was() -> None:
    before, rigs = sys.getswitchinterval(), []
    for interval_s in (0.0002, 0.0001):
        rig = BlockingRig(full_layout(), config={"switch_interval_s": interval_s})
        rigs.append((rig, rig.open()))
    assert sys.getswitchinterval() == pytest.approx(0.0001)
    for (rig, engine), left in zip(rigs, (0.0001, before), strict=True):
        engine.close()
        assert sys.getswitchinterval() == pytest.approx(left)
        rig.memory.close()
