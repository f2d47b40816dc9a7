"""The same lookups and masks, asked of vLLM's own cache managers, on random groups and holes.

Hits below the boundary are switched off in vLLM (`allow_partial_hash_hits=False`). Where the two differ on purpose the
test says so:

* a chunk edge inside a block: vLLM takes the block that the edge cuts for read without looking. We look.
* a speculative window whose run reaches token 0, with B larger than its block: vLLM rounds the run down to B before it
  drops the extra block, then again, and loses a boundary. We return it.
* several speculative windows: vLLM looks further once per length, but forgets to after another speculative group shrank
  it. We look further at every length.
* a single speculative group whose prompt ends on a block: vLLM does not look past the prompt's last token there.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvactors.core.layout import Group, GroupKind
from kvactors.core.reachability import Reachability

coordinators: Any = pytest.importorskip(
    "vllm.v1.core.kv_cache_coordinator", reason="vLLM is not importable: pip install kvactors[vllm]", exc_type=ImportError
)
pytestmark = pytest.mark.vllm

UNIT = 4
KINDS = (GroupKind.FULL, GroupKind.MLA, GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW, GroupKind.STATE)
CASES = 3000


def vllm_spec(group: Group) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as specs

    common: dict[str, Any] = {"block_size": group.block_tokens, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    match group.kind:
        case GroupKind.FULL:
            return specs.FullAttentionSpec(**common)
        case GroupKind.SLIDING_WINDOW:
            return specs.SlidingWindowSpec(**common, sliding_window=group.window)
        case GroupKind.CHUNKED_LOCAL:
            return specs.ChunkedLocalAttentionSpec(**common, attention_chunk_size=group.chunk_tokens)
        case GroupKind.STATE:
            shapes, dtypes = ((8,),), (torch.bfloat16,)
            return specs.MambaSpec(block_size=group.block_tokens, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")
        case kind:
            size = {GroupKind.MLA: 8, GroupKind.COMPRESSED: 16, GroupKind.INDEXER: 24}[kind]
            return specs.MLAAttentionSpec(**{**common, "head_size": size})


def vllm_coordinator(groups: Sequence[Group], unit: int, unitary: bool = False) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    members = [KVCacheGroupSpec([f"layer{i}"], vllm_spec(g), is_eagle_group=g.speculative) for i, g in enumerate(groups)]
    arguments: dict[str, Any] = {
        "kv_cache_config": KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=members),
        "max_model_len": 1 << 20,
        "max_in_flight_tokens": 8192,
        "use_eagle": any(g.speculative for g in groups),
        "enable_caching": True,
        "enable_kv_cache_events": False,
        "dcp_world_size": 1,
        "pcp_world_size": 1,
        "scheduler_block_size": math.lcm(*(g.block_tokens for g in groups)),
        "hash_block_size": unit,
    }
    if unitary:
        return coordinators.UnitaryKVCacheCoordinator(**arguments)
    return coordinators.HybridKVCacheCoordinator(**arguments, allow_partial_hash_hits=False)


class Lookup:
    """A random prompt over given groups, with holes: what vLLM finds and what we find."""

    def __init__(self, groups: Sequence[Group], rng: random.Random, unit: int = UNIT, unitary: bool = False) -> None:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        self.groups = groups
        self.prompt = rng.randint(1, 240)
        hashes = [rng.randbytes(32) for _ in range(self.prompt // unit)]
        vllm = vllm_coordinator(groups, unit, unitary)
        stored = set()
        for i, g in enumerate(groups):
            missing = rng.choice([0, 0.03, 0.1, 0.3, 0.6])
            for h in hashes[g.block_tokens // unit - 1 :: g.block_tokens // unit]:
                if rng.random() >= missing:
                    stored.add((g.id, h))
                    key = make_block_hash_with_group_id(h, i)
                    vllm.block_pool.cached_block_hash_to_block.insert(key, vllm.block_pool.blocks[1])
        blocks, self.theirs, _ = vllm.find_longest_cache_hit(hashes, self.prompt - 1)
        self.their_masks = tuple(tuple(b is not vllm.block_pool.null_block for b in group) for group in blocks)
        self.ours = Reachability(groups, unit).longest_hit(hashes, self.prompt, lambda gid, h: (gid, h) in stored)

    def __repr__(self) -> str:
        groups = [(g.kind.value, g.block_tokens, g.window or g.chunk_tokens, g.speculative) for g in self.groups]
        return f"prompt {self.prompt}, groups {groups}: vLLM {self.theirs}, ours {self.ours.tokens}"

    def check_same(self) -> None:
        assert self.ours.tokens == self.theirs, self
        assert self.ours.masks == self.their_masks, self


def random_groups(rng: random.Random, kinds: Sequence[GroupKind] = KINDS, block: int | None = None) -> list[Group]:
    groups = []
    for gid in rng.sample(range(30), rng.randint(1, 5)):
        kind = rng.choice(kinds)
        more: dict[str, Any] = {}
        if kind is GroupKind.SLIDING_WINDOW:
            more["window"] = rng.randint(2, 70)
        if kind is GroupKind.CHUNKED_LOCAL:
            more["chunk_tokens"] = (block or UNIT) * rng.randint(1, 6)
        groups.append(Group(gid, kind, block or UNIT * rng.choice([1, 1, 2, 2, 3, 4]), {}, **more))
    return groups


def one_speculative(rng: random.Random, groups: list[Group], kinds: set[GroupKind]) -> list[Group]:
    candidates = [i for i, g in enumerate(groups) if g.kind in kinds]
    chosen = rng.choice(candidates) if candidates else None
    return [replace(g, speculative=i == chosen) for i, g in enumerate(groups)]


def test_hits_of_groups_of_any_kind_and_size() -> None:
    rng = random.Random(1)
    for _ in range(CASES):
        Lookup(random_groups(rng), rng).check_same()


def test_hits_of_chunked_local_groups_with_equal_blocks() -> None:
    rng = random.Random(2)
    for _ in range(CASES):
        Lookup(random_groups(rng, [*KINDS, GroupKind.CHUNKED_LOCAL], block=8), rng).check_same()


def test_hits_of_compressed_and_indexer_groups() -> None:
    rng = random.Random(3)
    kinds = [GroupKind.FULL, GroupKind.MLA, GroupKind.COMPRESSED, GroupKind.INDEXER, GroupKind.STATE]
    for _ in range(CASES // 3):
        Lookup(random_groups(rng, kinds), rng).check_same()


def test_hits_of_a_single_group() -> None:
    rng = random.Random(4)
    for _ in range(CASES // 3):
        group = random_groups(rng)[0]
        Lookup([group], rng, unit=group.block_tokens, unitary=True).check_same()


@pytest.mark.parametrize("kind", [GroupKind.FULL, GroupKind.STATE], ids=lambda k: k.value)
def test_hits_with_a_speculative_group(kind: GroupKind) -> None:
    rng = random.Random(5)
    for _ in range(CASES):
        Lookup(one_speculative(rng, random_groups(rng), {kind, GroupKind.MLA}), rng).check_same()


def test_hits_with_a_speculative_window() -> None:
    rng = random.Random(6)
    for _ in range(CASES):
        Lookup(one_speculative(rng, random_groups(rng, block=8), {GroupKind.SLIDING_WINDOW}), rng).check_same()


def test_hits_with_a_speculative_window_smaller_than_b_are_never_shorter() -> None:
    rng = random.Random(7)
    for _ in range(CASES):
        lookup = Lookup(one_speculative(rng, random_groups(rng), {GroupKind.SLIDING_WINDOW}), rng)
        assert lookup.ours.tokens >= lookup.theirs, lookup


def test_hits_of_a_single_speculative_group() -> None:
    rng = random.Random(8)
    for _ in range(CASES // 3):
        group = replace(random_groups(rng)[0], speculative=True)
        lookup = Lookup([group], rng, unit=group.block_tokens, unitary=True)
        if lookup.prompt % group.block_tokens or group.kind is GroupKind.STATE:
            lookup.check_same()
        else:
            assert lookup.ours.tokens >= lookup.theirs, lookup


def best_seconds(call: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return min(once() for _ in range(7))


@pytest.mark.parametrize("share", [0, 0.5, 1], ids=["no hit", "half", "all"])
def test_a_lookup_of_100_000_fine_hashes_is_not_slower(share: float) -> None:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    groups = [
        Group(0, GroupKind.FULL, 16, {}),
        Group(1, GroupKind.SLIDING_WINDOW, 16, {}, window=1024),
        Group(2, GroupKind.MLA, 32, {}),
        Group(3, GroupKind.STATE, 64, {}),
        Group(4, GroupKind.SLIDING_WINDOW, 32, {}, window=128),
    ]
    rng = random.Random(10)
    hashes = [rng.randbytes(32) for _ in range(100_000)]
    prompt = 1_600_001
    vllm = vllm_coordinator(groups, 16)
    stored: dict[int, set[bytes]] = {}
    for i, g in enumerate(groups):
        own = hashes[g.block_tokens // 16 - 1 :: g.block_tokens // 16]
        stored[g.id] = set(own[: int(len(own) * share)])
        for h in stored[g.id]:
            vllm.block_pool.cached_block_hash_to_block.insert(make_block_hash_with_group_id(h, i), vllm.block_pool.blocks[1])
    r = Reachability(groups, 16)

    def readable_many(gid: int, asked: Sequence[bytes]) -> list[bool]:
        held = stored[gid]
        return [h in held for h in asked]

    theirs = best_seconds(lambda: vllm.find_longest_cache_hit(hashes, prompt - 1))
    assert best_seconds(lambda: r.longest_hit(hashes, prompt, lambda gid, h: h in stored[gid])) <= theirs
    assert best_seconds(lambda: r.longest_hit(hashes, prompt, readable_many=readable_many)) <= theirs


def test_store_masks() -> None:
    rng = random.Random(9)
    for _ in range(CASES):
        groups = random_groups(rng, [*KINDS, GroupKind.CHUNKED_LOCAL])
        spread = rng.random() < 0.5
        groups = [replace(g, speculative=spread and rng.random() < 0.5) for g in groups]
        # As in vLLM, one speculative group makes those with an equal spec speculative too.
        alike = {(g.kind, g.block_tokens, g.window) for g in groups if g.speculative}
        r = Reachability(groups, UNIT)
        b = r.boundary_tokens
        tokens, prompt = rng.randint(0, 8) * b, rng.randint(0, 8 * b + 20)
        retention = rng.choice([None, 0, b, 2 * b, 3 * b, 5 * b])
        junctions = [rng.randint(0, 9) * b for _ in range(rng.randint(0, 2))]
        for g, ours in zip(groups, r.store_mask(tokens, prompt, retention, junctions), strict=True):
            theirs = vllm_mask(g, tokens, b, (g.kind, g.block_tokens, g.window) in alike, retention, [prompt - 1, *junctions])
            assert list(ours) == theirs, (g, tokens, prompt, retention, junctions)


def vllm_mask(
    group: Group, tokens: int, boundary: int, speculative: bool, retention: int | None, ends: Sequence[int]
) -> list[bool]:
    from vllm.v1.core.single_type_kv_cache_manager import (
        ChunkedLocalAttentionManager,
        FullAttentionManager,
        MambaManager,
        SlidingWindowManager,
    )

    managers = {
        GroupKind.SLIDING_WINDOW: SlidingWindowManager,
        GroupKind.STATE: MambaManager,
        GroupKind.CHUNKED_LOCAL: ChunkedLocalAttentionManager,
    }
    blocks = tokens // group.block_tokens
    mask = managers.get(group.kind, FullAttentionManager).reachable_block_mask(
        start_block=0,
        end_block=blocks,
        alignment_tokens=boundary,
        kv_cache_spec=vllm_spec(group),
        use_eagle=speculative,
        retention_interval=retention,
        reachable_boundaries=ends,
    )
    return [True] * blocks if mask is None else mask
