"""Prefill/decode planning per group, beside a flat plan of the same bytes.

A request of many blocks between two workers, with no two blocks neighbours on both sides, so that every block of every region
is a descriptor: the dearest case. The five groups share the regions out among them; the flat plan has all regions in one
group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvactors.bench.figures import Answer, Figure, Target
from kvactors.bench.measure import in_turn, timed
from kvactors.core.layout import GroupKind
from kvactors.disagg import (
    EntryGeometry,
    GroupBlocks,
    GroupGeometry,
    RegionCopy,
    RequestBlocks,
    TransferRegion,
    WorkerGeometry,
    plan_blocks,
    request_descriptors,
    route,
)
from kvactors.errors import TransferPlanError

NAME = "groups"
KINDS = (GroupKind.FULL, GroupKind.MLA, GroupKind.SLIDING_WINDOW, GroupKind.COMPRESSED, GroupKind.INDEXER)

_BLOCK_TOKENS, _BLOCK_BYTES = 16, 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """`layers` must be a multiple of five."""

    layers: int
    blocks: tuple[int, ...]
    repeat: int


FULL, QUICK = Sizes(60, (256, 4096), 41), Sizes(60, (256, 4096), 11)


def measure(sizes: Sizes, say: Callable[[str], object]) -> Answer:
    """Plans of both kinds, in turn.

    Raises:
        TransferPlanError: the two do not move the same bytes.
    """
    figures = []
    for blocks in sizes.blocks:
        say(f"{blocks} blocks")
        per_group, flat = _Pair(KINDS, sizes.layers, blocks), _Pair(KINDS[:1], sizes.layers, blocks)
        if per_group.plan() != flat.plan():
            raise TransferPlanError("bench groups: the two plans move different bytes")
        ways = {"groups": partial(timed, per_group.plan), "flat": partial(timed, flat.plan)}
        measured = in_turn(ways, sizes.repeat)
        case = f"{blocks} blocks, {sizes.layers} layers, five groups / one group"
        ours, theirs = (measured.median(way) * 1e6 for way in ways)
        figures.append(Figure(NAME, case, ours, theirs, "µs", Target("<=", 1.2)))
    return Answer(figures)


class _Pair:
    """A prefill and a decode worker with these groups, and a request of `blocks` blocks in each of them."""

    def __init__(self, kinds: tuple[GroupKind, ...], layers: int, blocks: int) -> None:
        tokens = blocks * _BLOCK_TOKENS
        self._groups = [_group(kind, range(i, layers, len(kinds)), blocks, tokens) for i, kind in enumerate(kinds)]
        workers = [_worker(self._groups, layers, side) for side in (1, 2)]
        self._copies: tuple[RegionCopy, ...] = route(*workers)
        rng = np.random.default_rng(0)
        ids = [tuple((rng.permutation(blocks) + 1).tolist()) for _ in range(2)]
        self._prefill, self._decode = (RequestBlocks(tokens, tuple(GroupBlocks(0, i) for _ in kinds)) for i in ids)

    def plan(self) -> tuple[int, int]:
        """Plans the whole request. Answers descriptors and bytes."""
        pairs = plan_blocks(self._groups, self._groups, self._prefill, self._decode)
        found = request_descriptors(self._copies, pairs)
        return len(found), found.total_bytes


def _group(kind: GroupKind, layers: range, blocks: int, tokens: int) -> GroupGeometry:
    entries = (EntryGeometry("kv", "bf16", _BLOCK_BYTES),)
    return GroupGeometry(
        kind=kind,
        block_tokens=_BLOCK_TOKENS,
        blocks=blocks + 1,
        layers=dict.fromkeys(layers, entries),
        kv_heads=1,
        window=tokens if kind is GroupKind.SLIDING_WINDOW else None,
    )


def _worker(groups: list[GroupGeometry], layers: int, side: int) -> WorkerGeometry:
    regions = [
        TransferRegion(f"layer{layer}", layer, (side << 40) + (layer << 30), _BLOCK_BYTES, _BLOCK_BYTES, layer % len(groups))
        for layer in range(layers)
    ]
    return WorkerGeometry(
        layout_digest="bench", tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, groups=tuple(groups), regions=tuple(regions)
    )
