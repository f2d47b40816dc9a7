"""From blocks to descriptors: runs become one, everything else one for each piece."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.disagg import (
    BlockPairs,
    Descriptors,
    RegionCopy,
    TransferRegion,
    batches,
    region_descriptors,
    request_descriptors,
)
from kvactors.disagg.heads import ByteRange
from kvactors.errors import TransferPlanError

P, D = 1_000_000, 9_000_000


def region(base: int, stride: int, payload: int, *, split: bool = False, group: int = 0) -> TransferRegion:
    return TransferRegion("l0", 0, base, stride, payload, group, split)


def blocks(*pairs: tuple[int, int]) -> BlockPairs:
    return BlockPairs(np.array([a for a, _ in pairs], dtype=np.int64), np.array([b for _, b in pairs], dtype=np.int64))


def rows(d: Descriptors) -> list[tuple[int, int, int]]:
    return list(zip(d.src.tolist(), d.dst.tolist(), d.nbytes.tolist(), strict=True))


DENSE = RegionCopy(region(P, 10, 10), region(D, 10, 10), ByteRange(0, 0, 10))
PADDED = RegionCopy(region(P, 16, 10), region(D, 10, 10), ByteRange(0, 0, 10))
PADDED_AT_DECODE = RegionCopy(region(P, 10, 10), region(D, 16, 10), ByteRange(0, 0, 10))
SPLIT = RegionCopy(region(P, 20, 10, split=True), region(D, 20, 10, split=True), ByteRange(0, 0, 10))
LAST_HEADS = RegionCopy(region(P, 10, 10), region(D, 4, 4), ByteRange(6, 0, 4))
INTO_LAST_HEADS = RegionCopy(region(P, 4, 4), region(D, 10, 10), ByteRange(0, 6, 4))
HALF_OF_SPLIT = RegionCopy(region(P, 20, 10, split=True), region(D, 10, 5, split=True), ByteRange(5, 0, 5))
FIRST_HEADS = RegionCopy(region(P, 10, 10), region(D, 4, 4), ByteRange(0, 0, 4))

CASES = [
    ("a run", DENSE, [(1, 5), (2, 6), (3, 7)], [(P + 10, D + 50, 30)]),
    (
        "runs end on either side",
        DENSE,
        [(1, 5), (2, 6), (4, 7), (5, 9)],
        [(P + 10, D + 50, 20), (P + 40, D + 70, 10), (P + 50, D + 90, 10)],
    ),
    ("a run backwards is none", DENSE, [(3, 5), (2, 6)], [(P + 30, D + 50, 10), (P + 20, D + 60, 10)]),
    ("padded at prefill", PADDED, [(1, 5), (2, 6)], [(P + 16, D + 50, 10), (P + 32, D + 60, 10)]),
    ("padded at decode", PADDED_AT_DECODE, [(1, 5), (2, 6)], [(P + 10, D + 80, 10), (P + 20, D + 96, 10)]),
    (
        "K and V apart",
        SPLIT,
        [(0, 1), (1, 2)],
        [(P, D + 20, 10), (P + 10, D + 30, 10), (P + 20, D + 40, 10), (P + 30, D + 50, 10)],
    ),
    ("the last heads of prefill", LAST_HEADS, [(0, 0), (1, 1)], [(P + 6, D, 4), (P + 16, D + 4, 4)]),
    ("into the last heads of decode", INTO_LAST_HEADS, [(0, 0), (1, 1)], [(P, D + 6, 4), (P + 4, D + 16, 4)]),
    ("the first heads: no offset, and yet no run", FIRST_HEADS, [(0, 0), (1, 1)], [(P, D, 4), (P + 10, D + 4, 4)]),
    ("heads of K and of V", HALF_OF_SPLIT, [(1, 2)], [(P + 25, D + 20, 5), (P + 35, D + 25, 5)]),
    ("nothing", DENSE, [], []),
    ("nothing, padded", PADDED, [], []),
]


@pytest.mark.parametrize(("copy", "pairs", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_descriptors(copy: RegionCopy, pairs: list[tuple[int, int]], expected: list[tuple[int, int, int]]) -> None:
    d = region_descriptors(copy, blocks(*pairs))
    assert rows(d) == expected
    assert d.total_bytes == sum(n for _, _, n in expected)


def test_4096_blocks_of_4_kib_are_one_descriptor() -> None:
    """vllm#55434"""
    copy = RegionCopy(region(P, 4096, 4096), region(D, 4096, 4096), ByteRange(0, 0, 4096))
    ids = np.arange(4096, dtype=np.int64)
    assert rows(region_descriptors(copy, BlockPairs(ids + 7, ids))) == [(P + 7 * 4096, D, 16_777_216)]


def test_112000_fragments_are_56_batches() -> None:
    ids = np.arange(112_000, dtype=np.int64)
    d = region_descriptors(PADDED, BlockPairs(ids, ids))
    parts = list(batches(d))
    assert [len(part) for part in parts] == [2000] * 56
    assert [row for part in parts for row in rows(part)] == rows(d)


@pytest.mark.parametrize(("count", "limit", "sizes"), [(0, 5, []), (5, 5, [5]), (6, 5, [5, 1]), (3, 1, [1, 1, 1])])
def test_batches(count: int, limit: int, sizes: list[int]) -> None:
    ids = np.arange(count, dtype=np.int64)
    assert [len(part) for part in batches(region_descriptors(PADDED, BlockPairs(ids, ids)), limit)] == sizes


def test_a_batch_holds_something() -> None:
    with pytest.raises(TransferPlanError, match="limit = 0"):
        list(batches(region_descriptors(DENSE, blocks((1, 1))), 0))


def test_regions_take_the_blocks_of_their_group() -> None:
    state = RegionCopy(region(P * 2, 8, 8, group=1), region(D * 2, 8, 8, group=1), ByteRange(0, 0, 8))
    d = request_descriptors([DENSE, state], [blocks((1, 1), (2, 2)), blocks((3, 4))])
    assert rows(d) == [(P + 10, D + 10, 20), (2 * P + 24, 2 * D + 32, 8)]
    assert len(request_descriptors([], [])) == 0
    assert len(request_descriptors([DENSE, state], [blocks(), blocks()])) == 0


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=12))
def test_a_run_moves_the_same_bytes_as_its_blocks(pairs: list[tuple[int, int]]) -> None:
    def moved(d: Descriptors) -> list[tuple[int, int]]:
        return [(src + i, dst + i) for src, dst, n in rows(d) for i in range(n)]

    one_by_one = [moved(region_descriptors(DENSE, blocks(pair))) for pair in pairs]
    d = region_descriptors(DENSE, blocks(*pairs))
    assert moved(d) == [byte for block in one_by_one for byte in block]
    steps = [(c - a, e - b) for (a, b), (c, e) in itertools.pairwise(pairs)]
    assert len(d) == sum(step != (1, 1) for step in steps) + bool(pairs)
