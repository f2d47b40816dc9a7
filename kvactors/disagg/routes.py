"""The route between two workers: what one prefill worker sends of each block to one decode worker, settled at the handshake."""

from __future__ import annotations

from collections import Counter

from kvactors.disagg.descriptors import RegionCopy
from kvactors.disagg.geometry import WorkerGeometry, compatible, tp_map
from kvactors.disagg.regions import TransferRegion, align_regions
from kvactors.errors import PeerMismatchError, TransferPlanError


def route(prefill: WorkerGeometry, decode: WorkerGeometry) -> tuple[RegionCopy, ...]:
    """What is copied of each block from the prefill worker to the decode worker; empty if they only exchange reports.

    Raises:
        PeerMismatchError: the two cannot hand requests over; names both values. See `compatible` and `align_regions`;
            besides, a piece has another size, or K and V lie in one unsplit piece where heads have to be cut.
        TransferPlanError: a region contradicts itself, names a group that is not there, or does not end in 63-bit addresses.
    """
    compatible(prefill, decode)
    pairs = align_regions(prefill.regions, decode.regions, prefill_stages=prefill.pp_size, decode_stages=decode.pp_size)
    mapping = tp_map(prefill, decode)
    pieces = Counter[tuple[int, int]]()
    for src, dst in pairs:
        _check(src, prefill)
        _check(dst, decode)
        pieces[src.group_index, src.layer_index] += src.pieces
    copies: list[RegionCopy] = []
    for src, dst in pairs:
        where = f"layer {src.layer_name}"
        entries = len(prefill.groups[src.group_index].layers.get(src.layer_index, ()))
        for part in mapping.parts(src.group_index, decode.tp_rank):
            if part.prefill_rank != prefill.tp_rank:
                continue
            found = pieces[src.group_index, src.layer_index]
            if not part.whole and found != entries:
                raise PeerMismatchError(
                    f"{where}: {found} piece(s) of a block for {entries} cache entries, so heads cannot be cut",
                    f"TP {prefill.tp_size}",
                    f"TP {decode.tp_size}",
                    "register K and V apart, or use the same TP size",
                )
            copies.append(RegionCopy(src, dst, part.cut(src.payload_bytes, dst.payload_bytes, where)))
    return tuple(copies)


def _check(region: TransferRegion, worker: WorkerGeometry) -> None:
    if not 0 <= region.group_index < len(worker.groups):
        raise TransferPlanError(
            f"layer {region.layer_name}: group {region.group_index} does not exist; there are {len(worker.groups)}"
        )
    group = worker.groups[region.group_index]
    blocks = group.blocks * group.kernel_blocks
    if region.base_address + blocks * region.block_bytes > 1 << 63:
        raise TransferPlanError(
            f"layer {region.layer_name}: {blocks} blocks of {region.block_bytes} bytes from {region.base_address:#x} leave the "
            "address space"
        )
