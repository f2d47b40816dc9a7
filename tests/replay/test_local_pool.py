"""Local blocks: entries lie apart, strides are kept, ids are handed out once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.replay.content import block_seeds
from kvactors.replay.local_pool import LocalPool
from kvactors.stores import open_store


def layout() -> KVLayout:
    return KVLayout(
        "m",
        [
            Group(0, GroupKind.FULL, 16, {0: (CacheEntry("k", 10), CacheEntry("v", 24, 40)), 2: (CacheEntry("k", 16),)}),
            Group(1, GroupKind.STATE, 32, {2: (CacheEntry("s", 18),)}),
        ],
    )


def test_regions_do_not_overlap_and_have_the_entries_strides() -> None:
    pool = LocalPool(layout(), {0: 7, 1: 3})
    regions = []
    for group in pool.layout.groups:
        for r in pool.layout.ranges(group.id):
            start = pool.bases[(group.id, r.layer, r.entry.name)]
            assert start % 8 == 0
            regions.append((start, start + pool.capacity[group.id] * r.entry.stride))
    regions.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(regions))


def test_filling_every_entry_of_every_block_disturbs_no_other() -> None:
    pool = LocalPool(layout(), {0: 7, 1: 3})
    seeds = {g: block_seeds("m", g, [bytes([i]) for i in range(n)]) for g, n in pool.capacity.items()}
    ids = {g: np.arange(n) for g, n in pool.capacity.items()}
    contents = [(c, e) for layer in (0, 2) for c in pool.layer(layer) for e in c.entries]
    for content, entry in contents:
        entry.fill(ids[content.group_id], seeds[content.group_id])
    assert len(contents) == 4
    assert all(entry.mismatched(ids[c.group_id], seeds[c.group_id]) == 0 for c, entry in contents)


def test_blocks_are_taken_once_and_all_or_none() -> None:
    pool = LocalPool(layout(), {0: 4, 1: 2}, limit=5)
    first = pool.take({0: 3, 1: 1})
    assert first == {0: [0, 1, 2], 1: [0]}
    assert pool.free == 1
    assert pool.take({0: 1, 1: 1}) is None
    assert pool.take({0: 2}) is None
    assert pool.free == 1
    pool.give_back(0, [1, 0])
    assert pool.take({0: 2, 1: 1}) == {0: [0, 1], 1: [1]}
    assert (pool.used, pool.peak) == (5, 5)


def test_one_group_cannot_take_more_than_its_arena() -> None:
    pool = LocalPool(layout(), {0: 2, 1: 2}, limit=10)
    assert pool.take({0: 3, 1: 0}) is None


def test_all_memory_is_registered_with_the_store() -> None:
    pool, store = LocalPool(layout(), {0: 7, 1: 3}), open_store("memory")
    pool.register(store)
    for (group_id, layer, name), base in pool.bases.items():
        assert base > 0, (group_id, layer, name)
    pool.unregister(store)
    store.close()


def test_a_layer_knows_its_payload() -> None:
    pool = LocalPool(layout(), {0: 1, 1: 1})
    assert [(c.group_id, c.nbytes) for c in pool.layer(2)] == [(0, 16), (1, 18)]
    assert [(c.group_id, c.nbytes) for c in pool.layer(0)] == [(0, 34)]
    assert pool.layer(1) == ()


def test_more_memory_than_there_is_says_what_to_do() -> None:
    from kvactors.errors import ConfigError

    with pytest.raises(ConfigError, match="--scale"):
        LocalPool(layout(), {0: 1 << 58, 1: 1})
