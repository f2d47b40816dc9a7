"""What a worker says of its caches to the workers that it hands requests to, or takes them from. It is read from tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec import structs
from torch import Tensor

from kvactors.core.layout import Group, GroupKind
from kvactors.disagg.geometry import WorkerGeometry, worker_geometry
from kvactors.disagg.regions import TransferRegion, expand_transfer_regions
from kvactors.errors import LayoutError
from kvactors.vllm.layouts import Caches, ModelFacts, WorkerMemory, worker_memory
from kvactors.vllm.support import inner_specs

HEADED = frozenset({GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL})
"""Kinds whose caches have heads that ranks share."""

V = TypeVar("V")


class Inside(NamedTuple):
    """How the blocks of a group are made."""

    kernel_blocks: int = 1
    heads_first: bool = False


def transfer_memory(config: Any, caches: Caches, facts: ModelFacts, stored: WorkerMemory | None) -> WorkerMemory:
    """The layout of the caches that are handed over: what is `stored`, where that is the same."""
    if stored is not None and tuple(config.transfer_group_ids) == tuple(config.prefix_cacheable_group_ids):
        return stored
    return worker_memory(config, caches, facts, group_ids=config.transfer_group_ids)


def handoff_geometry(
    config: Any, caches: Caches, memory: WorkerMemory, tp_rank: int, kv_heads: int | None = None
) -> WorkerGeometry:
    """The geometry of a worker.

    Args:
        config: vLLM's KVCacheConfig.
        memory: of `caches`, over `config.transfer_group_ids`.
        kv_heads: those of every attention layer of the whole model (`heads.only_kv_heads`); None = layers may differ, and a
            group of which that is in doubt is handed over between equal TP sizes only.

    Raises:
        LayoutError, TransferPlanError: the caches do not fit each other; names group or layer.
    """
    groups = memory.layout.groups
    known = {g.id: _inside(config, g, caches, memory) for g in groups if g.layers}
    headed = [known[g.id] for g in groups if g.id in known and g.kind is not GroupKind.STATE]
    usual = Inside(_common((i.kernel_blocks for i in headed), 1), _common((i.heads_first for i in headed), False))
    # A stage without layers of a group says of it what holds for the others: stages are compared, and none of it is sent.
    inside = {g.id: known.get(g.id, Inside() if g.kind is GroupKind.STATE else usual) for g in groups}
    found = worker_geometry(
        memory.layout,
        tp_rank,
        int(config.num_blocks),
        _regions(config, memory, inside),
        kernel_blocks={g.id: inside[g.id].kernel_blocks for g in groups if g.kind is not GroupKind.STATE},
        heads_first=[g.id for g in groups if g.kind in HEADED and inside[g.id].heads_first],
    )
    if kv_heads is None:
        return found
    here = max(1, kv_heads // memory.layout.tp_size)
    sure = [
        structs.replace(known, kv_heads=kv_heads)
        if known.kv_heads is None and g.kind in HEADED and _has_heads(config.kv_cache_groups[g.id].kv_cache_spec, here)
        else known
        for g, known in zip(groups, found.groups, strict=True)
    ]
    return structs.replace(found, groups=tuple(sure))


def _has_heads(spec: Any, here: int) -> bool:
    """Whether each of a group's layers has so many heads on this rank, as all layers of the model should."""
    return all(_heads(inner) == here for inner in inner_specs(spec))


def _common(values: Iterable[V], otherwise: V) -> V:
    found = set(values)
    return found.pop() if len(found) == 1 else otherwise


def _regions(config: Any, memory: WorkerMemory, inside: Mapping[int, Inside]) -> Sequence[TransferRegion]:
    rows = list(_rows(config, memory, inside))
    return expand_transfer_regions(
        [r[0] for r in rows],
        [r[1] for r in rows],
        [r[2] for r in rows],
        [r[3] for r in rows],
        [r[4] for r in rows],
        blocks_first=False,
        group_indices=[r[5] for r in rows],
    )


def _rows(config: Any, memory: WorkerMemory, inside: Mapping[int, Inside]) -> Iterator[tuple[int, int, int, str, int, int]]:
    """Of each cache entry: address, stride and payload (of a kernel block), layer name, layer, place of its group."""
    for position, group in enumerate(memory.layout.groups):
        names = {
            (memory.names[n].layer, memory.names[n].entry): n
            for n in config.kv_cache_groups[group.id].layer_names
            if n in memory.names
        }
        kernel = inside[group.id].kernel_blocks
        for layer, entries in sorted(group.layers.items()):
            for entry in entries:
                base = memory.bases[group.id, layer, entry.name]
                name = _registered_name(names, layer, entry.name)
                yield base, entry.stride // kernel, entry.nbytes // kernel, name, layer, position


def _registered_name(names: Mapping[tuple[int, str], str], layer: int, entry: str) -> str:
    """The layer name of a cache entry, whose own name begins with the layer's."""
    found = [(len(of), name) for (number, of), name in names.items() if number == layer and entry.startswith(of)]
    if not found:
        raise LayoutError(f"layer {layer}: the cache entry {entry!r} belongs to no registered layer name")
    return max(found)[1]


def _inside(config: Any, group: Group, caches: Caches, memory: WorkerMemory) -> Inside:
    if group.kind is GroupKind.STATE:
        return Inside()
    blocks, spec = int(config.num_blocks), config.kv_cache_groups[group.id].kv_cache_spec
    tensors = [
        (name, tensor)
        for name in config.kv_cache_groups[group.id].layer_names
        if name in memory.names
        for tensor in _tensors(caches[name])
    ]
    kernel = _common((tensor.shape[0] // blocks for _, tensor in tensors), 1)
    tokens = group.block_tokens // kernel
    inner: Mapping[str, Any] = getattr(spec, "kv_cache_specs", None) or {}
    first = group.kind in HEADED and all(_heads_first(t, _heads(inner.get(name, spec)), tokens) for name, t in tensors)
    return Inside(kernel, first)


def _heads(spec: Any) -> int:
    return int(getattr(spec, "num_kv_heads", 0))


def _heads_first(tensor: Tensor, heads: int, tokens: int) -> bool:
    """Whether a (kernel) block is one run of bytes, with one run in it for each head."""
    if tensor.dim() != 4 or tuple(tensor.shape[1:3]) != (heads, tokens):
        return False
    return tensor[0].is_contiguous()


def _tensors(cache: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [cache] if isinstance(cache, Tensor) else list(cache)
