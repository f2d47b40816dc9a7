"""The engine with one of its threads stopped anywhere: bytes, failures and sessions are as they must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvactors.actors.loader import Loader
from kvactors.actors.loops import call_on
from kvactors.actors.pool import TransferPool
from kvactors.actors.threads import WorkerThreads
from kvactors.core.steps import ReleaseReason, StepRequest
from kvactors.core.store import Outcome, RangeBatch
from kvactors.engine import BlockingEngine
from kvactors.errors import DrainTimeout
from kvactors.messages import TransferDone
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import PATIENCE_S, full_layout, hashes
from tests.engine.test_blocking import BlockingRig
from tests.threads.stalls import THREADS, Stall, explore

pytestmark = pytest.mark.sim


class Scene(BlockingRig):
    """An engine, what its caller does, and whether what is in the store is right."""

    def __init__(self, faults: Iterable[Fault] = (), **config: Any) -> None:
        super().__init__(full_layout(), faults, config={"workers": 1, **config})
        self.prompts: dict[str, Sequence[bytes]] = {}

    def prompt(self, name: str, blocks: int = 2) -> Sequence[bytes]:
        return self.prompts.setdefault(name, hashes(blocks, name))

    def must_be_right(self) -> None:
        """Every object in the store holds the bytes that belong to its key; no rule was broken."""
        assert self.blocking.violations() == []
        size = self.layout.object_bytes(0)
        for fine in self.prompts.values():
            for index in self.committed(0, fine):
                key, found = self.key(0, index, fine), np.zeros(size, np.uint8)
                self.memory.register(found.ctypes.data, size)
                where = [np.array(a, np.int64) for a in ([[found.ctypes.data]], [size], [0])]
                assert self.memory.get_open([key], [size]) == [Outcome.OK]
                assert self.memory.get_ranges(RangeBatch([key], *where)) == [Outcome.OK]
                self.memory.get_close([key])
                self.memory.unregister(found.ctypes.data)
                for r in self.layout.ranges(0):
                    right = self.right((0, int(r.layer), r.entry.name), fine[index])
                    assert (found[r.offset : r.offset + len(right)] == right).all(), (key, r)


@contextmanager
def staged(stall: Stall, monkeypatch: pytest.MonkeyPatch, scene: Callable[[], Scene]) -> Iterator[Scene]:
    with stall.watching(monkeypatch):
        rig = scene()
        with rig.open(WorkerThreads()) as engine:
            stall.engine = engine
            yield rig
            stall.engine = None
        rig.must_be_right()
    rig.memory.close()


def settled(engine: BlockingEngine) -> None:
    engine.drain()
    assert engine.stats().sessions.open_now == 0
    while engine.pending_saves:  # a worker may take it off after the end
        engine.lookup([], 0)


TRANSFER_FAILED = {"what": "outcome", "outcome": Outcome.TRANSFER_FAILED, "times": 1}


def served(rig: Scene) -> None:
    """Saves, a hit, loads in a step and outside, and an orderly end."""
    engine, a, b = rig.blocking, rig.prompt("a"), rig.prompt("b")
    rig.forward(rig.request("a", a, save={0: [0, 1]}))
    assert rig.committed(0, a) == [0, 1]
    assert engine.lookup(a, 33).tokens == 32
    rig.wipe()
    loading = rig.request("again", a, load={0: [0, 1]}, first_id=9)
    assert not any(rig.forward(loading, rig.request("b", b, save={0: [0, 1]}, first_id=20)).values())
    assert rig.loaded_right(loading)
    assert rig.committed(0, b) == [0, 1]
    outside = [rig.request(name, a, load={0: [0, 1]}, first_id=at) for name, at in (("c", 30), ("d", 40))]
    load = engine.load_many(outside)
    assert [load.result(name).failure for name in "cd"] == [None, None]
    assert all(map(rig.loaded_right, outside))
    for name in ("a", "again", "b", "c", "d"):
        engine.release(name)
        engine.forget(name)
    settled(engine)


def failing(rig: Scene) -> None:
    """A get fails outside a step and one in a step; then a put."""
    engine, a = rig.blocking, rig.prompt("a", 3)
    rig.forward(rig.request("a", a, save={0: [0, 1, 2]}))
    rig.wipe()
    outside = [rig.request(name, a, load={0: [i]}, first_id=at) for name, i, at in (("b", 0, 10), ("c", 1, 20))]
    load = engine.load_many(outside)
    done = {r.request_id: load.result(r.request_id).failure for r in outside}
    assert done["b"] is not None, "a failed load was told as complete"
    assert done["c"] is None
    assert rig.loaded_right(outside[1])
    assert not rig.forward(rig.request("b", rig.prompt("wrong"), save={0: [0]}, first_id=10))[1]
    assert rig.committed(0, rig.prompt("wrong")) == [], "computed from what did not arrive"
    inside = [rig.request(name, a, load={0: [i]}, first_id=at) for name, i, at in (("d", 2, 30), ("e", 1, 40))]
    failed = rig.forward(*inside, rig.request("f", rig.prompt("f"), save={0: [0, 1]}, first_id=50))
    assert failed[0] <= failed[1] == {"d"}
    assert rig.loaded_right(inside[1])
    assert rig.committed(0, rig.prompt("f")) == [0]
    settled(engine)


def failing_scene() -> Scene:
    return Scene(
        [
            Fault(call=call, key=hashes(index + 1, prompt)[index].hex(), **TRANSFER_FAILED)
            for call, prompt, index in (("get_ranges", "a", 0), ("get_ranges", "a", 2), ("put_ranges", "f", 1))
        ]
    )


def disturbed(rig: Scene) -> None:
    """A step is overtaken, one is aborted, a request leaves its load; late signals of all of them follow."""
    engine, a, b = rig.blocking, rig.prompt("a"), rig.prompt("b")
    rig.forward(rig.request("a", a, save={0: [0, 1]}))
    saving = rig.request("b", b, save={0: [0, 1]}, first_id=9)
    overtaken = engine.begin_step([saving, rig.request("c", a, load={0: [0, 1]}, first_id=20)])
    rig.compute(0, saving)
    overtaken.wait_layer(0)
    overtaken.layer_ready(0)
    other = rig.request("d", rig.prompt("d"), save={0: [0]}, first_id=30)
    aborted = engine.begin_step([other])
    overtaken.layer_ready(1)
    overtaken.end()
    rig.compute(0, other)
    aborted.layer_ready(0)
    aborted.abort("the model raised")
    aborted.layer_ready(1)
    load = engine.load_many([rig.request(name, a, load={0: [0, 1]}, first_id=at) for name, at in (("e", 40), ("f", 50))])
    engine.release("e", ReleaseReason.ABORTED)
    kept = load.result("f")
    assert kept.failure is None
    assert rig.loaded_right(rig.request("f", a, load={0: [0, 1]}, first_id=50))
    for step in (overtaken, aborted):
        step.settled()
    assert rig.committed(0, b) == rig.committed(0, rig.prompt("d")) == []
    rig.forward(rig.request("b", b, save={0: [0, 1]}, first_id=9))
    assert rig.committed(0, b) == [0, 1]
    settled(engine)


def whatever(rig: Scene) -> None:
    """Steps, loads, lookups and releases of which each may be cut short: every wait ends, and what did not fail is right."""
    engine, a = rig.blocking, rig.prompt("a")
    rig.forward(rig.request("a", a, save={0: [0, 1]}))
    saving, loading = rig.request("b", rig.prompt("b"), save={0: [0, 1]}, first_id=9), _loading(rig, "c", 20)
    step = engine.begin_step([saving, loading])
    outside = _loading(rig, "d", 30)
    load, asked = engine.load("d", outside.groups, a), engine.start_lookup(a, 33)
    for layer in (0, 1):
        failed = step.wait_layer(layer)
        assert failed or rig.holds(0, a[0], 20, layer)
        rig.compute(layer, saving)
        step.layer_ready(layer)
        step.checkpoint(layer)
    step.end()
    assert load.result().failure or rig.loaded_right(outside)
    assert asked.wait(PATIENCE_S)
    engine.release("c")
    engine.forget("c")
    late = _loading(rig, "e", 40)
    assert rig.forward(late)[1] or rig.loaded_right(late)
    step.settled()
    with suppress(DrainTimeout):
        engine.drain()
    assert all(rig.forward(late).values())


def _loading(rig: Scene, name: str, first_id: int) -> StepRequest:
    return rig.request(name, rig.prompt("a"), load={0: [0, 1]}, first_id=first_id)


def close(rig: Scene) -> None:
    rig.blocking.close()


def drain(rig: Scene) -> None:
    with suppress(DrainTimeout):  # the engine may be closed before
        rig.blocking.drain()


def release(rig: Scene) -> None:
    for name in "abcde":
        rig.blocking.release(name, ReleaseReason.ABORTED)


def crash(rig: Scene) -> None:
    """Of the group's actor, at its next message; there may be none."""

    async def raise_it(_: Any) -> None:
        raise RuntimeError("planted")

    rig.blocking._engine.crew.groups[0].handle = raise_it  # type: ignore[method-assign]  # the crash


def stop_loop(rig: Scene) -> None:
    call_on(rig.blocking._loop, rig.blocking._loop.stop)


def cut_off(rig: Scene) -> None:
    """The store cannot be reached for one call of a save; the sessions of before are void, and the engine says so."""
    engine, a, b = rig.blocking, rig.prompt("a"), rig.prompt("b")
    rig.forward(rig.request("a", a, save={0: [0, 1]}))
    rig.forward(rig.request("b", b, save={0: [0, 1]}, first_id=9), rig.request("c", a, load={0: [0, 1]}, first_id=20))
    rig.forward(rig.request("d", rig.prompt("d"), save={0: [0]}, first_id=30))
    settled(engine)


class Scenario(NamedTuple):
    """What the caller does; and what another thread does, once one has stopped."""

    act: Callable[[Scene], None]
    scene: Callable[[], Scene] = Scene
    meanwhile: Callable[[Scene], None] | None = None


UNREACHABLE = Fault(what="outcome", call="put_ranges", nth=4, outcome=Outcome.UNREACHABLE)

SCENARIOS: Mapping[str, Scenario] = {
    "served": Scenario(served),
    "failing": Scenario(failing, failing_scene),
    "disturbed": Scenario(disturbed, partial(Scene, max_pending_saves=1)),
    "cut off": Scenario(cut_off, partial(Scene, [UNREACHABLE])),
    "closed": Scenario(whatever, meanwhile=close),
    "drained": Scenario(whatever, meanwhile=drain),
    "released": Scenario(whatever, meanwhile=release),
    "crashed": Scenario(whatever, meanwhile=crash),
    "without a loop": Scenario(whatever, meanwhile=stop_loop),
}


@pytest.mark.parametrize("role", THREADS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_one_thread_stops_anywhere(name: str, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = SCENARIOS[name]

    def play(stall: Stall) -> None:
        with staged(stall, monkeypatch, scenario.scene) as rig:
            if scenario.meanwhile is not None:
                stall.meanwhile = partial(scenario.meanwhile, rig)
            scenario.act(rig)

    assert explore(role, play) > 200


def test_a_race_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was once: a worker said what had failed after its answer, and a failed load was told as complete."""
    note, settle = Loader._note_failures, TransferPool.settle
    unnoted: dict[int, Callable[[], None]] = {}

    def note_later(self: Loader, gs: Any, call: Any, done: TransferDone) -> None:
        unnoted[id(done)] = partial(note, self, gs, call, done)

    def noted_and_settled(answers: Sequence[TransferDone]) -> None:
        for done in answers:
            unnoted.pop(id(done), lambda: None)()
        settle(answers)

    monkeypatch.setattr(Loader, "_note_failures", note_later)
    monkeypatch.setattr(TransferPool, "settle", staticmethod(noted_and_settled))

    def play(stall: Stall) -> None:
        with staged(stall, monkeypatch, failing_scene) as rig:
            failing(rig)

    with pytest.raises(AssertionError, match=r"told as complete|computed from what did not arrive"):
        explore("worker", play)
