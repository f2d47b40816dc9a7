"""What two workers tell each other at the handshake, and whether they can hand requests over.

One `WorkerGeometry` for each worker (one TP rank of one pipeline stage); exchanged once and kept by the peer's id, since it
changes only with a restart. Layout digests, and TP and PP sizes, may differ. What no mapping can bridge is refused here, once,
and not by every request. The digest knows neither weights nor tenants: who may talk to whom is the operator's business.
Source: docs/design/disagg.md; vllm#42895 (handshake passed, every request failed).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import msgspec

from kvactors.core.layout import GroupKind, KVLayout
from kvactors.disagg.heads import SharedGroup, TpMap
from kvactors.disagg.regions import TransferRegion
from kvactors.errors import PeerMismatchError, TransferPlanError

PROTOCOL_VERSION = 1
"""Of the structs in this file and of the messages around them; workers of different versions refuse each other."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Number = Annotated[int, msgspec.Meta(ge=0)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class EntryGeometry(msgspec.Struct, frozen=True):
    """One cache entry of a layer.

    Attributes:
        name: within the layer ("k", "v", "conv", …).
        element_kind: canonical name ("bf16", "fp8_e4m3").
        payload_bytes: of one logical block on this rank.
    """

    name: str
    element_kind: str
    payload_bytes: Count


class GroupGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """One KV group of one worker; the fields that `Group` has too mean the same.

    Attributes:
        blocks: logical blocks (slots of a state group) that the worker has; ids are below it.
        layers: model layer -> its entries on this stage, ordered by name.
        kernel_blocks: kernel blocks that make up one logical block (attention); regions count in kernel blocks.
        heads_first: every piece of a region's block is [head, token, …], so that a slice of heads is one run of bytes. Not true
            of pages that hold K and V without being split, nor of blocks with tokens first.
        scratch_slots: slots at the end of a request's list that hold no state to keep (speculative decoding; states only).
    """

    kind: GroupKind
    block_tokens: Count
    blocks: Count
    layers: dict[Number, tuple[EntryGeometry, ...]]
    kv_heads: Count | None = None
    window: Count | None = None
    chunk_tokens: Count | None = None
    kernel_blocks: Count = 1
    heads_first: bool = False
    scratch_slots: Number = 0


class WorkerGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself at the handshake.

    Attributes:
        layout_digest: `KVLayout.digest`, to tell geometries apart; equal digests are not required.
        groups: in order; regions name them by position.
        regions: the worker's registered regions.
        protocol: version of this exchange.
    """

    layout_digest: str
    tp_rank: Number
    tp_size: Ranks
    pp_rank: Number
    pp_size: Ranks
    groups: tuple[GroupGeometry, ...]
    regions: tuple[TransferRegion, ...]
    protocol: int = PROTOCOL_VERSION


def worker_geometry(
    layout: KVLayout,
    tp_rank: int,
    blocks: int,
    regions: Sequence[TransferRegion],
    *,
    kernel_blocks: Mapping[int, int] | None = None,
    heads_first: Collection[int] = (),
    scratch_slots: int = 0,
) -> WorkerGeometry:
    """The geometry of a worker with this layout.

    Args:
        blocks: logical blocks that the worker has, of every group.
        kernel_blocks: group id -> kernel blocks in one logical block; groups left out have one.
        heads_first: ids of groups whose blocks have heads outermost, see `GroupGeometry`.
        scratch_slots: speculative slots at the end of the lists of state groups.

    Raises:
        TransferPlanError: there is no such rank; a state group is said to have kernel blocks; a region names no group.
    """
    ratios = {} if kernel_blocks is None else kernel_blocks
    if not 0 <= tp_rank < layout.tp_size:
        raise TransferPlanError(f"TP rank {tp_rank}: there are {layout.tp_size} ranks, from 0")
    groups: list[GroupGeometry] = []
    for g in layout.groups:
        ratio, state = ratios.get(g.id, 1), g.kind is GroupKind.STATE
        if state and ratio != 1:
            raise TransferPlanError(
                f"group {g.id}: a recurrent state has no kernel blocks, but {ratio} are given; leave it out"
            )
        layers = {
            layer: tuple(EntryGeometry(e.name, e.dtype, e.nbytes) for e in entries) for layer, entries in g.layers.items()
        }
        groups.append(
            GroupGeometry(
                kind=g.kind,
                block_tokens=g.block_tokens,
                blocks=blocks,
                layers=layers,
                kv_heads=g.kv_heads,
                window=g.window,
                chunk_tokens=g.chunk_tokens,
                kernel_blocks=ratio,
                heads_first=g.id in heads_first,
                scratch_slots=scratch_slots if state else 0,
            )
        )
    for region in regions:
        if not 0 <= region.group_index < len(groups):
            raise TransferPlanError(f"layer {region.layer_name}: group {region.group_index} does not exist; {len(groups)} do")
    return WorkerGeometry(
        layout_digest=layout.digest,
        tp_rank=tp_rank,
        tp_size=layout.tp_size,
        pp_rank=layout.pp_rank,
        pp_size=layout.pp_size,
        groups=tuple(groups),
        regions=tuple(regions),
    )


def tp_map(prefill: WorkerGeometry, decode: WorkerGeometry) -> TpMap:
    """Who sends what to whom between the two workers' instances.

    Raises:
        PeerMismatchError: the TP sizes cannot be mapped; names both.
    """
    return TpMap([SharedGroup(g.kind, g.kv_heads) for g in prefill.groups], prefill.tp_size, decode.tp_size)


def compatible(prefill: WorkerGeometry, decode: WorkerGeometry) -> None:
    """Checks the groups of a prefill and a decode worker, before any region is looked at.

    `route` (routes.py) calls it and goes on with the regions.

    Raises:
        PeerMismatchError: protocol, number or kind of groups, block size, window, heads, order inside of a block, kernel
            blocks, entries or element kinds differ, or the TP sizes cannot be mapped; names both values.
        TransferPlanError: one of the two names a rank that its instance does not have.
    """
    for side, worker in (("prefill", prefill), ("decode", decode)):
        if worker.tp_rank >= worker.tp_size or worker.pp_rank >= worker.pp_size:
            raise TransferPlanError(
                f"the {side} worker is TP rank {worker.tp_rank} of {worker.tp_size} and stage {worker.pp_rank} of "
                f"{worker.pp_size}; ranks count from 0"
            )
    _same("protocol version", prefill.protocol, decode.protocol, "run the same release on both")
    _same("number of KV groups", len(prefill.groups), len(decode.groups), "run the same model on both")
    for i, (p, d) in enumerate(zip(prefill.groups, decode.groups, strict=True)):
        _same(f"group {i}: kind", p.kind.value, d.kind.value, "run the same model on both")
        _same(f"group {i}: block_tokens", p.block_tokens, d.block_tokens, "use the same block size on both")
        _same(f"group {i}: window", p.window, d.window, "run the same model on both")
        _same(f"group {i}: chunk_tokens", p.chunk_tokens, d.chunk_tokens, "run the same model on both")
        _same(f"group {i}: kv_heads", p.kv_heads, d.kv_heads, "run the same model on both")
        _same(
            f"group {i}: kernel blocks in a block", p.kernel_blocks, d.kernel_blocks, "use the same attention backend on both"
        )
        _same(f"group {i}: heads_first", p.heads_first, d.heads_first, "use the same cache layout on both")
    mapping = tp_map(prefill, decode)
    for i, (p, d) in enumerate(zip(prefill.groups, decode.groups, strict=True)):
        parts = [part for part in mapping.parts(i, decode.tp_rank) if part.prefill_rank == prefill.tp_rank]
        if not p.heads_first and any(not part.whole for part in parts):
            raise PeerMismatchError(
                f"group {i}: heads are not outermost in a block, so they cannot be cut",
                f"TP {prefill.tp_size}",
                f"TP {decode.tp_size}",
                "use the same TP size, or a cache layout with heads first",
            )
        for layer in p.layers.keys() & d.layers.keys():
            where = f"group {i}, layer {layer}"
            mine, theirs = p.layers[layer], d.layers[layer]
            kinds = [[f"{e.name}:{e.element_kind}" for e in entries] for entries in (mine, theirs)]
            _same(f"{where}: entries", kinds[0], kinds[1], "use the same element kinds on both")
            for a, b in zip(mine, theirs, strict=True):
                for part in parts:
                    part.cut(a.payload_bytes, b.payload_bytes, f"{where}, entry {a.name}")


def _same(what: str, prefill: object, decode: object, advice: str) -> None:
    if prefill != decode:
        raise PeerMismatchError(what, prefill, decode, advice)
