"""Layers that wait are joined into one store call: the same ranges, within the limits, and an answer for each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.actors.audit import AuditedStore
from kvactors.actors.pool import TransferPool
from kvactors.actors.workers import Worker
from kvactors.core.calls import RowPlan
from kvactors.core.config import EngineConfig
from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.observe import Span
from kvactors.core.queue import Priority
from kvactors.core.ranges import MAX_RANGES, GroupRanges, group_ranges
from kvactors.core.store import Outcome, RangeBatch, Store
from kvactors.devices import MonotonicClock
from kvactors.messages import JoinedTransfer, Kind, Transfer, TransferDone
from kvactors.simulate.loop import VirtualLoop, run_virtual
from kvactors.stores import FaultyStore, MemoryStore

T = TypeVar("T")
GOOD = 1 << 20
"""A good range that no test's object reaches: only limits end a run."""
LAYERS = 6
ENTRY_BYTES = 10
PUT, GET = (Kind.PUT, Priority.SAVE), (Kind.GET, Priority.DEMANDED)


class Hands:
    """An executor that runs nothing: the test is the workers."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.woken: list[Worker] = []

    def start(self, pool: TransferPool, workers: Sequence[Worker]) -> None:  # noqa: ARG002 - part of the protocol
        self.workers = list(workers)

    def wake(self, worker: Worker) -> None:
        self.woken.append(worker)

    def replace(self, lost: Worker, fresh: Worker) -> None:
        self.workers[self.workers.index(lost)] = fresh

    def stop(self) -> None:
        pass


class RecordingStore:
    """Keeps every batch that it is given; answers OK, or what the test says for a key."""

    name, lease_s, put_safe_age_s = "recording", 10.0, 15.0

    def __init__(self, good_range_bytes: int) -> None:
        self.good_range_bytes = good_range_bytes
        self.calls: list[tuple[Kind, RangeBatch]] = []
        self.answers: dict[str, Outcome] = {}
        self.opened: list[str] = []

    def put_ranges(self, batch: RangeBatch) -> list[Outcome]:
        self.calls.append((Kind.PUT, batch))
        return [self.answers.get(key, Outcome.OK) for key in batch.keys]

    def get_ranges(self, batch: RangeBatch) -> list[Outcome]:
        self.calls.append((Kind.GET, batch))
        return [self.answers.get(key, Outcome.OK) for key in batch.keys]

    def get_open(self, keys: Sequence[str], _sizes: Sequence[int]) -> list[Outcome]:
        self.opened.extend(keys)
        return [Outcome.OK] * len(keys)

    def ranges(self) -> Counter[tuple[Kind, str, int, int, int]]:
        """Every range that was sent: its kind, key, address, bytes and place in the object."""
        return Counter(
            (kind, key, address, size, offset)
            for kind, b in self.calls
            for key, addresses in zip(b.keys, b.addresses.tolist(), strict=True)
            for address, size, offset in zip(addresses, b.sizes.tolist(), b.offsets.tolist(), strict=True)
        )


class Spans:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def span(self, span: Span) -> None:
        self.spans.append(span)


class Desk:
    """A pool with its store, and every answer and settlement that it gave."""

    def __init__(self, loop: VirtualLoop, good: int, **config: Any) -> None:
        self.store = RecordingStore(good)
        self.hands, self.spans = Hands(), Spans()
        self.loop = loop
        self.answered: list[TransferDone] = []
        self.settled: list[Transfer] = []
        self.config = EngineConfig(**{"max_transfer_bytes": 0, **config})
        store: Any = self.store
        self.pool = TransferPool(store, self.config, loop, self.hands, on_store_lost=lambda _: None, observer=self.spans)
        self.pool.start()
        self.ranges = {group: ranges_of(group, self.config) for group in (0, 1)}

    def transfers(
        self,
        layer: int,
        rows: Iterable[int] = (0, 1),
        *,
        way: tuple[Kind, Priority] = PUT,
        step: int = 1,
        group: int = 0,
        run: int = -1,
    ) -> list[Transfer]:
        """What a group sends for one layer: one job for each call that its pieces are cut into."""
        kind, priority = way
        which = np.array(list(rows), dtype=np.intp)
        keys = [f"{group}/{step}/{row}" for row in range(8)]
        jobs = []
        plan = RowPlan(which, keys, np.arange(8, dtype=np.int64) + 10 * step, lambda _: None)
        for call in plan.calls(self.ranges[group].layers[layer]):
            job = Transfer(
                reply=self.answered.append,
                priority=priority,
                group_id=group,
                step=step,
                layer=layer,
                distance=layer,
                kind=kind,
                call=call,
                object_bytes=self.ranges[group].object_bytes,
                oldest_s=self.loop.now(),
                run=run,
            )
            job.settled = lambda job=job: self.settled.append(job)
            jobs.append(job)
        return jobs

    def submit(self, *layers: int, **how: Any) -> list[Transfer]:
        jobs = [job for layer in layers for job in self.transfers(layer, **how)]
        for job in jobs:
            self.pool.submit(job)
        return jobs

    def work(self) -> None:
        """The workers do all there is, in turn."""
        busy = True
        while busy:
            busy = False
            for worker in self.hands.workers:
                job = self.pool.take(worker)
                if job is not None:
                    busy = True
                    self.pool.run(job, worker)

    def take(self) -> tuple[Worker, Transfer]:
        worker = self.hands.workers[0]
        job = self.pool.take(worker)
        assert isinstance(job, Transfer)
        return worker, job


def ranges_of(group: int, config: EngineConfig) -> GroupRanges:
    """Six layers of two entries each."""
    entries = [CacheEntry("k", ENTRY_BYTES), CacheEntry("v", ENTRY_BYTES, ENTRY_BYTES + 6)]
    layout = KVLayout("m", [Group(g, GroupKind.FULL, 16, dict.fromkeys(range(LAYERS), entries)) for g in range(2)])
    bases = {(group, int(r.layer), r.entry.name): 10_000 * (n + 1) for n, r in enumerate(layout.ranges(group))}
    return group_ranges(layout, group, bases, config)


def on_a_desk(body: Any, good: int = GOOD, **config: Any) -> Any:
    """Runs a test on virtual time, with a pool of its own."""
    loop = VirtualLoop()

    async def main() -> Any:
        desk = Desk(loop, good, **config)
        out = body(desk)
        out = await out if isinstance(out, Coroutine) else out
        desk.pool.stop()
        return out

    return run_virtual(main(), loop)


def layers_of(jobs: Iterable[TransferDone]) -> list[int]:
    return [done.job.layer for done in jobs]


# -- what is joined ----------------------------------------------------------------------------------------------------


def test_layers_that_wait_go_in_one_call_and_each_is_answered() -> None:
    def body(desk: Desk) -> None:
        jobs = desk.submit(0, 1, 2, 3)
        desk.work()
        [(kind, batch)] = desk.store.calls
        assert kind is Kind.PUT
        assert batch.nbytes_per_key == 4 * 2 * ENTRY_BYTES
        assert batch.offsets.tolist() == [n * ENTRY_BYTES for n in range(8)], "neighbours in the object"
        assert [done.job for done in desk.answered] == jobs
        assert desk.settled == jobs
        assert desk.pool.joined_transfers == 3
        [span] = desk.spans.spans
        assert span.args == {"group": 0, "step": 1, "keys": 2, "layer": 0, "layers": 4, "bytes": 160}

    on_a_desk(body)


def test_a_demanded_load_takes_the_prefetches_of_its_run_along_and_nothing_else() -> None:
    def body(desk: Desk) -> None:
        prefetch = (Kind.GET, Priority.PREFETCH)
        jobs = [job for layer in (1, 2) for job in desk.transfers(layer, way=prefetch, run=2)]
        jobs += [job for layer in (3, 4) for job in desk.transfers(layer, way=prefetch, run=4)]
        desk.pool.submit_together(jobs)
        other = desk.submit(0, way=(Kind.GET, Priority.DEMANDED), group=1)
        desk.pool.promote(1, 1)
        desk.work()
        assert [layers_of([done]) for done in desk.answered][:1] == [[0]], "what was demanded before it"
        assert desk.answered[0].job is other[0]
        assert layers_of(desk.answered) == [0, 1, 2, 3, 4]
        assert [batch.nbytes_per_key // (2 * ENTRY_BYTES) for _, batch in desk.store.calls] == [1, 2, 2]

    on_a_desk(body)


def test_loads_that_demand_nothing_of_a_run_wait_for_no_rider() -> None:
    def body(desk: Desk) -> None:
        desk.submit(1, way=(Kind.GET, Priority.DEMANDED))
        desk.submit(2, way=(Kind.GET, Priority.PREFETCH))
        desk.work()
        assert len(desk.store.calls) == 2

    on_a_desk(body)


def test_a_store_without_a_good_range_gets_one_call_for_each_layer() -> None:
    def body(desk: Desk) -> None:
        desk.submit(0, 1, 2)
        desk.work()
        assert len(desk.store.calls) == 3
        assert desk.pool.joined_transfers == 0

    on_a_desk(body, good=0)


def test_a_layer_that_finds_a_worker_goes_at_once_and_alone() -> None:
    def body(desk: Desk) -> None:
        for layer in range(3):
            desk.submit(layer)
            desk.work()
        assert len(desk.store.calls) == 3

    on_a_desk(body)


def test_a_run_ends_when_it_is_a_good_range() -> None:
    def body(desk: Desk) -> None:
        desk.submit(*range(6))
        desk.work()
        assert [b.nbytes_per_key for _, b in desk.store.calls] == [60, 60]

    on_a_desk(body, good=41)


@pytest.mark.parametrize(
    "other",
    [
        {"rows": (0, 2)},
        {"rows": (1, 0)},
        {"rows": (0, 1, 2)},
        {"step": 2},
        {"group": 1},
        {"way": (Kind.GET, Priority.PREFETCH)},
    ],
    ids=["rows", "order", "more rows", "step", "group", "kind"],
)
def test_only_the_same_rows_of_the_same_step_are_joined(other: dict[str, Any]) -> None:
    def body(desk: Desk) -> None:
        desk.submit(0)
        desk.submit(1, **other)
        desk.work()
        assert len(desk.store.calls) == 2

    on_a_desk(body)


def test_a_gap_between_layers_is_not_joined_over() -> None:
    def body(desk: Desk) -> None:
        desk.submit(0, 2, 3)
        desk.work()
        assert [b.nbytes_per_key for _, b in desk.store.calls] == [20, 40]

    on_a_desk(body)


def test_a_demanded_load_takes_no_prefetch_along() -> None:
    def body(desk: Desk) -> None:
        desk.submit(0, 1, 2, way=(Kind.GET, Priority.PREFETCH))
        desk.pool.promote(1, 0)
        _, job = desk.take()
        assert (job.layer, len(job.parts)) == (0, 1)

    on_a_desk(body)


def test_transfers_under_sessions_of_another_life_of_the_master_are_not_joined() -> None:
    def body(desk: Desk) -> None:
        a, b = desk.transfers(0) + desk.transfers(1)
        a.epoch, b.epoch = 0, 1
        for job in (a, b):
            desk.pool.submit(job)
        desk.work()
        assert {done.job: done.outcomes for done in desk.answered} == {a: [Outcome.OK] * 2, b: [Outcome.STALE] * 2}

    on_a_desk(body)


def test_the_ranges_of_a_call_are_counted() -> None:
    def body(desk: Desk) -> None:
        for n, job in enumerate(job for layer in range(3) for job in desk.transfers(layer, range(8))):
            pieces = MAX_RANGES // 8 // 2
            sizes = np.ones(pieces, dtype=np.int64)
            offsets = np.arange(pieces) + n * pieces
            job.call.batch = RangeBatch(job.call.batch.keys, np.zeros((8, pieces), np.int64), sizes, offsets)
            desk.pool.submit(job)
        desk.work()
        assert [b.addresses.size for _, b in desk.store.calls] == [MAX_RANGES, MAX_RANGES // 2]

    on_a_desk(body)


ways = st.sampled_from([PUT, GET, (Kind.GET, Priority.PREFETCH)])
rows = st.sampled_from([(0,), (0, 1), (0, 2), (1, 2), (0, 1, 2), (3, 4, 5, 6)])
signals = st.lists(
    st.tuples(st.integers(0, LAYERS - 1), rows, ways, st.integers(1, 2), st.integers(0, 1)), min_size=1, max_size=30
)


@given(signals, st.sampled_from([1, 15, 20, 45, GOOD]), st.integers(0, 3), st.sampled_from([0, 7, 40, 100, 500]))
def test_whatever_waits_the_same_ranges_are_sent_within_the_limits_and_each_job_is_answered_once(
    drawn: list[Any], good: int, most_keys: int, most_bytes: int
) -> None:
    def body(desk: Desk) -> RecordingStore:
        jobs = [
            job
            for layer, which, way, step, group in drawn
            for job in desk.transfers(layer, which, way=way, step=step, group=group)
        ]
        for job in jobs:
            desk.pool.submit(job)
        desk.work()
        assert Counter(map(id, (done.job for done in desk.answered))) == Counter(map(id, jobs))
        assert Counter(map(id, desk.settled)) == Counter(map(id, jobs))
        assert all(done.outcomes == [Outcome.OK] * done.job.count for done in desk.answered)
        for _, batch in desk.store.calls:
            keys = len(batch.keys)
            assert not most_keys or keys <= most_keys
            assert not most_bytes or keys * batch.nbytes_per_key <= most_bytes
            ends = (batch.offsets + batch.sizes)[:-1].tolist()
            assert batch.offsets[1:].tolist() == ends, "one run of the object"
        for group in (0, 1):
            assert desk.pool.jobs_of(group) == []
        return desk.store

    limits = {"max_transfer_blocks": most_keys, "max_transfer_bytes": most_bytes}
    one_by_one: RecordingStore = on_a_desk(body, 0, **limits)
    joined: RecordingStore = on_a_desk(body, good, **limits)
    assert joined.ranges() == one_by_one.ranges()
    assert len(joined.calls) <= len(one_by_one.calls)


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_key_that_failed_has_failed_in_every_layer_of_the_call() -> None:
    def body(desk: Desk) -> None:
        desk.store.answers["0/1/1"] = Outcome.TRANSFER_FAILED
        desk.submit(0, 1)
        desk.work()
        assert [done.outcomes for done in desk.answered] == [[Outcome.OK, Outcome.TRANSFER_FAILED]] * 2

    on_a_desk(body)


def test_a_lease_renewed_for_the_call_counts_for_each_layer() -> None:
    async def body(desk: Desk) -> None:
        jobs = desk.submit(0, 1, way=GET)
        jobs[1].oldest_s -= 0.9 * desk.store.lease_s
        desk.work()
        assert desk.store.opened == ["0/1/0", "0/1/1"]
        assert [job.oldest_s for job in jobs] == [desk.loop.now()] * 2

    on_a_desk(body)


def test_while_the_call_is_under_way_its_layers_are_known_by_themselves() -> None:
    def body(desk: Desk) -> None:
        jobs = desk.submit(0, 1, 2)
        worker, job = desk.take()
        assert isinstance(job, JoinedTransfer)
        assert desk.pool.jobs_of(0) == jobs
        desk.pool.cancel(1)
        assert desk.answered == [], "too late: it is under way"
        desk.pool.run(job, worker)
        assert desk.pool.jobs_of(0) == []
        assert [done.job for done in desk.answered] == jobs

    on_a_desk(body)


def test_what_was_cancelled_rides_no_more() -> None:
    def body(desk: Desk) -> None:
        desk.submit(1, 2, step=2)
        desk.pool.cancel(2)
        jobs = desk.submit(0)
        desk.work()
        assert layers_of(desk.answered) == [1, 2, 0]
        assert [b.nbytes_per_key for _, b in desk.store.calls] == [20]
        assert desk.answered[-1].job in jobs

    on_a_desk(body)


def test_a_joined_call_past_its_deadline_is_answered_for_each_layer_and_again_when_it_returns() -> None:
    async def body(desk: Desk) -> None:
        jobs = desk.submit(0, 1, way=GET)
        worker, job = desk.take()
        lost = desk.loop.create_future()
        desk.loop.call_later(desk.config.call_deadline_s + 1, lost.set_result, None)
        await lost
        assert [(d.job, d.outcomes, d.late) for d in desk.answered] == [(j, [Outcome.LOST] * 2, False) for j in jobs]
        assert desk.settled == jobs
        assert desk.pool.lost_of(0) == jobs
        assert desk.pool.jobs_of(0) == []
        desk.pool.run(job, worker)
        assert [(d.job, d.late) for d in desk.answered[2:]] == [(j, True) for j in jobs]
        assert desk.settled == jobs, "a late answer settles nothing"
        assert desk.pool.lost_of(0) == []

    on_a_desk(body)


def test_a_joined_call_under_way_when_the_pool_stops_is_answered_when_it_returns() -> None:
    async def body(desk: Desk) -> None:
        under_way = desk.submit(0, 1)
        worker, job = desk.take()
        queued = desk.submit(2, 3)
        at_rest = desk.pool.stop()
        assert [(d.job, d.outcomes[0]) for d in desk.answered] == [(j, Outcome.CANCELLED) for j in queued]
        assert not at_rest.is_open
        desk.pool.run(job, worker)
        assert at_rest.is_open
        assert [done.job for done in desk.answered[2:]] == under_way

    on_a_desk(body)


def test_wrapped_stores_say_what_a_good_range_is() -> None:
    class Slow(MemoryStore):
        good_range_bytes = 4096

    store: Store = FaultyStore(Slow(capacity=1 << 16))
    assert isinstance(store, Store)
    assert getattr(store, "good_range_bytes", 0) == 4096
    assert AuditedStore(store, MonotonicClock(), EngineConfig()).good_range_bytes == 4096
    assert getattr(FaultyStore(MemoryStore(capacity=1 << 16)), "good_range_bytes", 0) == 0
