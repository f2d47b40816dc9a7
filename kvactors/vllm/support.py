"""What the connector takes, and what it refuses when vLLM starts: all reasons at once, each with what to do.

Everything is read by attribute, so that tests need no vLLM and another version's classes are judged by what they have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvactors.errors import ConfigError
from kvactors.log import get_logger
from kvactors.vllm.settings import BOTH, CONSUMER, PRODUCER, ConnectorSettings

log = get_logger("kvactors.vllm")

LEAST_VERSION, NEWEST_VERSION = (0, 32), (0, 33)
"""Of vLLM: the first and the last that the tests were run with. pyproject.toml's extra `vllm` says the same; `.ci/matrix` reads
it there, and a test holds both and docs/vllm.md together."""

VERSIONS = " to ".join(".".join(map(str, version)) for version in (LEAST_VERSION, NEWEST_VERSION))

VALIDATED_BACKENDS = frozenset(
    {"AMX_MLA", "CPU_ATTN", "GDN_ATTN", "MAMBA2_ATTN", "MAMBA1_ATTN", "SHORT_CONV_ATTN", "LINEAR_ATTN"}
)
"""Attention backends whose caches have been moved and compared bit for bit (tests/vllm), and those of recurrent layers."""

NO_PREFIXES: Mapping[str, str] = {
    "CPU_MLA": "vLLM's reference MLA for CPUs does not read what is cached of a prompt, so a loaded prefix would be ignored; "
    "it takes a CPU with AMX (AMX_MLA)",
}
"""Attention backends that cannot go on from a part of a prompt, and why. They can decode, so a hand-off alone is served:
prefill computes a prompt in one piece, and decode needs one token of it."""

REFUSED_SPECS: Mapping[str, str] = {
    "CrossAttentionSpec": "cross attention (its cache belongs to an encoder's input, which no token hash names)",
    "EncoderOnlyAttentionSpec": "encoder-only attention (it keeps no cache)",
    "HiSparseHotSpec": "HiSparse (its blocks live in a pool of its own)",
    "HiSparseResidentSpec": "HiSparse (its blocks live in a pool of its own)",
}


def warn_of_version(version: str) -> None:
    """One line in the log if a vLLM is older or newer than those that were tried, or does not say which it is. It is not
    refused: what differs may not matter to this model, and `require_supported` judges by what there is."""
    said = re.match(r"(\d+)\.(\d+)", version)
    if said is None or not LEAST_VERSION <= (int(said[1]), int(said[2])) <= NEWEST_VERSION:
        log.warning(
            "KVActorsConnector was not tried with this vLLM; compare outputs with those of a run without the connector first",
            version=version,
            tried=VERSIONS,
        )


def require_supported(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
    """Asks everything, changes nothing.

    Raises:
        ConfigError: names all that stands against it.
    """
    problems = [
        *_of_caches(kv_cache_config, settings),
        *_of_parallelism(vllm_config.parallel_config, settings),
        *_of_the_device(vllm_config),
        *_of_settings(vllm_config, kv_cache_config, settings),
    ]
    if problems:
        raise ConfigError(f"KVActorsConnector cannot serve this configuration: {'; '.join(dict.fromkeys(problems))}")


def spec_names(spec: Any) -> set[str]:
    """Names of the classes that a cache specification is an instance of."""
    return {c.__name__ for c in type(spec).__mro__}


def inner_specs(spec: Any) -> list[Any]:
    """The specifications that a group's own stands for: its layers' where they differ (a wrapper), else itself."""
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if inner else [spec]


def _of_caches(config: Any, settings: ConnectorSettings) -> Iterator[str]:
    groups = getattr(config, "kv_cache_groups", None)
    if not groups:
        yield "the model has no kv_cache_groups, so there is nothing to store; start without the connector"
        return
    ids = config.prefix_cacheable_group_ids if settings.stores else config.transfer_group_ids
    if not ids:
        yield "none of its cache groups can be found again by a hash of tokens; start without the connector"
    for number in ids:
        group = groups[number]
        for spec in inner_specs(group.kv_cache_spec):
            for name in spec_names(spec) & set(REFUSED_SPECS):
                yield f"group {number}: {REFUSED_SPECS[name]}"
            mode = getattr(spec, "mamba_cache_mode", "align")
            if "MambaSpec" in spec_names(spec) and mode != "align":
                yield (
                    f"group {number}: recurrent state with mamba_cache_mode={mode!r}: only 'align' keeps states at block "
                    "boundaries; start with --enable-prefix-caching --mamba-cache-mode align"
                )
        if getattr(group, "host_resident", False):
            yield f"group {number}: its cache is resident on the host"


def _of_parallelism(parallel: Any, settings: ConnectorSettings) -> Iterator[str]:
    for name, what in (("decode_context_parallel_size", "DCP"), ("prefill_context_parallel_size", "PCP")):
        size = getattr(parallel, name, 1)
        if size > 1:
            yield f"{what} ({name}={size}): it shards the tokens of a block over ranks; set it to 1"
    if getattr(parallel, "use_ubatching", False):
        yield "micro-batches (DBO): a layer reports before all of its requests are computed; start without --enable-dbo"
    if not settings.stores:
        return  # workers tell each other their sizes when they meet
    for key in ("prefill_tp_size", "decode_tp_size"):
        ranks = getattr(settings, key)
        if ranks is not None and ranks != parallel.tensor_parallel_size:
            yield (
                f"{key}={ranks} with tensor_parallel_size={parallel.tensor_parallel_size}: objects are one rank's heads; run "
                "both with the same number of ranks"
            )
    stages = settings.prefill_pp_size
    if stages is not None and stages != parallel.pipeline_parallel_size:
        yield (
            f"prefill_pp_size={stages} with pipeline_parallel_size={parallel.pipeline_parallel_size}: objects are one stage's; "
            "run both with the same number of stages"
        )


def device_type(vllm_config: Any) -> str:
    """ "cpu", "cuda", "npu", …"""
    return str(getattr(getattr(vllm_config, "device_config", None), "device_type", "cpu"))


def _of_the_device(vllm_config: Any) -> Iterator[str]:
    device = device_type(vllm_config)
    dtype = str(getattr(vllm_config.cache_config, "cache_dtype", "auto"))
    if device == "cpu" and dtype.startswith(("fp8", "nvfp4", "int8")):
        yield f"kv-cache-dtype {dtype} on a CPU, whose kernels have no such cache; use auto"


def _of_settings(vllm_config: Any, config: Any, settings: ConnectorSettings) -> Iterator[str]:
    transfer = vllm_config.kv_transfer_config
    role = transfer.kv_role
    if role not in (PRODUCER, CONSUMER, BOTH):
        yield f"kv_role {role!r}: must be {PRODUCER}, {CONSUMER} or {BOTH}"
    workers = vllm_config.parallel_config.world_size
    if settings.backend == "memory" and workers > 1:
        yield f"backend 'memory' with {workers} worker processes: they cannot share a process's memory; use 'mooncake'"
    groups = len(getattr(config, "prefix_cacheable_group_ids", ()))
    if groups > 1 and not settings.discard_partial_chunks:
        yield f"discard_partial_chunks=false with {groups} cache groups: a partly filled block has no common boundary"
    if groups > 1 and getattr(vllm_config.cache_config, "enable_cross_layers_blocks", False):
        yield f"cross-layer blocks with {groups} cache groups"


def require_validated(vllm_config: Any, backends: Mapping[str, str], settings: ConnectorSettings) -> None:
    """Warns of what nobody has compared bit for bit; refuses it unless `allow_unvalidated` says that the user knows. What is
    known to be wrong is refused always.

    Args:
        backends: layer name -> name of its attention backend.

    Raises:
        ConfigError: something is not validated and was not opted into.
    """
    used = set(backends.values())
    if settings.stores and (refused := sorted(used & set(NO_PREFIXES))):
        why = "; ".join(f"attention backend {name}: {NO_PREFIXES[name]}" for name in refused)
        raise ConfigError(f"KVActorsConnector cannot serve this configuration: {why}")
    device = device_type(vllm_config)
    doubts = [f"attention backend {name}" for name in sorted(used - VALIDATED_BACKENDS - set(NO_PREFIXES))]
    if device != "cpu":
        doubts.append(f"device {device}")
        if not getattr(vllm_config.model_config, "enforce_eager", True):
            doubts.append("graph capture (hooks of layers are not called while a graph is replayed)")
    if not doubts:
        return
    what = ", ".join(doubts)
    log.warning("not validated", what=what)
    if not settings.allow_unvalidated:
        raise ConfigError(
            f"KVActorsConnector is not validated with: {what}. Start with enforce_eager and a validated backend "
            f"({', '.join(sorted(VALIDATED_BACKENDS))}), or set allow_unvalidated to true in kv_connector_extra_config"
        )
