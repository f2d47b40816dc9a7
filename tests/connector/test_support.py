"""What is refused when vLLM starts: each with its reason and what to do, all at once."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvactors.errors import ConfigError
from kvactors.vllm.settings import CONSUMER, PRODUCER, ConnectorSettings
from kvactors.vllm.support import (
    LEAST_VERSION,
    NEWEST_VERSION,
    VALIDATED_BACKENDS,
    VERSIONS,
    require_supported,
    require_validated,
    warn_of_version,
)
from tests.connector import rig
from tests.connector.rig import CacheConfig, CacheGroup, FullAttentionSpec, MambaSpec, SlidingWindowSpec, vllm_config

ONE = CacheConfig([CacheGroup(FullAttentionSpec())])
HYBRID = CacheConfig([CacheGroup(FullAttentionSpec()), CacheGroup(MambaSpec()), CacheGroup(MambaSpec())])
MEMORY = ConnectorSettings.of({"backend": "memory"})


def refusal(config: Any = None, caches: Any = ONE, **settings: Any) -> str:
    """Why it is refused; empty if it is not."""
    try:
        require_supported(vllm_config() if config is None else config, caches, ConnectorSettings.of(settings))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "spec",
    [
        FullAttentionSpec(),
        SlidingWindowSpec(),
        rig.ChunkedLocalAttentionSpec(),
        rig.MLAAttentionSpec(),
        rig.MLAAttentionSpec(tokens_per_state=4),
        MambaSpec(),
        rig.UniformTypeKVCacheSpecs(16, {"model.layers.0.a": FullAttentionSpec(), "model.layers.1.a": FullAttentionSpec()}),
    ],
    ids=lambda s: type(s).__name__,
)
def test_every_kind_of_cache_that_a_hash_finds_again_is_served(spec: Any) -> None:
    assert refusal(caches=CacheConfig([CacheGroup(FullAttentionSpec()), CacheGroup(spec)])) == ""


@pytest.mark.parametrize("role", [PRODUCER, CONSUMER, "kv_both"])
def test_every_role_of_vllm_is_served(role: str) -> None:
    assert refusal(vllm_config(role=role)) == ""


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 2), (2, 2)])
def test_ranks_and_stages_that_share_a_pool_are_served(tp: int, pp: int) -> None:
    given = {"prefill_tp_size": tp, "decode_tp_size": str(tp), "prefill_pp_size": pp}
    assert refusal(vllm_config(tp=tp, pp=pp), HYBRID, **given) == ""


# -- caches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [[], None])
def test_a_model_without_cache_groups(groups: Any) -> None:
    caches = SimpleNamespace(kv_cache_groups=groups, prefix_cacheable_group_ids=())
    assert "no kv_cache_groups" in refusal(caches=caches)
    assert "start without the connector" in refusal(caches=caches)


def test_a_model_none_of_whose_groups_a_hash_can_find() -> None:
    assert "none of its cache groups can be found again" in refusal(caches=CacheConfig(ONE.kv_cache_groups, cacheable=()))


@pytest.mark.parametrize("mode", ["none", "all"])
def test_recurrent_state_that_is_not_kept_at_block_boundaries(mode: str) -> None:
    caches = CacheConfig([CacheGroup(FullAttentionSpec()), CacheGroup(MambaSpec(mamba_cache_mode=mode))])
    told = refusal(caches=caches)
    assert f"group 1: recurrent state with mamba_cache_mode='{mode}'" in told
    assert "--enable-prefix-caching --mamba-cache-mode align" in told


def test_recurrent_state_inside_of_a_wrapper_is_judged_too() -> None:
    wrapped = rig.UniformTypeKVCacheSpecs(16, {"a.0": MambaSpec(), "a.1": MambaSpec(mamba_cache_mode="none")})
    assert "mamba_cache_mode='none'" in refusal(caches=CacheConfig([CacheGroup(wrapped)]))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (rig.CrossAttentionSpec(), "cross attention"),
        (rig.EncoderOnlyAttentionSpec(), "encoder-only attention"),
        (rig.HiSparseHotSpec(), "HiSparse"),
    ],
)
def test_a_cache_that_no_hash_of_tokens_names(spec: Any, reason: str) -> None:
    assert f"group 1: {reason}" in refusal(caches=CacheConfig([CacheGroup(FullAttentionSpec()), CacheGroup(spec)]))


def test_a_cache_that_is_resident_on_the_host() -> None:
    assert "group 0: its cache is resident on the host" in refusal(
        caches=CacheConfig([CacheGroup(FullAttentionSpec(), host_resident=True)])
    )


def test_a_group_that_is_never_keyed_may_be_anything() -> None:
    others = [CacheGroup(rig.CrossAttentionSpec()), CacheGroup(MambaSpec(mamba_cache_mode="none"), host_resident=True)]
    assert refusal(caches=CacheConfig([CacheGroup(FullAttentionSpec()), *others], cacheable=(0,))) == ""


# -- parallelism -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (vllm_config(dcp=2), r"DCP (decode_context_parallel_size=2)"),
        (vllm_config(pcp=4), r"PCP (prefill_context_parallel_size=4)"),
    ],
)
def test_ranks_that_share_the_tokens_of_a_block(config: Any, reason: str) -> None:
    assert reason in refusal(config)


@pytest.mark.parametrize("key", ["prefill_tp_size", "decode_tp_size"])
def test_instances_of_a_pool_with_other_numbers_of_ranks(key: str) -> None:
    told = refusal(vllm_config(tp=2), **{key: 4})
    assert f"{key}=4 with tensor_parallel_size=2" in told
    assert "same number of ranks" in told


def test_instances_of_a_pool_with_other_numbers_of_stages() -> None:
    told = refusal(vllm_config(pp=2), prefill_pp_size=4)
    assert "prefill_pp_size=4 with pipeline_parallel_size=2" in told


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (4, 2)])
def test_several_workers_cannot_share_a_processs_memory(tp: int, pp: int) -> None:
    told = refusal(vllm_config(tp=tp, pp=pp), backend="memory")
    assert f"backend 'memory' with {tp * pp} worker processes" in told
    assert "use 'mooncake'" in told
    assert refusal(vllm_config(tp=tp, pp=pp), backend="mooncake") == ""


# -- device and settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "nvfp4", "int8_per_token_head"])
def test_a_cache_type_that_a_cpus_kernels_have_not(dtype: str) -> None:
    assert f"kv-cache-dtype {dtype} on a CPU" in refusal(vllm_config(dtype=dtype))
    assert refusal(vllm_config(dtype=dtype, device="cuda")) == ""


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_cache_type_that_they_have(dtype: str) -> None:
    assert refusal(vllm_config(dtype=dtype)) == ""


@pytest.mark.parametrize("role", [None, "", "kv_none"])
def test_a_role_that_vllm_does_not_know(role: Any) -> None:
    assert "must be kv_producer, kv_consumer or kv_both" in refusal(vllm_config(role=role))


def test_partly_filled_blocks_have_no_common_boundary_in_several_groups() -> None:
    assert "discard_partial_chunks=false with 3 cache groups" in refusal(caches=HYBRID, discard_partial_chunks=False)
    assert refusal(caches=ONE, discard_partial_chunks=False) == ""


def test_cross_layer_blocks_with_several_groups() -> None:
    assert "cross-layer blocks with 3 cache groups" in refusal(vllm_config(cross_layers=True), HYBRID)
    assert refusal(vllm_config(cross_layers=True), ONE) == ""


def test_everything_that_stands_against_it_is_said_at_once() -> None:
    caches = CacheConfig([CacheGroup(MambaSpec(mamba_cache_mode="none")), CacheGroup(rig.CrossAttentionSpec())])
    config = vllm_config(role="kv_none", tp=2, dcp=2, pcp=2, dtype="fp8")
    told = refusal(config, caches, backend="memory", prefill_pp_size=3, decode_tp_size=8, discard_partial_chunks=False)
    for reason in (
        "mamba_cache_mode='none'",
        "cross attention",
        "DCP",
        "PCP",
        "decode_tp_size=8",
        "prefill_pp_size=3",
        "kv-cache-dtype fp8",
        "kv_role 'kv_none'",
        "backend 'memory' with 2 worker processes",
        "discard_partial_chunks=false",
    ):
        assert reason in told


def test_a_reason_that_several_layers_have_is_said_once() -> None:
    wrapped = rig.UniformTypeKVCacheSpecs(16, {f"a.{i}": MambaSpec(mamba_cache_mode="none") for i in range(40)})
    assert refusal(caches=CacheConfig([CacheGroup(wrapped)])).count("mamba_cache_mode='none'") == 1


# -- what nobody has validated -----------------------------------------------------------------------------------------

UNKNOWN = {"model.layers.0.a": "FLASH_ATTN", "model.layers.1.a": "CPU_ATTN", "model.layers.2.a": "TRITON_ATTN"}


def test_a_validated_backend_on_a_cpu_is_no_matter() -> None:
    require_validated(vllm_config(), {f"model.layers.{i}.a": b for i, b in enumerate(VALIDATED_BACKENDS)}, MEMORY)
    require_validated(vllm_config(enforce_eager=False), {}, MEMORY)


@pytest.mark.parametrize(
    ("config", "backends", "doubts"),
    [
        (vllm_config(), UNKNOWN, ["attention backend FLASH_ATTN, attention backend TRITON_ATTN"]),
        (vllm_config(device="cuda"), {}, ["device cuda"]),
        (vllm_config(device="npu", enforce_eager=False), UNKNOWN, ["FLASH_ATTN", "device npu", "graph capture"]),
    ],
)
def test_what_is_not_validated_needs_to_be_allowed(
    config: Any, backends: dict[str, str], doubts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="allow_unvalidated to true") as error:
        require_validated(config, backends, MEMORY)
    assert all(doubt in str(error.value) for doubt in doubts)
    assert "CPU_ATTN" in str(error.value)
    caplog.clear()
    require_validated(config, backends, ConnectorSettings.of({"allow_unvalidated": True}))
    (told,) = caplog.messages
    assert all(doubt in told for doubt in ["not validated", *doubts])


def test_a_backend_that_does_not_use_what_is_loaded_is_refused_whatever_is_allowed() -> None:
    with pytest.raises(ConfigError, match="does not read what is cached"):
        require_validated(vllm_config(), {"model.layers.0": "CPU_MLA"}, ConnectorSettings.of({"allow_unvalidated": True}))


# -- versions of vLLM --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev7+g12345.cpu", "0.33.0+cpu", "0.33.0rc1"])
def test_a_vllm_that_was_tried_is_not_mentioned(version: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_version(version)
    assert caplog.messages == []


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.33.0", "0.4.0", "0.330.0", "dev", ""])
def test_another_vllm_is_told_in_one_line_with_what_was_tried(version: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_version(version)
    (told,) = caplog.messages
    assert all(part in told for part in ["was not tried with this vLLM", f"version={version!r}", f"tried={VERSIONS!r}"])


def test_the_extra_and_the_page_name_the_same_versions() -> None:
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (major, least), (same, newest) = LEAST_VERSION, NEWEST_VERSION
    assert (major, extras["vllm"]) == (same, [f"vllm>={major}.{least},<{major}.{newest + 1}"])
    assert f"vLLM {VERSIONS}" in (root / "docs" / "vllm.md").read_text()
