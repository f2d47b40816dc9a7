"""From vLLM's cache configuration to a layout: groups with their kinds, and on a worker the entries and addresses of caches.

Both halves read specifications by attribute and class name: the scheduler sees a group's own specification, a worker may see a
wrapper of its layers' specifications, and both must come to the same digest. So nothing of how a framework wraps them goes in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvactors.core.layout import Group, GroupKind, KVLayout, check_model_name
from kvactors.errors import LayoutError
from kvactors.memory.entries import group_memory, registered_regions
from kvactors.vllm.names import CacheName, cache_names
from kvactors.vllm.support import inner_specs, spec_names

Caches = Mapping[str, Tensor | Sequence[Tensor]]
"""Layer name -> its cache as `register_kv_caches` gets it: one tensor, or several (K and V; states)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a layout needs to know besides its caches.

    Attributes:
        model: name that starts every key, without a path and without a namespace.
        hidden_layers: layers of the model itself, drafts not counted.
        kv_heads: KV heads of the whole model.
    """

    model: str
    hidden_layers: int
    kv_heads: int
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """One worker's layout, and where its caches are.

    Attributes:
        layout: of this stage; a group without layers here is in it, empty.
        bases: (group id, physical layer, entry name) -> address of block 0.
        regions: (address, bytes) to register with a store.
        names: layer name -> place; aliases of another layer's cache are not in it.
    """

    layout: KVLayout
    bases: Mapping[tuple[int, int, str], int]
    regions: Sequence[tuple[int, int]]
    names: Mapping[str, CacheName]


def model_name(path: str) -> str:
    """The part of a model's name or path that does not depend on where it is kept."""
    name = path.rstrip("/").rpartition("/")[2]
    if not name:
        raise LayoutError(f"the model {path!r} has no name; give its path or its name")
    return name


def group_kind(spec: Any) -> GroupKind:
    """What a cache specification's layers need from the past.

    Raises:
        LayoutError: a specification of an unknown kind, or a wrapper of several kinds.
    """
    kinds = {_kind(inner) for inner in inner_specs(spec)}
    if len(kinds) > 1:
        if kinds <= {GroupKind.FULL, GroupKind.MLA, GroupKind.COMPRESSED, GroupKind.INDEXER}:
            return GroupKind.FULL  # all of them need an unbroken prefix
        raise LayoutError(f"a cache group of several kinds: {', '.join(sorted(kinds))}")
    return kinds.pop()


def _kind(spec: Any) -> GroupKind:
    names = spec_names(spec)
    if "MambaSpec" in names:
        return GroupKind.STATE
    if "SlidingWindowSpec" in names:
        return GroupKind.SLIDING_WINDOW
    if "ChunkedLocalAttentionSpec" in names:
        return GroupKind.CHUNKED_LOCAL
    if "MLAAttentionSpec" in names:
        if str(getattr(getattr(spec, "cache_role", None), "value", "")) == "indexer":
            return GroupKind.INDEXER
        return GroupKind.COMPRESSED if getattr(spec, "tokens_per_state", 1) > 1 else GroupKind.MLA
    if "FullAttentionSpec" in names:
        return GroupKind.FULL
    raise LayoutError(f"a cache specification of unknown kind, {type(spec).__name__}")


def make_group(number: int, spec: Any, layers: Mapping[int, Any], facts: ModelFacts, *, speculative: bool = False) -> Group:
    """One group of a layout.

    Args:
        number: the group's number in vLLM, which is its id here.
        layers: physical layer -> its entries on this stage.

    Raises:
        LayoutError: its layers need different windows, chunks or numbers of heads.
    """
    kind = group_kind(spec)
    inner = inner_specs(spec)
    window = _one(number, "sliding_window", inner) if kind is GroupKind.SLIDING_WINDOW else None
    chunk = _one(number, "attention_chunk_size", inner) if kind is GroupKind.CHUNKED_LOCAL else None
    return Group(
        number,
        kind,
        int(spec.block_size),
        layers,
        window=window,
        chunk_tokens=chunk,
        speculative=speculative,
        kv_heads=_heads(kind, inner, facts),
    )


def _one(number: int, attribute: str, specs: Sequence[Any]) -> int:
    values = {int(getattr(spec, attribute)) for spec in specs}
    if len(values) > 1:
        raise LayoutError(f"group {number}: its layers have different {attribute}: {sorted(values)}")
    return values.pop()


def _heads(kind: GroupKind, specs: Sequence[Any], facts: ModelFacts) -> int | None:
    """KV heads of the whole model for put_step; None: every rank stores its own."""
    if kind is GroupKind.STATE:
        return 1 if all(getattr(spec, "tp_replicated", False) for spec in specs) else None
    shards = {getattr(spec, "max_tp_shards", None) for spec in specs}
    if len(shards) == 1 and (known := shards.pop()) is not None:
        return int(known)
    if kind in (GroupKind.MLA, GroupKind.COMPRESSED, GroupKind.INDEXER):
        return 1
    here = max(1, facts.kv_heads // facts.tp_size)
    usual = all(int(getattr(spec, "num_kv_heads", here)) == here for spec in specs)
    return facts.kv_heads if usual else None


def worker_memory(
    config: Any, caches: Caches, facts: ModelFacts, namespace: str = "", group_ids: Sequence[int] | None = None
) -> WorkerMemory:
    """The layout of a worker's registered caches.

    Args:
        group_ids: of the groups to lay out; None = those that can be stored.

    Raises:
        LayoutError: a cache cannot be laid out; names group and layer.
    """
    chosen = config.prefix_cacheable_group_ids if group_ids is None else group_ids
    here = [name for g in chosen for name in config.kv_cache_groups[g].layer_names if name in caches]
    if not here:
        raise LayoutError("no registered cache belongs to a cache group that can be stored; is the model loaded?")
    names = cache_names(here, facts.hidden_layers)
    groups: list[Group] = []
    bases: dict[tuple[int, int, str], int] = {}
    used: dict[str, CacheName] = {}
    tensors: list[Tensor] = []
    for number in chosen:
        group = config.kv_cache_groups[number]
        views: dict[int, dict[str, Tensor]] = {}
        seen: set[tuple[int, ...]] = set()
        for name in group.layer_names:
            if name not in caches:
                continue
            parts = _tensors(caches[name])
            where = tuple(t.data_ptr() for t in parts)
            if where in seen:  # a layer that reads another's cache has none of its own
                continue
            seen.add(where)
            place = used[name] = names[name]
            of_layer = views.setdefault(place.layer, {})
            for i, tensor in enumerate(parts):
                of_layer[f"{place.entry}{_order(tensor)}{f':{i}' if len(parts) > 1 else ''}"] = tensor
            tensors.extend(parts)
        memory = group_memory(number, views, int(config.num_blocks))
        bases.update(memory.bases)
        speculative = bool(getattr(group, "is_eagle_group", False))
        groups.append(make_group(number, group.kv_cache_spec, memory.layers, facts, speculative=speculative))
    groups = _with_sure_heads(groups)
    check_model_name(facts.model)
    layout = KVLayout(facts.model, groups, tp_size=facts.tp_size, pp_rank=facts.pp_rank, pp_size=facts.pp_size)
    if namespace:
        layout = layout.with_namespace(namespace)
    return WorkerMemory(layout, bases, registered_regions(tensors), used)


def _order(tensor: Tensor) -> str:
    """Marks a cache whose tokens come before its heads in memory: its bytes are others than those of a head-major one."""
    several = tensor.dim() == 4 and tensor.shape[1] > 1 and tensor.shape[2] > 1
    return "/token-major" if several and tensor.stride(1) < tensor.stride(2) else ""


def _with_sure_heads(groups: Sequence[Group]) -> list[Group]:
    """A model says how many KV heads it has, not its layers: where they are of several attention kinds they may differ, and
    then no rank may take another's copy for its own."""
    split = (GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)
    if len({g.kind for g in groups} & set(split)) < 2:
        return list(groups)
    return [replace(g, kv_heads=None) if g.kind in split and g.kv_heads != 1 else g for g in groups]


def _tensors(cache: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [cache] if isinstance(cache, Tensor) else list(cache)
