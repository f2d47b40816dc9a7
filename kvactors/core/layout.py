"""The layout of KV objects: groups, their cache entries, ranges inside an object, digest and keys.

One object holds one block of one group, for one storing head (or rank) of one pipeline stage: the bytes of the group's
entries on this stage, ordered by physical layer, then by entry name. Local memory is not part of a layout except for the
stride: block `i` of an entry lies at `base + i * stride`, and only `nbytes` of each stride are payload.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from kvactors.core.ids import ModelLayer, StageLayer
from kvactors.errors import LayoutError

NAMESPACE_MARK = "::"
"""Stands between a namespace and the model's name in every key."""

MOST_LAYERS = 1 << 16
"""Of a model: no real one comes near. What is made for each layer, whether it has a cache or not, would take the memory."""

_NAMESPACE = re.compile(r"[A-Za-z0-9._/-]+")


class GroupKind(StrEnum):
    """What the layers of a group need from the past; see `core/reachability.py` for what each kind means for a hit."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    MLA = "mla"
    COMPRESSED = "compressed"
    INDEXER = "indexer"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One registered cache tensor of one layer.

    Attributes:
        name: cache name within the layer ("k", "v", "conv", …).
        nbytes: payload of one block in bytes.
        stride_bytes: distance between two blocks in local memory; None = nbytes. The gap is padding, never transferred.
        dtype: canonical element kind ("bf16", "fp8_e4m3"); part of the digest.
    """

    name: str
    nbytes: int
    stride_bytes: int | None = None
    dtype: str = ""

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise LayoutError(f"entry name {self.name!r}: must be a non-empty string")
        _whole(f"entry {self.name!r}: nbytes", self.nbytes, 1)
        if self.stride_bytes is not None:
            _whole(f"entry {self.name!r}: stride_bytes", self.stride_bytes, 1)
            if self.stride_bytes < self.nbytes:
                raise LayoutError(
                    f"entry {self.name!r}: {self.nbytes} bytes per block are larger than the stride of {self.stride_bytes}; "
                    "give a stride of at least the payload"
                )

    @property
    def stride(self) -> int:
        return self.nbytes if self.stride_bytes is None else self.stride_bytes


@dataclass(frozen=True)
class Group:
    """Layers that share block ids.

    Attributes:
        id: number of the group, unique in its layout.
        kind: what its layers need from the past.
        block_tokens: RAW tokens that one block covers; a compression ratio is already folded in.
        layers: physical layer -> its cache entries on this stage; may be empty on a stage that has none of the group.
        window: sliding window in tokens (sliding_window only, at least 2).
        chunk_tokens: attention chunk in tokens (chunked_local only).
        speculative: a draft model re-reads the last block of a hit.
        kv_heads: KV heads of the whole model; None = every TP rank its own head; 1 = one writer.
    """

    id: int
    kind: GroupKind
    block_tokens: int
    layers: Mapping[int, Sequence[CacheEntry]]
    window: int | None = None
    chunk_tokens: int | None = None
    speculative: bool = False
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        where = f"group {self.id}"
        _whole("group id", self.id, 0)
        try:
            object.__setattr__(self, "kind", GroupKind(self.kind))
        except ValueError:
            raise LayoutError(f"{where}: unknown kind {self.kind!r}; one of {', '.join(k.value for k in GroupKind)}") from None
        _whole(f"{where}: block_tokens", self.block_tokens, 1)
        self._check_reach(where)
        if self.kv_heads is not None:
            _whole(f"{where}: kv_heads", self.kv_heads, 1)
        layers: dict[int, tuple[CacheEntry, ...]] = {}
        for layer in sorted(self.layers):
            _whole(f"{where}: layer number", layer, 0)
            if layer >= MOST_LAYERS:
                raise LayoutError(f"{where}: layer number = {layer}: must be less than {MOST_LAYERS}; count layers from 0")
            entries = tuple(sorted(self.layers[layer], key=lambda e: e.name))
            if not entries:
                raise LayoutError(f"{where}, layer {layer}: has no entries; leave the layer out or give it one")
            for a, b in itertools.pairwise(entries):
                if a.name == b.name:
                    raise LayoutError(f"{where}, layer {layer}: entry {a.name!r} is given twice")
            layers[layer] = entries
        object.__setattr__(self, "layers", MappingProxyType(layers))

    def _check_reach(self, where: str) -> None:
        if self.kind is GroupKind.SLIDING_WINDOW:
            if self.window is None:
                raise LayoutError(f"{where}: kind sliding_window needs a window (tokens, at least 2)")
            _whole(f"{where}: window", self.window, 2)
        elif self.window is not None:
            raise LayoutError(f"{where}: a window is only for kind sliding_window, not for {self.kind.value}")
        if self.kind is GroupKind.CHUNKED_LOCAL:
            if self.chunk_tokens is None:
                raise LayoutError(f"{where}: kind chunked_local needs chunk_tokens")
            _whole(f"{where}: chunk_tokens", self.chunk_tokens, 1)
        elif self.chunk_tokens is not None:
            raise LayoutError(f"{where}: chunk_tokens is only for kind chunked_local, not for {self.kind.value}")

    def __reduce__(self) -> tuple[Any, ...]:
        layers = {layer: list(entries) for layer, entries in self.layers.items()}
        args = (self.id, self.kind, self.block_tokens, layers, self.window, self.chunk_tokens, self.speculative, self.kv_heads)
        return Group, args

    def __hash__(self) -> int:
        return hash((self.id, self.kind, self.block_tokens, self.window, self.chunk_tokens, self.speculative))


class EntryRange(NamedTuple):
    """Where an entry lies in its object, and how its blocks lie in local memory (bytes)."""

    layer: ModelLayer
    entry: CacheEntry
    offset: int


@dataclass(frozen=True)
class KVLayout:
    """All groups of one pipeline stage of a model.

    Attributes:
        model: name that starts every key; a namespace, if any, is its prefix.
        groups: in order; at least one has layers.
        tp_size, pp_rank, pp_size: the parallel shape of the instance.
        first_layer: model layer that is `StageLayer` 0; by default 0 on the first stage, else the stage's lowest layer.

    Raises:
        LayoutError: when the groups or the sizes contradict each other; says which and how.
    """

    model: str
    groups: Sequence[Group]
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    first_layer: int | None = None
    _by_id: Mapping[int, Group] = field(init=False, repr=False, compare=False)
    _ranges: Mapping[int, tuple[EntryRange, ...]] = field(init=False, repr=False, compare=False)
    _digest: str = field(init=False, repr=False, compare=False)
    _key_prefix: Mapping[int, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.model or not isinstance(self.model, str):
            raise LayoutError(f"model name {self.model!r}: must be a non-empty string")
        _whole("tp_size", self.tp_size, 1)
        _whole("pp_size", self.pp_size, 1)
        _whole("pp_rank", self.pp_rank, 0)
        if self.pp_rank >= self.pp_size:
            raise LayoutError(f"pp_rank {self.pp_rank}: must be less than pp_size {self.pp_size}")
        put = object.__setattr__
        put(self, "groups", tuple(self.groups))
        if not any(g.layers for g in self.groups):
            raise LayoutError("a layout needs at least one group with layers")
        by_id: dict[int, Group] = {}
        for g in self.groups:
            if g.id in by_id:
                raise LayoutError(f"group id {g.id} is given twice")
            by_id[g.id] = g
            heads = None if g.kind in (GroupKind.MLA, GroupKind.STATE) else g.kv_heads  # those are not split by head
            if heads is not None and heads < self.tp_size and self.tp_size % heads:
                raise LayoutError(f"group {g.id}: {g.kv_heads} KV heads do not divide tp_size {self.tp_size} evenly")
        lowest = min(layer for g in self.groups for layer in g.layers)
        first = self.first_layer if self.first_layer is not None else (0 if self.pp_rank == 0 else lowest)
        if not 0 <= first <= lowest:
            raise LayoutError(f"first_layer {first}: must not be above the stage's lowest layer {lowest}")
        put(self, "first_layer", first)
        put(self, "_by_id", MappingProxyType(by_id))
        put(self, "_ranges", MappingProxyType({g.id: _tile(g) for g in self.groups}))
        put(self, "_digest", self._compute_digest())
        put(self, "_key_prefix", MappingProxyType({g.id: self._prefix(g) for g in self.groups}))

    def __reduce__(self) -> tuple[Any, ...]:
        return KVLayout, (self.model, list(self.groups), self.tp_size, self.pp_rank, self.pp_size, self.first_layer)

    # -- geometry ----------------------------------------------------------------------------------------------------

    def group(self, group_id: int) -> Group:
        try:
            return self._by_id[group_id]
        except KeyError:
            raise LayoutError(f"there is no group {group_id}; this layout has {sorted(self._by_id)}") from None

    def object_bytes(self, group_id: int) -> int:
        """Bytes of one object of the group."""
        self.group(group_id)
        ranges = self._ranges[group_id]
        return ranges[-1].offset + ranges[-1].entry.nbytes if ranges else 0

    def ranges(self, group_id: int) -> tuple[EntryRange, ...]:
        """All entries of the group in object order, with their offsets; they tile the object exactly."""
        self.group(group_id)
        return self._ranges[group_id]

    def entry_ranges(self, group_id: int, layer: int) -> list[tuple[int, int]]:
        """(offset, nbytes) of the group's entries on a physical layer, in object order; empty where it has none."""
        return [(r.offset, r.entry.nbytes) for r in self.ranges(group_id) if r.layer == layer]

    def commit_layer(self, group_id: int) -> ModelLayer:
        """The physical layer after which the group's objects are complete on this stage."""
        layers = self.group(group_id).layers
        if not layers:
            raise LayoutError(f"group {group_id} has no layer on this stage, so nothing of it is ever committed here")
        return ModelLayer(max(layers))

    def stage_layer(self, layer: int) -> StageLayer:
        """The stage's own number of a physical layer."""
        return StageLayer(layer - self._first)

    def model_layer(self, layer: int) -> ModelLayer:
        """The physical number of a stage layer."""
        return ModelLayer(layer + self._first)

    @property
    def stage_layers(self) -> int:
        """How many layers a step walks on this stage; layers without cache entries count."""
        return max(layer for g in self.groups for layer in g.layers) - self._first + 1

    @property
    def _first(self) -> int:
        assert self.first_layer is not None
        return self.first_layer

    # -- who stores --------------------------------------------------------------------------------------------------

    def put_step(self, group_id: int) -> int:
        """One of every `put_step` TP ranks stores the group; the others hold copies of its heads.

        Recurrent state is split over all ranks whatever the number of KV heads, unless it is replicated (kv_heads 1);
        MLA caches are replicated. Source: the storage rules of vLLM-Ascend's AscendStore.
        """
        g = self.group(group_id)
        if g.kind is GroupKind.MLA or g.kv_heads == 1:
            return self.tp_size
        if g.kind is GroupKind.STATE or g.kv_heads is None or g.kv_heads >= self.tp_size:
            return 1
        return self.tp_size // g.kv_heads

    def heads(self, group_id: int) -> int:
        """Number of storing heads of the group: objects per block and stage."""
        return self.tp_size // self.put_step(group_id)

    def head_of(self, group_id: int, tp_rank: int) -> int:
        """The head whose objects a TP rank reads (and writes, if it stores)."""
        if not 0 <= tp_rank < self.tp_size:
            raise LayoutError(f"tp_rank {tp_rank}: must be from 0 to {self.tp_size - 1}")
        return tp_rank // self.put_step(group_id)

    def stores(self, group_id: int, tp_rank: int) -> bool:
        """Whether a TP rank is the one writer of its head."""
        return tp_rank % self.put_step(group_id) == 0

    # -- identity ----------------------------------------------------------------------------------------------------

    @property
    def digest(self) -> str:
        """SHA-256 over TP and PP size and every group's block size, layers and entries: 64 lower-case hex digits.

        Two instances that wrap the same specs differently get the same digest; strides are not part of it. It is no
        checksum of weights and isolates no tenants: use a namespace for those.
        """
        return self._digest

    def _compute_digest(self) -> str:
        groups = [
            {
                "block_tokens": g.block_tokens,
                "layers": [[layer, [[e.name, e.nbytes, e.dtype] for e in entries]] for layer, entries in g.layers.items()],
            }
            for g in self.groups
        ]
        document = {"tp": self.tp_size, "pp": self.pp_size, "groups": groups}
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def _prefix(self, g: Group) -> str:
        stage = f"pp_rank:{self.pp_rank}@" if self.pp_size > 1 else ""
        if len(self.groups) > 1:
            return f"{self.model}@mooncake_hybrid_v1:{self._digest}@{stage}group:{g.id}@block:{g.block_tokens}@"
        return f"{self.model}@mooncake_pp_v1:{self._digest}@{stage}" if stage else f"{self.model}@"

    def key(self, group_id: int, block_hash: bytes, head: int = 0) -> str:
        """The store key of a block; `block_hash` is the block's chained hash (bytes), shown in lower-case hex."""
        if not 0 <= head < self.heads(group_id):
            raise LayoutError(f"group {group_id}: head {head} does not exist; it has {self.heads(group_id)}")
        return f"{self._key_prefix[group_id]}{block_hash.hex()}@{head}"

    def key_parts(self, group_id: int, head: int = 0) -> tuple[str, str]:
        """What stands before and after the hash in the group's keys, for callers that make many."""
        key = self.key(group_id, b"", head)
        return key[: key.rindex("@")], f"@{head}"

    def with_model(self, model: str) -> KVLayout:
        return KVLayout(model, self.groups, self.tp_size, self.pp_rank, self.pp_size, self.first_layer)

    def with_namespace(self, namespace: str) -> KVLayout:
        """The same layout with keys of its own: another epoch of the weights, another tenant."""
        return self.with_model(f"{_namespace(namespace)}{NAMESPACE_MARK}{self.model}")


def check_model_name(model: str) -> None:
    """Refuses a model's own name that would give its keys to a namespace: `a::m` has the keys of `m` in the namespace `a`.

    Raises:
        LayoutError: it holds the mark of a namespace.
    """
    if NAMESPACE_MARK in model:
        raise LayoutError(
            f"model name {model!r}: must not hold {NAMESPACE_MARK!r}, which ends a namespace; give the namespace apart"
        )


def namespace_pattern(namespace: str) -> str:
    """A regular expression that matches every key of a namespace, and no other key, as a whole."""
    return f"{_namespace(namespace).replace('.', '[.]')}{NAMESPACE_MARK}.*"


def _namespace(namespace: str) -> str:
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        raise LayoutError(f"namespace {namespace!r}: must be made of letters, digits, '.', '_', '-' and '/'")
    return namespace


def _tile(group: Group) -> tuple[EntryRange, ...]:
    out: list[EntryRange] = []
    offset = 0
    for layer, entries in group.layers.items():
        for entry in entries:
            out.append(EntryRange(ModelLayer(layer), entry, offset))
            offset += entry.nbytes
    return tuple(out)


def group_hashes(fine_hashes: Sequence[bytes], block_tokens: int, hash_tokens: int) -> Sequence[bytes]:
    """Hash of each whole block of a group: the last of the chained fine hashes that the block spans."""
    k = block_tokens // hash_tokens
    return fine_hashes if k == 1 else fine_hashes[k - 1 :: k]


def finest_hash_tokens(groups: Sequence[Group]) -> int:
    """The coarsest hash unit (tokens) that every group's block size is a multiple of."""
    return math.gcd(*(g.block_tokens for g in groups))


def _whole(what: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LayoutError(f"{what} = {value!r}: must be a whole number >= {least}")
