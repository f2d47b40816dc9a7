"""What breaks around a real pool, and what must hold then: nobody waits beyond the deadlines, no wrong byte is delivered, no
foreign object is overwritten, and the engine works again once the fault is over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvactors.core.store import Outcome
from tests.engine.rig import hashes
from tests.mooncake.rig import MooncakeRig, hybrid_layout
from tests.mooncake.sentinels import Sentinels
from tests.mooncake.site import Site, native_patience
from tests.stores.contract import Buffer, one_range

DEADLINES = {"call_deadline_s": 0.5, "step_deadline_s": 1.0, "drain_deadline_s": 5.0, "probe_interval_s": 0.2}

FINE, OTHER = hashes(4, "loaded"), hashes(4, "saved")


@pytest.fixture(autouse=True)
def short_native_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    native_patience(monkeypatch, rpc_s=6, transfer_s=3)


async def ends_well(rig: MooncakeRig, sentinels: Sentinels) -> None:
    """The four things that every fault must leave true; the rig compares what it delivers."""
    assert rig.longest_wait_s < rig.engine.patience_s
    assert sentinels.check().wrong == 0
    await rig.usable_again("after the fault")
    assert sentinels.check().wrong == 0
    assert rig.wrong == []


async def step_with(rig: MooncakeRig, fault: Callable[[], None], layer: int = 0) -> None:
    """A step that loads a prompt and saves another, with something that happens after one of its layers."""
    loading = rig.request("loads", FINE, load=rig.all_blocks(FINE), first_id=10)
    saving = rig.request("saves", OTHER, save=rig.all_blocks(OTHER), first_id=20)
    await rig.play(loading, saving, before_ready=lambda at: fault() if at == layer else None)


# -- the master --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", range(4))
async def test_a_master_that_restarts_in_a_step_costs_no_foreign_object(layer: int) -> None:
    """The new master gives the memory of the step's objects to others before the step goes on: what is saved after that must
    not land there, and what is loaded after that must not come from there, although no lease has ended."""
    with Site(lease_s=60.0, discard_timeout_s=60, release_timeout_s=120) as site:
        site.owner()
        sentinels = Sentinels(site.client(staging_bytes=0))  # not written yet: they are to take the place of the step's objects

        def restart() -> None:
            site.master.kill()
            site.master.start()
            sentinels.put_all()

        async with MooncakeRig(site.client(), hybrid_layout(), config=DEADLINES | {"prefetch_layers": 0}) as rig:
            await rig.save("w", FINE)
            await step_with(rig, restart, layer)
            assert sentinels.check() == (len(sentinels.keys), 0, 0)
            await ends_well(rig, sentinels)


@pytest.mark.parametrize("staging", [0, 32 << 20])
def test_sessions_of_a_master_that_is_gone_move_no_bytes(staging: int) -> None:
    """Their client has heard nothing of it: no call of its own failed, and no lease has ended."""
    with Site(lease_s=60.0, discard_timeout_s=60, release_timeout_s=120) as site:
        site.owner()
        client, buffer = site.client(staging_bytes=staging), Buffer()
        client.register(buffer.address, buffer.nbytes)
        sentinels = Sentinels(site.client(staging_bytes=0))
        for key in ("read", "written"):
            assert client.put_open([key], [4096]) == [Outcome.OK]
        assert client.put_ranges(one_range("read", buffer.fill(0, b"r" * 4096), 4096)) == [Outcome.OK]
        assert client.put_commit(["read"]) == [Outcome.OK]
        assert client.get_open(["read"], [4096]) == [Outcome.OK]
        site.master.kill()
        site.master.start()
        sentinels.put_all()
        assert client.get_ranges(one_range("read", buffer.address, 4096)) == [Outcome.NOT_FOUND]
        assert client.put_ranges(one_range("written", buffer.address, 4096)) == [Outcome.NOT_FOUND]
        assert client.get_ranges(one_range("read", buffer.address, 4096)) == [Outcome.INVALID]
        assert sentinels.check() == (len(sentinels.keys), 0, 0)
