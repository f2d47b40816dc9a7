"""Transfer regions: where the blocks of one cache tensor lie, and which regions of two workers belong together.

A region is one registered cache tensor of one layer: block `b` begins at `base_address + b * block_bytes`, and its payload is
what is sent of it. Layers that share an allocation keep a region each. Source: docs/design/disagg.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvactors.errors import PeerMismatchError, TransferPlanError


@dataclass(frozen=True, slots=True)
class TransferRegion:
    """One cache tensor of one layer on one worker.

    Attributes:
        layer_name: the layer's registered name; both workers use the same.
        layer_index: the layer's number in the whole model.
        base_address: address of block 0.
        block_bytes: distance between two blocks (the stride), padding included.
        payload_bytes: bytes of one block that belong to the region; of a split region, the bytes of K alone and of V alone.
        group_index: position of its KV group.
        split_kv: a block is K in its first half and V in its second, sent as two pieces. Follows from the other fields where
            regions are made as `expand_transfer_regions` says, so it is no part of equality.
    """

    layer_name: str
    layer_index: int
    base_address: int
    block_bytes: int
    payload_bytes: int
    group_index: int = 0
    split_kv: bool = field(default=False, compare=False)

    @property
    def pieces(self) -> int:
        """Pieces of `payload_bytes` in one block, one behind the other."""
        return 2 if self.split_kv else 1


def expand_transfer_regions(
    base_addresses: Sequence[int],
    block_bytes: Sequence[int],
    payload_bytes: Sequence[int],
    layer_names: Sequence[str],
    layer_indices: Sequence[int],
    blocks_first: bool,
    group_indices: Sequence[int] | None = None,
    split_kv: Sequence[bool] | None = None,
) -> list[TransferRegion]:
    """The regions of a worker's registered tensors, one for each, in their order.

    A region is split only when `blocks_first` and its `split_kv` are both true. Its payload is then half of its block, whatever
    `payload_bytes` says; so a page with padding cannot be split: give its K and its V as two tensors.

    Args:
        base_addresses, block_bytes, payload_bytes, layer_names, layer_indices: one value for each tensor (bytes).
        blocks_first: a block of an attention tensor holds both K and V.
        group_indices: KV group of each tensor; None = all of group 0.
        split_kv: whether K and V of the tensor are sent apart; None = all as `blocks_first`. False for recurrent states.

    Raises:
        TransferPlanError: (a ValueError) two of the lists have different lengths; names both.
    """
    count = len(base_addresses)
    groups = [0] * count if group_indices is None else group_indices
    split = [blocks_first] * count if split_kv is None else split_kv
    given = {
        "block_bytes": block_bytes,
        "payload_bytes": payload_bytes,
        "layer_names": layer_names,
        "layer_indices": layer_indices,
        "group_indices": groups,
        "split_kv": split,
    }
    for name, values in given.items():
        if len(values) != count:
            raise TransferPlanError(
                f"{name} has {len(values)} values and base_addresses has {count}; give one for each registered tensor"
            )
    regions: list[TransferRegion] = []
    for base, stride, payload, layer_name, index, group, apart in zip(
        base_addresses, block_bytes, payload_bytes, layer_names, layer_indices, groups, split, strict=True
    ):
        halves = blocks_first and apart
        regions.append(TransferRegion(layer_name, index, base, stride, stride // 2 if halves else payload, group, halves))
    return regions


def align_regions(
    prefill: Sequence[TransferRegion], decode: Sequence[TransferRegion], *, prefill_stages: int = 1, decode_stages: int = 1
) -> list[tuple[TransferRegion, TransferRegion]]:
    """The regions of two workers that hold the same cache, as (prefill's, decode's), in prefill's order.

    Regions belong together by layer name; several of one layer (K and V, conv and ssm) in the order of their registration.
    Layers that only one of the two has are left out where the other side is one of several pipeline stages.

    Raises:
        PeerMismatchError: a layer is missing, or the two differ in its number of regions, its index, its group, or in whether K
            and V are apart; names both values.
        TransferPlanError: a region contradicts itself.
    """
    mine, theirs = _by_layer(prefill), _by_layer(decode)
    for side, one, other, stages in (
        ("prefill", mine, theirs, decode_stages),
        ("decode", theirs, mine, prefill_stages),
    ):
        if stages == 1 and (lone := [name for name in one if name not in other]):
            here, there = f"{len(one)} layers with {lone[0]!r}", f"{len(other)} without it"
            raise PeerMismatchError(
                f"layer {lone[0]}",
                *((here, there) if side == "prefill" else (there, here)),
                "run the same model, with the same draft layers, on both",
            )
    pairs: list[tuple[TransferRegion, TransferRegion]] = []
    for name, regions in mine.items():
        peers = theirs.get(name)
        if peers is None:
            continue
        if len(regions) != len(peers):
            raise PeerMismatchError(
                f"layer {name}", f"{len(regions)} regions", f"{len(peers)}", "register the same cache tensors on both"
            )
        for a, b in zip(regions, peers, strict=True):
            _require_alike(a, b)
            pairs.append((a, b))
    return pairs


def _by_layer(regions: Sequence[TransferRegion]) -> dict[str, list[TransferRegion]]:
    found: dict[str, list[TransferRegion]] = {}
    for region in regions:
        _check(region)
        found.setdefault(region.layer_name, []).append(region)
    return found


def _check(region: TransferRegion) -> None:
    used = region.pieces * region.payload_bytes
    if not 0 < used <= region.block_bytes or (region.split_kv and used != region.block_bytes):
        raise TransferPlanError(
            f"layer {region.layer_name}: {region.pieces} piece(s) of {region.payload_bytes} bytes do not fit a block of "
            f"{region.block_bytes}; a split block is two equal halves, any other holds at least its payload"
        )
    if not 0 <= region.base_address < 1 << 63:
        raise TransferPlanError(f"layer {region.layer_name}: {region.base_address} is no address; give a 63-bit number")


def _require_alike(prefill: TransferRegion, decode: TransferRegion) -> None:
    for what, a, b in (
        ("layer index", prefill.layer_index, decode.layer_index),
        ("KV group", prefill.group_index, decode.group_index),
        ("pieces of a block", prefill.pieces, decode.pieces),
    ):
        if a != b:
            raise PeerMismatchError(f"layer {prefill.layer_name}: {what}", a, b, "register the same cache tensors on both")
