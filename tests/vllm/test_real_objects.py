"""vLLM's own classes where `tests/connector` has stand-ins: specifications, configurations, requests, block pool. No engine."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

# It imports all that is needed of vLLM, and keeps quiet about the warnings.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils", reason="vLLM is not importable", exc_type=ImportError)

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

try:  # where vLLM 0.33 has it, and where 0.32 does
    from vllm.v1.core.kv_cache_planning import _project_kv_cache_groups_to_worker as cut_for_worker
except ImportError:
    from vllm.v1.core.kv_cache_utils import _project_kv_cache_groups_to_worker as cut_for_worker

from kvactors.core.layout import GroupKind, KVLayout
from kvactors.devices import ManualClock
from kvactors.errors import ConfigError, LayoutError
from kvactors.vllm.layouts import ModelFacts, group_kind, worker_memory
from kvactors.vllm.messages import Life
from kvactors.vllm.pins import Pins
from kvactors.vllm.settings import ConnectorSettings
from kvactors.vllm.support import require_supported
from tests.connector.rig import Serving, full, loads, saves, vllm_config

BLOCKS = 4


def attention(spec: type[Any], **more: Any) -> Any:
    return spec(**{"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16, **more})


def state(**more: Any) -> MambaSpec:
    given = {"block_size": 16, "shapes": ((8,), (2, 4)), "dtypes": (torch.bfloat16, torch.float32), **more}
    return MambaSpec(**{"mamba_cache_mode": "align", **given})


SPECS: Mapping[GroupKind, KVCacheSpec] = {
    GroupKind.FULL: attention(FullAttentionSpec),
    GroupKind.SLIDING_WINDOW: attention(SlidingWindowSpec, sliding_window=64),
    GroupKind.CHUNKED_LOCAL: attention(ChunkedLocalAttentionSpec, attention_chunk_size=64),
    GroupKind.MLA: attention(MLAAttentionSpec, max_tp_shards=1),
    GroupKind.COMPRESSED: attention(MLAAttentionSpec, max_tp_shards=1, tokens_per_state=4),
    GroupKind.INDEXER: attention(MLAAttentionSpec, max_tp_shards=1, cache_role=SparseCacheRole.INDEXER),
    GroupKind.STATE: state(),
}


def config(*groups: KVCacheGroupSpec) -> KVCacheConfig:
    return KVCacheConfig(BLOCKS, [], list(groups))


def name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def layout_of(cache: KVCacheConfig, **facts: Any) -> KVLayout:
    names = [n for g in cache.kv_cache_groups for n in g.layer_names]
    caches = {n: torch.zeros(BLOCKS, 32, dtype=torch.bfloat16) for n in names}
    given = {"model": "m", "hidden_layers": 8, "kv_heads": 2, "tp_size": 4, **facts}
    return worker_memory(cache, caches, ModelFacts(**given)).layout


def test_a_model_whose_keys_would_be_a_namespaces_is_refused() -> None:
    with pytest.raises(LayoutError, match="model name 'a::m': must not hold '::'"):
        layout_of(config(KVCacheGroupSpec([name(0)], SPECS[GroupKind.FULL])), model="a::m")


# -- specifications ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "spec"), SPECS.items())
def test_each_of_vllms_specifications_is_of_its_kind(kind: GroupKind, spec: KVCacheSpec) -> None:
    assert group_kind(spec) is kind


def test_a_window_over_a_latent_cache_is_a_window_with_one_writer() -> None:
    """DeepSeek-V4."""
    spec = attention(SlidingWindowMLASpec, sliding_window=128, max_tp_shards=1)
    layout = layout_of(config(KVCacheGroupSpec([name(0)], spec)))
    assert (layout.group(0).kind, layout.group(0).window, layout.put_step(0)) == (GroupKind.SLIDING_WINDOW, 128, 4)


@pytest.mark.parametrize("kind", SPECS)
def test_vllms_wrapper_changes_neither_digest_nor_who_stores(kind: GroupKind) -> None:
    """The scheduler sees a concrete specification where a worker may see the wrapper."""
    names = [name(0), name(1)]
    wrapper = UniformTypeKVCacheSpecs.from_specs(dict.fromkeys(names, SPECS[kind]))
    assert wrapper is not None
    concrete = layout_of(config(KVCacheGroupSpec(names, SPECS[kind])))
    wrapped = layout_of(config(KVCacheGroupSpec(names, wrapper)))
    assert concrete.digest == wrapped.digest
    assert concrete == wrapped
    assert concrete.put_step(0) == wrapped.put_step(0)


@pytest.mark.parametrize(
    ("kind", "put_step"),
    [(GroupKind.FULL, 2), (GroupKind.SLIDING_WINDOW, 2), (GroupKind.MLA, 4), (GroupKind.INDEXER, 4), (GroupKind.STATE, 1)],
)
def test_with_2_heads_on_4_ranks_those_store_that_have_no_copy(kind: GroupKind, put_step: int) -> None:
    assert layout_of(config(KVCacheGroupSpec([name(0)], SPECS[kind]))).put_step(0) == put_step


def test_a_state_that_every_rank_has_whole_has_one_writer() -> None:
    assert layout_of(config(KVCacheGroupSpec([name(0)], state(tp_replicated=True)))).put_step(0) == 4


@pytest.mark.parametrize("wrap", [False, True])
def test_a_groups_part_on_each_stage_is_of_the_same_group(wrap: bool) -> None:
    """As vLLM cuts its groups: stage 0 has no layer of the second."""
    window: Any = SPECS[GroupKind.SLIDING_WINDOW]
    spec: Any = UniformTypeKVCacheSpecs.from_specs({name(2): window, name(3): window}) if wrap else window
    whole = [
        KVCacheGroupSpec([name(0), name(1)], SPECS[GroupKind.FULL]),
        KVCacheGroupSpec([name(2), name(3)], spec),
    ]
    stages = []
    for rank, here in enumerate([(0, 1), (2, 3)]):
        of_worker = {name(n): window if n > 1 else SPECS[GroupKind.FULL] for n in here}
        cut = cut_for_worker(whole, of_worker)
        stages.append(layout_of(config(*cut), tp_size=1, pp_size=2, pp_rank=rank))
    assert [[list(g.layers) for g in s.groups] for s in stages] == [[[0, 1], []], [[], [2, 3]]]
    with Serving(*stages) as vllm:
        assert vllm.side.storing_ranks == {0: 1, 1: 1}


# -- support -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPECS)
def test_every_kind_is_served(kind: GroupKind) -> None:
    require_supported(vllm_config(), config(KVCacheGroupSpec([name(0)], SPECS[kind])), ConnectorSettings())


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (attention(CrossAttentionSpec), "cross attention"),
        (state(mamba_cache_mode="none"), "mamba_cache_mode='none'"),
        (state(mamba_cache_mode="all"), "mamba_cache_mode='all'"),
    ],
)
def test_what_is_refused_is_known_by_vllms_classes(spec: KVCacheSpec, reason: str) -> None:
    groups = [KVCacheGroupSpec([name(0)], SPECS[GroupKind.FULL]), KVCacheGroupSpec([name(1)], spec)]
    with pytest.raises(ConfigError, match=f"group 1: .*{reason}"):
        require_supported(vllm_config(), config(*groups), ConnectorSettings())


def test_a_model_without_caches_is_refused() -> None:
    with pytest.raises(ConfigError, match="no kv_cache_groups"):
        require_supported(vllm_config(), config(), ConnectorSettings())


def test_a_group_that_vllm_does_not_transfer_is_left_out() -> None:
    other = KVCacheGroupSpec([name(1)], attention(CrossAttentionSpec), enable_kv_transfer=False)
    cache = config(KVCacheGroupSpec([name(0)], SPECS[GroupKind.FULL]), other)
    require_supported(vllm_config(), cache, ConnectorSettings())
    assert [g.id for g in layout_of(cache).groups] == [0]


# -- the block pool ----------------------------------------------------------------------------------------------------


def test_vllms_pool_gives_nobody_a_block_that_may_still_be_written() -> None:
    pool, pins = BlockPool(4, enable_caching=True, hash_block_size=16), Pins(ManualClock())  # block 0 stands for none
    pins.pool = pool
    one, *others = pool.get_new_blocks(3)
    pins.update(Counter([one.block_id]), Counter())
    pool.free_blocks([one, *others])
    assert pool.get_num_free_blocks() == 2
    assert one not in pool.get_new_blocks(2)
    pins.update(Counter(), Counter([one.block_id]))
    assert pool.get_new_blocks(1) == [one]


# -- requests and steps ------------------------------------------------------------------------------------------------


@pytest.fixture
def vllm() -> Iterator[Serving]:
    init_none_hash(sha256)
    with Serving(full(), events=True) as found:
        yield found


def request(name: str, tokens: int) -> Request:
    parameters = SamplingParams(max_tokens=16)
    return Request(name, list(range(tokens)), parameters, None, block_hasher=get_request_block_hasher(16, sha256))


def output(blocks: KVCacheBlocks | None, tokens: int, **more: Any) -> SchedulerOutput:
    given: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(SchedulerOutput)}
    ids = {} if blocks is None else {"a": blocks.get_block_ids()}
    given |= {
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": CachedRequestData.make_empty(),
        "num_scheduled_tokens": {"a": tokens} if tokens else {},
        "total_num_scheduled_tokens": tokens,
        "scheduled_spec_decode_tokens": {},
        "scheduled_encoder_inputs": {},
        "finished_req_ids": set(),
        "free_encoder_mm_hashes": [],
        "kv_connector_block_state": KVConnectorBlockState(set(ids), ids.__getitem__, {}),
    }
    return SchedulerOutput(**{**given, **more})


def test_a_request_of_vllms_goes_through_match_allocation_step_and_end(vllm: Serving) -> None:
    pool = BlockPool(16, enable_caching=True, hash_block_size=16)
    first = request("a", 100)
    assert vllm.side.matched(first, 0) == (0, False)
    blocks = KVCacheBlocks((pool.get_new_blocks(7),))
    vllm.side.allocated(first, blocks, 0)
    plan = vllm.side.plan(output(blocks, 100))
    assert saves(plan) == {"a": {0: [0, 1, 2, 3, 4, 5]}}
    assert plan.requests[0].event.token_ids == list(range(96))
    assert list(plan.requests[0].groups[0].block_ids) == [b.block_id for b in blocks.blocks[0]]
    for block_hash in plan.requests[0].hashes:
        key = vllm.stages[0].key(0, block_hash)
        vllm.store.put_open([key], [8])
        vllm.store.put_commit([key])
    assert vllm.side.plan(output(None, 0, finished_req_ids={"a"})).ended == [Life("a")]

    again = request("a", 100)
    assert vllm.side.matched(again, 0) == (96, True)
    vllm.side.allocated(again, blocks, 96)
    assert loads(vllm.side.plan(output(None, 0))) == {"a": {0: [0, 1, 2, 3, 4, 5]}}
    again.num_computed_tokens = 96
    vllm.side.reported(None, ["a"])
    vllm.side.allocated(again, blocks, 0)
    assert saves(vllm.side.plan(output(blocks, 4))) == {}
    assert vllm.side.totals()["hit_tokens"] == 96
