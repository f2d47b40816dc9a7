"""From a cache configuration and registered tensors to a layout: the same digest however vLLM wraps what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="layouts are made of tensors")

import torch

from kvactors.core.layout import GroupKind, KVLayout
from kvactors.core.lookup import KeySpace
from kvactors.errors import LayoutError
from kvactors.vllm.layouts import ModelFacts, group_kind, make_group, model_name, worker_memory
from tests.connector import rig
from tests.connector.rig import (
    CacheConfig,
    CacheGroup,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

BLOCKS = 4


def facts(**more: Any) -> ModelFacts:
    return ModelFacts(**{"model": "m", "hidden_layers": 44, "kv_heads": 2, **more})


def cache(payload: int = 64, stride: int | None = None, blocks: int = BLOCKS) -> Any:
    """A cache of bf16 with so many bytes in a block."""
    stride = payload if stride is None else stride
    return torch.zeros(blocks * stride // 2, dtype=torch.bfloat16).as_strided((blocks, payload // 2), (stride // 2, 1))


def attention(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def caches_of(config: CacheConfig) -> dict[str, Any]:
    return {name: cache() for group in config.kv_cache_groups for name in group.layer_names}


def layout_of(config: CacheConfig, namespace: str = "", **more: Any) -> KVLayout:
    return worker_memory(config, caches_of(config), facts(**more), namespace).layout


# -- kinds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (FullAttentionSpec(), GroupKind.FULL),
        (FullAttentionSpec(sliding_window=32), GroupKind.FULL),  # the hybrid manager is off: all its blocks are kept
        (SlidingWindowSpec(), GroupKind.SLIDING_WINDOW),
        (rig.ChunkedLocalAttentionSpec(), GroupKind.CHUNKED_LOCAL),
        (MLAAttentionSpec(), GroupKind.MLA),
        (MLAAttentionSpec(tokens_per_state=4), GroupKind.COMPRESSED),
        (MLAAttentionSpec(cache_role=rig.INDEXER), GroupKind.INDEXER),
        (MLAAttentionSpec(cache_role=rig.INDEXER, tokens_per_state=4), GroupKind.INDEXER),
        (MambaSpec(), GroupKind.STATE),
    ],
)
def test_the_kind_of_a_group_is_its_specifications_and_also_inside_of_a_wrapper(spec: Any, kind: GroupKind) -> None:
    assert group_kind(spec) is kind
    assert group_kind(UniformTypeKVCacheSpecs(16, {"a.0": spec, "a.1": spec})) is kind


def test_kinds_that_need_an_unbroken_prefix_may_share_a_group() -> None:
    wrapped = UniformTypeKVCacheSpecs(16, {"a": MLAAttentionSpec(), "b": MLAAttentionSpec(cache_role=rig.INDEXER)})
    assert group_kind(wrapped) is GroupKind.FULL


@pytest.mark.parametrize("other", [MambaSpec(), SlidingWindowSpec(), rig.ChunkedLocalAttentionSpec()])
def test_kinds_that_need_different_things_may_not(other: Any) -> None:
    with pytest.raises(LayoutError, match=r"a cache group of several kinds: .*full"):
        group_kind(UniformTypeKVCacheSpecs(16, {"a": FullAttentionSpec(), "b": other}))


def test_a_specification_of_no_known_kind_is_named() -> None:
    with pytest.raises(LayoutError, match="unknown kind, HiSparseHotSpec"):
        group_kind(rig.HiSparseHotSpec())


def test_windows_and_chunks_go_with_the_group() -> None:
    assert make_group(0, SlidingWindowSpec(sliding_window=128), {}, facts()).window == 128
    assert make_group(0, rig.ChunkedLocalAttentionSpec(attention_chunk_size=8192), {}, facts()).chunk_tokens == 8192


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (SlidingWindowSpec(sliding_window=64), SlidingWindowSpec(sliding_window=128), r"sliding_window: \[64, 128\]"),
        (
            rig.ChunkedLocalAttentionSpec(attention_chunk_size=64),
            rig.ChunkedLocalAttentionSpec(attention_chunk_size=128),
            r"attention_chunk_size: \[64, 128\]",
        ),
    ],
)
def test_layers_of_a_group_must_agree_on_them(one: Any, other: Any, what: str) -> None:
    with pytest.raises(LayoutError, match=f"group 3: its layers have different {what}"):
        make_group(3, UniformTypeKVCacheSpecs(16, {"a": one, "b": other}), {}, facts())


def test_block_tokens_are_raw_tokens_whatever_is_compressed() -> None:
    assert make_group(0, MLAAttentionSpec(block_size=256, tokens_per_state=4), {}, facts()).block_tokens == 256


# -- who stores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "tp", "kv_heads", "put_step"),
    [
        (FullAttentionSpec(num_kv_heads=1), 4, 2, 2),  # two ranks hold the same head
        (FullAttentionSpec(num_kv_heads=1, max_tp_shards=2), 4, 2, 2),
        (FullAttentionSpec(num_kv_heads=1, max_tp_shards=4), 4, 2, 1),  # what vLLM says of the layer counts most
        (FullAttentionSpec(num_kv_heads=1, max_tp_shards=1), 4, 2, 4),
        (FullAttentionSpec(num_kv_heads=2), 4, 8, 1),
        (FullAttentionSpec(num_kv_heads=2), 1, 2, 1),
        (FullAttentionSpec(num_kv_heads=3), 4, 2, 1),  # heads of its own: nobody knows who holds which
        (SlidingWindowSpec(num_kv_heads=1), 4, 2, 2),
        (MLAAttentionSpec(), 4, 128, 4),
        (MLAAttentionSpec(max_tp_shards=None), 4, 128, 4),
        (MLAAttentionSpec(max_tp_shards=None, tokens_per_state=4), 4, 128, 4),
        (MLAAttentionSpec(max_tp_shards=None, cache_role=rig.INDEXER), 4, 128, 4),
        (MambaSpec(), 4, 2, 1),  # split over all ranks, whatever the KV heads
        (MambaSpec(tp_replicated=True), 4, 2, 4),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_one_of_the_ranks_that_hold_the_same_bytes_stores_them(
    spec: Any, tp: int, kv_heads: int, put_step: int, wrapped: bool
) -> None:
    spec = UniformTypeKVCacheSpecs(16, {attention(0): spec}) if wrapped else spec
    layout = layout_of(CacheConfig([CacheGroup(spec, [attention(0)])]), tp_size=tp, kv_heads=kv_heads)
    assert layout.put_step(0) == put_step
    assert layout.heads(0) == tp // put_step
    assert [rank for rank in range(tp) if layout.stores(0, rank)] == list(range(0, tp, put_step))


def test_layers_with_more_heads_than_the_models_number_says_are_stored_by_every_rank() -> None:
    """MiMo-V2-Flash has 4 KV heads, and 8 in the layers with a window: with TP 8 one a rank in both, but not the same ones."""
    config = CacheConfig(
        [
            CacheGroup(FullAttentionSpec(num_kv_heads=1), [attention(0)]),
            CacheGroup(SlidingWindowSpec(num_kv_heads=1), [attention(1)]),
        ]
    )
    layout = layout_of(config, tp_size=8, kv_heads=4)
    assert [rank for rank in range(8) if layout.stores(1, rank)] == list(range(8))


def test_a_block_of_4_ranks_with_2_heads_on_2_stages_has_4_keys() -> None:
    """vllm-ascend#4761."""
    spec = FullAttentionSpec(num_kv_heads=1)
    stages = [layout_of(CacheConfig([CacheGroup(spec, [attention(s)])]), tp_size=4, pp_size=2, pp_rank=s) for s in range(2)]
    keys = KeySpace(stages).keys(0, b"\xab")
    assert len(set(keys)) == 4
    assert sum("@pp_rank:0@" in key for key in keys) == sum(key.endswith("@0") for key in keys) == 2


# -- digests -----------------------------------------------------------------------------------------------------------


def wrapped(config: CacheConfig) -> CacheConfig:
    """As a worker may see it: every group's specification as a wrapper of its layers'."""
    groups = [
        CacheGroup(
            UniformTypeKVCacheSpecs(g.kv_cache_spec.block_size, dict.fromkeys(g.layer_names, g.kv_cache_spec)),
            g.layer_names,
            g.is_eagle_group,
        )
        for g in config.kv_cache_groups
    ]
    return CacheConfig(groups, config.num_blocks, config.cacheable)


HYBRIDS: Mapping[str, Sequence[CacheGroup]] = {
    "full": [CacheGroup(FullAttentionSpec(), [attention(0), attention(1)])],
    "mla": [CacheGroup(MLAAttentionSpec(), [attention(0), attention(1)])],
    "window": [CacheGroup(SlidingWindowSpec(), [attention(0)]), CacheGroup(FullAttentionSpec(), [attention(1)])],
    "state": [CacheGroup(MambaSpec(), ["model.layers.0.linear_attn"]), CacheGroup(FullAttentionSpec(), [attention(1)])],
    "draft": [
        CacheGroup(FullAttentionSpec(), [attention(0), "mtp.layers.0.self_attn.attn"], is_eagle_group=True),
        CacheGroup(MambaSpec(), ["model.layers.1.linear_attn"]),
    ],
}


@pytest.mark.parametrize("groups", HYBRIDS.values(), ids=HYBRIDS)
def test_a_wrapper_changes_neither_digest_nor_keys_nor_reachability(groups: Sequence[CacheGroup]) -> None:
    config = CacheConfig(groups)
    one, other = layout_of(config), layout_of(wrapped(config))
    assert one.digest == other.digest
    assert one == other
    assert [one.key(g.id, b"\x01") for g in one.groups] == [other.key(g.id, b"\x01") for g in other.groups]


def test_padding_is_not_part_of_an_object_nor_of_the_digest() -> None:
    """Page stride 96 with a payload of 64, as a state's page that an attention's page decided."""
    config = CacheConfig([CacheGroup(MambaSpec(), ["model.layers.0.mixer"])])
    dense, padded = (worker_memory(config, {"model.layers.0.mixer": cache(64, stride)}, facts()).layout for stride in (64, 96))
    (entry,) = padded.groups[0].layers[0]
    assert (entry.nbytes, entry.stride, padded.object_bytes(0)) == (64, 96, 64)
    assert dense.digest == padded.digest


@pytest.mark.parametrize("change", [{"tp_size": 2}, {"pp_size": 2}])
def test_the_parallel_shape_is_part_of_the_digest(change: dict[str, int]) -> None:
    config = CacheConfig(HYBRIDS["state"])
    assert layout_of(config).digest != layout_of(config, **change).digest


def test_another_size_or_element_kind_or_layer_is_another_digest() -> None:
    config = CacheConfig([CacheGroup(FullAttentionSpec(), [attention(0)])])
    other = CacheConfig([CacheGroup(FullAttentionSpec(), [attention(1)])])
    caches = [cache(), cache(128), cache().view(torch.float16)]
    found = {worker_memory(config, {attention(0): tensor}, facts()).layout.digest for tensor in caches}
    assert len(found | {layout_of(other).digest}) == 4


# -- entries and addresses ---------------------------------------------------------------------------------------------


def test_bases_are_the_addresses_of_block_0_and_regions_cover_every_cache() -> None:
    config = CacheConfig(HYBRIDS["state"])
    caches = caches_of(config)
    memory = worker_memory(config, caches, facts())
    assert memory.bases == {
        (0, 0, "model.layers.*.linear_attn"): caches["model.layers.0.linear_attn"].data_ptr(),
        (1, 1, "model.layers.*.self_attn.attn"): caches[attention(1)].data_ptr(),
    }
    assert sorted(memory.regions) == sorted((t.data_ptr(), BLOCKS * 64) for t in caches.values())
    assert set(memory.names) == set(caches)


def test_k_and_v_in_tensors_of_their_own_are_two_entries() -> None:
    config = CacheConfig([CacheGroup(FullAttentionSpec(), [attention(3)])])
    k, v = cache(32), cache(48)
    memory = worker_memory(config, {attention(3): (k, v)}, facts())
    entry = "model.layers.*.self_attn.attn"
    assert [(e.name, e.nbytes) for e in memory.layout.groups[0].layers[3]] == [(f"{entry}:0", 32), (f"{entry}:1", 48)]
    assert memory.bases == {(0, 3, f"{entry}:0"): k.data_ptr(), (0, 3, f"{entry}:1"): v.data_ptr()}


def test_a_layer_that_reads_anothers_cache_is_counted_once() -> None:
    """Two names, one tensor: KV sharing between layers."""
    shared = cache()
    config = CacheConfig([CacheGroup(FullAttentionSpec(), [attention(0), attention(1), attention(2)])])
    memory = worker_memory(config, {attention(0): shared, attention(1): cache(), attention(2): shared}, facts())
    assert list(memory.layout.groups[0].layers) == [0, 1]
    assert memory.layout.object_bytes(0) == 128
    assert set(memory.names) == {attention(0), attention(1)}


def test_groups_may_lie_over_the_same_memory() -> None:
    """One pool of block ids: a block belongs to one group at a time."""
    shared = cache()
    config = CacheConfig(HYBRIDS["window"])
    memory = worker_memory(config, {attention(0): shared, attention(1): shared}, facts())
    assert [list(g.layers) for g in memory.layout.groups] == [[0], [1]]
    assert list(memory.regions) == [(shared.data_ptr(), BLOCKS * 64)]


def test_an_attention_and_its_indexer_are_two_entries_of_one_layer() -> None:
    indexer = "model.layers.0.self_attn.indexer.k_cache"
    config = CacheConfig([CacheGroup(FullAttentionSpec(), [attention(0), indexer])])
    memory = worker_memory(config, {attention(0): cache(64), indexer: cache(16)}, facts())
    assert [e.nbytes for e in memory.layout.groups[0].layers[0]] == [64, 16]


def test_a_group_that_is_never_keyed_has_no_place_in_the_layout() -> None:
    config = CacheConfig([*HYBRIDS["state"], CacheGroup(rig.CrossAttentionSpec(), ["model.layers.0.cross"])], cacheable=(0, 1))
    assert [g.id for g in layout_of(config).groups] == [0, 1]


def test_groups_keep_vllms_numbers() -> None:
    config = CacheConfig([CacheGroup(rig.CrossAttentionSpec(), ["model.layers.0.cross"]), *HYBRIDS["state"]], cacheable=(1, 2))
    assert [g.id for g in layout_of(config).groups] == [1, 2]


def test_no_cache_at_all_is_refused() -> None:
    with pytest.raises(LayoutError, match="no registered cache belongs to a cache group that can be stored"):
        worker_memory(CacheConfig(HYBRIDS["full"]), {}, facts())


def test_a_cache_that_is_not_made_of_the_configurations_blocks_is_named() -> None:
    """vllm-ascend#13474."""
    config = CacheConfig([CacheGroup(FullAttentionSpec(), [attention(7)])], num_blocks=72)
    with pytest.raises(LayoutError, match=r"group 0, layer 7.*73.*72"):
        worker_memory(config, {attention(7): cache(blocks=73)}, facts())


# -- stages ------------------------------------------------------------------------------------------------------------


def stage(rank: int, layers: Sequence[int], **more: Any) -> KVLayout:
    names = [attention(n) if n < 44 else f"model.layers.{n}.mtp_block.self_attn.attn" for n in layers]
    return layout_of(CacheConfig([CacheGroup(MLAAttentionSpec(), names)]), pp_rank=rank, pp_size=2, **more)


def test_44_layers_cut_into_21_and_23() -> None:
    """vllm-ascend#15507."""
    first, second = stage(0, range(21)), stage(1, range(21, 44))
    assert (first.first_layer, first.stage_layers, first.commit_layer(0)) == (0, 21, 20)
    assert (second.first_layer, second.stage_layers, second.commit_layer(0)) == (21, 23, 43)
    assert second.entry_ranges(0, 21) == [(0, 64)]
    assert second.stage_layer(21) == 0
    assert first.digest != second.digest


def test_with_an_mtp_layer_behind_them() -> None:
    second = stage(1, range(21, 45))
    assert second.commit_layer(0) == 44
    assert second.entry_ranges(0, 44) == [(23 * 64, 64)]


@pytest.mark.parametrize("wrap", [False, True])
def test_a_stage_that_has_no_layer_of_a_group_has_the_group_nevertheless(wrap: bool) -> None:
    """vLLM leaves it the whole model's specification, and no names."""
    spec: Any = SlidingWindowSpec(sliding_window=64)
    spec = UniformTypeKVCacheSpecs(16, {attention(1): spec}) if wrap else spec
    config = CacheConfig([CacheGroup(FullAttentionSpec(), [attention(0)]), CacheGroup(spec, [])])
    layout = layout_of(config, pp_size=2)
    assert [(g.id, g.kind, len(g.layers)) for g in layout.groups] == [
        (0, GroupKind.FULL, 1),
        (1, GroupKind.SLIDING_WINDOW, 0),
    ]
    assert layout.group(1).window == 64
    assert layout.object_bytes(1) == 0


def test_a_draft_group_is_marked_for_reachability() -> None:
    assert [g.speculative for g in layout_of(CacheConfig(HYBRIDS["draft"])).groups] == [True, False]


# -- names in keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen3-8B", "Qwen3-8B"),
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("/models/Qwen3-8B", "Qwen3-8B"),
        ("/mnt/a/b/Qwen3-8B///", "Qwen3-8B"),
        ("./Qwen3-8B/", "Qwen3-8B"),
    ],
)
def test_a_key_does_not_say_where_the_model_is_kept(path: str, name: str) -> None:
    assert model_name(path) == name


@pytest.mark.parametrize("path", ["", "/", "///"])
def test_a_model_without_a_name_is_refused(path: str) -> None:
    with pytest.raises(LayoutError, match="has no name"):
        model_name(path)


def test_one_group_has_the_keys_that_it_always_had() -> None:
    layout = layout_of(CacheConfig(HYBRIDS["full"]), model="Qwen3-8B")
    assert layout.key(0, b"\x0f\xf0") == "Qwen3-8B@0ff0@0"


def test_a_namespace_is_in_every_key_and_not_in_the_digest() -> None:
    config = CacheConfig(HYBRIDS["state"])
    plain, named = layout_of(config), layout_of(config, "tenant-1/epoch.2")
    assert plain.digest == named.digest
    for g in plain.groups:
        assert named.key(g.id, b"\x01") == f"tenant-1/epoch.2::{plain.key(g.id, bytes([1]))}"
