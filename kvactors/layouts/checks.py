"""What a layout file says twice must agree: layers with groups and with the model, bytes with heads, tokens and elements.

The more a file says, the more is checked. Layers without a cache are common (experts alone), and so are layers in more than one
group (an indexer or a compressed cache beside the attention, a state in parallel). So a layer that was forgotten can be told
only where the file says how many there are, and bytes that are wrong only where it says the size of a head.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvactors.core.layout import Group, GroupKind
from kvactors.errors import LayoutError
from kvactors.layouts.elements import ELEMENT_BYTES
from kvactors.textfiles import did_you_mean

ROW_A_TOKEN = (GroupKind.FULL, GroupKind.CHUNKED_LOCAL, GroupKind.MLA, GroupKind.SLIDING_WINDOW)
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
    if head_size is None:
        return
    if shape.kind not in ROW_A_TOKEN:
        kinds = ", ".join(kind.value for kind in ROW_A_TOKEN)
        raise LayoutError(f"{where}: head_size: found in a group of kind {shape.kind.value}, expected only in {kinds}")
    if shape.kv_heads is None:
        raise LayoutError(f"{where}: head_size: the group has no kv_heads, expected both or neither")
    item = ELEMENT_BYTES.get(dtype)
    if item is None:
        hint = did_you_mean(dtype, ELEMENT_BYTES) if dtype else ""
        raise LayoutError(f"{where}: head_size: found dtype {dtype!r}, expected one of {', '.join(ELEMENT_BYTES)}{hint}")
    size = shape.block_tokens * shape.kv_heads * head_size * item
    if nbytes != size:
        factors = f"block_tokens {shape.block_tokens} x kv_heads {shape.kv_heads} x head_size {head_size}"
        raise LayoutError(f"{where}: bytes: found {nbytes}, expected {size} ({factors} x {item} bytes of {dtype})")


def check_layers(where: str, groups: Sequence[Group], layers: int | None, uncached: Collection[int] | None) -> None:
    """Checks that every layer of the model is in a group or has no cache, where the file says how many or which.

    Args:
        layers: how many the model has; None = up to the highest that is named.
        uncached: layers that have no cache, and so no group; None = the file does not say.

    Raises:
        LayoutError: names the group, the layer, and what was expected.
    """
    named = {layer for group in groups for layer in group.layers}
    if not named or (layers is None and uncached is None):  # without any, the layout itself says what is wrong
        return
    uncached = uncached or ()
    for group in groups:
        _check_numbers(f"{where}: group {group.id}", group, layers, uncached)
    last = max([*named, *uncached]) if layers is None else layers - 1
    if beyond := [layer for layer in uncached if layer > last]:
        raise LayoutError(f"{where}: uncached_layers: found {spans(beyond)}, expected numbers from 0 to {last}")
    if missing := _gaps(sorted(named.union(uncached)), last):
        raise LayoutError(
            f"{where}: layers {missing}: found in no group, expected every layer from 0 to {last} in one at least; "
            "name those that have no cache in uncached_layers"
        )


def check_names(where: str, groups: Sequence[Group]) -> None:
    """Checks that no two attention groups hold the same cache: a layer that both have, with an entry of the same name.

    A layer may be in several groups (an indexer, a compressed cache or a state beside the attention, two attentions), but two
    kinds that hold a row for each token would keep one tensor under two rules.

    Raises:
        LayoutError: names both groups, the layers and the entries.
    """
    owners: dict[tuple[int, str], Group] = {}
    for group in groups:
        if group.kind not in ROW_A_TOKEN:
            continue
        shared: dict[int, list[tuple[int, str]]] = {}
        for layer, entries in group.layers.items():
            for entry in entries:
                owner = owners.setdefault((layer, entry.name), group)
                if owner is not group:
                    shared.setdefault(owner.id, []).append((layer, entry.name))
        for owner_id, found in shared.items():
            owner = next(g for g in groups if g.id == owner_id)
            layers, names = sorted({layer for layer, _ in found}), dict.fromkeys(name for _, name in found)
            raise LayoutError(
                f"{where}: groups {owner.id} ({owner.kind.value}) and {group.id} ({group.kind.value}): both have layer "
                f"{spans(layers)} with {', '.join(map(repr, names))}, expected each cache of a layer in one attention group; "
                "take the layer out of one of them, or name the entries apart if the layer has two caches"
            )


def _check_numbers(where: str, group: Group, layers: int | None, uncached: Collection[int]) -> None:
    for layer in group.layers:
        if layers is not None and layer >= layers:
            raise LayoutError(
                f"{where}: found layer {layer}, expected numbers from 0 to {layers - 1}: the model has {layers} layers"
            )
        if layer in uncached:
            raise LayoutError(f"{where}: found layer {layer}, which uncached_layers names too; expected it in one of them")


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
