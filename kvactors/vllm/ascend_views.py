"""Strided cache views in vLLM-Ascend's model runner V1: a general plugin of vLLM, by choice. Not verified on hardware.

With KVACTORS_ASCEND_VIEWS=1 the runner's `_reshape_kv_cache_tensors` is replaced by one that calls
`kvactors.memory.cache_views`. Allocation, block ids, block tables and the mapping from layer names to caches stay the runner's.
What is not known to take such views is refused by name before anything is changed (`ascend_support`).

A choice that cannot apply is a warning and no error: vLLM calls its plugins unguarded in every process, the environment may be
that of a machine without an NPU, and a runner left as it is keeps its own layout, which is right by itself. A configuration
that is refused is an error: there the views were asked for and the model would run with others than its operator thinks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import wraps
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvactors.errors import ConfigError
from kvactors.log import get_logger
from kvactors.vllm.after_import import after_import
from kvactors.vllm.ascend_support import GRAPHS, VIEWS, require_supported

if TYPE_CHECKING:
    from kvactors.memory.placement import Raw

MODULE, RUNNER, METHOD = "vllm_ascend.worker.model_runner_v1", "NPUModelRunner", "_reshape_kv_cache_tensors"
PARAMETERS = ["self", "kv_cache_config", "kv_cache_raw_tensors"]
OURS = "__kvactors_views__"

log = get_logger("kvactors.vllm")


def register() -> None:
    """The plugin's entry point; may be called any number of times, and never raises."""
    if os.environ.get(VIEWS) != "1":
        return
    if "vllm_ascend" not in sys.modules and find_spec("vllm_ascend") is None:
        log.warning(f"{VIEWS}=1 has no effect: vLLM-Ascend is not installed here")
        return
    after_import(MODULE, apply)


def apply(module: ModuleType) -> None:
    """Replaces the method in the runner's module, if it is the one that we know."""
    runner = getattr(module, RUNNER, None)
    method = getattr(runner, METHOD, None)
    if getattr(method, OURS, False):
        return
    if runner is None or not callable(method):
        log.warning(f"{VIEWS}=1 has no effect: {MODULE} of this vLLM-Ascend has no {RUNNER}.{METHOD}; its own layout stays")
        return
    if list(signature(method).parameters) != PARAMETERS:
        log.warning(
            f"{VIEWS}=1 has no effect: {RUNNER}.{METHOD} of this vLLM-Ascend takes {signature(method)}; its own layout stays"
        )
        return

    @wraps(method)
    def reshape(self: Any, kv_cache_config: Any, kv_cache_raw_tensors: Mapping[str, Raw]) -> dict[str, Any]:
        return strided_caches(self, kv_cache_config, kv_cache_raw_tensors, os.environ.get(GRAPHS) == "1")

    setattr(reshape, OURS, True)
    setattr(runner, METHOD, reshape)
    log.warning(f"{VIEWS}=1: {RUNNER} gets strided cache views, which are not verified on hardware")


def strided_caches(runner: Any, config: Any, raw: Mapping[str, Raw], graphs_allowed: bool = False) -> dict[str, Any]:
    """Layer name -> (K, V), or a list of states, as the runner binds them to its layers.

    Args:
        runner: vLLM-Ascend's model runner V1; it is read and not changed.
        config: its `KVCacheConfig`.
        raw: what its `_allocate_kv_cache_tensors` made.
        graphs_allowed: whether graph capture is not refused.

    Raises:
        ConfigError: the configuration is not known to take such views.
        LayoutError: a placement that has no views, such as padded blocks that a kernel wants split.
    """
    from kvactors.memory import cache_views
    from kvactors.memory.placement import is_state, layer_specs

    names = [
        name for group in config.kv_cache_groups for name in group.layer_names if name not in runner.runner_only_attn_layers
    ]
    missing = [name for name in names if name not in raw]
    if missing:
        raise ConfigError(f"{VIEWS}=1: the runner allocated no memory for {', '.join(missing)}; unset {VIEWS}")
    raw = {name: raw[name] for name in names}
    require_supported(runner, config, raw, graphs_allowed)
    attention = {name for name, (_, spec) in layer_specs(config).items() if not is_state(spec)}
    token_major = {
        name
        for group in runner._kv_cache_spec_attn_group_iterator()
        for name in attention.intersection(raw, group.layer_names)
        if _token_major(group.backend)
    }
    views = cache_views(config, raw, kernel_block_sizes=_kernel_block_sizes(runner, config), token_major=token_major)
    return {name: found if name in attention else list(found) for name, found in views.items()}


def _kernel_block_sizes(runner: Any, config: Any) -> list[int]:
    """Tokens of a kernel block by group, as the runner's block tables count them; states (0 there) are not split.

    The runner's list leaves out groups that have no cache (encoder-only layers, which are the runner's own).
    """
    says = iter(runner.kernel_block_sizes)
    sizes: list[int] = []
    for group in config.kv_cache_groups:
        size = 0 if runner.runner_only_attn_layers.issuperset(group.layer_names) else next(says, 0)
        sizes.append((size[0] if isinstance(size, Sequence) else size) or group.kv_cache_spec.block_size)
    return sizes


def _token_major(backend: Any) -> bool:
    """Whether the operators of a backend want [block, token, head, …] and not [block, head, token, …] inside of a page.

    Raises:
        ConfigError: they want something else.
    """
    blocks, tokens, heads, head = 3, 128, 5, 64
    shape = tuple(backend.get_kv_cache_shape(blocks, tokens, heads, head))[-4:]
    if shape not in ((blocks, tokens, heads, head), (blocks, heads, tokens, head)):
        raise ConfigError(
            f"{VIEWS}=1: {backend.__name__} wants caches of shape {shape} for {blocks} blocks of {tokens} tokens with {heads} "
            f"heads of {head} elements; known are [block, token, head, …] and [block, head, token, …]; unset {VIEWS}"
        )
    return shape[1] == tokens
