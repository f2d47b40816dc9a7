"""The same geometry with fewer bytes, or with other block sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.errors import LayoutError

SCALED_TO_BYTES = 16
"""Scaled entries are rounded up to a multiple of this."""


def boundary_tokens(layout: KVLayout) -> int:
    """B in tokens: the least length at which every group's blocks end."""
    return math.lcm(*(g.block_tokens for g in layout.groups))


def scale(layout: KVLayout, factor: int) -> KVLayout:
    """Divides every entry's payload by `factor`, rounded up to 16 bytes; groups, layers and padding stay as they are.

    A factor of 1 changes nothing.

    Raises:
        LayoutError: when the factor is less than 1.
    """
    if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
        raise LayoutError(f"scale {factor!r}: must be a whole number of at least 1")
    if factor == 1:
        return layout
    return _rebuilt(layout, lambda group, e: (group.block_tokens, -(-e.nbytes // (factor * SCALED_TO_BYTES)) * SCALED_TO_BYTES))


def with_block_tokens(layout: KVLayout, block_tokens: int) -> KVLayout:
    """Gives every group the same block size; what grows with tokens grows along, recurrent state and padding do not.

    Raises:
        LayoutError: when the size is less than 1.
    """
    if isinstance(block_tokens, bool) or not isinstance(block_tokens, int) or block_tokens < 1:
        raise LayoutError(f"block_tokens {block_tokens!r}: must be a whole number of at least 1")

    def resized(group: Group, entry: CacheEntry) -> tuple[int, int]:
        if group.kind is GroupKind.STATE:
            return block_tokens, entry.nbytes
        return block_tokens, max(1, -(-entry.nbytes * block_tokens // group.block_tokens))

    return _rebuilt(layout, resized)


def _rebuilt(layout: KVLayout, change: Callable[[Group, CacheEntry], tuple[int, int]]) -> KVLayout:
    groups = []
    for group in layout.groups:
        block_tokens = group.block_tokens
        layers: dict[int, list[CacheEntry]] = {}
        for layer, entries in group.layers.items():
            layers[layer] = []
            for entry in entries:
                block_tokens, nbytes = change(group, entry)
                stride = None if entry.stride_bytes is None else entry.stride_bytes - entry.nbytes + nbytes
                layers[layer].append(CacheEntry(entry.name, nbytes, stride, entry.dtype))
        groups.append(replace(group, block_tokens=block_tokens, layers=layers))
    return KVLayout(layout.model, groups, layout.tp_size, layout.pp_rank, layout.pp_size, layout.first_layer)
