"""Small layouts and geometries for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvactors.core.layout import GroupKind
from kvactors.disagg import EntryGeometry, GroupGeometry, TransferRegion, WorkerGeometry

BLOCKS = 100


def group(kind: str = "full", block_tokens: int = 16, **more: Any) -> GroupGeometry:
    given = {"blocks": BLOCKS, "layers": {}, **more}
    return GroupGeometry(kind=GroupKind(kind), block_tokens=block_tokens, **given)


def attention(heads: int, here: int, **more: Any) -> GroupGeometry:
    """Layer 0, K and V of 8 bytes for each head and block, `here` heads on this rank."""
    entries = (EntryGeometry("k", "bf16", 8 * here), EntryGeometry("v", "bf16", 8 * here))
    return group(**{"layers": {0: entries}, "kv_heads": heads, "heads_first": True, **more})


def state(nbytes: int = 24, **more: Any) -> GroupGeometry:
    return group("state", **{"layers": {1: (EntryGeometry("ssm", "fp32", nbytes),)}, **more})


def lanes(here: int, address: int = 1 << 20) -> list[TransferRegion]:
    """K and V of layer 0 in the halves of one block."""
    return [TransferRegion("l0", 0, address, 16 * here, 8 * here, 0, split_kv=True)]


def state_region(nbytes: int = 24, group_index: int = 1, address: int = 1 << 30) -> TransferRegion:
    return TransferRegion("l1", 1, address, nbytes, nbytes, group_index)


def worker(
    groups: Sequence[GroupGeometry], regions: Sequence[TransferRegion], tp: int = 1, rank: int = 0, **more: Any
) -> WorkerGeometry:
    given = {"layout_digest": "d", "pp_rank": 0, "pp_size": 1, **more}
    return WorkerGeometry(tp_rank=rank, tp_size=tp, groups=tuple(groups), regions=tuple(regions), **given)


def gqa(heads: int, tp: int, rank: int = 0, **more: Any) -> WorkerGeometry:
    """A worker with one attention group of one layer."""
    here = max(1, heads // tp)
    return worker([attention(heads, here, **more)], lanes(here), tp, rank)
