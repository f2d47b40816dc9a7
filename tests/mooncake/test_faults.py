"""What breaks around a real pool, and what must hold then: nobody waits beyond the deadlines, no wrong byte is delivered, no
foreign object is overwritten, and the engine works again once the fault is over."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable

import pytest

from kvactors.core.store import Outcome
from kvactors.stores import MooncakeStore
from tests.engine.rig import full_layout, hashes
from tests.engine.test_late_answers import until
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
        first = client.get_ranges(one_range("read", buffer.address, 4096))
        assert first in ([Outcome.NOT_FOUND], [Outcome.UNREACHABLE])  # the latter on a connection of before
        assert client.put_ranges(one_range("written", buffer.address, 4096)) == [Outcome.NOT_FOUND]
        assert client.get_ranges(one_range("read", buffer.address, 4096)) == [Outcome.INVALID]
        assert sentinels.check() == (len(sentinels.keys), 0, 0)


async def test_a_restarted_master_that_gave_the_keys_to_another_costs_no_foreign_object() -> None:
    """Two instances compute the same prompt: that a key is being written says nothing about who writes it."""
    with Site(lease_s=60.0, discard_timeout_s=60, release_timeout_s=120) as site:
        site.owner()
        sentinels = Sentinels(site.client(staging_bytes=0))
        layout = full_layout(4, 4096)
        async with MooncakeRig(site.client(), layout, config=DEADLINES) as rig:
            keys, second = rig.keys(FINE), site.client()

            def restart() -> None:
                site.master.kill()
                site.master.start()
                sentinels.put_all()
                opened = [Outcome.UNREACHABLE]
                while Outcome.UNREACHABLE in opened:  # the connections of before are lost, one by one
                    opened = second.put_open(keys, [layout.object_bytes(0)] * len(keys))
                assert opened == [Outcome.OK] * len(keys)

            request = rig.request("w", FINE, save=rig.all_blocks(FINE))
            step = rig.engine.begin_step([request])
            for layer in range(layout.stage_layers):
                await step.wait_layer(layer)
                rig.compute(layer, request)
                if layer == 1:
                    await until(rig, lambda: rig.engine.stats().sessions.put_opened == len(keys))
                    await asyncio.to_thread(restart)
                step.layer_ready(layer)
                await step.checkpoint(layer)
            await step.end()
            await step.settled()
            assert rig.engine.stats().groups[0].saved == 0
            assert rig.engine.violations() == []
            assert sentinels.check() == (len(sentinels.keys), 0, 0)
            assert second.put_revoke(keys) == [Outcome.OK] * len(keys)


async def test_a_master_that_stays_dead_until_the_step_is_over() -> None:
    with Site() as site:
        site.owner()
        sentinels = site.sentinels()
        async with MooncakeRig(site.client(), hybrid_layout(), config=DEADLINES) as rig:
            await rig.save("w", FINE)
            await step_with(rig, site.master.kill)
            assert rig.engine.stats().circuit == "open"
            began = time.monotonic()
            for i in range(20):
                await step_with(rig, lambda: None)
                assert (await rig.engine.lookup(FINE, 64)).tokens == 0, i
            assert time.monotonic() - began < 1.0, "an open circuit makes no calls"
            site.master.start()
            sentinels.put_all()
            await ends_well(rig, sentinels)


async def test_a_frozen_master_holds_nobody_beyond_the_deadlines() -> None:
    """The client itself would wait for 6 s (30 s as it comes)."""
    with Site(client_ttl_s=20) as site:
        site.owner()
        sentinels = site.sentinels()
        async with MooncakeRig(site.client(), hybrid_layout(), config=DEADLINES) as rig:
            await rig.save("w", FINE)
            await step_with(rig, lambda: site.master.process.send_signal(signal.SIGSTOP))
            began = time.monotonic()
            assert (await rig.engine.lookup(FINE, 64)).tokens == 0
            assert time.monotonic() - began <= rig.engine.patience_s
            assert rig.engine.stats().lost_workers > 0
            await step_with(rig, lambda: None)
            site.master.process.send_signal(signal.SIGCONT)
            await rig.calls_returned()
            await ends_well(rig, sentinels)


async def test_a_master_that_is_killed_while_it_is_frozen() -> None:
    with Site() as site:
        site.owner()
        sentinels = site.sentinels()
        async with MooncakeRig(site.client(), hybrid_layout(), config=DEADLINES) as rig:
            await rig.save("w", FINE)
            await step_with(rig, lambda: site.master.process.send_signal(signal.SIGSTOP), layer=1)
            site.master.kill()
            site.master.start()
            sentinels.put_all()
            await ends_well(rig, sentinels)


# -- whose memory it is ------------------------------------------------------------------------------------------------


async def test_a_killed_owner_of_the_memory_takes_its_objects_with_it_and_no_more() -> None:
    with Site() as site:
        owner = site.other_owner()
        sentinels = site.sentinels()
        async with MooncakeRig(site.client(), hybrid_layout(), config=DEADLINES) as rig:
            await rig.save("w", FINE)
            await step_with(rig, owner.kill)
            sentinels.wait_until_gone()  # the master takes a client for dead after its TTL
            site.other_owner()
            await ends_well(rig, sentinels)


async def test_a_frozen_owner_costs_about_one_timeout_and_no_more() -> None:
    """A read of it takes 3 s here, 30 s as it comes; the engine gives up after half a second, and the client remembers."""
    with Site(client_ttl_s=20) as site:
        owner = site.other_owner()
        sentinels = site.sentinels()
        client = site.client(suspect_after_s=0.3, negative_s=3.0)
        async with MooncakeRig(client, hybrid_layout(), config=DEADLINES) as rig:
            await rig.save("w", FINE)
            owner.freeze()
            began = time.monotonic()
            for i in range(20):
                prompt = FINE + hashes(1, f"question {i}")
                hit = await rig.engine.lookup(prompt, 80)
                loading = rig.request(f"r{i}", FINE, load=rig.all_blocks(FINE), first_id=10)
                step, _ = await rig.play(loading)
                assert step.failures, "nothing arrives from a frozen owner"
                assert hit.tokens == (64 if i == 0 else 0), "it is known not to be readable"
            assert time.monotonic() - began < 2 * DEADLINES["call_deadline_s"] + 0.5
            assert client.stats()["whole_objects"] == 0, "Mooncake spins while it waits for a whole object of another process"
            owner.thaw()
            await rig.calls_returned()
            await ends_well(rig, sentinels)
            assert sentinels.check().right == len(sentinels.keys)


async def test_an_owner_that_freezes_while_a_step_saves_gets_no_late_range() -> None:
    """What was abandoned is not opened again, so that a range that arrives late lands in memory that is still pinned."""
    with Site(client_ttl_s=20) as site:
        owner = site.other_owner()
        sentinels = site.sentinels()
        async with MooncakeRig(site.client(), hybrid_layout(), config=DEADLINES) as rig:
            await rig.save("w", FINE)
            await step_with(rig, owner.freeze, layer=1)
            assert rig.engine.stats().lost_workers > 0
            owner.thaw()
            await rig.calls_returned()
            await ends_well(rig, sentinels)
            assert sentinels.check().right == len(sentinels.keys)


def test_twenty_reads_of_a_frozen_owner_cost_one_timeout() -> None:
    """The client alone: a key whose read failed slowly, and everything on its segment, is refused at once for a while."""
    with Site(client_ttl_s=20) as site:
        owner = site.other_owner()
        client, buffer = site.client(suspect_after_s=1.0, negative_s=30.0), Buffer()
        client.register(buffer.address, buffer.nbytes)
        keys = [f"k{i}" for i in range(20)]
        assert client.put_open(keys, [16] * 20) == [Outcome.OK] * 20
        assert [client.put_ranges(one_range(key, buffer.address, 16)) for key in keys] == [[Outcome.OK]] * 20
        assert client.put_commit(keys) == [Outcome.OK] * 20
        owner.freeze()
        began, answers = time.monotonic(), []
        for key in keys:
            opened = client.get_open([key], [16])
            answers += client.get_ranges(one_range(key, buffer.address, 16)) if opened == [Outcome.OK] else opened
        assert answers == [Outcome.TRANSFER_FAILED] * 20
        assert time.monotonic() - began < 4.0
        assert client.stats()["negative"] == 19
        assert client.readable(keys) == [False] * 20
        owner.thaw()


# -- other writers -----------------------------------------------------------------------------------------------------


async def test_the_keys_of_a_killed_writer_are_free_after_the_discard_timeout() -> None:
    with Site() as site:
        site.owner()
        sentinels = site.sentinels()
        async with MooncakeRig(site.client(), full_layout(), config=DEADLINES) as rig:
            writer = site.other()
            opened_at = time.monotonic()
            assert writer.put_open(rig.keys(OTHER), rig.layout.object_bytes(0)) == ["ok"] * 4
            writer.kill()
            await rig.save("a", OTHER)
            assert rig.engine.stats().groups[0].skipped_existing == 4, "the dead writer's keys count as existing"
            assert rig.committed(0, OTHER) == []
            await asyncio.sleep(opened_at + site.master.discard_timeout_s + 0.1 - time.monotonic())
            await rig.save("b", OTHER)
            assert rig.committed(0, OTHER) == [0, 1, 2, 3]
            await ends_well(rig, sentinels)


async def test_a_full_pool_costs_saves_and_nothing_else() -> None:
    """Everything in the pool is leased, so nothing can be evicted for the engine's objects."""
    with Site(lease_s=3.0) as site:
        site.client(global_segment_size=16 << 20)
        sentinels = site.sentinels()
        filler = site.client()
        async with MooncakeRig(site.client(), full_layout(2, 128 << 10), config=DEADLINES) as rig:
            await rig.save("w", FINE)
            leased = fill(filler, 62)  # of the 64 that the pool has room for
            assert filler.get_open(leased, [256 << 10] * len(leased)) == [Outcome.OK] * len(leased)
            before = rig.engine.stats().groups[0].saved
            await step_with(rig, lambda: None)
            stats = rig.engine.stats()
            assert stats.groups[0].skipped_no_space == 4
            assert (stats.groups[0].saved, stats.sessions.open_now) == (before, 0)
            filler.get_close(leased)
            await remove_fillers(site, filler)
            await ends_well(rig, sentinels)


def fill(store: MooncakeStore, count: int) -> list[str]:
    """Commits so many objects of 256 KiB, each with a lease, as soon as others were evicted for them; answers their keys."""
    keys, deadline = [f"filler/{i}" for i in range(count)], time.monotonic() + 10.0
    for key in keys:
        while store.put_open([key], [256 << 10]) != [Outcome.OK]:
            assert time.monotonic() < deadline, f"{key} does not fit"
            time.sleep(0.005)
        assert store.put_commit([key]) == [Outcome.OK]
        assert store.readable([key]) == [True]
    return keys


async def remove_fillers(site: Site, filler: MooncakeStore) -> None:
    await asyncio.sleep(site.master.lease_s + 0.1)
    assert filler.remove_matching("filler/.*") > 50


# -- leases and eviction -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staging", [0, 32 << 20])
async def test_a_lease_that_ends_in_a_read_delivers_no_late_byte(staging: int) -> None:
    """The owner of the memory holds the read up for longer than the lease, and then answers it with success."""
    config = DEADLINES | {"call_deadline_s": 5.0, "step_deadline_s": 5.0, "prefetch_layers": 0}
    with Site(client_ttl_s=20) as site:
        owner = site.other_owner()
        sentinels = site.sentinels()
        async with MooncakeRig(site.client(staging_bytes=staging), full_layout(2, 4096), config=config) as rig:
            await rig.save("w", FINE)
            rig.wipe()
            thaw = threading.Timer(site.master.lease_s + 0.5, owner.thaw)
            loading = rig.request("loads", FINE, load=rig.all_blocks(FINE), first_id=10)
            step = rig.engine.begin_step([loading])
            assert await step.wait_layer(0) == frozenset()
            owner.freeze()
            thaw.start()
            assert await step.wait_layer(1) == {"loads"}
            assert "lease" in step.failures["loads"].reason
            if staging:
                assert not any(rig.local[0, 1, name].any() for name in ("k", "v")), "the bytes stay in the staging buffer"
            await step.end()
            thaw.join()
            await ends_well(rig, sentinels)


async def test_what_is_evicted_between_lookup_and_load_is_computed_again() -> None:
    with Site() as site:
        site.client(global_segment_size=16 << 20)
        filler = site.client()
        sentinels = site.sentinels(20)
        async with MooncakeRig(site.client(), full_layout(2, 64 << 10), config=DEADLINES) as rig:
            await rig.save("w", FINE)
            assert (await rig.engine.lookup(FINE + hashes(1), 80)).tokens == 64
            await asyncio.sleep(site.master.lease_s + 0.1)
            fill(filler, 61)  # the pool has room for 64, and the prompt's objects take that of 4
            loading = rig.request("r", FINE, load=rig.all_blocks(FINE), first_id=10)
            step, failed = await rig.play(loading)
            assert failed[1] == {"r"}
            assert "not found" in step.failures["r"].reason
            await remove_fillers(site, filler)
            again = rig.request("r", FINE, save=rig.all_blocks(FINE), first_id=10, restarted_at=0)
            step, _ = await rig.play(again)
            assert rig.committed(0, FINE) == [0, 1, 2, 3]
            await ends_well(rig, sentinels)
