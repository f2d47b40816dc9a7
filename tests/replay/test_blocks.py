"""Which blocks a prompt holds, computes, saves and loads: each kept block is saved in exactly one chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.layouts import FAMILIES, with_block_tokens
from kvactors.replay.blocks import BlockRules
from kvactors.replay.hashing import trace_hash_tokens


def rules(layout: KVLayout, retention: int | None = None) -> BlockRules:
    return BlockRules(layout, trace_hash_tokens(g.block_tokens for g in layout.groups), retention)


def full(block_tokens: int) -> KVLayout:
    return KVLayout("m", [Group(0, GroupKind.FULL, block_tokens, {0: (CacheEntry("k", 16),)})])


@pytest.mark.parametrize(
    ("tokens", "block_tokens", "chunk", "saves"),
    [(18_000, 512, 8192, 35), (24_576, 256, 8192, 96), (511, 512, 8192, 0), (513, 512, 100, 1), (8192, 512, 8192, 16)],
)
def test_saves_over_all_chunks(tokens: int, block_tokens: int, chunk: int, saves: int) -> None:  # maru#57, vllm#53314
    r = rules(full(block_tokens))
    kept = r.kept(tokens)[0]
    seen: list[int] = []
    for start in range(0, tokens, chunk):
        seen += r.saved(r.groups[0], kept, start, min(tokens, start + chunk)).tolist()
    assert seen == list(range(saves))


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    tokens=st.integers(1, 9000),
    chunk=st.integers(1, 5000),
    hit_boundaries=st.integers(0, 8),
)
def test_every_kept_block_is_held_computed_and_saved_in_one_chunk(
    family: str, tokens: int, chunk: int, hit_boundaries: int
) -> None:
    r = rules(FAMILIES[family].build())
    start = min(hit_boundaries * r.boundary_tokens, r.aligned(tokens - 1))
    kept = r.kept(tokens)
    for group in r.groups:
        want = [i for i in kept[group.id].tolist() if (i + 1) * group.block_tokens > start]
        assert all((i + 1) * group.block_tokens <= r.aligned(tokens) for i in want)
        saved: list[int] = []
        held: set[int] = set()
        at = start
        while at < tokens:
            end = min(tokens, at + chunk)
            new = set(r.held(group, kept[group.id], at, end).tolist())
            assert not new & held
            held |= new
            made = r.completed(group, kept[group.id], at, end).tolist()
            assert set(made) <= held
            part = r.saved(group, kept[group.id], at, end).tolist()
            assert set(part) <= set(made)
            saved += part
            at = end
        assert saved == want
        assert len(held) <= r.most_blocks(tokens)[group.id]


def test_a_state_group_keeps_one_state_per_boundary() -> None:
    r = rules(FAMILIES["seed-example"].build())
    assert r.boundary_tokens == 1024
    assert r.kept(3000)[2].tolist() == [1, 3]
    assert r.kept(3000)[0].tolist() == [0, 1, 2, 3]
    assert r.kept(1023)[0].tolist() == []


def test_retention_keeps_fewer_windows_and_states() -> None:
    layout = FAMILIES["gemma-3-27b"].build()
    dense, sparse, none = rules(layout), rules(layout, 4096), rules(layout, 0)
    assert len(dense.kept(16_000)[0]) == len(sparse.kept(16_000)[0]) == len(none.kept(16_000)[0]) == 125
    assert len(none.kept(16_000)[1]) < len(sparse.kept(16_000)[1]) < len(dense.kept(16_000)[1])


def test_the_block_hash_is_the_last_fine_hash_of_the_block() -> None:
    r = rules(with_block_tokens(full(512), 1024))
    fine = [bytes([i]) for i in range(8)]
    import numpy as np

    assert r.hash_tokens == 512
    assert r.hashes_of(r.groups[0], np.array([0, 2]), fine) == [b"\x01", b"\x05"]
