"""What a layout file says twice must agree: layers with groups and with the model, bytes with heads, tokens and elements.

Many hybrid models name a layer in more than one group, and rightly so: an indexer or a compressed cache beside the attention, a
recurrent state beside it (both in parallel), the state of a compressor as a sliding window. What no model has is one cache in
two groups, or a layer whose whole attention is of two kinds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvactors.core.layout import Group, GroupKind
from kvactors.errors import LayoutError
from kvactors.layouts.elements import ELEMENT_BYTES

WHOLE_ATTENTION = (GroupKind.FULL, GroupKind.CHUNKED_LOCAL, GroupKind.MLA)
"""A layer's attention is one of these at most."""

ROW_A_TOKEN = (*WHOLE_ATTENTION, GroupKind.SLIDING_WINDOW)
"""Kinds whose blocks hold a row for each token and KV head; compressed and indexer blocks hold fewer, states none."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What a group says about the blocks of all its entries."""

    kind: GroupKind
    block_tokens: int
    kv_heads: int | None


def check_bytes(where: str, shape: BlockShape, nbytes: int, dtype: str, head_size: int | None) -> None:
    """Compares an entry's bytes with what the other fields make of them, as far as they are given; `where` ends with the entry.

    Raises:
        LayoutError: says what was found and what was expected.
    """
    item = ELEMENT_BYTES.get(dtype)
    if head_size is not None:
        if shape.kind not in ROW_A_TOKEN:
            kinds = ", ".join(kind.value for kind in ROW_A_TOKEN)
            raise LayoutError(f"{where}: head_size: found in a group of kind {shape.kind.value}, expected only in {kinds}")
        if shape.kv_heads is None:
            raise LayoutError(f"{where}: head_size: the group has no kv_heads, expected both or neither")
        if item is None:
            raise LayoutError(f"{where}: head_size: found dtype {dtype!r}, expected one of {', '.join(ELEMENT_BYTES)}")
    if shape.kv_heads is None or item is None or shape.kind not in ROW_A_TOKEN:
        return
    size = shape.block_tokens * shape.kv_heads * (head_size or 1) * item
    factors = [f"block_tokens {shape.block_tokens}", f"kv_heads {shape.kv_heads}"]
    factors += [] if head_size is None else [f"head_size {head_size}"]
    product = f"{size} ({' x '.join(factors)} x {item} bytes of {dtype})"
    if head_size is not None and nbytes != size:
        raise LayoutError(f"{where}: bytes: found {nbytes}, expected {product}")
    if nbytes % size:
        raise LayoutError(
            f"{where}: bytes: found {nbytes}, expected a multiple of {product}; "
            "leave dtype out if the cache holds something else besides"
        )


def check_layers(where: str, groups: Sequence[Group], layers: int | None, uncached: Collection[int]) -> None:
    """Checks that every layer up to the last is in a group, and in no two that exclude each other.

    Args:
        layers: how many the model has; None = up to the highest that is named.
        uncached: layers that have no cache, and so no group.

    Raises:
        LayoutError: names the group, the layer, and what was expected.
    """
    named = {layer for group in groups for layer in group.layers}
    if not named:  # the layout itself says what is wrong then
        return
    for group in groups:
        _check_numbers(f"{where}: group {group.id}", group, layers, uncached)
    _check_shared(where, groups)
    last = max([*named, *uncached]) if layers is None else layers - 1
    if beyond := [layer for layer in uncached if layer > last]:
        raise LayoutError(f"{where}: uncached_layers: found {spans(beyond)}, expected numbers from 0 to {last}")
    if missing := _gaps(sorted(named.union(uncached)), last):
        raise LayoutError(
            f"{where}: layers {missing}: found in no group, expected every layer from 0 to {last} in one at least; "
            "name those that have no cache in uncached_layers"
        )


def _check_numbers(where: str, group: Group, layers: int | None, uncached: Collection[int]) -> None:
    for layer in group.layers:
        if layers is not None and layer >= layers:
            raise LayoutError(
                f"{where}: found layer {layer}, expected numbers from 0 to {layers - 1}: the model has {layers} layers"
            )
        if layer in uncached:
            raise LayoutError(f"{where}: found layer {layer}, which uncached_layers names too; expected it in one of them")


def _check_shared(where: str, groups: Sequence[Group]) -> None:
    caches: dict[tuple[int, str], int] = {}
    attention: dict[int, Group] = {}
    for group in groups:
        for layer, entries in group.layers.items():
            here = f"{where}: group {group.id}: layer {layer}"
            for entry in entries:
                first = caches.setdefault((layer, entry.name), group.id)
                if first != group.id:
                    raise LayoutError(
                        f"{here}: found its entry {entry.name!r} here and in group {first}, expected it in one group; "
                        "take the layer out of one of them, or give another cache of it another name"
                    )
            if group.kind in WHOLE_ATTENTION:
                other = attention.setdefault(layer, group)
                if other.kind is not group.kind:
                    kinds = ", ".join(kind.value for kind in WHOLE_ATTENTION)
                    raise LayoutError(
                        f"{here}: found kind {group.kind.value} here and kind {other.kind.value} in group {other.id}, "
                        f"expected one of {kinds} a layer"
                    )


def _gaps(numbers: Sequence[int], last: int) -> str:
    """What a sorted list of numbers leaves out from 0 to `last`, in spans; however far they are apart."""
    out, expected = [], 0
    for number in (*numbers, last + 1):
        if number > expected:
            out.append(_span(expected, number - 1))
        expected = number + 1
    return ", ".join(out)


def spans(numbers: Sequence[int]) -> str:
    """0-3, 5, 7-9 for a sorted list of numbers."""
    out: list[str] = []
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            out.append(_span(numbers[start], numbers[i - 1]))
            start = i
    return ", ".join(out)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
