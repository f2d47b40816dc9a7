"""A worker may stop, as threads do, between the answer of a call and what follows it: whoever acts on the answer knows by then
what failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvactors.actors.pool import TransferPool
from kvactors.core.store import Outcome
from kvactors.messages import TransferDone
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import Rig, full_layout, hashes

ROUNDS = 30
"""Of the loop: in so many every actor has acted on an answer, and on what others sent because of it."""


@pytest.fixture(autouse=True)
async def workers_that_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows an answer comes when the actors have long acted on it."""
    loop, settle = asyncio.get_running_loop(), TransferPool.settle

    def later(answers: Sequence[TransferDone], rounds: int = ROUNDS) -> None:
        if rounds:
            loop.call_soon_threadsafe(later, answers, rounds - 1)
        else:
            settle(answers)

    monkeypatch.setattr(TransferPool, "settle", staticmethod(later))


def failing(layer: int) -> list[Fault]:
    return [Fault(what="outcome", call="get_ranges", outcome=Outcome.TRANSFER_FAILED, nth=layer + 1, times=1)]


@pytest.mark.parametrize("layer", [0, 1])
async def test_a_load_outside_steps_that_failed_is_told_so(layer: int) -> None:
    async with Rig(full_layout(), failing(layer), config={"workers": 1}) as rig:
        fine = hashes(2)
        await rig.save("a", fine)
        load = rig.request("b", fine, load={0: [0, 1]}, first_id=9)
        done = await rig.engine.load("b", load.groups, fine)
        assert done.failure is not None
        assert (done.failure.layer, done.failure.reason) == (layer, f"layer {layer}: transfer failed")
        await rig.run(rig.request("b", fine, save={0: [1]}, first_id=9))  # tainted: nothing of it is published (I12)
        assert any("put not begun (a load of its request failed)" in line for line in rig.engine.story("b"))


async def test_a_story_tells_why_a_block_did_not_arrive() -> None:
    async with Rig(full_layout(), failing(1), config={"workers": 1}) as rig:
        fine = hashes(2)
        await rig.save("a", fine)
        _, failed = await rig.run(rig.request("b", fine, load={0: [0, 1]}, first_id=9))
        assert failed == {0: frozenset(), 1: {"b"}}
        assert [line for line in rig.engine.story("b") if "released (not loaded: layer 1: transfer failed)" in line]
