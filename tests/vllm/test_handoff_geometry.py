"""What a worker says of its caches: read from tensors such as vLLM's and vLLM-Ascend's runners register."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed here")

import torch
from torch import Tensor

from kvactors.disagg.geometry import WorkerGeometry
from kvactors.disagg.routes import route
from kvactors.errors import LayoutError, PeerMismatchError
from kvactors.vllm.handoff_geometry import handoff_geometry, transfer_memory
from kvactors.vllm.layouts import ModelFacts
from tests.connector.rig import (
    CacheConfig,
    CacheGroup,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

BLOCKS, TOKENS, DIM = 4, 16, 8


@dataclass
class Config(CacheConfig):
    @property
    def transfer_group_ids(self) -> tuple[int, ...]:
        return tuple(range(len(self.kv_cache_groups)))


def name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def config(*specs: Any, layers: Sequence[Sequence[int]] | None = None, **more: Any) -> Config:
    """Groups with a layer each, unless it is said which."""
    of = [[i] for i in range(len(specs))] if layers is None else layers
    groups = [CacheGroup(spec, [name(i) for i in numbers]) for spec, numbers in zip(specs, of, strict=True)]
    return Config(groups, BLOCKS, **more)


def facts(**more: Any) -> ModelFacts:
    return ModelFacts(**{"model": "m", "hidden_layers": 8, "kv_heads": 2, **more})


def geometry(config: Config, caches: dict[str, Any], **more: Any) -> WorkerGeometry:
    given = facts(**more)
    return handoff_geometry(config, caches, transfer_memory(config, caches, given, None), given.tp_rank)


def paged(heads: int = 2, tokens: int = TOKENS, blocks: int = BLOCKS) -> Tensor:
    """As on a CPU: a block is, for each head, its tokens; K and V in one."""
    return torch.zeros(blocks, heads, tokens, 2 * DIM, dtype=torch.bfloat16)


PAGE = 2 * TOKENS * 2 * DIM * 2


def test_a_page_with_heads_first_is_one_region() -> None:
    cache = paged()
    found = geometry(config(FullAttentionSpec(TOKENS)), {name(0): cache})
    (group,), (region,) = found.groups, found.regions
    assert (group.block_tokens, group.blocks, group.kv_heads) == (TOKENS, BLOCKS, 2)
    assert (group.kernel_blocks, group.heads_first) == (1, True)
    assert (region.base_address, region.block_bytes, region.payload_bytes) == (cache.data_ptr(), PAGE, PAGE)
    assert (region.layer_name, region.layer_index, region.group_index, region.pieces) == (name(0), 0, 0, 1)


def test_tokens_before_heads() -> None:
    cache = torch.zeros(BLOCKS, TOKENS, 2, 2 * DIM, dtype=torch.bfloat16).transpose(1, 2)
    (group,) = geometry(config(FullAttentionSpec(TOKENS)), {name(0): cache}).groups
    assert not group.heads_first


def test_a_shape_that_says_tokens_first() -> None:
    cache = torch.zeros(BLOCKS, TOKENS, 2, 2 * DIM, dtype=torch.bfloat16)
    (group,) = geometry(config(FullAttentionSpec(TOKENS)), {name(0): cache}).groups
    assert not group.heads_first


def test_kernel_blocks_are_the_regions_unit() -> None:
    cache = paged(tokens=TOKENS // 2, blocks=2 * BLOCKS)
    found = geometry(config(FullAttentionSpec(TOKENS)), {name(0): cache})
    (group,), (region,) = found.groups, found.regions
    assert (group.kernel_blocks, group.heads_first, group.blocks) == (2, True, BLOCKS)
    assert (region.block_bytes, region.payload_bytes) == (PAGE // 2, PAGE // 2)
    (entries,) = group.layers.values()
    assert [e.payload_bytes for e in entries] == [PAGE]


def test_padded_pages() -> None:
    """K and V of a block one behind the other, then padding: two regions with one stride, or one with its padding left out."""
    memory = torch.zeros(BLOCKS, 2048, dtype=torch.bfloat16)
    size = 2 * TOKENS * DIM
    k, v = (memory[:, at : at + size].view(BLOCKS, 2, TOKENS, DIM) for at in (0, size))
    found = geometry(config(FullAttentionSpec(TOKENS)), {name(0): [k, v]})
    assert [(r.base_address - memory.data_ptr(), r.block_bytes, r.payload_bytes) for r in found.regions] == [
        (0, 4096, 2 * size),
        (2 * size, 4096, 2 * size),
    ]
    assert found.groups[0].heads_first


def test_a_state_is_moved_whole_and_without_its_padding() -> None:
    """As on a CPU: bytes, with padding at the end of the page."""
    page, payload = 4096, 1000
    memory = torch.zeros(BLOCKS * page, dtype=torch.int8)
    state = torch.as_strided(memory, (BLOCKS, payload), (page, 1))
    found = geometry(config(FullAttentionSpec(TOKENS), MambaSpec(TOKENS)), {name(0): paged(), name(1): state})
    assert [(r.group_index, r.block_bytes, r.payload_bytes) for r in found.regions] == [(0, PAGE, PAGE), (1, page, payload)]
    assert [g.heads_first for g in found.groups] == [True, False]
    assert found.groups[1].kv_heads is None


def test_layers_that_share_memory_keep_regions_of_their_own() -> None:
    cache = paged()
    specs = FullAttentionSpec(TOKENS), SlidingWindowSpec(TOKENS)
    found = geometry(config(*specs), {name(0): cache, name(1): cache})
    assert [(r.layer_name, r.group_index, r.base_address) for r in found.regions] == [
        (name(0), 0, cache.data_ptr()),
        (name(1), 1, cache.data_ptr()),
    ]
    assert [g.window for g in found.groups] == [None, 32]


def test_a_layer_that_reads_anothers_cache_has_no_region() -> None:
    cache = paged()
    found = geometry(config(FullAttentionSpec(TOKENS), layers=[[0, 1]]), {name(0): cache, name(1): cache})
    assert [r.layer_name for r in found.regions] == [name(0)]


def test_a_latent_cache_and_its_indexer_are_told_apart_by_name() -> None:
    latent, indexer = (torch.zeros(BLOCKS, TOKENS, size, dtype=torch.bfloat16) for size in (64, 32))
    names = [name(0), "model.layers.0.self_attn.attn.indexer"]
    wrapper = UniformTypeKVCacheSpecs(TOKENS, dict.fromkeys(names, MLAAttentionSpec(TOKENS)))
    caches = dict(zip(names, (latent, indexer), strict=True))
    found = geometry(Config([CacheGroup(wrapper, names)], BLOCKS), caches)
    assert [(r.layer_name, r.payload_bytes) for r in found.regions] == [(names[0], 2048), (names[1], 1024)]
    assert not found.groups[0].heads_first


def test_groups_are_named_by_their_place() -> None:
    """vLLM's group 0 takes no part."""
    two = config(FullAttentionSpec(TOKENS), FullAttentionSpec(TOKENS))
    caches: dict[str, Any] = {name(0): paged(), name(1): paged()}
    given = facts()
    one = type("One", (), {**two.__dict__, "transfer_group_ids": (1,), "prefix_cacheable_group_ids": (1,)})()
    found = handoff_geometry(one, caches, transfer_memory(one, caches, given, None), 0)
    assert [(r.layer_name, r.group_index) for r in found.regions] == [(name(1), 0)]


def test_a_stage_says_of_a_group_without_layers_what_the_others_say() -> None:
    specs = FullAttentionSpec(TOKENS), SlidingWindowSpec(TOKENS)
    cache = paged(tokens=TOKENS // 2, blocks=2 * BLOCKS)
    here = geometry(config(*specs), {name(0): cache}, pp_size=2, pp_rank=0)
    there = geometry(config(*specs), {name(1): cache}, pp_size=2, pp_rank=1)
    assert [(g.kernel_blocks, g.heads_first) for g in (*here.groups, *there.groups)] == [(2, True)] * 4
    assert route(here, there) == ()


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "cuts"),
    [
        (1, 2, [(0, 0, PAGE // 2), (PAGE // 2, 0, PAGE // 2)]),
        (2, 1, [(0, 0, PAGE // 2), (0, PAGE // 2, PAGE // 2)]),
        (2, 2, [(0, 0, PAGE // 2)] * 2),
    ],
)
def test_a_page_is_cut_by_heads(prefill_tp: int, decode_tp: int, cuts: list[tuple[int, int, int]]) -> None:
    """Of what each pair of ranks exchanges: source offset, destination offset, bytes."""

    def ranks(size: int) -> list[WorkerGeometry]:
        heads = 2 // size
        spec = FullAttentionSpec(TOKENS, num_kv_heads=heads)
        return [geometry(config(spec), {name(0): paged(heads)}, tp_size=size, tp_rank=rank) for rank in range(size)]

    found = [tuple(copy.part) for p in ranks(prefill_tp) for d in ranks(decode_tp) for copy in route(p, d)]
    assert found == cuts


@pytest.mark.parametrize(
    ("windows_heads", "known", "heads"),
    [(2, None, [None, None]), (2, 2, [2, 2]), (1, 2, [2, None])],
    ids=["the model does not say", "it says so", "a layer has other heads"],
)
def test_heads_of_several_kinds_of_attention(windows_heads: int, known: int | None, heads: list[int | None]) -> None:
    """They are believed where the model's configuration names them, and the layers have them."""
    found = config(FullAttentionSpec(TOKENS), SlidingWindowSpec(TOKENS, num_kv_heads=windows_heads))
    caches = {name(0): paged(), name(1): paged(windows_heads)}
    memory = transfer_memory(found, caches, facts(), None)
    assert [g.kv_heads for g in handoff_geometry(found, caches, memory, 0, known).groups] == heads


def test_heads_inside_of_tokens_are_not_cut() -> None:
    def rank(size: int, number: int) -> WorkerGeometry:
        heads = 2 // size
        cache = torch.zeros(BLOCKS, TOKENS, heads, 2 * DIM, dtype=torch.bfloat16).transpose(1, 2)
        spec = FullAttentionSpec(TOKENS, num_kv_heads=heads)
        return geometry(config(spec), {name(0): cache}, tp_size=size, tp_rank=number)

    with pytest.raises(PeerMismatchError):
        route(rank(1, 0), rank(2, 0))


def test_what_is_stored_is_handed_over_as_it_is() -> None:
    both, caches, given = config(FullAttentionSpec(TOKENS)), {name(0): paged()}, facts()
    stored = transfer_memory(both, caches, given, None)
    assert transfer_memory(both, caches, given, stored) is stored
    only = config(FullAttentionSpec(TOKENS), MambaSpec(TOKENS), cacheable=[0])
    more = {**caches, name(1): torch.zeros(BLOCKS, 64, dtype=torch.int8)}
    assert [g.id for g in transfer_memory(only, more, given, stored).layout.groups] == [0, 1]


def test_a_cache_that_cannot_be_laid_out_is_named() -> None:
    with pytest.raises(LayoutError, match="group 0, layer 0"):
        geometry(config(FullAttentionSpec(TOKENS)), {name(0): torch.zeros(BLOCKS + 1, 2, TOKENS, DIM)})
