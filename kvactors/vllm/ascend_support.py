"""For which configurations of vLLM-Ascend the strided views may be used: all that is not known to take them is refused by name.

Strided views change where a cache's bytes are. Whoever reads those bytes by another way than the view (a captured graph, a
connector, an offload path, a sparse or compressed cache with a layout of its own) has to say that it follows the view.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvactors.errors import ConfigError

if TYPE_CHECKING:
    from kvactors.memory.placement import Raw

VIEWS = "KVACTORS_ASCEND_VIEWS"
GRAPHS = "KVACTORS_ASCEND_VIEWS_ALLOW_GRAPHS"

ACCEPTS = "accepts_strided_kv_cache"
"""The declaration, an attribute of a class that is True.

On a KV connector: it takes address, stride and payload of a block from the tensors that `register_kv_caches` gives it, layer by
layer, and assumes neither that they are contiguous nor that K and V are neighbours.
On the specification of a compressed cache: its `block_size`, `num_kv_heads`, `head_size`, `dtype` and `page_size_bytes` are the
physical ones, so that the views that follow from them are right.
"""


def require_supported(runner: Any, config: Any, raw: Mapping[str, Raw], graphs_allowed: bool) -> None:
    """Changes nothing, and asks everything.

    Args:
        runner: vLLM-Ascend's model runner V1.
        config: its `KVCacheConfig`.
        raw: the raw memory of each layer that gets views.
        graphs_allowed: whether `KVACTORS_ASCEND_VIEWS_ALLOW_GRAPHS` is 1.

    Raises:
        ConfigError: names all that stands against the views.
    """
    problems = [*_of_the_runner(runner, graphs_allowed), *_of_connectors(runner), *_of_layers(runner, config, raw)]
    if problems:
        raise ConfigError(
            f"{VIEWS}=1 asks for strided cache views, and this configuration is not known to take them: "
            f"{'; '.join(dict.fromkeys(problems))}. Nothing was changed; unset {VIEWS}, or leave out what is named"
        )


def _of_the_runner(runner: Any, graphs_allowed: bool) -> Iterator[str]:
    """A switch that a version of the runner does not have is off."""
    if _captures_graphs(runner) and not graphs_allowed:
        yield f"graph capture (start with enforce_eager, or set {GRAPHS}=1 as well)"
    if getattr(runner, "use_sparse", False):
        yield "sparse attention"
    offloading = getattr(runner.vllm_config.cache_config, "kv_offloading_size", None) is not None
    if offloading or getattr(runner, "sparse_kv_offload_enabled", False):
        yield "KV offload"
    quantisation = getattr(runner.vllm_config, "quant_config", None)
    if getattr(quantisation, "enable_fa_quant", False):
        yield "a quantised K or V whose type the specification does not name (fa_quant)"


def _captures_graphs(runner: Any) -> bool:
    says: bool | None = getattr(runner, "use_aclgraph", None)
    if says is not None:
        return says
    mode = runner.vllm_config.compilation_config.cudagraph_mode
    return getattr(mode, "name", str(mode)) != "NONE" and not runner.vllm_config.model_config.enforce_eager


def _of_connectors(runner: Any) -> Iterator[str]:
    transfer = runner.vllm_config.kv_transfer_config
    if transfer is None:
        return
    agents = import_module("vllm.distributed.kv_transfer")
    if not agents.has_kv_transfer_group():
        yield f"KV connector {transfer.kv_connector} ({transfer.kv_role}), which is not there yet and cannot be asked"
        return
    for connector in _leaves(agents.get_kv_transfer_group()):
        kind = type(connector)
        if getattr(kind, ACCEPTS, False) is not True:
            yield f"KV connector {kind.__name__} ({transfer.kv_role}), which does not declare {ACCEPTS}"


def _leaves(connector: Any) -> Iterator[Any]:
    """Connectors that consist of others (vLLM's MultiConnector) are asked one by one."""
    inner = getattr(connector, "_connectors", None)
    if not inner:
        yield connector
        return
    for one in inner:
        yield from _leaves(one)


def _of_layers(runner: Any, config: Any, raw: Mapping[str, Raw]) -> Iterator[str]:
    from kvactors.memory.placement import is_state, layer_specs

    specs = layer_specs(config)
    pages: dict[int, tuple[str, int]] = {}
    for name, memory in raw.items():
        spec = specs[name][1]
        parts = memory if isinstance(memory, tuple | list) else (memory,)
        first, page = pages.setdefault(parts[0].data_ptr(), (name, int(spec.page_size_bytes)))
        if page != spec.page_size_bytes:
            yield f"{name} and {first}, which share memory with pages of {spec.page_size_bytes} and {page} bytes"
        if not is_state(spec):
            yield from _of_attention(runner, name, spec, parts, alone=parts is not memory)


def _of_attention(runner: Any, name: str, spec: Any, parts: Any, *, alone: bool) -> Iterator[str]:
    kind = type(spec)
    if hasattr(spec, "cache_sparse_li_c8") or getattr(spec, "cache_sparse_sfa_c8", False):
        yield f"the sparse cache of {name}"
    elif not hasattr(spec, "num_kv_heads"):
        yield f"the cache of {name}, a {kind.__name__}, which is neither attention nor a recurrent state"
    elif "cache_only_layers" in name or "HiddenState" in kind.__name__:
        yield f"the hidden states in {name}, which are no K and V"
    elif getattr(runner, "use_compress", False) or _tokens_per_row(spec) != 1:
        if getattr(kind, ACCEPTS, False) is not True:
            yield f"the compressed cache of {name}, whose {kind.__name__} does not declare {ACCEPTS}"
    elif getattr(spec, "store_on_host", False):
        yield f"KV offload of {name}"
    elif getattr(spec, "scale_dim", 0):
        yield f"the quantised cache of {name} with its scales"
    elif alone and getattr(spec, "head_size_v", None) == 0:
        yield f"the latent vectors (MLA) of {name} in one tensor, of which the operators want two parts"
    elif not alone and len(parts) != 2:
        yield f"the cache of {name} in {len(parts)} tensors, where K and V are two"


def _tokens_per_row(spec: Any) -> Any:
    return getattr(spec, "compress_ratio", getattr(spec, "tokens_per_state", 1))
