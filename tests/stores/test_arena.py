from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.stores.arena import ALIGNMENT, Arena, Extents
from kvactors.stores.copying import view

SLAB = 1 << 16


def test_an_extent_of_the_same_size_is_used_again_first() -> None:
    arena = Arena(SLAB)
    first, _, second, _, large, _ = (arena.allocate(n) for n in (1024, 64, 1024, 64, 4096, 64))  # live ones between them
    for extents in (first, second, large):
        arena.free(extents)
    arena.check()
    assert arena.allocate(1024) == second, "the newest, whose bytes are still in a cache"
    assert arena.allocate(1024) == first
    assert arena.allocate(1024)[0][0] == large[0][0], "else the smallest that fits"
    arena.check()


def test_free_neighbours_become_one() -> None:
    arena = Arena(SLAB)
    pieces = [arena.allocate(SLAB // 4) for _ in range(4)]
    for piece in (pieces[1], pieces[3], pieces[0], pieces[2]):
        arena.free(piece)
        arena.check()
    assert len(arena.allocate(SLAB)) == 1
    assert arena.footprint_bytes == SLAB


def test_a_steady_state_touches_no_fresh_page() -> None:
    arena = Arena(SLAB)
    live = [arena.allocate(3000) for _ in range(100)]
    before = arena.footprint_bytes
    for round_ in range(20):
        for i in range(round_ % 3, 100, 3):
            arena.free(live[i])
        for i in range(round_ % 3, 100, 3):
            live[i] = arena.allocate(3000)
    assert arena.footprint_bytes == before


def test_fragments_are_used_together_rather_than_growing() -> None:
    arena = Arena(SLAB, reserve_bytes=16 * SLAB)
    live = [arena.allocate(4096) for _ in range(16 * SLAB // 4096)]
    for extents in live[::2]:
        arena.free(extents)
    large = arena.allocate(8 * SLAB)
    assert len(large) > 1
    assert sum(nbytes for _, nbytes in large) == 8 * SLAB
    assert arena.footprint_bytes == 16 * SLAB
    arena.free(large)
    arena.check()


def test_only_what_is_live_can_be_freed() -> None:
    arena = Arena(SLAB)
    extents = arena.allocate(100)
    arena.free(extents)
    with pytest.raises(KeyError):
        arena.free(extents)
    with pytest.raises(KeyError):
        arena.free(((12345, 64),))


def test_reserved_memory_is_there_at_once() -> None:
    arena = Arena(SLAB, reserve_bytes=1 << 20)
    assert arena.footprint_bytes == 1 << 20
    arena.allocate(1 << 20)
    assert arena.footprint_bytes == 1 << 20


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([1, 64, 300, 4096, 5000, 20000, SLAB, 3 * SLAB]), st.integers(0, 1 << 16)),
        max_size=120,
    )
)
def test_extents_never_overlap_and_memory_stays_bounded(steps: list[tuple[bool, int, int]]) -> None:
    arena = Arena(SLAB)
    live: list[tuple[Extents, int]] = []
    for number, (give_back, nbytes, pick) in enumerate(steps):
        if give_back and live:
            extents, mark = live.pop(pick % len(live))
            for start, size in extents:
                assert (view(start, size) == mark).all(), "another object wrote here"
            arena.free(extents)
        else:
            extents = arena.allocate(nbytes)
            assert sum(size for _, size in extents) == nbytes
            for start, size in extents:
                assert start % ALIGNMENT == 0
                view(start, size)[:] = number % 251
            live.append((extents, number % 251))
        arena.check()
    peak = arena.peak_bytes
    assert arena.footprint_bytes <= peak + peak // 8 + SLAB
