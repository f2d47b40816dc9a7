"""From views to what the engine works with: cache entries (payload and stride), base addresses, and regions to register.

The engine itself sees numbers only. A group's entries come from its views, never from assumed sizes: the address of block b is
the view's own plus b strides, and the length is the payload.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kvactors.core.layout import CacheEntry
from kvactors.errors import LayoutError
from kvactors.memory.overlaps import Run, block_runs, first_meeting

ELEMENT_KINDS: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float32: "fp32",
        torch.float16: "fp16",
        torch.bfloat16: "bf16",
        torch.float8_e4m3fn: "fp8_e4m3",
        torch.float8_e5m2: "fp8_e5m2",
        torch.int8: "int8",
        torch.uint8: "uint8",
        torch.int32: "int32",
    }
)
"""Canonical names of element kinds, which are part of a layout's digest."""

HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Placed:
    """A cache entry, and the address of its block 0."""

    entry: CacheEntry
    address: int


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """What a group's views say of it.

    Attributes:
        layers: physical layer -> its entries, as `Group` takes them.
        bases: (group id, physical layer, entry name) -> address of block 0, as `Engine` takes them.
    """

    layers: Mapping[int, tuple[CacheEntry, ...]]
    bases: Mapping[tuple[int, int, str], int]


def group_memory(group_id: int, views: Mapping[int, Mapping[str, Tensor]], blocks: int) -> GroupMemory:
    """Entries and bases of one group.

    Args:
        views: physical layer -> cache name ("k", "v", "conv", …) -> its view, blocks (or kernel blocks) first.
        blocks: the group's blocks; a view may have a multiple of them as kernel blocks.

    Raises:
        LayoutError: see `placed_entries`; two entries of a layer have one name or share bytes.
    """
    layers: dict[int, tuple[CacheEntry, ...]] = {}
    bases: dict[tuple[int, int, str], int] = {}
    for layer, named in views.items():
        try:
            placed = [p for name, view in named.items() for p in placed_entries(name, view, blocks)]
        except LayoutError as error:
            raise LayoutError(f"group {group_id}, layer {layer}, {error}") from None
        _require_apart(placed, blocks, f"group {group_id}, layer {layer}")
        layers[layer] = tuple(p.entry for p in placed)
        bases.update({(group_id, layer, p.entry.name): p.address for p in placed})
    return GroupMemory(layers, bases)


def _require_apart(placed: Sequence[Placed], blocks: int, where: str) -> None:
    names = [p.entry.name for p in placed]
    for name in names:
        if names.count(name) > 1:
            raise LayoutError(f"{where}: two entries are named {name}; a run of one view has the name of another view")
    runs = [Run(p.address, p.entry.nbytes, p.entry.stride, blocks) for p in placed]
    if (pair := first_meeting(runs, names)) is not None:
        one, other = (placed[i] for i in pair)
        raise LayoutError(
            f"{where}: {one.entry.name} ({one.entry.nbytes} of every {one.entry.stride} bytes from {one.address:#x}) and "
            f"{other.entry.name} ({other.entry.nbytes} of every {other.entry.stride} from {other.address:#x}) share bytes; "
            "give each bytes of its own"
        )


def placed_entries(name: str, view: Tensor, blocks: int) -> list[Placed]:
    """The entries of one view: one where a block is one dense run of bytes, else one for each such run, `name.0`, `name.1`, ….

    Raises:
        LayoutError: the element kind is unknown, the view is not made of so many blocks, they overlap each other, or kernel
            blocks do not make up one dense page.
    """
    kind = ELEMENT_KINDS.get(view.dtype)
    if kind is None:
        raise LayoutError(
            f"{name}: element type {view.dtype} has no canonical name; view it as one of {', '.join(ELEMENT_KINDS.values())}"
        )
    if view.dim() < 1 or blocks < 1 or view.shape[0] % blocks:
        raise LayoutError(
            f"{name}: a view of shape {tuple(view.shape)} is not made of {blocks} blocks; give the blocks of its group"
        )
    if not view.numel():
        raise LayoutError(f"{name}: a view of shape {tuple(view.shape)} has no elements; leave it out")
    per_block = view.shape[0] // blocks
    runs = block_runs(view, name)
    stride = view.stride(0) * view.element_size()
    if per_block > 1:
        if len(runs) > 1 or runs[0].nbytes != stride:
            raise LayoutError(
                f"{name}: kernel blocks of {[run.nbytes for run in runs]} bytes, {stride} apart, do not make up one dense "
                "page; give the unsplit view"
            )
        runs = [Run(runs[0].address, per_block * stride, per_block * stride, blocks)]
    names = [name] if len(runs) == 1 else [f"{name}.{i}" for i in range(len(runs))]
    return [
        Placed(CacheEntry(n, run.nbytes, max(run.stride, run.nbytes), kind), run.address)
        for n, run in zip(names, runs, strict=True)
    ]


def registered_regions(views: Iterable[Tensor], align_bytes: int = 1) -> list[tuple[int, int]]:
    """(address, bytes) to register with a store: each storage once, from its first byte in use to its last.

    Args:
        views: of any groups and layers, shared memory included.
        align_bytes: beginnings and ends are moved outwards to multiples of it, as far as the storage goes
            (`HUGE_PAGE_BYTES` where a transport wants it).

    Raises:
        LayoutError: `align_bytes` is below 1, or a view has no elements.
    """
    if align_bytes < 1:
        raise LayoutError(f"align_bytes = {align_bytes}: must be at least 1")
    found: dict[int, tuple[int, int, int]] = {}
    for view in views:
        if not view.numel():
            raise LayoutError(f"a view of shape {tuple(view.shape)} has no elements, so nothing to register; leave it out")
        storage = view.untyped_storage()
        begin = view.data_ptr()
        end = begin + (sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True)) + 1) * view.element_size()
        low, high, limit = found.get(storage.data_ptr(), (begin, end, storage.data_ptr() + storage.nbytes()))
        found[storage.data_ptr()] = (min(low, begin), max(high, end), limit)
    regions: list[tuple[int, int]] = []
    for start, (low, high, limit) in sorted(found.items()):
        begin = max(start, low // align_bytes * align_bytes)
        end = min(limit, -(-high // align_bytes) * align_bytes)
        regions.append((begin, end - begin))
    return _merged(regions)


def _merged(regions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """By address; those that overlap are one: two storages may stand for the same memory, and a store takes it once."""
    out: list[tuple[int, int]] = []
    for begin, nbytes in sorted(regions):
        if out and begin < sum(out[-1]):
            begin, nbytes = out[-1][0], max(sum(out[-1]), begin + nbytes) - out[-1][0]
            out.pop()
        out.append((begin, nbytes))
    return out
