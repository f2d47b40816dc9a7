from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.errors import StoreError, UnregisteredMemoryError
from kvactors.stores.copying import HIGHEST, address_of, copy_rows, copy_table, view
from kvactors.stores.regions import Regions

MEMORY = 1 << 18


def naive(memory: np.ndarray, to: list[int], other: np.ndarray, of: list[int], size: int) -> np.ndarray:
    wanted = memory.copy()
    for t, o in zip(to, of, strict=True):
        wanted[t : t + size] = other[o : o + size]
    return wanted


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """Destinations that do not overlap, in stretches of constant steps and at random; sources anywhere."""
    size = draw(st.sampled_from([1, 2, 3, 7, 8, 64, 255, 256, 1000, 2048, 2049, 4096]))
    slots = MEMORY // (2 * size)
    stretches = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(-3, 3)), max_size=6))
    shuffled = draw(st.booleans())
    to: list[int] = []
    of: list[int] = []
    slot = 0
    for length, step, source_step in stretches:
        source = draw(st.integers(0, MEMORY - size))
        for i in range(length):
            if slot >= slots:
                break
            to.append(slot * 2 * size)
            of.append((source + i * source_step * size) % (MEMORY - size + 1))
            slot += step
    if shuffled:
        order = draw(st.permutations(range(len(to))))
        to = [to[i] for i in order]
    elif draw(st.booleans()):
        to, of = to[::-1], of[::-1]
    return size, to, of


@settings(max_examples=200, deadline=None)
@given(rows(), st.integers(0, 7))
def test_any_rows_equal_a_naive_copy(case: tuple[int, list[int], list[int]], shift: int) -> None:
    size, to, of = case
    source = np.random.default_rng(len(to)).integers(0, 256, MEMORY, np.uint8)
    target = np.zeros(MEMORY + shift, np.uint8)[shift:]
    wanted = naive(target, to, source, of, size)
    copy_rows(np.array(to, np.int64) + address_of(target), np.array(of, np.int64) + address_of(source), size)
    assert (target == wanted).all()


@pytest.mark.parametrize("size", [16384, 16385, 65535, 65536, 65537])
@pytest.mark.parametrize("shuffled", [False, True])
def test_big_rows_equal_a_naive_copy(size: int, shuffled: bool) -> None:
    n, rng = 20, np.random.default_rng(size)
    source = rng.integers(0, 256, 2 * n * size, np.uint8)
    target = np.zeros(n * size, np.uint8)
    to = (rng.permutation(n) if shuffled else np.arange(n)) * size
    of = (rng.permutation(2 * n)[:n] if shuffled else np.arange(n) * 2) * size
    wanted = naive(target, to.tolist(), source, of.tolist(), size)
    copy_rows(to + address_of(target), of + address_of(source), size)
    assert (target == wanted).all()


def test_one_source_fans_out() -> None:
    source, target = np.arange(100, dtype=np.uint8), np.zeros(64 * 100, np.uint8)
    copy_rows(np.arange(64) * 100 + address_of(target), np.full(64, address_of(source)), 100)
    assert (target.reshape(64, 100) == source).all()


@pytest.mark.parametrize("into_objects", [True, False])
@pytest.mark.parametrize("sizes", [[8], [8, 8], [8, 24, 8, 5], [300, 7]])
@pytest.mark.parametrize("n", [1, 3, 50])
def test_a_table_equals_a_naive_copy(n: int, sizes: list[int], into_objects: bool) -> None:
    rng, total = np.random.default_rng(n), sum(sizes)
    objects = rng.integers(0, 256, (n, total + 3), np.uint8)
    local = rng.integers(0, 256, (len(sizes), n * 2, max(sizes)), np.uint8)
    blocks = rng.permutation(2 * n)[:n]
    offsets = np.cumsum([0, *sizes[:-1]])
    wanted_objects, wanted_local = objects.copy(), local.copy()
    for i, block in enumerate(blocks.tolist()):
        for j, (size, offset) in enumerate(zip(sizes, offsets.tolist(), strict=True)):
            if into_objects:
                wanted_objects[i, offset : offset + size] = local[j, block, :size]
            else:
                wanted_local[j, block, :size] = objects[i, offset : offset + size]
    bases = address_of(objects) + np.arange(n) * (total + 3)
    addresses = address_of(local) + (np.arange(len(sizes)) * 2 * n + blocks[:, None]) * max(sizes)
    copy_table(bases, offsets, addresses, np.array(sizes), into_objects=into_objects)
    assert (objects == wanted_objects).all()
    assert (local == wanted_local).all()


def test_views_write_through() -> None:
    memory = np.zeros(100, np.uint8)
    view(address_of(memory) + 10, 5)[:] = 7
    assert memory.sum() == 35


def test_a_big_copy_releases_the_interpreter() -> None:
    """With thread switches off, another thread runs during the copies only if a copy itself lets it."""
    source, target = np.ones(1 << 20, np.uint8), np.empty(1 << 20, np.uint8)
    started, seen = threading.Event(), threading.Event()
    rounds_left = 5000

    def copy() -> None:
        nonlocal rounds_left
        to, of = np.array([address_of(target)]), np.array([address_of(source)])
        started.set()
        while rounds_left and not seen.is_set():
            copy_rows(to, of, 1 << 20)
            rounds_left -= 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=copy)
        thread.start()
        started.wait()
        seen.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert rounds_left > 0


# Registered memory


def cover(regions: Regions, address: int, nbytes: int) -> bool:
    return bool(regions.cover(np.array([[address]], np.int64), np.array([nbytes], np.int64))[0])


def test_a_range_must_lie_in_one_stretch_of_registered_memory() -> None:
    regions = Regions().with_region(10_000, 100).with_region(10_200, 100)
    assert cover(regions, 10_000, 100)
    assert cover(regions, 10_299, 1)
    for address, nbytes in ((9_999, 2), (10_099, 2), (10_050, 200), (10_100, 1), (0, 1), (-5, 1), (1 << 62, 1)):
        assert not cover(regions, address, nbytes), (address, nbytes)
    assert not cover(regions, 10_000, (1 << 63) - 1)
    assert not cover(Regions(), 10_000, 1)


def test_contiguous_regions_make_one_stretch_while_both_are_registered() -> None:
    regions = Regions().with_region(10_100, 100).with_region(10_000, 100)
    assert cover(regions, 10_050, 100)
    assert not cover(regions.without_region(10_100), 10_050, 100)


@pytest.mark.parametrize(("address", "nbytes"), [(10_000, 100), (9_950, 100), (10_099, 1), (9_000, 5_000), (10_020, 10)])
def test_overlapping_regions_are_refused(address: int, nbytes: int) -> None:
    with pytest.raises(StoreError, match="overlaps"):
        Regions().with_region(10_000, 100).with_region(address, nbytes)


@pytest.mark.parametrize(("address", "nbytes"), [(0, 100), (10_000, 0), (10_000, -1), (HIGHEST - 10, 11)])
def test_only_user_memory_can_be_registered(address: int, nbytes: int) -> None:
    with pytest.raises(StoreError, match="user memory"):
        Regions().with_region(address, nbytes)


def test_only_known_regions_can_be_forgotten() -> None:
    with pytest.raises(UnregisteredMemoryError):
        Regions().with_region(10_000, 100).without_region(10_001)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=8),
    st.integers(0, 80),
    st.integers(1, 40),
)
def test_coverage_equals_a_byte_by_byte_check(regions: list[tuple[int, int]], address: int, nbytes: int) -> None:
    table, held = Regions(), set()
    for start, size in regions:
        span = set(range(start, start + size))
        if span & held:
            with pytest.raises(StoreError):
                table.with_region(start + 5000, size)
        else:
            table = table.with_region(start + 5000, size)
            held |= span
    assert cover(table, address + 5000, nbytes) == (set(range(address, address + nbytes)) <= held)
