"""What is noted for stories, as it is written: nothing is said twice, and numbers stand without the brackets of a list."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest

from kvactors.core.steps import ReleaseReason
from kvactors.core.store import Outcome
from kvactors.core.story import StoryBook
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import Rig, arrived, full_layout, hashes, quiet, seed_layout

TWICE = re.compile(r"\b([a-z]+(?: \d+)?)(?:: | \()\1\b")
LIST = re.compile(r"\[\d+(?:, \d+)*\]")
FINE = hashes(2)


async def load(rig: Rig) -> None:
    await rig.run(rig.request("a", FINE, load={0: [0]}))


async def signal_too_early(rig: Rig) -> None:
    step = rig.engine.begin_step([rig.request("a", FINE, load={0: [0]})])
    await arrived(rig.store.gates["gate"])
    step.layer_ready(0)
    rig.store.release()
    await step.end()


async def abort(rig: Rig) -> None:
    step = rig.engine.begin_step([rig.request("a", hashes(2, "other"), save={0: [0]})])
    await quiet(rig)
    await step.abort()
    await step.settled()


async def release(rig: Rig, reason: ReleaseReason) -> None:
    loading = asyncio.create_task(rig.engine.load_many([rig.request("a", FINE, load={0: [0]})]))
    await arrived(rig.store.gates["gate"])
    releasing = asyncio.create_task(rig.engine.release("a", reason))
    await rig.engine.lookup(FINE, 17)
    rig.store.release()
    await asyncio.gather(loading, releasing)


async def prepare_too_long(rig: Rig) -> None:
    step = rig.engine.begin_step([rig.request("a", FINE, load={0: [0], 1: [0]})])
    await step.wait_layer(0)
    rig.store.release()
    await step.end()


FROZEN_READ = [Fault(what="freeze", call="get_ranges", nth=1)]
FROZEN_OPENS = [Fault(what="freeze", call="get_open")]
SHORT = {"step_deadline_s": 0.05}

CASES: list[tuple[Callable[[Rig], Awaitable[None]], list[Fault], dict[str, float], list[str]]] = [
    (
        load,
        [Fault(what="outcome", call="get_ranges", nth=2, outcome=Outcome.TRANSFER_FAILED)],
        {},
        ["load failed from token 0 on (layer 1: transfer failed)", "get released (not loaded: layer 1: transfer failed)"],
    ),
    (
        load,
        [Fault(what="outcome", call="get_open", outcome=Outcome.NOT_FOUND)],
        {},
        ["load failed from token 0 on (get open: not found)"],
    ),
    (
        signal_too_early,
        FROZEN_READ,
        {},
        ["load failed from token 0 on (layer 0 was signalled before its loads had been waited for)"],
    ),
    (abort, [], {}, ["step 2 is aborted (by the caller)", "put open -> revoking (aborted: by the caller)"]),
    (lambda rig: release(rig, ReleaseReason.ABORTED), FROZEN_READ, {}, ["step 2 is aborted (its request was aborted)"]),
    (lambda rig: release(rig, ReleaseReason.PREEMPTED), FROZEN_READ, {}, ["step 2 is aborted (its request was preempted)"]),
    (
        prepare_too_long,
        FROZEN_OPENS,
        SHORT,
        ["step 2 is rolled back (preparation failed: groups 0, 1 were not prepared before the deadline)"],
    ),
]


@pytest.mark.parametrize(("trouble", "faults", "config", "noted"), CASES)
async def test_what_is_noted_says_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[Rig], Awaitable[None]],
    faults: list[Fault],
    config: dict[str, float],
    noted: list[str],
) -> None:
    told: list[str] = []
    monkeypatch.setattr(StoryBook, "record", lambda *noted: told.append(noted[-1]))
    layout = seed_layout() if trouble is prepare_too_long else full_layout()
    async with Rig(layout, faults, config=config) as rig:
        await rig.save("w", FINE)
        await trouble(rig)
    assert set(noted) <= set(told), told
    assert [what for what in told if TWICE.search(what) or LIST.search(what)] == []
