"""Fewer, bigger ranges that move the very same bytes."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from kvactors.core.store import RangeBatch
from kvactors.stores.copying import address_of, view
from kvactors.stores.mooncake.coalesce import STAGE_MOST_BYTES, Staging, joined
from tests.stores.contract import ranges


def row(*at: tuple[int, int, int]) -> RangeBatch:
    """Ranges of one key: address, size, offset."""
    addresses, sizes, offsets = zip(*at, strict=True)
    return ranges(["k"], [list(addresses)], list(sizes), list(offsets))


def sent(batch: RangeBatch) -> list[tuple[int, int, int]]:
    return list(zip(batch.addresses[0].tolist(), batch.sizes.tolist(), batch.offsets.tolist(), strict=True))


def moves(batch: RangeBatch) -> Iterator[tuple[int, int, int]]:
    """Every byte that a batch moves: key's row, address, offset."""
    for i in range(len(batch.keys)):
        for address, size, offset in zip(
            batch.addresses[i].tolist(), batch.sizes.tolist(), batch.offsets.tolist(), strict=True
        ):
            yield from ((i, address + n, offset + n) for n in range(size))


# Joining


def test_neighbours_on_both_sides_are_one_range() -> None:
    assert sent(joined(row((5000, 8, 0), (5008, 4, 8), (5012, 8, 12)))) == [(5000, 20, 0)]


def test_neighbours_on_one_side_only_stay_apart() -> None:
    for batch in (row((5000, 8, 0), (5016, 8, 8)), row((5000, 8, 0), (5008, 8, 16)), row((5008, 8, 0), (5000, 8, 8))):
        assert joined(batch) is batch


def test_a_range_is_joined_only_if_it_is_a_neighbour_for_every_key() -> None:
    batch = ranges(["k", "l"], [[5000, 5008, 5016], [6000, 6009, 6017]], [8, 8, 8], [0, 8, 16])
    whole = joined(batch)
    assert (whole.addresses.tolist(), whole.sizes.tolist(), whole.offsets.tolist()) == (
        [[5000, 5008], [6000, 6009]],
        [8, 16],
        [0, 8],
    )


@st.composite
def batches(draw: st.DrawFn) -> RangeBatch:
    """Some keys with ranges that lie in order in the object, with and without gaps, and anyhow in memory."""
    n, r = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    sizes = draw(st.lists(st.integers(1, 12), min_size=r, max_size=r))
    gaps = draw(st.lists(st.sampled_from([0, 0, 0, 3]), min_size=r, max_size=r))
    offsets = np.cumsum([0, *sizes[:-1]]) + np.cumsum(gaps)
    rows = []
    for i in range(n):
        order = draw(st.permutations(range(r)) | st.just(list(range(r))))
        spaces = draw(st.lists(st.sampled_from([0, 0, 0, 5]), min_size=r, max_size=r))
        addresses, at = [0] * r, 1000 * i
        for j in order:
            addresses[j], at = at + spaces[j], at + spaces[j] + sizes[j]
        rows.append(addresses)
    return ranges([f"k{i}" for i in range(n)], rows, sizes, offsets.tolist())


@given(batches())
def test_joining_moves_the_same_bytes(batch: RangeBatch) -> None:
    whole = joined(batch)
    assert sorted(moves(whole)) == sorted(moves(batch))
    assert len(joined(whole).sizes) == len(whole.sizes)


# Staging


def test_a_run_in_the_object_is_staged_and_sent_as_one() -> None:
    plan = Staging.plan(row((5000, 8, 0), (7000, 8, 8), (9000, 8, 100)))
    assert plan is not None
    assert (plan.sizes.tolist(), plan.offsets.tolist(), plan.source.tolist()) == ([16, 8], [0, 100], [-1, 2])
    assert (plan.columns.tolist(), plan.places.tolist()) == ([0, 1], [0, 8])


def test_nothing_is_staged_where_it_saves_no_range() -> None:
    assert Staging.plan(row((5000, 8, 0))) is None
    assert Staging.plan(row((5000, 8, 0), (5008, 8, 16), (5016, 8, 32))) is None


def test_large_ranges_are_not_staged() -> None:
    most = STAGE_MOST_BYTES
    assert Staging.plan(row((0, most, 0), (1 << 20, most, most))) is not None
    assert Staging.plan(row((0, most, 0), (1 << 20, most + 1, most))) is None


def test_runs_of_a_key_do_not_share_bytes_of_the_buffer() -> None:
    plan = Staging.plan(row((0, 100, 0), (0, 100, 100), (0, 7, 300), (0, 7, 307)))
    assert plan is not None
    assert (plan.runs.tolist(), plan.pitch) == ([0, 256], 320)


@given(batches())
def test_what_is_staged_arrives_where_it_belongs(batch: RangeBatch) -> None:
    plan = Staging.plan(batch)
    if plan is None:
        return
    memory, buffer = np.zeros(5000, np.uint8), np.zeros(plan.pitch * len(batch.keys), np.uint8)
    at = RangeBatch(batch.keys, batch.addresses + address_of(memory), batch.sizes, batch.offsets)
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
    plan.gather(at, address_of(buffer))
    objects = [bytearray(500) for _ in batch.keys]
    store(plan.sent(at, address_of(buffer)), objects)
    wanted = [bytearray(500) for _ in batch.keys]
    store(at, wanted)
    assert objects == wanted

    before = memory.copy()
    memory[:] = 0
    buffer[:] = 0
    load(plan.sent(at, address_of(buffer)), objects)
    plan.scatter(at, address_of(buffer), slice(None))
    touched = np.zeros(len(memory), np.bool_)
    for _, address, _ in moves(batch):
        touched[address] = True
    assert (memory[touched] == before[touched]).all()
    assert not memory[~touched].any()


def store(batch: RangeBatch, objects: list[bytearray]) -> None:
    for i, address, offset in moves(batch):
        objects[i][offset] = view(address, 1)[0]


def load(batch: RangeBatch, objects: list[bytearray]) -> None:
    for i, address, offset in moves(batch):
        view(address, 1)[0] = objects[i][offset]
