"""The harness against the real engine and the embedded store, with real bytes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvactors.core.config import EngineConfig
from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.stats import EngineStats, SessionStats
from kvactors.core.steps import ReleaseReason
from kvactors.core.store import Outcome, RangeBatch
from kvactors.devices import CpuDevices, ManualClock, MonotonicClock
from kvactors.engine import Engine
from kvactors.errors import DrainTimeout, StoreError, StoreUnreachableError
from kvactors.layouts import FAMILIES, scale
from kvactors.replay import live
from kvactors.replay.blocks import BlockRules
from kvactors.replay.compute import Computed, ThreadCompute
from kvactors.replay.harness import Harness, Pace
from kvactors.replay.hashing import PromptHasher, trace_hash_tokens
from kvactors.replay.live import run_live
from kvactors.replay.local_pool import LocalPool
from kvactors.replay.plan import ReplayOptions, plan_replay
from kvactors.replay.report import Report
from kvactors.replay.tally import Tally
from kvactors.replay.trace import TraceRequest
from kvactors.stores import PRESETS, Fault, FaultPlan, FaultyStore, MemoryStore, open_store

SAMPLE = Path(__file__).parents[2] / "examples" / "sample_trace.jsonl"


def full(block_tokens: int = 512, layers: int = 3) -> KVLayout:
    entries = (CacheEntry("k", 48), CacheEntry("v", 24, 40))
    return KVLayout("m", [Group(0, GroupKind.FULL, block_tokens, dict.fromkeys(range(layers), entries))])


def rows_of(*prompts: tuple[int, Sequence[int]]) -> list[TraceRequest]:
    return [TraceRequest(i + 1, 0.0, tokens, tuple(ids)) for i, (tokens, ids) in enumerate(prompts)]


def chats(seed: int, requests: int = 60) -> list[TraceRequest]:
    """Random prompts that share prefixes: each continues, branches off or starts anew; partial last ids are their own."""
    rng = random.Random(seed)
    fresh = iter(range(1000, 1 << 40))
    known: list[list[int]] = [[]]
    rows = []
    for i in range(requests):
        base = rng.choice(known)
        ids = base[: rng.randint(0, len(base))] + [next(fresh) for _ in range(rng.randint(0, 6))]
        known.append(ids)
        tokens = len(ids) * 512 + rng.choice((0, 1, 100, 511)) or 17
        partial = [next(fresh)] if tokens % 512 else []
        rows.append(TraceRequest(i + 1, float(i), tokens, (*ids, *partial)))
    return rows


def prefix_reuse(rows: Iterable[TraceRequest]) -> int:
    """The tokens of complete 512-token blocks that an earlier prompt had in front too; one token is always computed."""
    seen: set[int] = set()
    reused = 0
    for row in rows:
        for i in range((row.input_length - 1) // 512):
            if row.hash_ids[i] not in seen:
                break
            reused += 512
        seen.update(row.hash_ids[: row.input_length // 512])
    return reused


@dataclass
class Played:
    harness: Harness
    engine: Any
    pool: LocalPool

    @property
    def tally(self) -> Tally:
        return self.harness.tally


class InlineCompute:
    """Computes on the loop itself, in no time: the seam that a virtual clock uses."""

    every_layer = False

    async def run(self, work: Callable[[], int]) -> Computed:
        return Computed(work(), 0.0, 0.0)

    def close(self) -> None:
        pass


async def play(
    rows: Sequence[TraceRequest],
    layout: KVLayout,
    store: Any,
    *,
    pace: Pace | None = None,
    local_blocks: int | None = None,
    compute: Any = None,
    clock: Any = None,
    sleep: Any = asyncio.sleep,
    on_progress: Callable[[Harness], None] | None = None,
    retention: int | None = None,
) -> Played:
    rules = BlockRules(layout, trace_hash_tokens(g.block_tokens for g in layout.groups), retention)
    pace = pace or Pace()
    most = [rules.most_blocks(r.input_length) for r in rows]
    capacity = {g.id: max(1, max(m[g.id] for m in most)) * min(pace.concurrency, len(rows)) for g in layout.groups}
    pool = LocalPool(layout, capacity, local_blocks)
    clock = clock or MonotonicClock()
    compute = compute or ThreadCompute(clock)
    engine = Engine(
        layout,
        store,
        pool.bases,
        EngineConfig(audit=True),
        clock=MonotonicClock(),
        rng=random.Random(0),
        devices=CpuDevices(),
        hash_tokens=rules.hash_tokens,
    )
    pool.register(store)
    harness = Harness(
        engine,
        pool,
        rules,
        compute,
        clock=clock,
        sleep=sleep,
        pace=pace,
        on_progress=None if on_progress is None else lambda _: on_progress(harness),
    )
    try:
        async with engine:
            await harness.play(iter(rows))
            played = Played(harness, engine, pool)
            assert engine.stats().sessions.open_now == 0
            assert engine.violations() == []
    finally:
        compute.close()
        with contextlib.suppress(StoreUnreachableError):  # killed by a fault plan
            pool.unregister(store)
    return played


def assert_right(played: Played, requests: int) -> None:
    tally = played.tally
    assert played.harness.violations == []
    assert (tally.completed, tally.failed) == (requests, 0), tally.events
    assert tally.mismatched_bytes == 0
    assert tally.hit_tokens + tally.computed_tokens == tally.input_tokens
    assert played.pool.used == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("chunk", [8192, 700])
async def test_hits_equal_the_traces_own_prefix_reuse(seed: int, chunk: int) -> None:
    rows = chats(seed)
    played = await play(rows, full(), open_store("memory"), pace=Pace(chunk_tokens=chunk))
    assert_right(played, len(rows))
    assert played.tally.hit_tokens == prefix_reuse(rows)
    stats = played.engine.stats()
    assert played.tally.verified_bytes == stats.groups[0].bytes_loaded == stats.groups[0].loaded * 3 * 72
    assert stats.groups[0].saved == len({h for r in rows for h in r.hash_ids[: r.input_length // 512]})


@pytest.mark.parametrize(
    ("rows", "block_tokens", "hit", "saved"),
    [
        (rows_of((700, [1, 2]), (1024, [1, 2])), 512, 512, 2),  # the prefix rule for partial ids
        (rows_of((1024, [1, 2]), (1024, [1, 2])), 512, 512, 2),  # one token must be computed
        (rows_of((1025, [1, 2, 3]), (1025, [1, 2, 3])), 512, 1024, 2),
        (rows_of((700, [1, 2]), (700, [1, 2])), 128, 640, 5),
        (rows_of((513, [5, 6]), (513, [4294967301, 6])), 512, 0, 2),  # dynamo#12046
        (rows_of((400, [1]), (400, [1])), 384, 384, 1),  # a hash unit of 128
        (rows_of(*[(18_000, range(36))] * 2), 512, 17_920, 35),  # maru#57, vllm#53314
        (rows_of(*[(24_576, range(48))] * 2), 256, 24_320, 96),
        (rows_of((20, [7])), 16, 0, 1),
    ],
)
async def test_hits_and_saves(rows: list[TraceRequest], block_tokens: int, hit: int, saved: int) -> None:
    played = await play(rows, full(block_tokens), open_store("memory"))
    assert_right(played, len(rows))
    assert played.tally.hit_tokens == hit
    assert played.engine.stats().groups[0].saved == saved


@pytest.mark.parametrize("name", sorted(FAMILIES))
async def test_families_hit_at_their_common_reachable_boundary(name: str) -> None:
    layout = scale(FAMILIES[name].build(), 1 << 20)
    rules = BlockRules(layout, trace_hash_tokens(g.block_tokens for g in layout.groups))
    hasher = PromptHasher(rules.hash_tokens)
    rows = chats(11, requests=16)
    rows += [TraceRequest(100, 0.0, 6500, tuple(range(13))), TraceRequest(101, 0.0, 6600, tuple(range(13)))]
    held: set[tuple[int, bytes]] = set()
    want = 0
    for row in rows:
        fine = hasher.hashes(row)
        want += rules.reach.longest_hit(fine, row.input_length, lambda g, h: (g, h) in held).tokens
        kept = rules.kept(row.input_length)
        held.update((g.id, h) for g in rules.groups for h in rules.hashes_of(g, kept[g.id], fine))
    played = await play(rows, layout, open_store("memory"))
    assert_right(played, len(rows))
    assert want > 0
    assert played.tally.hit_tokens == want


async def test_concurrent_requests_share_a_step_and_all_verify() -> None:  # vllm#44294
    store = open_store("memory")
    shared = list(range(20))
    await play(rows_of((20 * 512, shared)), full(), store)
    rows = rows_of(*[(20 * 512 + 50, [*shared, 1000 + i]) for i in range(50)])
    played = await play(rows, full(), store, pace=Pace(concurrency=50))
    assert_right(played, 50)
    sessions = played.engine.stats().sessions
    assert (sessions.get_opened, sessions.get_closed) == (20, 20)
    assert played.tally.hit_tokens == 50 * 20 * 512
    assert played.tally.steps == 1


@pytest.mark.parametrize("local_blocks", [None, 20, 13])
@pytest.mark.parametrize("name", ["full", "seed-example"])
async def test_preemption_and_parking_finish_every_request(local_blocks: int | None, name: str) -> None:
    layout = full() if name == "full" else FAMILIES[name].build()
    rows = [r for r in chats(5, requests=40) if r.input_length < 3000]
    pace = Pace(concurrency=5, chunk_tokens=600)
    played = await play(rows, layout, open_store("memory"), pace=pace, local_blocks=local_blocks)
    assert_right(played, len(rows))
    assert played.pool.peak <= (local_blocks or 10_000)
    if local_blocks == 13:
        assert played.harness.scheduler.preempted_in_all > 0


async def test_two_full_hits_that_exceed_the_pool_together_both_finish() -> None:  # vllm#57104
    store = open_store("memory")
    rows = rows_of((4096, range(8)), (4080, range(8)))
    await play(rows, full(16), store)
    for blocks in (511, 510, 300):
        played = await play(rows, full(16), store, pace=Pace(concurrency=2), local_blocks=blocks)
        assert_right(played, 2)
        assert played.tally.hit_tokens == 4080 + 4064


async def test_a_request_that_never_fits_fails_with_both_numbers_and_the_others_finish() -> None:
    rows = rows_of((600, [1, 2]), (5000, range(10)), (600, [1, 2]))
    played = await play(rows, full(), open_store("memory"), local_blocks=4)
    assert (played.tally.completed, played.tally.failed) == (2, 1)
    assert played.tally.events[0].startswith("r2 (line 2): failed: needs 10 local blocks, the pool has 4")


async def test_retention_saves_fewer_states_and_still_verifies() -> None:
    rows = chats(3)
    layout = FAMILIES["seed-example"].build()
    dense = await play(rows, layout, open_store("memory"))
    sparse = await play(rows, layout, open_store("memory"), retention=4096)
    assert_right(sparse, len(rows))
    assert sparse.engine.stats().groups[2].saved < dense.engine.stats().groups[2].saved
    assert 0 < sparse.tally.hit_tokens <= dense.tally.hit_tokens


async def test_eviction_under_a_capacity_still_verifies() -> None:
    store = open_store("memory", capacity=40 * 1024)
    rows = chats(7, requests=120)
    played = await play(rows, full(), store)
    assert_right(played, len(rows))
    assert played.tally.hit_tokens < prefix_reuse(rows)
    assert store.stats()["bytes"] <= 40 * 1024


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"slow-store"}))
@pytest.mark.parametrize("concurrency", [1, 4])
async def test_faults_cost_recomputation_but_no_request_and_no_byte(preset: str, concurrency: int) -> None:
    rows = chats(2, requests=50)
    store = FaultyStore(open_store("memory"), FaultPlan.preset(preset, seed=1))
    pace = Pace(concurrency=concurrency, chunk_tokens=1500)
    played = await play(rows, full(), store, pace=pace)
    tally = played.tally
    assert (tally.completed, tally.failed, tally.mismatched_bytes) == (50, 0, 0), tally.events
    assert tally.hit_tokens + tally.computed_tokens == tally.input_tokens
    assert played.harness.violations == []
    assert store.injected > 0


async def test_when_every_get_fails_nothing_is_hit_and_each_request_is_reported_once() -> None:  # dynamo#15079
    plan = FaultPlan((Fault(what="outcome", call="get_ranges", outcome=Outcome.TRANSFER_FAILED),))
    rows = rows_of(*[(2000, [1, 2, 3, 4])] * 4)
    played = await play(rows, full(), FaultyStore(open_store("memory"), plan))
    assert_right(played, 4)
    assert played.tally.hit_tokens == 0
    assert played.tally.load_failed == 3
    assert played.tally.recomputed_tokens == 3 * 1536
    assert played.tally.groups[0].hit == 0


def failing(store: Any, call: str, outcome: Outcome = Outcome.TRANSFER_FAILED, **when: Any) -> FaultyStore:
    return FaultyStore(store, FaultPlan((Fault(what="outcome", call=call, outcome=outcome, **when),)))


async def test_prompts_whose_loads_fail_in_one_step_restart_in_order_of_arrival() -> None:
    store = open_store("memory")
    await play(rows_of((1024, [1, 2])), full(), store)
    rows = rows_of(*[(1100, [1, 2, 10 + i]) for i in range(3)])
    waiting: list[list[str]] = []
    played = await play(
        rows,
        full(),
        failing(store, "get_ranges"),
        pace=Pace(concurrency=3),
        on_progress=lambda harness: waiting.append([p.id for p in harness.scheduler.waiting]),
    )
    assert_right(played, 3)
    assert waiting[0] == ["r1", "r2", "r3"]


async def test_after_two_failed_loads_a_request_still_hits() -> None:
    rows = rows_of((1024, [1, 2]), (1100, [1, 2, 3]))
    played = await play(rows, full(), failing(open_store("memory"), "get_open", times=2))
    assert_right(played, 2)
    assert len(played.tally.events) == 2
    assert (played.tally.load_failed, played.tally.hit_tokens) == (1, 1024)


async def test_what_a_request_computes_after_a_failed_load_is_saved() -> None:
    rows = rows_of((1024, [1, 2]), (2560, [1, 2, 3, 4, 5]))
    played = await play(rows, full(), failing(open_store("memory"), "get_open", times=1))
    assert_right(played, 2)
    assert played.tally.load_failed == 1
    assert played.engine.stats().groups[0].saved == 5


async def test_a_preempted_request_is_released_as_such_and_forgotten_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[ReleaseReason] = []
    release = Engine.release

    async def spied(engine: Engine, request_id: str, reason: ReleaseReason) -> None:
        reasons.append(reason)
        await release(engine, request_id, reason)

    monkeypatch.setattr(Engine, "release", spied)
    rows = [r for r in chats(5, requests=40) if r.input_length < 3000]
    pace = Pace(concurrency=5, chunk_tokens=600)
    played = await play(rows, full(), open_store("memory"), pace=pace, local_blocks=13)
    assert_right(played, len(rows))
    assert reasons.count(ReleaseReason.PREEMPTED) == played.harness.scheduler.preempted_in_all > 0
    assert reasons.count(ReleaseReason.FINISHED) == len(rows)
    assert [actor.table.memory for actor in played.engine.crew.groups.values()] == [{}]


async def test_a_put_session_that_ended_in_no_way_is_a_violation() -> None:
    played = await play(rows_of((20, [7])), full(), open_store("memory"))
    stats = EngineStats(sessions=SessionStats(put_opened=9, put_committed=2, put_revoked=1))
    played.harness._engine = SimpleNamespace(stats=lambda: stats)
    played.harness._check_end()
    assert played.harness.violations == ["9 put sessions were opened, 3 ended (I2)"]


DRAIN_TIMED_OUT = DrainTimeout(["put session of r1"])


@pytest.mark.parametrize(
    ("change", "blames_the_engine"), [({}, True), ({"circuit": "open"}, False), ({"lost_workers": 1}, False)]
)
async def test_a_drain_that_times_out_is_a_violation_only_where_the_store_answered(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], blames_the_engine: bool
) -> None:
    stats = Engine.stats

    async def drain(_: Engine) -> None:
        monkeypatch.setattr(Engine, "stats", lambda engine: replace(stats(engine), **change))
        raise DRAIN_TIMED_OUT

    monkeypatch.setattr(Engine, "drain", drain)
    played = await play(rows_of((20, [7])), full(), open_store("memory"))
    told = str(DRAIN_TIMED_OUT)
    assert played.harness.violations == ([told] if blames_the_engine else [])
    assert played.tally.events == ([] if blames_the_engine else [f"the store did not answer: {told}"])


async def test_an_outage_is_counted_once_however_long_it_lasts() -> None:
    unreachable = Fault(what="kill", call="put_open", nth=2, calls=40)  # then it is back
    played = await play(chats(2, requests=50), full(), FaultyStore(open_store("memory"), FaultPlan((unreachable,))))
    assert played.tally.outages == 1
    assert played.harness.violations == []


class FlipsAByte(MemoryStore):
    """Delivers every tenth range with one wrong byte."""

    reads = 0

    def get_ranges(self, batch: RangeBatch) -> list[Outcome]:
        answer = super().get_ranges(batch)
        FlipsAByte.reads += 1
        if FlipsAByte.reads % 10 == 0:
            byte = ctypes.c_ubyte.from_address(int(batch.addresses[0, 0]))
            byte.value ^= 0x10
        return answer


async def test_a_wrong_byte_from_the_store_is_found() -> None:
    rows = rows_of(*[(2000, [1, 2, 3, 4])] * 12)
    played = await play(rows, full(), FlipsAByte())
    assert played.tally.mismatched_bytes == FlipsAByte.reads // 10
    assert "loaded bytes are wrong" in played.tally.events[0]


async def test_compute_off_the_threads_gives_the_same_counts() -> None:
    rows = chats(9)
    a = await play(rows, full(), open_store("memory"))
    b = await play(rows, full(), open_store("memory"), compute=InlineCompute())
    for name in ("hit_tokens", "computed_tokens", "verified_bytes", "steps"):
        assert getattr(a.tally, name) == getattr(b.tally, name), name


async def test_speed_plays_by_timestamps_on_the_given_clock() -> None:
    clock = ManualClock()
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.advance(seconds)
        await asyncio.sleep(0)

    rows = [TraceRequest(i + 1, 1000.0 * i, 600, (i, 100 + i)) for i in range(5)]
    played = await play(rows, full(), open_store("memory"), pace=Pace(speed=2.0), clock=clock, sleep=sleep)
    assert_right(played, 5)
    assert sum(waits) == pytest.approx(2.0)
    assert played.harness.wall_s == pytest.approx(2.0)


async def test_stop_ends_after_the_step_in_hand_and_leaves_no_session_open() -> None:
    rows = chats(1)

    def stop_soon(harness: Harness) -> None:
        if harness.tally.steps == 7:
            harness.stop()

    played = await play(rows, full(), open_store("memory"), pace=Pace(concurrency=3), on_progress=stop_soon)
    assert played.tally.steps == 7
    assert 0 < played.tally.completed < len(rows)
    assert played.harness.violations == []


def test_run_live_reports(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = chats(4, requests=30)
    trace.write_text(
        "".join(
            json.dumps({"timestamp": r.timestamp_ms, "input_length": r.input_length, "hash_ids": list(r.hash_ids)}) + "\n"
            for r in rows
        )
    )
    outcome = run_live(plan_replay(ReplayOptions(str(trace), full())))
    report: Report = outcome.report
    assert not report.broken
    assert report.tokens.hit == prefix_reuse(rows)
    assert report.tokens.input == sum(r.input_length for r in rows)
    assert report.bytes.loaded == report.bytes.verified > 0
    assert report.bytes.saved == report.blocks["0"].saved * 3 * 72
    assert report.blocks["0"].hit * 512 == report.tokens.hit
    s = report.sessions
    assert s.put_opened == s.put_committed + s.put_revoked + s.put_poisoned + s.put_abandoned + s.open_at_end
    assert s.open_at_end == 0
    assert report.invariants.checked > 100
    assert outcome.samples[-1].completed == 30


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[MemoryStore]:
    """The stores that live runs open."""
    stores: list[MemoryStore] = []

    def opening(name: str, **options: Any) -> MemoryStore:
        store = open_store(name, **options)
        assert isinstance(store, MemoryStore)
        stores.append(store)
        return store

    monkeypatch.setattr(live, "open_store", opening)
    return stores


def sample_options(**change: Any) -> ReplayOptions:
    return ReplayOptions(str(SAMPLE), FAMILIES["seed-example"].build(), requests=10, **change)


def test_a_store_that_was_killed_to_the_end_is_closed_after_the_run(opened: list[MemoryStore]) -> None:
    plan = FaultPlan((Fault(what="kill", call="*", nth=5),))
    report = run_live(plan_replay(sample_options(faults=plan))).report
    assert report.failures.injected > 0
    assert [store.health().ok for store in opened] == [False]


def test_a_run_that_fails_before_its_start_leaves_no_thread_and_no_open_store(
    opened: list[MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def register(*_: int) -> None:
        raise StoreError("register: no")

    monkeypatch.setattr(MemoryStore, "register", register)
    with pytest.raises(StoreError, match="register: no"):
        run_live(plan_replay(sample_options()))
    assert "kvactors-compute" not in [thread.name for thread in threading.enumerate()]
    assert [store.health().ok for store in opened] == [False]
